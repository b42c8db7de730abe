"""The guard's picture of one replica, kept from the tap's events.

It also keeps what the decisions need beyond the present: since when the replica has been empty,
which share of time it is empty, and finished requests for the predictor and the meters.
Next step: ``signal`` merges it with the engine's own figures.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from rose_core.telemetry.events import (
    Arrived,
    Counted,
    Dismissed,
    Ended,
    EndKind,
    FirstToken,
    Health,
    Progress,
    Sized,
    TapEvent,
    progress,
)

# Memory of the idle share that the report shows; the gate goes by ``rose_core.guard.regime``.
_SHARE_TIME_S = 20.0
# Counts of streams come twice a second at least, and one such telling may be late.
_LIVELY_NS = 1_000_000_000
# Heartbeats kept to say what had been counted a moment ago: more than a second of them.
_BEATS = 27


_OfLive = Dismissed | Sized | FirstToken | Ended


@dataclass(slots=True)
class LiveRequest:
    """One request under way; ``size`` is the body's bytes, -1 unknown; 0 ns = not yet.

    Attributes:
        opaque: its end may not show.
        doubtful: its end may have been among segments that were lost.
    """

    number: int
    arrived_ns: int
    path: str = ""
    size: int = -1
    first_ns: int = 0
    last_ns: int = 0
    tokens: int = 0
    opaque: bool = False
    doubtful: bool = False

    @property
    def last_seen_ns(self) -> int:
        """When it was last active: its arrival, or its last token."""
        return max(self.arrived_ns, self.last_ns)


@dataclass(frozen=True)
class FinishedRequest:
    """One finished request; ``ttft_s`` and ``tpot_s`` are None where they have no meaning."""

    number: int
    arrived_ns: int
    first_ns: int
    ended_ns: int
    size: int
    tokens: int
    status: int
    how: EndKind
    path: str

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token of a streamed, successful response, in seconds."""
        return (self.first_ns - self.arrived_ns) / 1e9 if self.first_ns and self.good else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, in seconds."""
        if not self.first_ns or self.tokens < 2 or not self.good:
            return None
        return (self.ended_ns - self.first_ns) / 1e9 / (self.tokens - 1)

    @property
    def good(self) -> bool:
        """The response was complete and successful."""
        return self.how is EndKind.COMPLETE and self.status == 200


class Book:
    """Mutable picture of one replica; single-threaded."""

    def __init__(self, now_ns: int) -> None:
        self.live: dict[int, LiveRequest] = {}
        self.health: Health | None = None
        self._beats: deque[Health] = deque(maxlen=_BEATS)
        self.began_ns = now_ns
        self.last_seen_ns = 0
        self.mismatch_ns = 0
        self.mismatched_since_ns = 0
        self.blind_ns = now_ns
        self.requests_total = 0
        self._changed_ns = now_ns
        self._empty_since_ns = now_ns
        self._idle_share = 1.0
        self._busy_ns = 0

    def moment(self, event: TapEvent, now_ns: int) -> int:
        """When an event happened: now, but for those that have waited for their heartbeat.

        Those lie up to a heartbeat in the past. The moments of one replica ascend; those of several
        do not ascend together.
        """
        if self.health is None or self.health.at_once or isinstance(event, Health):
            return now_ns
        event_ns = 0 if isinstance(event, Dismissed | Sized | Counted) else event.time_ns
        return min(now_ns, max(self._changed_ns, self.health.time_ns, event_ns))

    def apply(self, event: TapEvent, now_ns: int) -> FinishedRequest | None:
        """Take one event of that ``moment``; a finished request is returned."""
        if isinstance(event, Progress):  # first: of every stream at every heartbeat
            request = self.live.get(event.request)
            if request is not None:
                request.last_ns, request.tokens = event.time_ns, event.tokens
            return None
        if isinstance(event, Counted):
            find = self.live.get
            for number, tokens, last_ns in progress(event):
                if (request := find(number)) is not None:
                    request.last_ns, request.tokens = last_ns, tokens
            return None
        if isinstance(event, Health):
            self._health(event, now_ns)
            return None
        if isinstance(event, Arrived):
            self._account(now_ns)
            known = self.live.get(event.request)
            if known is None:
                self.live[event.request] = LiveRequest(
                    event.request, event.time_ns, event.path, opaque=event.opaque
                )
                self.requests_total += 1
            return None
        return self._on_live(event, now_ns)

    def _on_live(self, event: _OfLive, now_ns: int) -> FinishedRequest | None:
        request = self.live.get(event.request)
        if request is None:
            return None
        if isinstance(event, Sized):
            request.size, request.path = event.size, event.path or request.path
        elif isinstance(event, FirstToken):
            request.first_ns = request.last_ns = event.time_ns
            request.tokens = 1
        elif isinstance(event, Dismissed):
            self._remove(event.request, now_ns)
            self.requests_total -= 1
        elif isinstance(event, Ended):
            self._remove(event.request, now_ns)
            return FinishedRequest(
                request.number,
                request.arrived_ns,
                request.first_ns,
                event.time_ns,
                request.size,
                event.tokens,
                event.status,
                event.how,
                request.path,
            )
        return None

    def _remove(self, number: int, now_ns: int) -> None:
        self._account(now_ns)
        del self.live[number]
        if not self.live:
            self._empty_since_ns = now_ns

    def _health(self, event: Health, now_ns: int) -> None:
        if self.health is None or event.problem:
            # What is under way cannot be known yet: the tap has just begun, or is blind.
            self.blind_ns = now_ns
        elif event.lost_ns > self.health.lost_ns:
            for request in self.live.values():
                request.doubtful = True
        self.health, self.last_seen_ns = event, now_ns
        self._beats.append(event)
        if event.problem:
            self._account(now_ns)
            self.live.clear()
            self._beats.clear()
        if event.in_flight != len(self.live):
            self.mismatch_ns = now_ns
            self.mismatched_since_ns = self.mismatched_since_ns or now_ns
        else:
            self.mismatched_since_ns = 0

    def forget(self, now_ns: int) -> None:
        """The tap is gone: nothing is known any more."""
        self._account(now_ns)
        self.live.clear()
        self.health = None
        self._beats.clear()
        self._empty_since_ns = now_ns

    def beat_before(self, time_ns: int) -> Health | None:
        """The tap's newest heartbeat of that time or before; None when none is kept."""
        return next((beat for beat in reversed(self._beats) if beat.time_ns <= time_ns), None)

    @property
    def outstanding(self) -> bool:
        """Whether a request is under way whose end may not show; other sources must say."""
        return any(request.opaque or request.doubtful for request in self.live.values())

    def lives(self, now_ns: int) -> bool:
        """Whether requests are under way, and each has shown life within the last second."""
        oldest = min((request.last_seen_ns for request in self.live.values()), default=0)
        return now_ns - oldest < _LIVELY_NS and not self.outstanding

    def empty_since_ns(self) -> int | None:
        """Since when no request has been under way; None while one is."""
        return None if self.live else self._empty_since_ns

    def idle_share(self, now_ns: int) -> float:
        """Recent share of time without a request (exponential memory of 20 s)."""
        self._account(self._known_until(now_ns))
        return self._idle_share

    def busy_ns(self, now_ns: int) -> int:
        """Total time with a request under way."""
        self._account(self._known_until(now_ns))
        return self._busy_ns

    def _known_until(self, now_ns: int) -> int:
        """What happened since the last heartbeat is not known yet, where it waits for the next."""
        health = self.health
        if health is None or health.at_once:
            return now_ns
        return min(now_ns, max(self._changed_ns, health.time_ns))

    def _account(self, now_ns: int) -> None:
        elapsed = max(0, now_ns - self._changed_ns)
        self._changed_ns = now_ns
        keep = math.exp(-elapsed / 1e9 / _SHARE_TIME_S)
        self._idle_share = self._idle_share * keep + (0.0 if self.live else 1.0) * (1 - keep)
        if self.live:
            self._busy_ns += elapsed
