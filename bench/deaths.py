"""``python -m bench.deaths``: who stops the rollouts when the guard, the engine host or both die.

Real SGLang serving beside a real SGLang rollout engine that streams without an end. Each victim is
killed, and in other rounds stopped, while tokens flow; the client's own clock tells when the last
token came, the kernel's accounting how much the engine's processes ran after the promised 250 ms.
An engine that waits at its own permit looks at the clock now and then: that is the CPU that may be
left. About four minutes.

``--long 900`` instead keeps one engine stopped for so many seconds, with a thaw every ten that is
too short for an iteration: the pattern that watchdogs mistake for a hang. Every stream must go on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.guard import gates
from bench.guard.node import Bench, running
from bench.guard.rollouts import STREAMS, Rollouts
from bench.record import Figure, figure, log, record
from rose_dev.engine_environment import engine_python
from rose_dev.models import make_named
from rose_engines.node.doorbell import ring
from rose_engines.node.permit import Permit

PROMISE_SECONDS = 0.25
WATCH_SECONDS = 1.0
THAW_SECONDS, BETWEEN_THAWS_SECONDS = 0.003, 10.0
FLOWING = 20  # tokens seen before somebody dies
VICTIMS = (("agent",), ("host",), ("agent", "host"))
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
NAMES = {"agent": "guard", "host": "engine host"}


@dataclass(frozen=True)
class Death:
    """One death as the rollouts saw it.

    Attributes:
        last_token_ms: from the signal to the last token that reached the client.
        late_tokens: tokens that came after the promise.
        late_core: share of one core that the engine used in the second after the promise.
    """

    last_token_ms: float
    late_tokens: int
    late_core: float


def core_seconds(pids: tuple[int, ...]) -> float:
    """What the kernel has accounted to every thread of these processes."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += int(task.read_text().split()[0])
    return total / 1e9


async def flowing(bench: Bench) -> tuple[Rollouts, asyncio.Task[None]]:
    """Streams that make tokens; while a node repairs itself the engine of before may answer."""
    while True:
        await bench.verified()
        rollouts = Rollouts(await bench.rollouts_ready())
        streams = asyncio.create_task(rollouts.run())
        for _ in range(100):
            if rollouts.made(0.0, time.monotonic()) >= FLOWING:
                return rollouts, streams
            await asyncio.sleep(0.1)
        streams.cancel()


def processes(bench: Bench) -> tuple[int, ...]:
    """The rollout engine's processes as the host wrote them down."""
    file = bench.engine()
    return () if file is None else file.pids


async def die(bench: Bench, victims: tuple[str, ...], number: signal.Signals) -> Death:
    """Signal the victims while tokens flow, and watch the engine."""
    rollouts, streams = await flowing(bench)
    pids = processes(bench)
    sent = time.monotonic()
    for victim in victims:
        bench.processes[victim].send_signal(number)
    await asyncio.sleep(PROMISE_SECONDS)
    promised, before = time.monotonic(), core_seconds(pids)
    await asyncio.sleep(WATCH_SECONDS)
    ended, used = time.monotonic(), core_seconds(pids) - before
    streams.cancel()
    last = rollouts.last_before(sent, ended)
    return Death(
        last_token_ms=1e3 * (last - sent) if last else 0.0,
        late_tokens=rollouts.made(promised, ended),
        late_core=used / (ended - promised),
    )


async def long_stop(model: str, seconds: float) -> list[Figure]:
    """Stop the engine for long, thaw it briefly now and then, and see whether it goes on."""
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with running(Path(folder), model) as bench:
            rollouts = Rollouts(await bench.rollouts_ready())
            await bench.guarded(up=False)  # not before: it is the guard that asks for an engine
            streams = asyncio.create_task(rollouts.run())
            try:
                async with bench.permit() as permit:
                    pids = functools.partial(processes, bench)
                    return await _stopped_for(seconds, permit, bench.bell, rollouts, pids)
            finally:
                streams.cancel()
                await asyncio.gather(streams, return_exceptions=True)


async def _stopped_for(
    seconds: float,
    permit: Permit,
    bell: Path,
    rollouts: Rollouts,
    pids: Callable[[], tuple[int, ...]],
) -> list[Figure]:
    async with gates.gate(permit, gates.always, bell):
        await _token(rollouts, 0.0)
    before, began, ends = pids(), time.monotonic(), rollouts.ended
    thaws = 0
    while time.monotonic() - began < seconds:
        await asyncio.sleep(min(BETWEEN_THAWS_SECONDS, seconds / 2))
        permit.extend(time.monotonic_ns() + int(THAW_SECONDS * 1e9))
        ring(bell)
        thaws += 1
    await asyncio.sleep(PROMISE_SECONDS)
    opened, cut = time.monotonic(), rollouts.ended - ends
    async with gates.gate(permit, gates.always, bell):
        first = await _token(rollouts, opened)
    return [
        figure("long stop: seconds", seconds, "s"),
        figure("long stop: brief thaws", thaws, "count"),
        figure("long stop: streams that ended meanwhile", cut, "count", at_most=0.0),
        figure("long stop: processes that were replaced", len({*before} ^ {*pids()}), "count"),
        figure("long stop: tokens afterwards", float(first is not None), "yes", at_least=1.0),
    ]


async def _token(rollouts: Rollouts, since_s: float) -> float | None:
    """The first token from then on; None when none comes within a minute."""
    for _ in range(600):
        first = rollouts.first_after(since_s)
        if first is not None:
            return first
        await asyncio.sleep(0.1)
    return None


async def start_host(bench: Bench) -> None:
    """The engine host, as before it died."""
    models = str(make_named(bench.model).parent)
    flags = ("--models", models, "--engine-python", str(engine_python()), "--data-port", "0")
    await bench.rose("host", "engine-host", *flags)


async def revive(bench: Bench, victims: tuple[str, ...], number: signal.Signals) -> None:
    """Bring the victims back; the node repairs itself from there."""
    for victim in victims:
        if number is signal.SIGSTOP:
            bench.processes[victim].send_signal(signal.SIGCONT)
        else:
            await bench.end(victim)
            await (bench.start_agent() if victim == "agent" else start_host(bench))


def rows(name: str, deaths: list[Death]) -> list[Figure]:
    """The table's rows of one way to die."""
    last = [death.last_token_ms for death in deaths]
    return [
        figure(f"{name}: last token, p50", statistics.median(last), "ms"),
        figure(f"{name}: last token, max", max(last), "ms", at_most=1e3 * PROMISE_SECONDS),
        figure(f"{name}: tokens later", sum(d.late_tokens for d in deaths), "count", at_most=0.0),
        figure(f"{name}: core used later, max", 100 * max(d.late_core for d in deaths), "%"),
    ]


async def measure(model: str, rounds: int) -> list[Figure]:
    """Every way to die, interleaved over the rounds."""
    found: dict[str, list[Death]] = {}
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with running(Path(folder), model) as bench:
            for turn in range(rounds):
                for victims in VICTIMS:
                    for how, number in SIGNALS.items():
                        name = f"{' and '.join(NAMES[victim] for victim in victims)} {how}"
                        death = await die(bench, victims, number)
                        found.setdefault(name, []).append(death)
                        await revive(bench, victims, number)
                        took = f"last token after {death.last_token_ms:.1f} ms"
                        log(f"round {turn + 1} of {rounds}, {name}: {took}")
    return [row for name, deaths in found.items() for row in rows(name, deaths)]


def main(argv: list[str] | None = None) -> int:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(prog="bench.deaths", description=__doc__)
    parser.add_argument("--model", default="mid")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args(argv)
    if options.long:
        found = asyncio.run(long_stop(options.model, options.long))
        record("long-stop", found, notes=[f"a thaw of {THAW_SECONDS:g} s every ten seconds"])
        return 0
    figures = asyncio.run(measure(options.model, options.rounds))
    notes = [f"two real SGLang engines on one core, {options.rounds} rounds, {STREAMS} streams"]
    record("deaths", figures, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
