"""What one serving replica reports to the guard beside the tap; it never reads the pod itself.

``ConfinedReaders`` starts a process per replica (``confined``), starts it anew with back-off when
it ends, and takes only what ``messages`` allows. ``DirectReaders`` reads in this process, for
benchmarks and tests whose serving engine is their own.

| reader process | figures | machines |
|---|---|---|
| begun, no message yet | unknown | unknown |
| has reported | its figures; a snapshot for ``_STALE_SECONDS`` | its figures |
| ended, or sent what no reader sends | unknown at once | its last figures |
| started anew after ``_BACK_OFF_SECONDS`` | as at the beginning | asked for again |
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from typing import Protocol

import aiohttp
import msgspec

from rose_agent import metrics
from rose_agent.errors import AgentError
from rose_agent.pods.model import ServingPod
from rose_agent.signals import confined
from rose_agent.signals.feed import Feed
from rose_agent.signals.http import TIMEOUT_SECONDS, EngineReader
from rose_agent.signals.messages import (
    LARGEST,
    Aim,
    Ask,
    Command,
    Describe,
    Latest,
    Open,
    Page,
    PageReply,
    Watch,
    pack,
    replies,
)
from rose_agent.signals.snapshot import Snapshot, open_snapshot
from rose_core.telemetry.dialects import Figures
from rose_core.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
_STALE_SECONDS = 1.5  # three times the period at which an unchanged snapshot is repeated
# Doubled at each end, so that a pod that kills its reader costs one fork in half a minute.
_BACK_OFF_SECONDS = (1.0, 30.0)
_LASTING_SECONDS = 60.0  # a reader that lived this long begins with the shortest again


class ReaderFactoryGone(AgentError):
    """The process that starts readers has ended; the agent cannot see serving pods without it."""


class Reader(Protocol):
    """One replica, as its engine describes itself.

    Attributes:
        scrapes: pages of metrics that the engine has answered to us.
        machines: over how many its engine stretches, as its processes say; None is unknown.
    """

    scrapes: int
    machines: int | None

    def aim(self, pod: ServingPod, engine: str) -> None:
        """Read this pod's present address and processes from now on."""

    def follow(self, scheduler: int) -> None:
        """Read the load snapshot of this process (pid, 0 = none visible)."""

    def watch(self, every_seconds: float) -> None:
        """Read the snapshot this often."""

    async def metrics(self) -> Figures | None:
        """Figures from ``/metrics``, None when nobody answered."""

    async def loads(self) -> Figures:
        """Figures from the engine's load page."""

    def snapshot(self) -> Figures:
        """The newest load snapshot; unknown when there is none or it is old."""

    def close(self) -> None:
        """Read no more."""


class Readers(Protocol):
    """Makes readers."""

    def of(self, pod: ServingPod, engine: str) -> Reader:
        """A reader of this pod, whose pool has this kind of engine."""

    async def run(self) -> None:
        """Until cancelled, or until no reader can be made any more."""


class DirectReaders:
    """Reads in this process.

    Args:
        session: HTTP session for engine figures.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    def of(self, pod: ServingPod, engine: str) -> DirectReader:
        """A reader of this pod."""
        return DirectReader(self._session, pod, engine)

    async def run(self) -> None:
        """Nothing to do."""
        await asyncio.Event().wait()


class DirectReader(EngineReader):
    """Reads one replica in this process."""

    def __init__(self, session: aiohttp.ClientSession, pod: ServingPod, engine: str) -> None:
        super().__init__(session, pod.url, engine)
        self._feed = Feed(pod.address, pod.feed_port) if pod.feed_port and pod.address else None
        self._snapshot: Snapshot | None = None
        self._scheduler = 0
        self.machines: int | None = confined.machines_of(pod.pids)

    def aim(self, pod: ServingPod, engine: str) -> None:  # type: ignore[override]  # of a pod, not an address
        """Read this pod's present address and processes from now on."""
        super().aim(pod.url, engine)
        self.machines = confined.machines_of(pod.pids)

    def follow(self, scheduler: int) -> None:
        """Read the load snapshot of this process."""
        if scheduler == self._scheduler and self._snapshot is not None:
            return
        self._drop_snapshot()
        self._scheduler = scheduler
        descriptor = open_snapshot(scheduler) if scheduler and self._feed is None else None
        self._snapshot = None if descriptor is None else Snapshot(descriptor)

    def watch(self, every_seconds: float) -> None:
        """Nothing to do: it is read when it is asked for."""

    def snapshot(self) -> Figures:
        """The load snapshot as it is now."""
        source = self._feed or self._snapshot
        return Figures() if source is None else source.read()

    def close(self) -> None:
        """Read no more."""
        if self._feed is not None:
            self._feed.close()
        self._drop_snapshot()

    def _drop_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None


class ConfinedReaders:
    """Starts reader processes by way of the factory.

    Args:
        factory: of ``confined.start``.
    """

    def __init__(self, factory: socket.socket) -> None:
        self._factory = factory
        factory.setblocking(False)

    def of(self, pod: ServingPod, engine: str) -> ConfinedReader:
        """A reader of this pod, in a process that begins now."""
        return ConfinedReader(self._factory, pod, engine)

    async def run(self) -> None:
        """Wait for the end of the factory.

        Raises:
            ReaderFactoryGone: it has ended.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._factory, _note, ended)
        try:
            await ended
        finally:
            loop.remove_reader(self._factory)
        raise ReaderFactoryGone("the process that starts readers of serving pods has ended")


class ConfinedReader:
    """One replica, read by a process of its own. It is used from the loop it was made in."""

    def __init__(self, factory: socket.socket, pod: ServingPod, engine: str) -> None:
        self.scrapes = 0
        self.machines: int | None = None if pod.pids else 1
        self._factory = factory
        self._pod, self._engine, self._scheduler = pod, engine, 0
        self._every_seconds = 0.2
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Figures | None]] = {}
        self._figures, self._received_s = Figures(), 0.0
        self._scrapes_before = 0
        self._channel: socket.socket | None = None
        self._handover: socket.socket | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._wait_seconds, self._began = _BACK_OFF_SECONDS[0], 0.0
        self._begin()

    # --- what the guard asks

    def aim(self, pod: ServingPod, engine: str) -> None:
        """Read this pod's present address and processes from now on."""
        before, self._pod, self._engine = self._pod, pod, engine
        if (pod.feed_port, pod.address) != (before.feed_port, before.address) and pod.feed_port:
            self._end("its load feed has moved", wait=False)
            return
        self._send(Aim(pod.url, engine))
        if pod.pids != before.pids:
            self.machines = None
            self._describe()

    def follow(self, scheduler: int) -> None:
        """Read the load snapshot of this process."""
        if scheduler != self._scheduler:
            self._scheduler = scheduler
            self._open()

    def watch(self, every_seconds: float) -> None:
        """Read the snapshot this often."""
        if every_seconds != self._every_seconds:
            self._every_seconds = every_seconds
            self._send(Watch(every_seconds))

    async def metrics(self) -> Figures | None:
        """Figures from ``/metrics``, None when nobody answered."""
        return await self._ask(Page.METRICS)

    async def loads(self) -> Figures:
        """Figures from the engine's load page."""
        return await self._ask(Page.LOADS) or Figures()

    def snapshot(self) -> Figures:
        """The newest load snapshot; unknown when there is none or it is old."""
        fresh = time.monotonic() - self._received_s < _STALE_SECONDS
        return self._figures if fresh else Figures()

    def close(self) -> None:
        """End the process; it ends when we hang up."""
        self._hang_up()
        if self._retry is not None:
            self._retry.cancel()

    # --- the process

    def _begin(self) -> None:
        """Start a process, and repeat to it what the guard has asked for so far."""
        self._retry = None
        self._channel, reader_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._handover, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._began = time.monotonic()
        self._scrapes_before = self.scrapes
        begin = msgspec.structs.replace(
            confined.begin_of(self._pod, self._engine), every_seconds=self._every_seconds
        )
        with reader_end, its_end:
            _order(self._factory, pack(begin), [reader_end.fileno(), its_end.fileno()])
        asyncio.get_running_loop().add_reader(self._channel, self._take)
        self._describe()
        self._open()

    def _describe(self) -> None:
        self._send(Describe(self._pod.pids))

    def _open(self) -> None:
        """Have the snapshot handed to the process, if there is one to read."""
        if self._scheduler and not self._pod.feed_port and self._handover is not None:
            _order(self._factory, pack(Open(self._scheduler)), [self._handover.fileno()])

    def _take(self) -> None:
        assert self._channel is not None  # noqa: S101  # its reader is removed with it
        try:
            data = self._channel.recv(LARGEST)
            reply = replies.decode(data) if data else None
        except BlockingIOError:
            return
        except (OSError, *UNREADABLE) as error:
            self._end(f"it said what no reader says: {error}")
            return
        if reply is None:
            self._end("it ended")
        elif isinstance(reply, Latest):
            self._figures, self._received_s = reply.figures.plain(), time.monotonic()
        elif isinstance(reply, PageReply):
            self.scrapes = self._scrapes_before + reply.scrapes
            waiting = self._asked.pop(reply.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None if reply.figures is None else reply.figures.plain())
        else:
            self.machines = reply.machines

    async def _ask(self, page: Page) -> Figures | None:
        number = next(self._numbers)
        answer: asyncio.Future[Figures | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._send(Ask(number, page))
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS + 1):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._asked.pop(number, None)

    def _send(self, command: Command) -> None:
        """To the process; one that does not read is ended by its silence, not waited for."""
        if self._channel is not None:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self._channel.send(pack(command))

    def _end(self, why: str, *, wait: bool = True) -> None:
        _log.warning("the reader of %s/%s: %s", self._pod.namespace, self._pod.name, why)
        metrics.READER_ENDS.inc()
        self._hang_up()
        shortest, longest = _BACK_OFF_SECONDS
        lasted = time.monotonic() - self._began >= _LASTING_SECONDS
        self._wait_seconds = shortest if lasted else self._wait_seconds
        pause = self._wait_seconds if wait else 0.0
        self._wait_seconds = min(longest, 2 * self._wait_seconds)
        self._retry = asyncio.get_running_loop().call_later(pause, self._begin)

    def _hang_up(self) -> None:
        self._received_s = 0.0
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_result(None)
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
        if self._handover is not None:
            self._handover.close()
            self._handover = None


def _order(factory: socket.socket, order: bytes, descriptors: list[int]) -> None:
    """Send it to the factory; what it cannot take now is repeated at the reader's next start."""
    with contextlib.suppress(BlockingIOError, ConnectionError):
        socket.send_fds(factory, [order], descriptors)


def _note(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
