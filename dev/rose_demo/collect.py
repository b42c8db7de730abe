"""What ROSE's processes say of themselves, as ``Sample``s: parsing is pure, ``Collector`` asks.

Only pages that users have as well are read: the router's ``/engines`` and ``/metrics``, the guard's
``/metrics`` and, once at the end, its flight recorder. A page that does not answer gives unknowns.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from rose_core.guard.crossover import Schedule
from rose_core.identity import published
from rose_demo.records import ClassFigures, Sample
from rose_demo.spans import SpanRecord

LOG = logging.getLogger(__name__)
_KINDS = ("borrowed", "dedicated")
_PAGE_SECONDS = 5.0


def totals(text: str) -> dict[tuple[str, str], float]:
    """Prometheus text as (sample name, value of the first label that matters) -> sum.

    Samples are summed over every label but ``kind``.
    """
    result: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, str(sample.labels.get("kind", "")).lower())
            result[key] = result.get(key, 0.0) + sample.value
    return result


def classes(text: str) -> dict[str, ClassFigures]:
    """The router's metrics by device class."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            name = one.name.removeprefix("rose_router_class_")
            if name != one.name and not name.endswith("_created"):
                key = f"{name} {one.labels.get('what', '')}".strip()
                found.setdefault(str(one.labels["device"]), {})[key] = one.value
    return {
        device: ClassFigures(
            int(figures.get("tokens_total read", 0)),
            int(figures.get("tokens_total written", 0)),
            int(figures.get("turns_total", 0)),
            figures.get("step_seconds"),
            figures.get("prefill_seconds"),
        )
        for device, figures in sorted(found.items())
    }


def _whole(values: Mapping[tuple[str, str], float] | None, name: str, kind: str) -> int | None:
    """A counter; one that its process has not touched yet is zero, an absent page is unknown."""
    return None if values is None else int(values.get((name, kind), 0))


def sample(
    at_s: float,
    *,
    withheld_now: bool,
    guard: str | None,
    router: str | None,
    engines: Mapping[str, Any] | None,
) -> Sample:
    """One sample from the pages' texts; None = the page did not answer.

    ``withheld`` is unknown unless a borrowed engine with the trainer's weights is attached: before
    that nothing is lent that the measurement asks about. Turns that an engine takes with its own
    checkpoint come before the measurement begins.
    """
    ours = totals(guard) if guard is not None else None
    theirs = totals(router) if router is not None else None
    attached = [e for e in (engines or {}).get("engines", ()) if e["attached"]]
    lending = any(e["kind"] == "Borrowed" and published(e["version"]) for e in attached)
    gate = None if ours is None else ours.get(("rose_guard_gate_open", ""))
    return Sample(
        at_s=at_s,
        gate_open=None if gate is None or not lending else gate > 0,
        withheld=withheld_now if lending else None,
        **{
            f"{kind}_{what}": _whole(theirs, f"rose_router_{what}_total", kind)
            for kind in _KINDS
            for what in ("tokens", "turns")
        },
        redone_tokens=_whole(theirs, "rose_router_redone_tokens_total", ""),
        undelivered_tokens=_whole(theirs, "rose_router_undelivered_tokens_total", ""),
        refused=_whole(theirs, "rose_router_refused_total", ""),
        open_s=None if ours is None else ours.get(("rose_guard_open_seconds_total", "")),
        versions={str(e["engine"]): str(e["version"]) for e in attached if e["version"]},
        lag=max((e["lag"] for e in attached if e["lag"] is not None), default=None),
        queued=None if engines is None else int(engines["queued"]),
        classes={} if router is None else classes(router),
    )


def gate_intervals(
    entries: Iterable[Mapping[str, Any]], origin_ns: int, end_ns: int
) -> tuple[tuple[float, float], ...]:
    """Open intervals from the flight recorder, seconds since ``origin_ns``."""
    moves = [(int(e["t"]), bool(e["open"])) for e in entries if e["what"] == "gate"]
    moves.append((end_ns, False))
    spans = [
        (max(start, origin_ns), min(end, end_ns))
        for (start, is_open), (end, _) in itertools.pairwise(sorted(moves))
        if is_open
    ]
    return tuple(((a - origin_ns) / 1e9, (b - origin_ns) / 1e9) for a, b in spans if b > a)


def stop_seconds(entries: Iterable[Mapping[str, Any]], origin_ns: int) -> tuple[float, ...]:
    """From arrival to standstill, every stop since ``origin_ns``."""
    return tuple(
        int(e["after_ns"]) / 1e9
        for e in entries
        if e["what"] == "stopped" and int(e["t"]) >= origin_ns
    )


@dataclass
class Collector:
    """Asks the pages.

    Args:
        guard, router: base URLs; ``traces`` that of the receiver of spans.
        token: the installation's, for the guard's pages that say more than metrics.
        turn_token: the trainer's, for the router's.
        window_s: crossover window; the guard counts windows on the same monotonic clock.
        origin: monotonic seconds that count as 0.
    """

    session: aiohttp.ClientSession
    guard: str
    router: str
    window_s: float
    origin: float
    token: str
    turn_token: str
    traces: str

    async def look(self) -> Sample:
        """One sample now."""
        guard, router, engines = await asyncio.gather(
            self._text(f"{self.guard}/metrics"),
            self._text(f"{self.router}/metrics"),
            self._text(f"{self.router}/engines"),
        )
        now = time.monotonic()
        return sample(
            round(now - self.origin, 3),
            withheld_now=Schedule(self.window_s).withheld(now),
            guard=guard,
            router=router,
            engines=None if engines is None else msgspec.json.decode(engines),
        )

    async def flight_record(self) -> list[dict[str, Any]]:
        """The guard's flight recorder; empty when it does not answer."""
        text = await self._text(f"{self.guard}/trace")
        entries: list[dict[str, Any]] = [] if text is None else msgspec.json.decode(text)["entries"]
        return entries

    async def inclusion(self) -> dict[str, Any]:
        """The router's bias meter; empty when it does not answer."""
        text = await self._text(f"{self.router}/trajectories")
        found: dict[str, Any] = {} if text is None else msgspec.json.decode(text)
        return found

    async def spans(self) -> list[SpanRecord]:
        """What the lease's router exported; empty when the receiver gives no spans."""
        text = await self._text(f"{self.traces}/spans")
        try:
            return [] if text is None else msgspec.json.decode(text, type=list[SpanRecord])
        except msgspec.DecodeError as error:  # one picture of the report is not worth a whole run
            LOG.warning("%s/spans: %s; the report has no trajectory", self.traces, error)
            return []

    def _token_for(self, url: str) -> str:
        """None is shown to others' pages."""
        if url.startswith(f"{self.traces}/"):
            return ""
        return self.turn_token if url.startswith(f"{self.router}/") else self.token

    async def _text(self, url: str) -> str | None:
        try:
            async with self.session.get(
                url,
                timeout=aiohttp.ClientTimeout(total=_PAGE_SECONDS),
                headers={"Authorization": f"Bearer {self._token_for(url)}"},
            ) as reply:
                return await reply.text() if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
