"""One followed replica: its sockets, its tracker, its health.

| condition | heartbeat says |
|---|---|
| sockets open and bound, no drops | nothing: healthy |
| segments dropped, queue not emptied, too many connections | ``lost_ns``: distrusted a while |
| a socket lost its interface, or reading failed | ``problem``; reopened by the parser |

| requests under way | segments/s | read |
|---|---|---|
| none, or one whose next segment matters | any | every segment |
| all stream their tokens | few | every segment |
| all stream their tokens | at least ``sample_from`` | the sample |

What a segment tells goes out at once, but for tokens after the first: those wait for the next
other event or heartbeat, for 20 ms at most where the replica is watched closely.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable

from rose_agent.tap import bpf, metrics, packets, sockets
from rose_agent.tap.frames import Watch
from rose_agent.tap.sockets import Pair
from rose_core.telemetry.events import Arrived, Health, Progress, TapEvent
from rose_core.telemetry.tracker import Tracker

SAMPLE_FROM_PER_SECOND = 400.0
_BATCH = 256  # segments handled before others get their turn
_BLANK = bytes(bpf.SNAP)
_MOST_BEHIND = 64  # batches that a heartbeat reads to be up to date
_PROGRESS_SECONDS = 0.02
_STAMP = struct.Struct("qq")
_BRACKETS, _TIGHT_NS = 5, 5_000
# A connection that shows nothing for this long is given up. Long, because a request that waits in
# a full queue shows nothing either, and forgetting it would open the gate.
_SILENT_NS = 900_000_000_000


class Replica:
    """A replica under watch.

    Args:
        watch: what to follow.
        pairs: open sockets.
        addresses: of the namespace, as ``packets.decode`` wants them.
        number: gives the next request number.
        sample_from: segments per second; 0 = never.
    """

    def __init__(
        self,
        watch: Watch,
        pairs: list[Pair],
        addresses: frozenset[str],
        number: Callable[[], int],
        sample_from: float,
    ) -> None:
        self.watch = watch
        self.tracker = Tracker(watch.replica, number)
        self.problem = ""
        self._pairs = pairs
        self._addresses = addresses
        self._sample_from = sample_from
        self._tell: Callable[[list[TapEvent]], None] = _nobody
        self._progress: dict[int, Progress] = {}
        self._flush: asyncio.TimerHandle | None = None
        self._buffer = memoryview(bytearray(bpf.SNAP))
        self._lost_ns = 0
        self._sampled = False
        self._rate = 0.0
        self._rate_base = (time.monotonic_ns(), 0)

    @property
    def sampled(self) -> bool:
        """Whether response segments are sampled now."""
        return self._sampled

    def start(self, tell: Callable[[list[TapEvent]], None]) -> None:
        """Read from now on, inside the running loop."""
        self._tell = tell
        loop = asyncio.get_running_loop()
        for tap in self._read_now():
            loop.add_reader(tap, self._readable, tap)

    def close(self) -> None:
        """Close the sockets."""
        loop = asyncio.get_running_loop()
        if self._flush is not None:
            self._flush.cancel()
        for tap in self._read_now():
            loop.remove_reader(tap)
        for pair in self._pairs:
            pair.close()
        self._pairs = []

    def _read_now(self) -> list[socket.socket]:
        return [pair.sampled if self._sampled else pair.whole for pair in self._pairs]

    def _left_alone(self) -> list[socket.socket]:
        return [pair.whole if self._sampled else pair.sampled for pair in self._pairs]

    # --- packets

    def _readable(self, tap: socket.socket) -> None:
        events: list[TapEvent] = []
        self._read(tap, events)
        self._sample(events)
        self._pass_on(events)

    def _pass_on(self, events: list[TapEvent]) -> None:
        """Tell what is urgent, and with it the tokens that waited."""
        urgent = [event for event in events if not isinstance(event, Progress)]
        if urgent:
            self._tell([*self._waiting(), *events])
            return
        self._progress.update((e.request, e) for e in events if isinstance(e, Progress))
        if self._progress and self.watch.closely and self._flush is None:
            loop = asyncio.get_running_loop()
            self._flush = loop.call_later(_PROGRESS_SECONDS, self._tell_progress)

    def _tell_progress(self) -> None:
        self._tell(self._waiting())

    def _waiting(self) -> list[TapEvent]:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        waiting: list[TapEvent] = [*self._progress.values()]
        self._progress.clear()
        return waiting

    def _read(self, tap: socket.socket, events: list[TapEvent]) -> bool:
        """Handle a batch of what waits on one socket; True when it is empty."""
        offset = clock_offset()
        try:
            for _ in range(_BATCH):
                size, ancillary, _, origin = tap.recvmsg_into([self._buffer], 64)
                if origin[2] == sockets.PACKET_OUTGOING and origin[0] == "lo":
                    continue  # it comes in again
                self._feed(bytes(self._buffer[:size]), _stamp(ancillary, offset), events)
        except BlockingIOError:
            return True
        except OSError as error:
            self.problem = f"packet socket failed: {error}"
            return True
        return False

    def _feed(self, packet: bytes, stamp_ns: int, events: list[TapEvent]) -> None:
        segment = packets.decode(packet, self.watch.port, stamp_ns, self._addresses)
        if segment is None:
            return
        for event in self.tracker.feed(segment):
            if isinstance(event, Arrived):
                metrics.REQUESTS.inc()
                metrics.LAG_SECONDS.observe((time.monotonic_ns() - stamp_ns) / 1e9)
            events.append(event)

    # --- heartbeat

    def beat(self) -> list[TapEvent]:
        """Read what waits, check sockets and counters; the heartbeat is the last event."""
        now = time.monotonic_ns()
        events = [*self._waiting(), *self.tracker.expire(now, _SILENT_NS)]
        for tap in self._read_now():
            self._catch_up(tap, events, now)
        self._buffer[:] = _BLANK  # the last packet does not wait there for the next
        self._check(now)
        self._measure(now)
        self._sample(events)
        ledger = self.tracker.ledger
        events.append(
            Health(
                self.watch.replica,
                now,
                self.problem,
                max(self._lost_ns, self.tracker.lost_ns),
                self.tracker.opaque,
                self.tracker.in_flight,
                dict(ledger.counts),
                self.tracker.packets,
                ledger.seen,
                ledger.finished,
                ledger.unsure,
            )
        )
        return events

    def _catch_up(self, tap: socket.socket, events: list[TapEvent], now_ns: int) -> None:
        """Whatever had passed before this heartbeat is in its counts."""
        if not any(self._read(tap, events) for _ in range(_MOST_BEHIND)):
            self._lost_ns = now_ns

    def _check(self, now_ns: int) -> None:
        try:
            for tap in self._left_alone():
                sockets.discard(tap)
            for pair, tap in zip(self._pairs, self._read_now(), strict=True):
                dropped = sockets.drops(tap)
                if dropped:
                    metrics.DROPPED.inc(dropped)
                    self._lost_ns = now_ns
                if not sockets.alive(pair):
                    self.problem = f"interface {pair.interface} is gone or down"
        except OSError as error:
            self.problem = f"packet socket failed: {error}"

    def _measure(self, now_ns: int) -> None:
        packets_now = self.tracker.packets
        then, before = self._rate_base
        if now_ns - then >= 250_000_000:
            self._rate = (packets_now - before) / ((now_ns - then) / 1e9)
            self._rate_base = (now_ns, packets_now)
            metrics.SEGMENTS.inc(packets_now - before)

    # --- sampling

    def _sample(self, events: list[TapEvent]) -> None:
        # Sampled counts are a share of the real rate; the border is crossed downwards when the
        # requests end, not when fewer segments pass.
        busy = self._sampled or (self._sample_from > 0 and self._rate >= self._sample_from)
        wanted = busy and self.tracker.in_flight > 0 and not self.tracker.needs_every_segment
        if wanted != self._sampled:
            try:
                self._switch(events)
            except OSError as error:
                self.problem = f"packet socket failed: {error}"

    def _switch(self, events: list[TapEvent]) -> None:
        """Read the other sockets: they are emptied first, so that nothing lies between the two."""
        loop = asyncio.get_running_loop()
        for tap in self._left_alone():
            sockets.discard(tap)
            sockets.drops(tap)
        for tap in self._read_now():
            self._catch_up(tap, events, time.monotonic_ns())
            loop.remove_reader(tap)
        self._sampled = not self._sampled
        for tap in self._read_now():
            loop.add_reader(tap, self._readable, tap)


def _nobody(_events: list[TapEvent]) -> None:
    return


def clock_offset() -> int:
    """Nanoseconds from the monotonic to the kernel's packet clock.

    Whoever is put aside between the two readings is wrong by that long, and events then change
    their order: the tightest of a few brackets counts.
    """
    best, offset = 1 << 62, 0
    for _ in range(_BRACKETS):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after - before < best:
            best, offset = after - before, wall - (before + after) // 2
        if best < _TIGHT_NS:
            break
    return offset


def _stamp(ancillary: list[tuple[int, int, bytes]], offset_ns: int) -> int:
    """Kernel's time of the packet on the monotonic clock; now when it makes no sense."""
    now = time.monotonic_ns()
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == sockets.SO_TIMESTAMPNS:
            seconds, nanoseconds = _STAMP.unpack_from(data)
            stamp = int(seconds) * 1_000_000_000 + int(nanoseconds) - offset_ns
            # A clock that was set between stamp and reading shows as a jump.
            return stamp if now - 1_000_000_000 < stamp <= now else now
    return now
