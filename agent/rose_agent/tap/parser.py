"""The unprivileged half of the tap: reads packets, follows requests, tells the guard.

It serves ``tap.sock``. The newest guard that connects is told: first the requests under way, then
every event as it happens, and a heartbeat per replica every 50 ms. Without a guard it goes on
following, so that a restarted guard finds the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from pathlib import Path

import msgspec

from rose_agent.tap import frames, metrics
from rose_agent.tap.frames import Unwatch, Watch
from rose_agent.tap.opener import Opened
from rose_agent.tap.replica import Replica
from rose_core.telemetry.events import Health, TapEvent

_log = logging.getLogger(__name__)
_BEAT_SECONDS = 0.05
_REOPEN_BEATS = 20
_MOST_WAITING = 4 * 1024 * 1024  # bytes; a guard that reads nothing is disconnected


class Parser:
    """Follows replicas and serves the guard.

    Args:
        channel: socket pair to the opener.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self._replicas: dict[str, Replica] = {}
        self._pending: dict[str, Watch] = {}
        self._failed: dict[str, tuple[Watch, str, int]] = {}
        self._guard: asyncio.StreamWriter | None = None

    async def run(self, listener: socket.socket) -> None:
        """Serve until cancelled or the opener is gone."""
        loop = asyncio.get_running_loop()
        gone = loop.create_future()
        self._channel.setblocking(False)
        loop.add_reader(self._channel, self._opened, gone)
        server = await asyncio.start_unix_server(self._serve, sock=listener)
        beat = asyncio.create_task(self._beat())
        try:
            await asyncio.wait({beat, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            beat.cancel()
            server.close()
            loop.remove_reader(self._channel)
            for replica in list(self._replicas.values()):
                self._drop(replica)

    # --- the guard

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._guard is not None:
            self._guard.close()
        self._guard = writer
        try:
            while True:
                for command in await frames.read(reader, frames.commands):
                    self._obey(command)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            _log.info("guard has gone: %s", error)
        finally:
            if self._guard is writer:
                self._guard = None
            writer.close()

    def _obey(self, command: frames.Command) -> None:
        known = self._replicas.get(command.replica)
        if isinstance(command, Unwatch):
            self._failed.pop(command.replica, None)
            self._pending.pop(command.replica, None)
            if known is not None:
                self._drop(known)
            return
        if known is not None and known.watch == command and not known.problem:
            self._tell([*known.tracker.open_requests(), *known.beat()])
            return
        if known is not None:
            self._drop(known)
        self._ask(command)

    def _tell(self, events: list[TapEvent]) -> None:
        guard = self._guard
        if guard is None or not events:
            return
        if guard.transport.get_write_buffer_size() > _MOST_WAITING:
            guard.transport.abort()
            return
        guard.write(frames.pack(events))

    # --- the opener

    def _ask(self, watch: Watch) -> None:
        self._pending[watch.replica] = watch
        self._channel.send(msgspec.msgpack.encode(watch))

    def _opened(self, gone: asyncio.Future[None]) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._channel, 65536, 16)
        if not data:
            if not gone.done():
                gone.set_result(None)
            return
        reply = msgspec.msgpack.decode(data, type=Opened)
        taps = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        watch = self._pending.pop(reply.replica, None)
        if watch is None or reply.error:
            for tap in taps:
                tap.close()
            if watch is not None:
                self._failed[reply.replica] = (watch, reply.error, _REOPEN_BEATS)
            return
        self._failed.pop(reply.replica, None)
        self._follow(watch, list(zip(reply.interfaces, taps, strict=True)))

    def _follow(self, watch: Watch, taps: list[tuple[str, socket.socket]]) -> None:
        replica = Replica(watch, taps, lambda: next(self._numbers))
        self._replicas[watch.replica] = replica
        metrics.REPLICAS.set(len(self._replicas))
        loop = asyncio.get_running_loop()
        for _, tap in taps:
            tap.setblocking(False)
            loop.add_reader(tap, self._readable, replica, tap)

    def _readable(self, replica: Replica, tap: socket.socket) -> None:
        self._tell(replica.read(tap))

    def _drop(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        for _, tap in replica.taps:
            loop.remove_reader(tap)
        replica.close()
        self._replicas.pop(replica.watch.replica, None)
        metrics.REPLICAS.set(len(self._replicas))

    # --- heartbeat

    async def _beat(self) -> None:
        while True:
            for replica in list(self._replicas.values()):
                self._tell(replica.beat())
                if replica.problem:
                    _log.warning("%s: %s", replica.watch.replica, replica.problem)
                    self._drop(replica)
                    self._failed[replica.watch.replica] = (replica.watch, replica.problem, 1)
            self._beat_failed()
            metrics.SAMPLING.set(sum(r.sampled for r in self._replicas.values()))
            await asyncio.sleep(_BEAT_SECONDS)

    def _beat_failed(self) -> None:
        for name, (watch, error, beats) in list(self._failed.items()):
            self._tell([unhealthy(name, error)])
            if beats > 1:
                self._failed[name] = (watch, error, beats - 1)
            else:
                self._failed[name] = (watch, error, _REOPEN_BEATS)
                if name not in self._pending:
                    self._ask(watch)


def unhealthy(replica: str, problem: str) -> Health:
    """The heartbeat of a replica whose sockets are not open."""
    return Health(
        replica, time.monotonic_ns(), problem, 0, opaque=False, in_flight=0, counts={}, packets=0
    )


def listen(path: Path) -> socket.socket:
    """Open the Unix socket, replacing a leftover; only our user may connect."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(4)
    return listener
