"""Virtual time: events in order of time, then of scheduling, so equal seeds give equal runs."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


@dataclass(order=True, slots=True)
class Event:
    """Something that will happen; ``cancel`` makes it nothing."""

    time_ns: int
    number: int
    call: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """Do not call."""
        self.call = None


class Clock:
    """The queue of events; ``now_ns`` only moves forward."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._number = 0
        self._queue: list[Event] = []

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return self.now_ns / SECOND

    def at(self, time_ns: int, call: Callable[[], None]) -> Event:
        """Call at a time; a time that has passed means now."""
        self._number += 1
        event = Event(max(time_ns, self.now_ns), self._number, call)
        heapq.heappush(self._queue, event)
        return event

    def after(self, seconds: float, call: Callable[[], None]) -> Event:
        """Call after so many seconds."""
        return self.at(self.now_ns + round(seconds * SECOND), call)

    def run(self, until_ns: int) -> int:
        """Work through the events up to a time; returns how many were called."""
        called = 0
        while self._queue and self._queue[0].time_ns <= until_ns:
            event = heapq.heappop(self._queue)
            if event.call is not None:
                self.now_ns = event.time_ns
                event.call()
                called += 1
        self.now_ns = until_ns
        return called
