"""The live table: a frame of text from what has been seen so far. Pure but for ``Screen``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rose_demo.records import Request, Role, Sample, Settings
from rose_demo.statistics import latencies, quantile
from rose_demo.verdicts import of_event

RECENT_SECONDS = 20.0
_UNKNOWN = "?"
_WIDTH = 78


def frame(
    settings: Settings,
    now_s: float,
    requests: Sequence[Request],
    samples: Sequence[Sample],
    training: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Lines of the table, at most 78 characters each."""
    rule = "-" * _WIDTH
    return [
        f"ROSE demo  {now_s:5.0f} / {settings.seconds:.0f} s",
        rule,
        "live traffic, last 20 s      n   TTFT p50/p90 ms   TPOT p50 ms   within SLO",
        *(_serving(settings, now_s, requests, role) for role in Role),
        rule,
        *_lending(samples),
        *_training(training),
        rule,
    ]


def _serving(settings: Settings, now_s: float, requests: Sequence[Request], role: Role) -> str:
    rows = [r for r in requests if r.role is role and r.end_s >= now_s - RECENT_SECONDS]
    ttft, tpot = latencies(rows, "ttft"), latencies(rows, "tpot")
    good = [
        r
        for r in rows
        if not r.error
        and (r.ttft_s or 0) <= settings.ttft_slo_s
        and (r.tpot_s or 0) <= settings.tpot_slo_s
    ]
    share = f"{len(good) / len(rows):.0%}" if rows else _UNKNOWN
    name = {Role.LENT: "replica that is lent", Role.CONTROL: "replica never lent"}[role]
    pair = f"{_ms(quantile(ttft, 0.5))} / {_ms(quantile(ttft, 0.9))}"
    return f"  {name:<22}{len(rows):>6}{pair:>18}{_ms(quantile(tpot, 0.5)):>14}{share:>13}"


def _ms(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{seconds * 1e3:.0f}"


def gate_state(sample: Sample | None) -> str:
    """The gate in one word."""
    if sample is None or sample.gate_open is None:
        return "unknown"
    if sample.gate_open:
        return "OPEN"
    return "withheld" if sample.withheld else "closed"


def _lending(samples: Sequence[Sample]) -> list[str]:
    last = samples[-1] if samples else None
    versions = ", ".join(f"{n} {v}" for n, v in sorted(last.versions.items())) if last else ""
    borrowed, dedicated = (
        _count(getattr(last, f"{kind}_tokens", None)) for kind in ("borrowed", "dedicated")
    )
    opened = getattr(last, "open_s", None)
    return [
        f"  gate {gate_state(last):<10} open {_count(opened, '{:.0f}')} s in all; "
        f"lag {_count(getattr(last, 'lag', None))} versions",
        f"  tokens: borrowed {borrowed}, dedicated {dedicated}",
        f"  engines: {versions or 'none attached'}"[:_WIDTH],
    ]


def _count(value: float | None, form: str = "{:,}") -> str:
    return _UNKNOWN if value is None else form.format(value)


def _training(training: Sequence[Mapping[str, Any]]) -> list[str]:
    steps, evaluations = of_event(training, "step"), of_event(training, "evaluation")
    if not steps:
        return ["  trainer: waiting for its first turns"]
    recent = [float(record["reward"]) for record in steps[-5:]]
    last = steps[-1]
    lines = [
        f"  trainer: step {last['step']}, reward {sum(recent) / len(recent):.3f} (last 5), "
        f"version {last['version']}"
    ]
    if evaluations:
        e = evaluations[-1]
        lines.append(
            f"  fixed tasks: trained {e['trained']:.3f}, frozen {e['frozen']:.3f}, "
            f"shuffled control {e['shuffled']:.3f}"
        )
    return lines


@dataclass
class Screen:
    """Shows frames: redrawn in place on a terminal, a line now and then in ``plain`` mode."""

    out: TextIO
    plain: bool
    plain_seconds: float = 10.0
    _height: int = 0
    _last: float = field(default=float("-inf"))

    def show(self, lines: Sequence[str]) -> None:
        """Draw one frame."""
        if self.plain:
            self._log(lines)
            return
        up = f"\x1b[{self._height}A" if self._height else ""
        self.out.write(up + "".join(f"\x1b[2K{line}\n" for line in lines))
        extra = self._height - len(lines)
        if extra > 0:
            self.out.write("\x1b[2K\n" * extra + f"\x1b[{extra}A")
        self._height = len(lines)
        self.out.flush()

    def _log(self, lines: Sequence[str]) -> None:
        now = time.monotonic()
        if now - self._last >= self.plain_seconds:
            self._last = now
            self.out.write("\n".join(lines) + "\n\n")
            self.out.flush()
