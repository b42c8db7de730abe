"""Virtual time: events in order of time, then of scheduling, so equal seeds give equal runs."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


@dataclass(slots=True, eq=False)
class Event:
    """Something that will happen; ``cancel`` makes it nothing."""

    call: Callable[[], object] | None

    def cancel(self) -> None:
        """Do not call."""
        self.call = None


class VirtualClock:
    """The queue of events; ``now_ns`` only moves forward."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._number = 0
        self._queue: list[tuple[int, int, Event]] = []

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return self.now_ns / SECOND

    def at(self, time_ns: int, call: Callable[[], object]) -> Event:
        """Call at a time; a time that has passed means now."""
        self._number += 1
        event = Event(call)
        heapq.heappush(self._queue, (max(time_ns, self.now_ns), self._number, event))
        return event

    def after(self, seconds: float, call: Callable[[], object]) -> Event:
        """Call after so many seconds."""
        return self.at(self.now_ns + round(seconds * SECOND), call)

    def run(self, until_ns: int) -> int:
        """Work through the events up to a time; returns how many were called."""
        called = 0
        while self._queue and self._queue[0][0] <= until_ns:
            time_ns, _, event = heapq.heappop(self._queue)
            if event.call is not None:
                self.now_ns = time_ns
                event.call()
                called += 1
        self.now_ns = until_ns
        return called
