"""What several tests of the engine host use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp

from rose_agent.host import main
from rose_agent.host.options.arguments import parser
from rose_agent.os.freezers import Freezer
from rose_core.host_reasons import HostReason
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.host import (
    EngineState,
    EngineStatus,
    EnsureEngine,
    HostStatusRequest,
    StopEngine,
)
from rose_core.wire.sync import EngineSpec, WeightSource
from rose_engines.node.permit import BadPermit, Permit
from rose_engines.node.rundir import RunDir

TOKEN = "token-of-the-slot"
DEADLINE_SECONDS = float(os.environ.get("ROSE_TEST_DEADLINE", "60"))  # longer where it is emulated


# It ends with us, also when we are killed. Half a second of a core would go into loading numba,
# for a model of 512 elements; ``tests/engines`` tries the fake with it.
FAKE = {"end-with": str(os.getpid()), "without-numba": "true"}


def order(
    uid: str = "slot-1", generation: int = 1, *, token: str = TOKEN, **arguments: str
) -> EnsureEngine:
    """An order for a fake engine; keyword arguments become its flags."""
    flags = FAKE | {name.replace("_", "-"): value for name, value in arguments.items()}
    return EnsureEngine(
        slot=SlotKey(SlotUid(uid), generation),
        slot_name=f"name-of-{uid}",
        engine=EngineSpec("fake", "small", arguments=flags),
        weights=WeightSource("127.0.0.1:1", "run"),
        token=token,
    )


class Guard:
    """Keeps a slot's permit open as the guard does, from a thread, until told otherwise."""

    def __init__(self, rundir: Path, uid: str = "slot-1") -> None:
        self._path = RunDir(rundir).slot(uid).permit
        self._open = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        """Stop extending; the permit lapses by itself."""
        self._open.clear()

    def end(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        permit: Permit | None = None
        while not self._ending.wait(0.02):
            if permit is None:
                with contextlib.suppress(OSError, BadPermit):
                    permit = Permit.attach(self._path)
            if permit is not None and self._open.is_set():
                # Longer than in production: the tests run on busy machines.
                permit.extend(time.monotonic_ns() + 400_000_000)
        if permit is not None:
            permit.detach()


@contextlib.contextmanager
def guarding(rundir: Path, uid: str = "slot-1") -> Iterator[Guard]:
    guard = Guard(rundir, uid)
    guard.open()
    try:
        yield guard
    finally:
        guard.end()


@contextlib.asynccontextmanager
async def running(
    rundir: Path, models: Path, freezer: Freezer | None = None
) -> AsyncIterator[main.RunningHost]:
    """A host inside this process."""
    arguments = parser().parse_args(
        [
            *("--rundir", str(rundir), "--models", str(models)),
            *("--engine-python", sys.executable, "--data-port", "0", "--http-port", "0"),
        ]
    )
    # A prefix of its own, so that hosts of tests beside this one keep their cgroups.
    own = Freezer("signals", "for the test", prefix=f"rose-{rundir.name}-")
    started = await main.start(arguments, freezer or own)
    try:
        yield started
    finally:
        await started.stop(0.0)


async def until(
    condition: Callable[[], Awaitable[bool]], what: str, seconds: float = DEADLINE_SECONDS
) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.05)


async def status_of(host: main.RunningHost, uid: str = "slot-1") -> EngineStatus:
    found = await host.host.status(HostStatusRequest())
    return next(one for one in found.engines if one.slot.uid == uid)


async def serving(host: main.RunningHost, uid: str = "slot-1") -> EngineStatus:
    async def ready() -> bool:
        return (await status_of(host, uid)).state is EngineState.SERVING

    await until(ready, f"{uid} serves")
    return await status_of(host, uid)


async def failed(failures: list[EngineStatus], reason: HostReason) -> EngineStatus:
    """Wait for a failure.

    Args:
        failures: the fixture of that name.
        reason: of the failure.

    Returns:
        The engine as it was when it failed.
    """

    async def there() -> bool:
        return any(one.reason == reason for one in failures)

    await until(there, f"the engine fails: {reason}")
    return next(one for one in failures if one.reason == reason)


def stop(uid: str = "slot-1", generation: int = 1) -> StopEngine:
    return StopEngine(SlotKey(SlotUid(uid), generation), "Test", deadline_seconds=30.0)


def body(tokens: int = 20, *, stream: bool = False, **extra: object) -> dict[str, object]:
    return {
        "input_ids": [1, 2, 3],
        "stream": stream,
        "sampling_params": {"max_new_tokens": tokens},
        **extra,
    }


async def stands_still(sample: Callable[[], Awaitable[int]]) -> int:
    """Wait until a counter that else grows every few milliseconds rests for half a second."""
    seen = [-1]

    async def rests() -> bool:
        seen.append(await sample())
        await asyncio.sleep(0.5)
        return await sample() == seen[-1]

    await until(rests, "the counter rests")
    return seen[-1]


BEARER = {"Authorization": f"Bearer {TOKEN}"}


async def generated(client: aiohttp.ClientSession, engine_url: str) -> int:
    """Tokens the engine itself has counted; asks the engine, not the host."""
    async with client.get(f"{engine_url}/metrics") as reply:
        text = await reply.text()
    line = next(one for one in text.splitlines() if one.startswith("sglang:generation_tokens"))
    return int(float(line.split()[-1]))
