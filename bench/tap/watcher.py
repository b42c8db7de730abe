"""The real ``rose tap`` on the traffic's namespace, heard as the guard hears it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from bench.tap.traffic import Order, Seen
from rose_agent.tap import frames
from rose_agent.tap.frames import TapWatch
from rose_core.identity import PodUid
from rose_core.telemetry.book import Book, FinishedRequest
from rose_core.telemetry.events import Arrived, Health, TapEvent

_SETTLED_SECONDS = 0.5


@dataclass
class Watched:
    """What one order looked like from outside.

    Attributes:
        client: as the client saw it.
        tap: as the tap saw it, by path.
        received_ns: when this process heard of each arrival.
        cpu_s: of the tap's parser, while the order lasted.
        grown_bytes: of its memory.
    """

    client: list[Seen]
    tap: dict[str, FinishedRequest] = field(default_factory=dict)
    received_ns: dict[int, int] = field(default_factory=dict)
    health: Health | None = None
    cpu_s: float = 0.0
    grown_bytes: int = 0
    packets: int = 0

    @property
    def tokens(self) -> int:
        """Tokens the client got."""
        return sum(one.tokens for one in self.client)


class Listener:
    """The guard's end of ``tap.sock``.

    A finished request is found again by the size of its body, or ``by`` what else is said.

    Attributes:
        events: everything it heard, where somebody wants to keep that.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.book = Book(0)
        self.watched = Watched([])
        self.events: list[TapEvent] | None = None
        self._reader = reader
        self._key: Callable[[FinishedRequest], str] = lambda done: str(done.size)

    def by(self, key: Callable[[FinishedRequest], str]) -> None:
        """Find finished requests by this."""
        self._key = key

    async def beat(self, until_ns: int) -> Health:
        """Take events until a heartbeat made after this time (0 = any)."""
        while True:
            events = await frames.read(self._reader, frames.events)
            now = time.monotonic_ns()
            beat = None
            if self.events is not None:
                self.events += events
            for event in events:
                done = self.book.apply(event, now)
                if done is not None:
                    self.watched.tap[self._key(done)] = done
                if isinstance(event, Arrived):
                    self.watched.received_ns[event.time_ns] = now
                elif isinstance(event, Health):
                    beat = event
            if beat is not None and beat.time_ns >= until_ns:
                self.watched.health = beat
                return beat


class Watcher:
    """Tap and traffic, side by side."""

    def __init__(
        self,
        traffic: asyncio.subprocess.Process,
        parser: psutil.Process,
        listener: Listener,
    ) -> None:
        self._traffic = traffic
        self._parser = parser
        self._listener = listener

    async def run(self, order: Order) -> Watched:
        """Let the traffic carry out an order and listen until the tap has seen all of it."""
        assert self._traffic.stdin is not None  # noqa: S101  # piped
        assert self._traffic.stdout is not None  # noqa: S101  # piped
        watched = self._listener.watched = Watched([])
        before = await self._listener.beat(time.monotonic_ns())
        cpu, memory = self._cpu(), self._parser.memory_info().rss
        self._traffic.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        answer = asyncio.create_task(self._traffic.stdout.readline())
        while not answer.done():
            await self._listener.beat(0)
        watched.cpu_s = self._cpu() - cpu
        after = await self._listener.beat(time.monotonic_ns() + int(_SETTLED_SECONDS * 1e9))
        watched.packets = after.packets - before.packets
        watched.grown_bytes = self._parser.memory_info().rss - memory
        watched.client = [Seen(**one) for one in json.loads(await answer)]
        return watched

    def _cpu(self) -> float:
        times = self._parser.cpu_times()
        return float(times.user + times.system)


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process with pipes, ended in the end."""
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.terminate()
        await started.wait()


@contextlib.asynccontextmanager
async def tap_process(
    folder: Path, watch: TapWatch, *more: str
) -> AsyncIterator[tuple[Listener, psutil.Process]]:
    """Start ``rose tap``, let it follow one replica, and listen; with its parser's process."""
    run = ("-m", "rose_cli.main", "tap", "--rundir", str(folder), "--http-host", "127.0.0.1")
    async with process(*run, "--http-port", "0", "--log-level", "WARNING", *more) as tap:
        reader, writer = await connected(folder / "tap.sock")
        writer.write(frames.pack([watch]))
        try:
            listener = Listener(reader)
            await listener.beat(0)  # it listens before it is two processes
            yield listener, psutil.Process(tap.pid).children()[0]
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def watching(folder: Path, *more: str) -> AsyncIterator[Watcher]:
    """Start both and connect as the guard does; ``more`` flags of the tap."""
    async with process("-m", "bench.tap.traffic") as traffic:
        assert traffic.stdout is not None  # noqa: S101  # piped
        port = int((await traffic.stdout.readline()).split()[1])
        watch = TapWatch(PodUid("bench"), traffic.pid, port)
        async with tap_process(folder, watch, *more) as (listener, parser):
            listener.by(lambda done: done.path)
            yield Watcher(traffic, parser, listener)


async def connected(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The guard's end of a tap's socket, as soon as it listens."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                return await asyncio.open_unix_connection(str(path), limit=1 << 22)
            await asyncio.sleep(0.05)
