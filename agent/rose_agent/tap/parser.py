"""The unprivileged half of the tap: reads packets, follows requests, tells the guard.

It serves ``tap.sock``. The newest guard that connects gets first the requests under way, then
every event as it happens, and a heartbeat per replica. Without a guard it goes on following, so
that a restarted guard finds the truth. ``main`` imports this module after the fork, before the
parser gives up its rights. Next step: ``replica`` reads, ``opener`` opens its sockets.

| replicas | a heartbeat |
|---|---|
| one is watched closely | just before a period of the duty begins, and in its middle |
| one has much to read, or cannot be heard | as often |
| all others | every 120 ms |

Where no process of the node may enter pods' namespaces (no SYS_ADMIN, sandboxed runtimes) a pod
brings a tap of its own (``rose tap --sidecar``), which needs NET_RAW only. It listens in a folder
of the node's run directory, ``taps/POD-UID``; a ``Relay`` speaks to it as the guard would, and
passes on what it says about that pod and about nothing else. Whoever may write there speaks for the
pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rose_agent.metrics import REGISTRY
from rose_agent.os.bpf_maps import HashMap
from rose_agent.tap import frames, kernel_counts, metrics
from rose_agent.tap.frames import TapWatch, Unwatch
from rose_agent.tap.opener import Opened
from rose_agent.tap.replica import TappedReplica
from rose_agent.tap.sockets import MOST_SOCKETS, PER_INTERFACE, Taps
from rose_core.identity import PodUid
from rose_core.telemetry.events import PERIOD_NS, Health, TapEvent
from rose_wire import plainpages

_log = logging.getLogger(__name__)
_CALM_SECONDS = 0.12
_STEP_NS = PERIOD_NS // 2
_LEAD_NS = 3_000_000  # what the tap and the guard need before a period begins
_REOPEN_BEATS = 20  # a second
_MOST_WAITING = 4 * 1024 * 1024  # bytes; a guard that reads nothing is disconnected


_NAME = re.compile(r"^[A-Za-z0-9][-A-Za-z0-9._]{0,127}$")


class Parser:
    """Follows replicas and serves the guard.

    Args:
        channel: socket pair to the opener.
        rundir: where pods' own taps listen.
        sample_from: segments per second above which token streams are sampled; 0 = never.
    """

    def __init__(self, channel: socket.socket, rundir: Path, sample_from: float) -> None:
        self._channel = channel
        self._rundir = rundir
        self._sample_from = sample_from
        self._relays: dict[str, Relay] = {}
        self._numbers = itertools.count(1)
        self._replicas: dict[str, TappedReplica] = {}
        self._pending: dict[str, TapWatch] = {}
        self._failed: dict[PodUid, tuple[TapWatch, str, int]] = {}
        self._guard: asyncio.StreamWriter | None = None
        self._next_beat: asyncio.TimerHandle | None = None
        self._sampled = 0

    async def run(self, listener: socket.socket) -> None:
        """Serve until cancelled or the opener is gone.

        Raises:
            Exception: whatever a heartbeat raised; a tap that cannot beat must end.
        """
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        self._channel.setblocking(False)
        loop.add_reader(self._channel, self._opened, gone)
        server = await asyncio.start_unix_server(self._serve, sock=listener)
        try:
            self._beat(gone)
            await gone
        finally:
            if self._next_beat is not None:
                self._next_beat.cancel()
            server.close()
            loop.remove_reader(self._channel)
            for replica in list(self._replicas.values()):
                self._drop(replica)
            for relay in self._relays.values():
                relay.close()

    # --- the guard

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._guard is not None:
            self._guard.close()
        self._guard = writer
        try:
            while True:
                for command in await frames.read(reader, frames.commands):
                    self._apply(command)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            _log.info("guard has gone: %s", error)
        finally:
            if self._guard is writer:
                self._guard = None
            writer.close()

    def _apply(self, command: frames.Command) -> None:
        known = self._replicas.get(command.replica)
        relay = self._relays.get(command.replica)
        if relay is not None:
            if isinstance(command, TapWatch) and relay.watch.same_sockets(command):
                relay.watch = command
                relay.resend()
                return
            self._relays.pop(command.replica).close()
        if isinstance(command, Unwatch):
            self._failed.pop(command.replica, None)
            self._pending.pop(command.replica, None)
            if known is not None:
                self._drop(known)
            return
        if known is not None and known.watch.same_sockets(command) and not known.problem:
            known.watch = command
            self._emit([*known.tracker.open_requests(), *known.beat()])
            return
        if known is not None:
            self._drop(known)
        self._ask(command)

    def _emit(self, events: list[TapEvent]) -> None:
        guard = self._guard
        if guard is None or not events:
            return
        if guard.transport.get_write_buffer_size() > _MOST_WAITING:
            guard.transport.abort()
            return
        guard.write(frames.pack(events))

    # --- the opener

    def _ask(self, watch: TapWatch) -> None:
        own = socket_of(self._rundir, watch.replica)
        if own is not None:
            self._failed.pop(watch.replica, None)
            self._relays[watch.replica] = Relay(own, watch, self._emit, self._note_silent)
            return
        self._pending[watch.replica] = watch
        self._channel.send(msgspec.msgpack.encode(watch))

    def _note_silent(self, watch: TapWatch, reason: str) -> None:
        self._relays.pop(watch.replica, None)
        self._failed[watch.replica] = (watch, reason, _REOPEN_BEATS)

    def _opened(self, gone: asyncio.Future[None]) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._channel, 65536, MOST_SOCKETS + 1)
        if not data:
            if not gone.done():
                gone.set_result(None)
            return
        reply = msgspec.msgpack.decode(data, type=Opened)
        number = PER_INTERFACE * len(reply.interfaces)
        opened = [socket.socket(fileno=descriptor) for descriptor in descriptors[:number]]
        own = (opened[n : n + PER_INTERFACE] for n in range(0, number, PER_INTERFACE))
        taps = [Taps(name, *four) for name, four in zip(reply.interfaces, own, strict=True)]
        streams = [kernel_counts.streams(descriptor) for descriptor in descriptors[number:]]
        watch = self._pending.pop(reply.replica, None)
        if watch is None or reply.error:
            for tap in taps:
                tap.close()
            for given in streams:
                given.close()
            if watch is not None:
                self._failed[reply.replica] = (watch, reply.error, _REOPEN_BEATS)
            return
        self._failed.pop(reply.replica, None)
        counting = self._usable(watch, streams, reply.uncounted)
        replica = TappedReplica(
            *(watch, taps, reply.addresses, lambda: next(self._numbers), self._sample_from),
            streams=counting,
        )
        self._replicas[watch.replica] = replica
        self._gauge()
        replica.start(self._emit)

    @staticmethod
    def _usable(watch: TapWatch, streams: list[HashMap], reason: str) -> HashMap | None:
        """The kernel's map, where this process may use it; the log says who counts tokens."""
        for stream in streams:
            try:
                stream.get(bytes(kernel_counts.KEY_BYTES))
            except OSError as error:  # before Linux 5.19
                stream.close()
                reason = f"a map without a capability: {error}"
            else:
                _log.info("%s: the kernel counts tokens", watch.replica)
                return stream
        _log.info("%s: tokens are counted packet by packet: %s", watch.replica, reason)
        return None

    def _gauge(self) -> None:
        metrics.REPLICAS.set(len(self._replicas))
        metrics.COUNTING.set(sum(replica.counting for replica in self._replicas.values()))

    def _drop(self, replica: TappedReplica) -> None:
        replica.close()
        self._replicas.pop(replica.watch.replica, None)
        self._gauge()

    # --- heartbeat

    def _beat(self, gone: asyncio.Future[None]) -> None:
        try:
            self._beat_all()
        except Exception as error:  # noqa: BLE001  # raised again by ``run``
            if not gone.done():
                gone.set_exception(error)
            return
        self._next_beat = asyncio.get_running_loop().call_later(self._pause(), self._beat, gone)

    def _pause(self) -> float:
        restless = bool(self._failed) or any(r.restless for r in self._replicas.values())
        return before(_STEP_NS, time.monotonic_ns()) / 1e9 if restless else _CALM_SECONDS

    def _beat_all(self) -> None:
        self._emit([event for replica in self._replicas.values() for event in replica.beat()])
        sampled = 0
        for replica in list(self._replicas.values()):
            sampled += replica.sampled
            if replica.problem:
                _log.warning("%s: %s", replica.watch.replica, replica.problem)
                self._drop(replica)
                self._failed[replica.watch.replica] = (replica.watch, replica.problem, 1)
        self._beat_failed()
        if sampled != self._sampled:
            self._sampled = sampled
            metrics.SAMPLING.set(sampled)

    def _beat_failed(self) -> None:
        for name, (watch, error, beats) in list(self._failed.items()):
            self._emit([unhealthy(name, error)])
            if beats > 1:
                self._failed[name] = (watch, error, beats - 1)
            else:
                self._failed[name] = (watch, error, _REOPEN_BEATS)
                if name not in self._pending:
                    self._ask(watch)


def before(every_ns: int, now_ns: int) -> int:
    """Nanoseconds until just before the clock's next multiple that is not all but there."""
    left = every_ns - (now_ns + _LEAD_NS) % every_ns
    return left if left > every_ns // 4 else left + every_ns


def unhealthy(replica: PodUid, problem: str) -> Health:
    """The heartbeat of a replica whose sockets are not open."""
    return Health(
        replica, time.monotonic_ns(), problem, 0, opaque=False, in_flight=0, counts={}, packets=0
    )


def run_parser(
    channel: socket.socket,
    rundir: Path,
    sample_from: float,
    listener: socket.socket,
    http: socket.socket,
) -> None:
    """Run until SIGTERM, SIGINT, or the opener's end.

    Args:
        channel: socket pair to the opener.
        rundir: where pods' own taps listen.
        sample_from: segments per second above which token streams are sampled; 0 = never.
        listener: ``tap.sock``.
        http: where the metrics are read.
    """
    asyncio.run(_run(Parser(channel, rundir, sample_from), listener, http))


async def _run(parser: Parser, listener: socket.socket, http: socket.socket) -> None:
    pages = await plainpages.serve(http, REGISTRY)
    task = asyncio.create_task(parser.run(listener))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    _log.info("tap on port %s for metrics", http.getsockname()[1])
    with contextlib.suppress(asyncio.CancelledError):
        await task
    pages.close()


def socket_of(rundir: Path, replica: PodUid) -> Path | None:
    """Where the replica's own tap listens; None when it has none."""
    if not _NAME.match(replica):
        return None
    path = rundir / "taps" / replica / "tap.sock"
    return path if path.exists() else None


class Relay:
    """One connection to a pod's own tap.

    Args:
        path: its socket.
        watch: the replica to follow there; namespace and interfaces are the pod's own.
        deliver: takes its events.
        ended: called with the reason when it is heard no more.
    """

    def __init__(
        self,
        path: Path,
        watch: TapWatch,
        deliver: Callable[[list[TapEvent]], None],
        ended: Callable[[TapWatch, str], None],
    ) -> None:
        self.watch = watch
        self._path = path
        self._deliver = deliver
        self._ended = ended
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.create_task(self._run())

    def resend(self) -> None:
        """Send the requests under way to a guard that has just connected."""
        if self._writer is not None:
            watch = msgspec.structs.replace(self.watch, pid=0, netns="", interfaces=())
            self._writer.write(frames.pack([watch]))

    def close(self) -> None:
        """Listen no more."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._session()
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            self._ended(self.watch, f"the pod's own tap at {self._path} is silent: {error}")

    async def _session(self) -> None:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        self._writer = writer
        _log.info("%s is heard through its own tap", self.watch.replica)
        try:
            self.resend()
            while True:
                events = await frames.read(reader, frames.events)
                self._deliver([e for e in events if e.replica == self.watch.replica])
        finally:
            self._writer = None
            writer.close()
