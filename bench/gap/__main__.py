"""``python -m bench.gap``: total token gap of a stream at a version switch, on a real SGLang.

Ours beside SGLang's tensor update, a full RAM-image copy and SGLang's update from disk, on one
engine per size, in interleaved rounds, each way there and back. A gap is the time beyond the
stream's own pace; it contains everything: fence, scatter, read back, label, and what staging and
confirming take from the stream. On CPU; about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.gap import loaders
from bench.gap.models import SIZES, elements
from bench.gap.switches import DiskUpdate, ImageCopy, Ours, Switch, TensorUpdate
from bench.record import Figure, figure, record
from rose_core.wire.sync import EngineSpec
from rose_dev.engine_testing import RealEngine, start_engine
from rose_engines.process.client import TurnClient

GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 3000}
_BEFORE, _AFTER = 16, 3
_END_SECONDS = 20.0
_ids = itertools.count()

SHARE = 0.01
_AIM, _AIM_APART = 0.35, 0.2
Gaps = dict[str, list[float]]


class StreamEnded(Exception):
    """A stream ended before it had what was to be measured."""


@dataclass
class Stream:
    """Times at which tokens arrived, seconds of the monotonic clock."""

    times: list[float] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: bool = False

    async def read(self, client: TurnClient, rid: str) -> None:
        """Read until aborted."""
        async for _ in client.stream([104], GREEDY, logprobs=False, rid=rid):
            self.times.append(time.monotonic())
            self._news.set()

    def end(self) -> None:
        """No token comes any more."""
        self._ended = True
        self._news.set()

    async def more(self, tokens: int) -> None:
        """Wait for so many further tokens.

        Raises:
            StreamEnded: they never come.
        """
        wanted = len(self.times) + tokens
        while len(self.times) < wanted:
            if self._ended:
                message = f"the stream ended after {len(self.times)} tokens; see the engine's log"
                raise StreamEnded(message)
            self._news.clear()
            await self._news.wait()


@asynccontextmanager
async def running(client: TurnClient) -> AsyncIterator[Stream]:
    """A stream that runs steadily by now; it is aborted at the end."""
    rid = f"gap-{next(_ids):06d}."
    stream = Stream()
    reader = asyncio.create_task(stream.read(client, rid))
    reader.add_done_callback(lambda _: stream.end())
    try:
        await stream.more(_BEFORE)
        yield stream
    finally:
        await client.abort(rid)
        await asyncio.wait_for(reader, _END_SECONDS)


async def gap(client: TurnClient, switch: Callable[[], Awaitable[None]]) -> float:
    """Milliseconds that a stream waits for tokens because of the switch."""
    async with running(client) as stream:
        began = time.monotonic()
        await switch()
        ended = time.monotonic()
        await stream.more(_AFTER)
        return 1e3 * lost(stream.times, began, ended)


def lost(times: Sequence[float], began: float, ended: float) -> float:
    """Seconds beyond the usual pace, over all intervals that the switch touches.

    Tokens that come sooner than usual count against those that come later: otherwise a long switch
    would be charged for the jitter of every token beside it.

    Args:
        times: arrivals of tokens.
        began: of the switch; the pace is that of the tokens before.
        ended: of the switch.
    """
    intervals = list(itertools.pairwise(times))
    pace = statistics.median(after - before for before, after in intervals if after <= began)
    touched = [(a, b) for a, b in intervals if b > began and a < ended]
    return sum(after - before - pace for before, after in touched)


async def rounds(engine: RealEngine, switches: Sequence[Switch], count: int) -> Gaps:
    """Gaps in milliseconds by way; every round has each way once, in another order."""
    found: Gaps = defaultdict(list)
    for number in range(count):
        for place in range(len(switches)):
            way = switches[(place + number) % len(switches)]
            for there in (True, False):
                await way.prepare(there=there)
                # Preparing takes long enough for the engine to close a connection that is kept.
                async with TurnClient(engine.url) as client:
                    found[way.name].append(await gap(client, way.switch))
                way.forget()
            sys.stdout.write(f"  round {number + 1}: {way.name}: {found[way.name][-2:]} ms\n")
            sys.stdout.flush()
    return found


@dataclass(frozen=True)
class Measured:
    """What was found on one engine.

    Attributes:
        gaps: see ``rounds``.
        parts: how long each part of our own switch took, ms; only the pause stops the engine.
        weights: of the model.
    """

    gaps: Gaps
    parts: Gaps
    weights: int


def keep_apart(engine: int) -> None:
    """Give what a switch computes beside the engine's own thread the last core of this process.

    That is the stager, and the other threads of the engine's process: what they do takes no core
    from a stream, whoever's switch it is.

    Args:
        engine: process group of the engine.
    """
    *others, last = sorted(os.sched_getaffinity(0))
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            process, thread = int(task.parts[2]), int(task.name)
            if os.getpgid(process) != engine:
                continue
            command = (task / "cmdline").read_bytes()
            beside = b"rose_engines.weights.stager" in command or (
                b"sglang::scheduler" in command and thread != process
            )
            os.sched_setaffinity(thread, {last} if beside else set(others))


def measure(size: str, count: int, shares: Sequence[float], *, apart: bool) -> Measured:
    """Gaps on one engine of this size; ``apart`` = its stager has a core of its own."""
    spec = EngineSpec("gap", "gap", context_tokens=4096, kv_tokens=4096, max_running=2)
    more = ("--custom-weight-loader", loaders.TENSORS, loaders.IMAGE)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        start_engine(Path(folder), SIZES[size], spec, more=more) as engine,
    ):
        if apart:
            keep_apart(os.getpgid(engine.process.pid))
        ours = [Ours(engine, Path(folder), share) for share in shares]
        stock: list[Switch] = [
            kind(engine, Path(memory), SHARE) for kind in (TensorUpdate, ImageCopy, DiskUpdate)
        ]
        gaps = asyncio.run(rounds(engine, [*ours, *stock], count))
        return Measured(gaps, ours[-1].parts, elements(engine.model))


def figures(size: str, measured: Measured, aim: float) -> list[Figure]:
    """Medians, and ours against the others at the same share."""
    gaps = measured.gaps
    found = [
        figure(f"{size}: {name}", statistics.median(all_), "ms") for name, all_ in gaps.items()
    ]
    found += [
        figure(f"{size}: of ours, {name} took", statistics.median(all_), "ms")
        for name, all_ in measured.parts.items()
    ]
    mine = statistics.median(gaps[f"ours, {SHARE:.3g} changed"])
    for name in (TensorUpdate.name, ImageCopy.name, DiskUpdate.name):
        ratio = mine / max(statistics.median(gaps[name]), 1e-3)
        found.append(figure(f"{size}: ours / {name}", ratio, "", at_most=aim))
    return found


def growth(sizes: Sequence[str], gaps: dict[str, Gaps], weights: dict[str, int]) -> list[Figure]:
    """Ours with the same number of changes in models of two sizes, and with ten times as many."""
    small, big = sizes[0], sizes[-1]
    medians = {
        size: {name: statistics.median(all_) for name, all_ in gaps[size].items()} for size in sizes
    }
    usual = f"ours, {SHARE:.3g} changed"
    few = f"ours, {SHARE / 10:.3g} changed"
    found = [
        figure(f"{size}: ours with ten times the changes", _ratio(medians[size], usual, few), "x")
        for size in sizes
    ]
    if small != big:
        same = f"ours, {_same_changes(weights[small], weights[big]):.3g} changed"
        times = weights[big] / weights[small]
        name = f"ours with the same changes in a model {times:.1f} times as large"
        found.append(figure(name, medians[big][same] / max(medians[small][usual], 1e-3), "x"))
    return found


def _ratio(medians: dict[str, float], one: str, other: str) -> float:
    return medians[one] / max(medians[other], 1e-3)


def _same_changes(small: int, big: int) -> float:
    return SHARE * small / big


def main(argv: list[str] | None = None) -> int:
    """Measure every size and print the table."""
    parser = argparse.ArgumentParser(prog="bench.gap", description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["0.5B", "1.5B"], choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--own-core",
        action="store_true",
        help="what a switch computes beside the engine's thread has a core, that thread all others",
    )
    arguments = parser.parse_args(argv)
    gaps: dict[str, Gaps] = {}
    weights: dict[str, int] = {}
    found: list[Figure] = []
    for size in arguments.sizes:
        shares = [SHARE / 10, SHARE]
        if weights:
            weights[size] = SIZES[size].parameters
            shares.insert(1, _same_changes(weights[arguments.sizes[0]], weights[size]))
        sys.stdout.write(f"{size}\n")
        measured = measure(size, arguments.rounds, shares, apart=arguments.own_core)
        gaps[size], weights[size] = measured.gaps, measured.weights
        found += figures(size, measured, _AIM_APART if arguments.own_core else _AIM)
    found += growth(arguments.sizes, gaps, weights)
    note = f"one stream, {arguments.rounds} rounds there and back, {SHARE:.0%} changed, on CPU"
    note += (
        ", what is beside the engine's thread on a core of its own" if arguments.own_core else ""
    )
    record("gap", found, notes=(note,))
    return 0


if __name__ == "__main__":
    sys.exit(main())
