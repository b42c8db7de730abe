"""One followed replica: its sockets, its tracker, its health.

| condition | heartbeat says |
|---|---|
| sockets open and bound, no drops | nothing: healthy |
| kernel dropped segments | ``lost_ns`` moves; the guard distrusts the tap for a while |
| a socket lost its interface, or reading failed | ``problem``; reopened by the parser |
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable

from rose_agent.tap import bpf, metrics, packets, sockets
from rose_agent.tap.frames import Watch
from rose_core.telemetry.events import Arrived, Health, TapEvent
from rose_core.telemetry.tracker import Tracker

_BATCH = 256  # segments handled before others get their turn
_STAMP = struct.Struct("qq")
_SAMPLE_FROM_PER_SECOND = 400.0
_SAMPLE_RATE = 8
# A connection that shows nothing for this long is given up. Long, because a request that waits in
# a full queue shows nothing either, and forgetting it would open the gate.
_SILENT_NS = 900_000_000_000


class Replica:
    """A replica under watch.

    Args:
        watch: what to follow.
        taps: open sockets with their interface names.
        number: gives the next request number.
    """

    def __init__(
        self, watch: Watch, taps: list[tuple[str, socket.socket]], number: Callable[[], int]
    ) -> None:
        self.watch = watch
        self.taps = taps
        self.tracker = Tracker(watch.replica, number)
        self.problem = ""
        self._lost_ns = 0
        self._sampled = False
        self._rate = 0.0
        self._rate_base = (time.monotonic_ns(), 0)

    def read(self, tap: socket.socket) -> list[TapEvent]:
        """Handle what waits on one socket."""
        events: list[TapEvent] = []
        offset = time.time_ns() - time.monotonic_ns()
        try:
            for _ in range(_BATCH):
                packet, ancillary, _, _ = tap.recvmsg(bpf.SNAP, 64)
                self._feed(packet, _stamp(ancillary, offset), events)
        except BlockingIOError:
            pass
        except OSError as error:
            self.problem = f"packet socket failed: {error}"
        self._sample()
        return events

    def _feed(self, packet: bytes, stamp_ns: int, events: list[TapEvent]) -> None:
        segment = packets.decode(packet, self.watch.port, stamp_ns)
        if segment is None:
            return
        for event in self.tracker.feed(segment):
            if isinstance(event, Arrived):
                metrics.REQUESTS.inc()
                metrics.LAG_SECONDS.observe((time.monotonic_ns() - stamp_ns) / 1e9)
            events.append(event)

    def beat(self) -> list[TapEvent]:
        """Check sockets and counters; the heartbeat is the last event."""
        now = time.monotonic_ns()
        events = self.tracker.expire(now, _SILENT_NS)
        for name, tap in self.taps:
            self._check(name, tap, now)
        packets_now = self.tracker.packets
        then, before = self._rate_base
        if now - then >= 250_000_000:
            self._rate = (packets_now - before) / ((now - then) / 1e9)
            self._rate_base = (now, packets_now)
            metrics.SEGMENTS.inc(packets_now - before)
        self._sample()
        tracker = self.tracker
        events.append(
            Health(
                self.watch.replica,
                now,
                self.problem,
                self._lost_ns,
                tracker.opaque,
                tracker.in_flight,
                dict(tracker.counts),
                packets_now,
            )
        )
        return events

    def _check(self, name: str, tap: socket.socket, now_ns: int) -> None:
        try:
            dropped = sockets.drops(tap)
            bound = sockets.alive(tap)
        except OSError as error:
            self.problem = f"packet socket on {name} failed: {error}"
            return
        if dropped:
            metrics.DROPPED.inc(dropped)
            self._lost_ns = now_ns
        if not bound:
            self.problem = f"interface {name} is gone or down"

    @property
    def sampled(self) -> bool:
        """Whether response segments are sampled now."""
        return self._sampled

    def _sample(self) -> None:
        # Sampled counts are a share of the real rate; the border is crossed downwards when the
        # requests end, not when fewer segments pass.
        busy = self._rate >= _SAMPLE_FROM_PER_SECOND or self._sampled
        wanted = busy and self.tracker.in_flight > 0 and not self.tracker.needs_every_segment
        if wanted == self._sampled:
            return
        self._sampled = wanted
        code = bpf.program(self.watch.port, rate=_SAMPLE_RATE if wanted else 0)
        for name, tap in self.taps:
            try:
                bpf.attach(tap, code)
            except OSError as error:
                self.problem = f"cannot change the filter on {name}: {error}"

    def close(self) -> None:
        """Close the sockets."""
        for _, tap in self.taps:
            with contextlib.suppress(OSError):
                tap.close()
        self.taps = []


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
