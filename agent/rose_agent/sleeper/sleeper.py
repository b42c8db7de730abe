r"""Puts a serving engine to sleep under a grant and brings it back when the grant lapses.

    python -m rose_agent.sleeper.sleeper --engine SGLang --url http://127.0.0.1:30000 \
        --grant DIR/permit --record DIR/sleeper.json --pid PID --release-bytes N

A process of its own, so that it outlives the process that grants. The grant is a permit: a deadline
in shared memory that its holder extends. An agent that dies, or whose own grant has lapsed because
the operator is gone, extends it no more. Every stage is on disk before its order is carried out;
one that starts without a readable record takes serving for asleep until it answers its probe.

``rose_core.devices.sleeper`` decides. Next step: ``rose_agent.sleeper.sleepers`` keeps one for each
replica of a node that is lent whole.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from rose_agent.devices.opening import open_driver
from rose_agent.devices.usage import MemoryMeter, meter_for
from rose_core.devices.sleeper import (
    Sleeper,
    SleeperLimits,
    SleeperOrder,
    SleeperSeen,
    SleepStage,
    decide,
    resting,
    unknown,
)
from rose_core.identity import GpuUuid
from rose_engines.errors import EngineUnavailable
from rose_engines.node.permit import BadPermit, Permit
from rose_engines.node.rundir import read_json, write_json
from rose_engines.process.sleep import SERVING, ServingEngine, SleepRefused

_log = logging.getLogger(__name__)
_PERIOD_SECONDS = 0.5
_WAITS_FOR_PROBE = frozenset({SleepStage.WAKING, SleepStage.BROKEN})


class SleeperRecord(msgspec.Struct, frozen=True):
    """What survives this process.

    Attributes:
        reference: serving's answer to the probe before it slept.
        before_bytes: what its processes held then; None = unknown.
    """

    sleeper: Sleeper
    reference: str = ""
    before_bytes: int | None = None


async def _unknown() -> bool | None:
    return None


@dataclass
class WatchedServing:
    """The engine and what is needed to watch it.

    Attributes:
        pids: its processes, now.
        gpus: where it holds its memory.
        vacated: no rollout engine holds these GPUs; None = unknown.
        restart: ends its processes, so that the kubelet starts them anew.
        drained: traffic is kept away from it; before that it is not put to sleep.
    """

    engine: ServingEngine
    meter: MemoryMeter
    pids: Callable[[], tuple[int, ...]]
    restart: Callable[[], None]
    gpus: tuple[GpuUuid, ...] = ()
    vacated: Callable[[], Awaitable[bool | None]] = _unknown
    drained: Callable[[], bool] = lambda: True


class DeadMan:
    """Dead man's switch of one serving engine: wakes it when its grant ends, whatever else is down.

    Args:
        serving: the engine.
        grant: the permit's file.
        record: file that survives this process.
        limits: see there.
        clock: seconds, monotonic across processes of the machine.
    """

    def __init__(
        self,
        serving: WatchedServing,
        grant: Path,
        record: Path,
        limits: SleeperLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._serving = serving
        self._grant = grant
        self._path = record
        self._limits = limits
        self._clock = clock
        self._refused = ""
        self.record = _remembered(record, clock())

    @property
    def state(self) -> Sleeper:
        """Where serving stands."""
        return self.record.sleeper

    @property
    def granted(self) -> bool:
        """Whoever grants still extends the permit."""
        return self._granted()

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(_PERIOD_SECONDS)

    async def step(self) -> None:
        """Look, decide, remember, carry out."""
        seen = await self._see()
        after, order = decide(self.state, seen, self._limits, self._clock())
        if after != self.state:
            _log.info("serving is %s %s", after.stage, after.refusal)
            self._remember(msgspec.structs.replace(self.record, sleeper=after))
        await self._carry_out(order)

    async def _see(self) -> SleeperSeen:
        granted, stage = self._granted(), self.state.stage
        if stage is SleepStage.AWAKE:
            # Serving is asked nothing while nobody could use the answer.
            wanted = granted and self._serving.drained()
            wanted = wanted and not resting(self.state, self._limits, self._clock())
            idle = await self._idle() if wanted else None
            known = bool(idle) and await self._take_reference()
            return SleeperSeen(granted, idle=idle, reference=known)
        if stage is SleepStage.FALLING:
            return SleeperSeen(
                granted, refused=self._refused, released_bytes=self._released_bytes()
            )
        if stage is SleepStage.RECALLED:
            return SleeperSeen(granted, vacated=await self._serving.vacated())
        well = await self._is_well() if stage in _WAITS_FOR_PROBE else None
        return SleeperSeen(granted, well=well)

    async def _carry_out(self, order: SleeperOrder) -> None:
        try:
            if order is SleeperOrder.RELEASE:
                self._refused = ""
                await self._serving.engine.release()
            elif order is SleeperOrder.RESUME:
                await self._serving.engine.resume()
            elif order is SleeperOrder.RESTART:
                _log.error("serving does not wake up: its processes are ended")
                self._serving.restart()
        except SleepRefused as error:
            self._refused = str(error)
            _log.warning("%s: %s", order, error)
        except EngineUnavailable as error:
            _log.warning("%s: %s", order, error)

    def _granted(self) -> bool:
        try:
            permit = Permit.attach(self._grant, writable=False)
        except (OSError, BadPermit):
            return False
        try:
            return permit.is_open_for_any(time.monotonic_ns())
        finally:
            permit.detach()

    async def _idle(self) -> bool | None:
        with contextlib.suppress(EngineUnavailable):
            return await self._serving.engine.idle()
        return None

    async def _take_reference(self) -> bool:
        """Take down what serving answers and holds while it is well; False = it does not answer."""
        try:
            reference = await self._serving.engine.probe()
        except EngineUnavailable as error:
            _log.warning("no reference for the probe: %s", error)
            return False
        before = self._held_bytes()
        self._remember(SleeperRecord(self.state, reference, before))
        return True

    async def _is_well(self) -> bool:
        try:
            answer = await self._serving.engine.probe()
        except EngineUnavailable:
            return False
        # Without a reference any answer has to do: nothing is known of what it should be.
        return not self.record.reference or answer == self.record.reference

    def _released_bytes(self) -> int | None:
        before, now = self.record.before_bytes, self._held_bytes()
        return None if before is None or now is None else max(0, before - now)

    def _held_bytes(self) -> int | None:
        return self._serving.meter.read(self._serving.pids(), self._serving.gpus)

    def _remember(self, record: SleeperRecord) -> None:
        write_json(self._path, record)
        self.record = record


def _remembered(path: Path, now_s: float) -> SleeperRecord:
    record = read_json(path, SleeperRecord)
    if record is None:
        return SleeperRecord(unknown(now_s))
    if record.sleeper.since_s > now_s:  # of an earlier boot: serving has been started since
        return SleeperRecord(unknown(now_s), record.reference)
    return record


def vacated_page(session: aiohttp.ClientSession, url: str) -> Callable[[], Awaitable[bool | None]]:
    """Asks the engine host's page."""

    async def ask() -> bool | None:
        try:
            async with session.get(url, timeout=aiohttp.ClientTimeout(total=2.0)) as reply:
                return (await reply.json()).get("free") is True
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None

    return ask


def tree(pid: int) -> tuple[int, ...]:
    """A process and its descendants."""
    found, fresh = [pid], [pid]
    while fresh:
        children = Path(f"/proc/{fresh.pop()}/task").glob("*/children")
        for path in children:
            with contextlib.suppress(OSError):
                fresh += (born := [int(text) for text in path.read_text().split()])
                found += born
    return tuple(found)


def end_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    for process in reversed(tree(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(prog="rose_agent.sleeper.sleeper", description=__doc__)
    made.add_argument("--engine", choices=sorted(SERVING), required=True)
    made.add_argument("--url", required=True, help="the serving engine")
    made.add_argument("--grant", type=Path, required=True, help="permit that allows it to sleep")
    made.add_argument("--record", type=Path, required=True, help="what survives this process")
    made.add_argument("--pid", type=int, required=True, help="root process of serving")
    made.add_argument("--release-bytes", type=int, required=True, help="what must become free")
    made.add_argument("--gpu", action="append", default=[], help="serving's GPUs")
    made.add_argument("--devices", choices=["static", "nvml"], default="static")
    made.add_argument("--vacated-url", default="", help="the engine host's page /vacated?gpu=...")
    made.add_argument("--wake-seconds", type=float, default=60.0)
    made.add_argument("--vacate-seconds", type=float, default=15.0)
    return made


async def watch(arguments: argparse.Namespace) -> None:
    """Run until cancelled."""
    limits = SleeperLimits(
        arguments.release_bytes, wake_s=arguments.wake_seconds, vacate_s=arguments.vacate_seconds
    )
    async with aiohttp.ClientSession() as session:
        url = arguments.vacated_url
        serving = WatchedServing(
            SERVING[arguments.engine](session, arguments.url),
            meter_for(open_driver(arguments.devices)),
            lambda: tree(arguments.pid),
            lambda: end_tree(arguments.pid),
            tuple(arguments.gpu),
            vacated_page(session, url) if url else _unknown,
        )
        await DeadMan(serving, arguments.grant, arguments.record, limits).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(watch(parser().parse_args()))
