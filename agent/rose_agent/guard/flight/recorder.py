"""The flight recorder: what the guard saw, decided and did, in a bounded ring in memory.

Entries are (CLOCK_MONOTONIC ns, track, what, details); a track is a pod or a slot.

| what | on | tells |
|---|---|---|
| ``arrived``, ``predicted``, ``finished`` | pod | a request; its predicted cost; its outcome |
| ``gate`` | slot | position, reason, duty, and the slack it was decided on |
| ``closed``, ``stopped`` | slot | how long after an arrival |
| ``engine`` | slot | its state as the host tells it, with the reason of a failure |
| ``order``, ``rung`` | slot | what was ordered, how far the engine was taken back |
| ``breaker``, ``serving-exit``, ``serving-restart`` | pod | |
| ``refused``, ``unsaved`` | ``sync`` | a deposed planner's answer; ``guard.json`` not written |

Next step: ``perfetto`` and ``timeline`` show a dump, ``blackbox`` keeps one after a breach.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

Entry = tuple[int, str, str, dict[str, Any]]
KEPT = 20_000


class Recorder:
    """A ring of the last entries."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ring: deque[Entry] = deque(maxlen=kept)
        # Lets a reader put the entries beside other clocks.
        self.wall_offset_ns = time.time_ns() - time.monotonic_ns()

    def note(self, time_ns: int, track: str, what: str, **details: Any) -> None:  # noqa: ANN401  # JSON
        """Add one entry."""
        self._ring.append((time_ns, track, what, details))

    def entries(self) -> list[Entry]:
        """Everything kept, oldest first."""
        return list(self._ring)

    def dump(self, since_ns: int = 0) -> dict[str, Any]:
        """The JSON form of what was noted from ``since_ns`` on."""
        return {
            "clock": "CLOCK_MONOTONIC nanoseconds",
            "wallOffsetNs": self.wall_offset_ns,
            "entries": [
                {"t": t, "track": track, "what": what, **details}
                for t, track, what, details in self._ring
                if t >= since_ns
            ],
        }
