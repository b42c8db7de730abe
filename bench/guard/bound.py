"""``python -m bench.guard.bound``: requests beyond their certificate's ceiling, real engines.

Two SGLang engines share a core, one serves and one has rollouts without an end. The guard learns
its certificate as in production, and counts each request that met an open gate under one and took
longer than next + D; ``docs/bound.md`` says what these are. Only those count here whose certificate
claims the 99th percentile. Requests come in pairs:

| request | comes | meets |
|---|---|---|
| first, one in four with another close behind | after an idle time | a gate that is open, mostly |
| next | as soon as those have ended | a gate that is still shut |

The guard says which met an open gate. What takes longer at a shut one is nothing that lending did.
Runs add up: the counts lie in ``out/bench`` and are written after every look, so a run that was
ended has lost none. ``--fresh`` begins anew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from bench.guard.node import POOL, Bench, running
from bench.guard.rollouts import Rollouts
from bench.guard.serving import SERVING
from bench.record import FOLDER, Figure, figure, record
from rose_core.stats import mixture_sequence, quantile
from rose_core.wire.sync import SignalSource

COUNTS = FOLDER / "bound-engines-counts.json"
_LEVEL = 0.99
_SLO_MS = 20_000  # so far off that the certificate never shuts the gate
_PAIRS = 10  # between two looks at the guard's counts
_PROMPT, _OUTPUT = 200, 4  # tokens
_BEHIND = 0.25  # share of the first ones with another close behind
_BEHIND_S = 0.003
_IDLE_S = (0.12, 0.3)  # a gate opens after 0.1 s at most
_START_SECONDS = 600.0


class Counts(msgspec.Struct):
    """What all runs together have seen.

    Attributes:
        promised: requests that met an open gate under a certificate of the 99th percentile.
        exceeded: of them, those beyond its ceiling; ``allowed``: what the levels allow.
        shut: requests at a shut gate while there was such a certificate; ``shut_exceeded``: of
            them, those beyond the ceiling that stood then.
    """

    promised: int = 0
    exceeded: int = 0
    allowed: float = 0.0
    shut: int = 0
    shut_exceeded: int = 0
    runs: int = 0


class Certificate(msgspec.Struct, rename="camel"):
    """Of the pool, as the guard's report has it."""

    level: float
    ceiling_seconds: float
    text: str
    requests: int
    exceeded: int
    allowed: float


class _Pool(msgspec.Struct):
    pool: str
    certificate: Certificate | None = None


class _Page(msgspec.Struct):
    pools: list[_Pool]


@dataclass
class Look:
    """Counts between two looks at the guard, the second of which makes them count."""

    shut_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)


class Counter:
    """Adds to the counts what the guard has counted between two looks."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._before: Certificate | None = None

    def take(self, now: Certificate | None, shut_s: list[float]) -> bool:
        """Take the guard's word, and the TTFTs at a shut gate since the last one.

        Returns:
            Whether they counted: the certificate claimed the percentile at both looks.
        """
        before, self._before = self._before, now
        if before is None or now is None or min(before.level, now.level) < _LEVEL:
            return False
        counts = self.counts
        counts.promised += now.requests - before.requests
        counts.exceeded += now.exceeded - before.exceeded
        counts.allowed += now.allowed - before.allowed
        counts.shut += len(shut_s)
        counts.shut_exceeded += sum(one > before.ceiling_seconds for one in shut_s)
        return True


async def _ask(http: aiohttp.ClientSession, url: str, draw: random.Random) -> float:
    """One request, to its end; seconds to its first token."""
    dialect = SERVING["sglang"].dialect
    prompt = [draw.randrange(3, 250) for _ in range(_PROMPT)]  # nothing of it is cached
    began, first = time.monotonic(), 0.0
    async with http.post(f"{url}{dialect.path}", json=dialect.body(prompt, _OUTPUT)) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not first and dialect.count(line, 0):
                first = time.monotonic() - began
    return first


async def _pair(http: aiohttp.ClientSession, url: str, draw: random.Random, look: Look) -> None:
    await asyncio.sleep(draw.uniform(*_IDLE_S))
    async with asyncio.TaskGroup() as both:
        first = both.create_task(_ask(http, url, draw))
        if draw.random() < _BEHIND:
            await asyncio.sleep(_BEHIND_S)
            both.create_task(_ask(http, url, draw))
    look.first_s.append(first.result())
    look.shut_s.append(await _ask(http, url, draw))


async def _certificate(node: Bench) -> Certificate | None:
    page = msgspec.convert(await node.page("report"), _Page)
    return next((one.certificate for one in page.pools if one.pool == POOL), None)


async def _count(node: Bench, counter: Counter, seconds: float) -> list[Figure]:
    """Send pairs until the time is up; what this run's requests took."""
    draw = random.Random(counter.counts.runs)  # a load's randomness
    counted, text, ends = Look(), "", time.monotonic() + seconds
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < ends:
            look = Look()
            for _ in range(_PAIRS):
                await _pair(http, node.serving_url, draw, look)
            now = await _certificate(node)
            if now is not None and counter.take(now, look.shut_s):
                text = now.text
                counted.first_s += look.first_s
                counted.shut_s += look.shut_s
                await asyncio.to_thread(_keep, counter.counts)
    if not counted.first_s:
        return []
    sys.stdout.write(f"the last certificate: {text}\n")
    rows = (("after an idle time", counted.first_s), ("at a shut gate", counted.shut_s))
    return [
        figure(f"this run, TTFT {where}, p{round(100 * share)}", 1e3 * quantile(seen, share), "ms")
        for where, seen in rows
        for share in (0.5, 0.99)
    ]


async def measure(counts: Counts, model: str, seconds: float) -> list[Figure]:
    """One run, whose counts are added."""
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with running(Path(folder), model) as node:
            async with asyncio.timeout(_START_SECONDS):
                rollouts = Rollouts(await node.rollouts_ready())
            task = asyncio.create_task(rollouts.run())
            try:
                await node.guarded_anew(tuple(SignalSource), (_SLO_MS, 0))
                return await _count(node, Counter(counts), seconds)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


def figures_of(counts: Counts) -> list[Figure]:
    """What all runs say."""
    share = mixture_sequence(counts.exceeded, counts.promised)
    shut = mixture_sequence(counts.shut_exceeded, counts.shut)
    return [
        figure("promised requests, all runs", counts.promised, "1", at_least=10_000),
        figure("of them beyond their ceiling", counts.exceeded, "1", at_most=0),
        figure("what their levels allow", counts.allowed, "1"),
        figure("share beyond, at most (95 %, at every look)", share.high, "ratio"),
        figure("requests at a shut gate", counts.shut, "1"),
        figure("of them beyond the same ceiling", counts.shut_exceeded, "1"),
        figure("share beyond at a shut gate, at most", shut.high, "ratio"),
    ]


def _known() -> Counts:
    return msgspec.json.decode(COUNTS.read_bytes(), type=Counts) if COUNTS.exists() else Counts()


def _keep(counts: Counts) -> None:
    COUNTS.parent.mkdir(parents=True, exist_ok=True)
    draft = COUNTS.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(counts))
    draft.replace(COUNTS)


def main() -> int:
    """Measure, add up, record."""
    parser = argparse.ArgumentParser(prog="python -m bench.guard.bound", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of requests")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs have seen")
    options = parser.parse_args()
    if missing := SERVING["sglang"].missing():
        sys.stderr.write(f"{missing}\n")
        return 1
    counts = Counts() if options.fresh else _known()
    counts.runs += 1
    mine = asyncio.run(measure(counts, options.model, 60 * options.minutes))
    notes = (
        f"{counts.runs} runs; serving and rollout engine on one core; it is no GPU",
        "next and D as the guard learns them: it claims the 99th percentile, not all",
    )
    record("bound-engines", [*figures_of(counts), *mine], notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
