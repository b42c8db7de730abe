"""``python -m bench.tap.cost``: CPU of guard and tap when idle, per request, per token.

A whole node of processes with fake engines (no GPU): the gate stands open, then short requests pass
one after the other, then streams of tokens. CPU seconds are counted, so that a busy machine
changes the figures little; what idling costs in the same time is taken off requests, and that and
the requests off the streams. The engine host stands beside them. Needs root (packet sockets).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.record import Figure, figure, record
from tests.agent.node import Node, node

# A permit is open or about to be: what the guard does when nothing else happens.
_SETTLE_SECONDS = 3.0
_SYNC_SECONDS = 2.0  # the operator's own default
PARTS = ("guard", "readers", "tap opener", "tap parser", "engine host")
GUARD_AND_TAP = PARTS[:4]


Part = tuple[psutil.Process, ...]
"""The processes that are told as one."""


@dataclass(frozen=True)
class Used:
    """What one part has used so far.

    Attributes:
        wakings: times that a thread had waited and went on.
    """

    cpu_s: float
    wakings: int


@dataclass(frozen=True)
class Phase:
    """What each part used in one phase, and what passed meanwhile."""

    seconds: float
    cpu_s: dict[str, float]
    wakings: dict[str, int]
    requests: int = 0
    tokens: int = 0


def used(part: Part) -> Used:
    """CPU and wakings of every thread, in the scheduler's nanoseconds."""
    cpu_ns = wakings = 0
    for task in (task for one in part for task in Path(f"/proc/{one.pid}/task").iterdir()):
        cpu_ns += int((task / "schedstat").read_text().split()[0])
        status = (task / "status").read_text()
        wakings += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return Used(cpu_ns / 1e9, wakings)


def parts_of(running: Node) -> dict[str, Part]:
    """The measured processes; the tap is two, and the guard has a reader for each replica."""
    opener, guard, host = (
        psutil.Process(running.processes[name].pid) for name in ("tap", "agent", "host")
    )
    readers = tuple(guard.children(recursive=True))
    found: tuple[Part, ...] = ((guard,), readers, (opener,), (opener.children()[0],), (host,))
    return dict(zip(PARTS, found, strict=True))


def memory(part: Part) -> int:
    """Bytes of its processes (PSS)."""
    return sum(int(one.memory_full_info().pss) for one in part)


async def phase(
    parts: dict[str, Part], work: Awaitable[object], requests: int = 0, tokens: int = 0
) -> Phase:
    """Count around one piece of work."""
    began = time.monotonic()
    before = {name: used(process) for name, process in parts.items()}
    await work
    after = {name: used(process) for name, process in parts.items()}
    return Phase(
        time.monotonic() - began,
        {name: after[name].cpu_s - before[name].cpu_s for name in parts},
        {name: after[name].wakings - before[name].wakings for name in parts},
        requests,
        tokens,
    )


async def _one_by_one(running: Node, requests: int) -> None:
    for _ in range(requests):
        await running.generate(1, stream=False)
        await asyncio.sleep(0.02)


async def _streams(running: Node, streams: int, tokens: int) -> None:
    await asyncio.gather(*(running.generate(tokens) for _ in range(streams)))


@dataclass(frozen=True)
class Costs:
    """What one part, or several together, cost; wakings are per second."""

    idle_ms: float
    wakings: float
    request_ms: float
    tokens_ms: float
    streaming_wakings: float

    @staticmethod
    def of(names: Iterable[str], idle: Phase, requests: Phase, streams: Phase) -> Costs:
        """Take idling off requests, both off streams."""
        names = tuple(names)

        def cpu_ms(found: Phase) -> float:
            return 1e3 * sum(found.cpu_s[name] for name in names)

        second = cpu_ms(idle) / idle.seconds
        request = (cpu_ms(requests) - second * requests.seconds) / requests.requests
        streamed = cpu_ms(streams) - second * streams.seconds - request * streams.requests
        wakings, streaming = (
            sum(found.wakings[name] for name in names) / found.seconds for found in (idle, streams)
        )
        return Costs(second, wakings, request, 1e3 * streamed / streams.tokens, streaming)

    def core_percent(self, tokens_per_second: float, tokens_per_request: float) -> float:
        """Share of a core at this rate."""
        requests = tokens_per_second / tokens_per_request
        busy_ms = requests * self.request_ms + tokens_per_second / 1e3 * self.tokens_ms
        return (self.idle_ms + busy_ms) / 10


def figures_of(
    phases: tuple[Phase, Phase, Phase], pss_bytes: dict[str, int], tokens_per_request: int
) -> list[Figure]:
    """Every part beside the others, then guard and tap together."""
    rows: list[Figure] = []
    for name in PARTS:
        costs = Costs.of((name,), *phases)
        rows += [
            figure(f"{name}: idle", costs.idle_ms, "ms/s"),
            figure(f"{name}: idle wakings", costs.wakings, "1/s"),
            figure(f"{name}: wakings while streaming", costs.streaming_wakings, "1/s"),
            figure(f"{name}: a request", costs.request_ms, "ms"),
            figure(f"{name}: 1,000 streamed tokens", costs.tokens_ms, "ms"),
            figure(f"{name}: memory (PSS)", pss_bytes[name] / 1e6, "MB"),
        ]
    both = Costs.of(GUARD_AND_TAP, *phases)
    share = both.core_percent(1000, tokens_per_request)
    pss = sum(pss_bytes[name] for name in GUARD_AND_TAP) / 1e6
    return [
        *rows,
        figure("guard and tap: idle", both.idle_ms / 10, "% of a core"),
        figure("guard and tap: a request", both.request_ms, "ms"),
        figure("guard and tap: 1,000 streamed tokens", both.tokens_ms, "ms"),
        figure("guard and tap: at 1,000 tokens/s", share, "% of a core", at_most=3.0),
        figure("guard and tap: memory (PSS)", pss, "MB", at_most=100.0),
    ]


async def measure(options: argparse.Namespace) -> list[Figure]:
    """Start the node, let its gate open, count the phases."""
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with node(Path(folder), cgroup="auto") as running:
            running.operator.sync_seconds = _SYNC_SECONDS
            running.operator.ttft_ms, running.operator.tpot_ms = options.ttft, options.tpot
            await running.until(lambda: running.gate(is_open=True), "gate opens")
            await asyncio.sleep(_SETTLE_SECONDS)
            parts = parts_of(running)
            requests, tokens = options.requests, options.streams * options.tokens
            idle = await phase(parts, asyncio.sleep(options.seconds))
            short = await phase(parts, _one_by_one(running, requests), requests)
            streaming = _streams(running, options.streams, options.tokens)
            streams = await phase(parts, streaming, options.streams, tokens)
            pss = {name: memory(part) for name, part in parts.items()}
    return figures_of((idle, short, streams), pss, options.tokens_per_request)


def main(argv: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="bench.tap.cost", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=15.0, help="of idling")
    add("--requests", type=int, default=150, help="short ones")
    add("--streams", type=int, default=4, help="at the same time")
    add("--tokens", type=int, default=2000, help="of each stream, 5 ms apart")
    add("--tokens-per-request", type=int, default=200, help="for the share of a core")
    add("--ttft", type=int, default=0, help="the pool's TTFT in ms; 0 = it names none")
    add("--tpot", type=int, default=0, help="the pool's TPOT in ms")
    options = parser.parse_args(argv)
    notes = [
        "one serving replica, one rollout engine (fake, idle), gate open; CPU of all threads",
        f"{options.tokens_per_request} tokens a request in the last figures",
    ]
    record("tap-cost", asyncio.run(measure(options)), notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
