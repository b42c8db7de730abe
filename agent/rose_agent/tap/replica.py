"""One followed replica of the tap: its sockets, its tracker, its health.

| condition | heartbeat says |
|---|---|
| sockets open and bound, no drops | nothing: healthy |
| segments dropped, queue not emptied, too many connections | ``lost_ns``: distrusted a while |
| a socket lost its interface, or reading failed | ``problem``; reopened by the parser |

To be woken costs more than to read a dozen segments, so two things are chosen by what goes on:

| requests under way | segments/s | what is read |
|---|---|---|
| none, or one whose next segment matters | any | every segment |
| all stream their tokens | few | every segment |
| all stream their tokens | ``sample_from``; not watched closely an eighth of it | the sample |

The eighth holds where the kernel counts nothing. Segments of streams that it follows
(``kernel_counts``) are none of these: it counts their tokens, and each heartbeat takes the counts.

| requests under way | when it is read |
|---|---|
| any, where nobody wants to hear at once | at the heartbeat |
| a first token is awaited, and wanted at once | at each segment, then not for 20 ms but by a bell |
| watched closely, four and more | when the bell for requests rings, at the heartbeat |
| an end may come unmarked: a body of known length, HTTP/2 | at each segment |
| any other, or none | when the bell rings (requests, heads, ends), at the heartbeat |

What a segment tells goes out when it is read, but for what changes little at once, and only keeps a
gate closed for longer: tokens after the first, and beside other requests the end of one, and its
first token where no gate is shut for one. Those wait for the next other event or heartbeat. The
guard decides on them when a period begins, and heartbeats come just before that and in its middle.
What the kernel counts is told at each heartbeat of a replica that is watched closely, and twice a
second elsewhere, where it only shows that streams are alive. Next step:
``packets`` decodes a segment, ``rose_core.telemetry.tracker`` follows requests.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from enum import Enum, auto

from rose_agent.os import bpf
from rose_agent.os.bpf_maps import HashMap
from rose_agent.tap import metrics, packets, sockets
from rose_agent.tap.frames import TapWatch
from rose_agent.tap.kernel_counts import KernelCounts
from rose_agent.tap.sockets import SAMPLE_RATE, Taps
from rose_core.telemetry.events import Arrived, Ended, FirstToken, Health, Progress, TapEvent
from rose_core.telemetry.tracker import Tracker

_BATCH = 256  # segments handled before others get their turn
_BLANK = memoryview(bytes(bpf.SNAP))
_MOST_BEHIND = 64  # batches that a heartbeat reads to be up to date
_COUNT_NS = 450_000_000  # between two tellings of counts where nobody paces by tokens
_TAKE_NS = 2_000_000_000  # a stream that is counted may look silent here for so long
_REST_SECONDS = 0.02  # how late a first token may be sent where tokens of others pass all the time
_CROWD = 4  # requests that hardly ever all end between two heartbeats: none of their ends is urgent
_MUCH = 32  # segments at once from which the sockets' buffers should be emptied more often
# A connection that shows nothing for this long is given up. Long, because a request that waits in
# a full queue shows nothing either, and forgetting it would open the gate.
_SILENT_NS = 900_000_000_000


class _WakeOn(Enum):
    """What wakes the tap."""

    NOTHING = auto()
    """Nobody wants to hear at once: the heartbeat reads."""
    BELL = auto()
    REQUESTS = auto()
    SEGMENTS = auto()


class TappedReplica:
    """A replica under watch.

    Args:
        watch: what to follow.
        taps: open sockets.
        addresses: of the namespace, as ``packets.decode`` wants them.
        number: gives the next request number.
        sample_from: segments per second from which tokens are sampled; 0 = never.
        streams: map of the program that counts tokens in the kernel; None = there is none.
    """

    def __init__(
        self,
        watch: TapWatch,
        taps: list[Taps],
        addresses: frozenset[str],
        number: Callable[[], int],
        sample_from: float,
        *,
        streams: HashMap | None = None,
    ) -> None:
        self.watch = watch
        self.tracker = Tracker(watch.replica, number)
        self._counts = None if streams is None else KernelCounts(streams, self.tracker)
        self.problem = ""
        self._taps = taps
        self._addresses = addresses
        self._sample_from = sample_from
        self._deliver: Callable[[list[TapEvent]], None] = _ignore
        self._progress: dict[int, Progress] = {}
        self._later: list[TapEvent] = []  # first tokens and ends that wait
        self._counted_ns = self._taken_ns = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._buffer = memoryview(bytearray(bpf.SNAP))
        self._used = 0
        self._lost_ns = 0
        self._sampled = False
        self._wake_on = _WakeOn.NOTHING
        self._rate = 0.0
        self._rate_base = (time.monotonic_ns(), 0)
        self._packets_then = 0
        self._is_crowded = False

    @property
    def restless(self) -> bool:
        """Whether heartbeats are frequent: a guard paces by tokens, or much gathers between two."""
        return self.watch.closely or self._is_crowded

    @property
    def counting(self) -> bool:
        """Whether the kernel counts tokens."""
        return self._counts is not None

    @property
    def sampled(self) -> bool:
        """Whether response segments are sampled now."""
        return self._sampled

    def start(self, deliver: Callable[[list[TapEvent]], None]) -> None:
        """Read from now on, inside the running loop."""
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._wake_on = self._choose_wake()
        self._listen()

    def close(self) -> None:
        """Close the sockets."""
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        self._stop_listening()
        for taps in self._taps:
            taps.close()
        if self._counts is not None:
            self._counts.close()
        self._taps, self._loop = [], None

    def _listen(self) -> None:
        if self._loop is None:
            return
        for taps in self._taps:
            waker = self._waker(taps)
            if waker is None:
                return
            if self._wake_on is _WakeOn.SEGMENTS:
                self._loop.add_reader(waker, self._on_readable, waker)
            else:
                self._loop.add_reader(waker, self._on_bell, waker, taps)

    def _stop_listening(self) -> None:
        if self._loop is None:
            return
        for taps in self._taps:
            if (waker := self._waker(taps)) is not None:
                self._loop.remove_reader(waker)

    def _waker(self, taps: Taps) -> socket.socket | None:
        """What wakes the tap, of the sockets of one interface."""
        match self._wake_on:
            case _WakeOn.BELL:
                return taps.bell
            case _WakeOn.REQUESTS:
                return taps.request_bell
            case _WakeOn.SEGMENTS:
                return self._choose(taps)
        return None

    def _choose(self, taps: Taps) -> socket.socket:
        return taps.sampled if self._sampled else taps.unsampled

    # --- packets

    def _on_bell(self, bell: socket.socket, taps: Taps) -> None:
        """Something urgent has passed: silence the bell, then read everything."""
        events: list[TapEvent] = []
        try:
            sockets.discard(bell)
        except OSError as error:
            self.problem = f"packet socket failed: {error}"
        self._empty(self._choose(taps), events)
        self._pass_on(events)

    def _on_readable(self, tap: socket.socket) -> None:
        events: list[TapEvent] = []
        self._read(tap, events)
        if not self._urgent(events):
            self._start_rest()
        self._pass_on(events)

    def _start_rest(self) -> None:
        """Only others' tokens came: rest, and tell a first token a little later."""
        if self._loop is not None and self._rest_timer is None and not self.tracker.ends_unmarked:
            self._rest_timer = self._loop.call_later(_REST_SECONDS, self._end_rest)

    def _end_rest(self) -> None:
        self._rest_timer = None
        self._adapt([])

    def _pass_on(self, events: list[TapEvent]) -> None:
        """Tell what is urgent together with what waited, or let these events wait too."""
        self._adapt(events)
        if self._urgent(events):
            self._deliver([*self._waiting(), *events])
        else:
            self._progress.update((e.request, e) for e in events if isinstance(e, Progress))
            self._later += [event for event in events if not isinstance(event, Progress)]

    def _urgent(self, events: list[TapEvent]) -> bool:
        waits: tuple[type[TapEvent], ...] = (Progress,)
        if self.tracker.in_flight:
            waits = (Progress, Ended) if self._wants_firsts else (Progress, Ended, FirstToken)
        return any(type(event) not in waits for event in events)

    def _waiting(self) -> list[TapEvent]:
        # A first token that waits too is older than its request's progress, and sets it back to 1.
        firsts = [event for event in self._later if isinstance(event, FirstToken)]
        ends = [event for event in self._later if isinstance(event, Ended)]
        waiting: list[TapEvent] = [*firsts, *self._progress.values(), *ends]
        self._progress.clear()
        self._later.clear()
        return waiting

    def _read(self, tap: socket.socket, events: list[TapEvent]) -> bool:
        """Handle a batch of what waits on one socket; True when it is empty."""
        offset: int | None = None
        try:
            for _ in range(_BATCH):
                size, ancillary, _, origin = tap.recvmsg_into([self._buffer], 64)
                self._used = max(self._used, size)
                offset = sockets.clock_offset() if offset is None else offset
                if origin[2] == sockets.PACKET_OUTGOING and origin[0] == "lo":
                    continue  # it comes in again
                self._feed(bytes(self._buffer[:size]), sockets.time_of(ancillary, offset), events)
        except BlockingIOError:
            return self._settle()
        except OSError as error:
            self.problem = f"packet socket failed: {error}"
            return True
        return False

    def _settle(self) -> bool:
        """The socket is empty: the kernel may count from here on."""
        if self._counts is not None:
            try:
                self._counts.settle()
            except OSError as error:
                self.problem = f"the kernel's counts failed: {error}"
        return True

    def _empty(self, tap: socket.socket, events: list[TapEvent]) -> bool:
        """Read everything that waits; False if it still had not ended after many batches."""
        return any(self._read(tap, events) for _ in range(_MOST_BEHIND))

    def _feed(self, packet: bytes, stamp_ns: int, events: list[TapEvent]) -> None:
        segment = packets.decode(packet, self.watch.port, stamp_ns, self._addresses)
        if segment is None:
            return
        for event in (self._counts or self.tracker).feed(segment):
            if isinstance(event, Arrived):
                metrics.REQUESTS.inc()
                if self.watch.at_once:
                    metrics.LAG_SECONDS.observe((time.monotonic_ns() - stamp_ns) / 1e9)
            events.append(event)

    # --- heartbeat

    def beat(self) -> list[TapEvent]:
        """Read what waits and check sockets and counters; the heartbeat is the last event."""
        now = time.monotonic_ns()
        events: list[TapEvent] = self._waiting()
        for taps in self._taps:
            self._catch_up(self._choose(taps), events, now)
        self._count(now, events)
        # The last packets do not wait there for the next.
        self._buffer[: self._used], self._used = _BLANK[: self._used], 0
        self._is_crowded = self.tracker.packets - self._packets_then > _MUCH
        self._packets_then = self.tracker.packets
        self._check(now)
        self._measure(now, events)
        self._adapt(events)
        events.append(self._health(now))
        return events

    def _health(self, now_ns: int) -> Health:
        tracker, ledger = self.tracker, self.tracker.ledger
        return Health(
            self.watch.replica,
            now_ns,
            self.problem,
            lost_ns=max(self._lost_ns, tracker.lost_ns),
            opaque=tracker.opaque,
            in_flight=tracker.in_flight,
            counts=dict(ledger.counts),
            packets=tracker.packets,
            seen=ledger.seen,
            finished=ledger.finished,
            unsure=ledger.unsure,
            at_once=self.watch.at_once,
        )

    def _catch_up(self, tap: socket.socket, events: list[TapEvent], now_ns: int) -> None:
        """Read everything, so that whatever passed before this heartbeat is in its counts."""
        if not self._empty(tap, events):
            self._lost_ns = now_ns

    def _count(self, now_ns: int, events: list[TapEvent], *, last: bool = False) -> None:
        """Tell what the kernel has counted; ``last``: from here on it counts nothing."""
        counts = self._counts
        pause_ns = 0 if last or self.watch.closely else _COUNT_NS
        if counts is None or now_ns - self._counted_ns < pause_ns:
            return
        self._counted_ns = now_ns
        try:
            if last:
                events += counts.stop()
            elif now_ns - self._taken_ns >= _TAKE_NS:
                self._taken_ns = now_ns
                events += counts.take_all()
            else:
                events += counts.counted()
        except OSError as error:
            self.problem = f"the kernel's counts failed: {error}"
        if counts.doubtful:
            counts.doubtful, self._lost_ns = False, now_ns

    def _check(self, now_ns: int) -> None:
        try:
            for taps in self._taps:
                dropped = sockets.drops(self._choose(taps))
                if dropped:
                    metrics.DROPPED.inc(dropped)
                    self._lost_ns = now_ns
        except OSError as error:
            self.problem = f"packet socket failed: {error}"

    def _measure(self, now_ns: int, events: list[TapEvent]) -> None:
        packets_now = self.tracker.packets
        then, before = self._rate_base
        if now_ns - then >= 250_000_000:
            self._rate = (packets_now - before) / ((now_ns - then) / 1e9)
            self._rate_base = (now_ns, packets_now)
            metrics.SEGMENTS.inc(packets_now - before)
            events += self.tracker.expire(now_ns, _SILENT_NS)
            # Reading says so too, in the next heartbeat; this is for an error that was read over.
            for taps in self._taps:
                if not sockets.are_bound(taps):
                    self.problem = f"interface {taps.interface} is gone or down"

    # --- what is read, and when

    def _adapt(self, events: list[TapEvent]) -> None:
        try:
            if self._wants_sample() != self._sampled:
                self._switch(events)
        except OSError as error:
            self.problem = f"packet socket failed: {error}"
        wake_on = self._choose_wake()
        if wake_on is not self._wake_on:
            self._stop_listening()
            self._wake_on = wake_on
            self._listen()

    def _choose_wake(self) -> _WakeOn:
        if not self.watch.at_once:
            return _WakeOn.NOTHING
        tracker = self.tracker
        if self._wants_firsts and self._rest_timer is None and tracker.needs_every_segment:
            return _WakeOn.SEGMENTS
        if self.watch.closely and tracker.in_flight >= _CROWD:
            return _WakeOn.REQUESTS
        return _WakeOn.SEGMENTS if tracker.ends_unmarked else _WakeOn.BELL

    @property
    def _wants_firsts(self) -> bool:
        """First tokens are told as they happen: who paces may wait for one."""
        return self.watch.closely and self.watch.firsts

    def _wants_sample(self) -> bool:
        # Sampled counts are a share of the real rate; the border is crossed downwards when the
        # requests end, not when fewer segments pass.
        # What the kernel counts is not among the segments, so few are too few to leave any out.
        patient = self.watch.closely or self._counts is not None
        border = self._sample_from if patient else self._sample_from / SAMPLE_RATE
        busy = self._sampled or (border > 0 and self._rate >= border)
        return busy and self.tracker.in_flight > 0 and not self.tracker.needs_every_segment

    def _switch(self, events: list[TapEvent]) -> None:
        """Change to the other sockets without losing or repeating a segment."""
        self._stop_listening()
        self._count(time.monotonic_ns(), events, last=True)  # the sample shows those as well
        for taps in self._taps:
            chosen, other = self._choose(taps), taps.unsampled if self._sampled else taps.sampled
            sockets.mute(other, muted=False)
            sockets.discard(other)
            sockets.drops(other)
            self._catch_up(chosen, events, time.monotonic_ns())
            sockets.mute(chosen, muted=True)
        self._sampled = not self._sampled
        if self._counts is not None and not self._sampled:
            self._counts.resume()
        self._listen()


def _ignore(_events: list[TapEvent]) -> None:
    return
