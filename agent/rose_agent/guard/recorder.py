"""The flight recorder: what the guard saw, decided and did, in a bounded ring in memory.

Entries are (CLOCK_MONOTONIC ns, track, what, details). ``perfetto`` turns them into trace-event
JSON that ui.perfetto.dev and chrome://tracing open: one track per replica and slot.
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

    def dump(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "clock": "CLOCK_MONOTONIC nanoseconds",
            "wallOffsetNs": self.wall_offset_ns,
            "entries": [
                {"t": t, "track": track, "what": what, **details}
                for t, track, what, details in self._ring
            ],
        }


def perfetto(dump: dict[str, Any]) -> dict[str, Any]:
    """Trace-event form of ``Recorder.dump``: gates as spans, everything else as instants."""
    tracks: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for entry in dump["entries"]:
        rest = {k: v for k, v in entry.items() if k not in {"t", "track", "what"}}
        thread = tracks.setdefault(entry["track"], len(tracks) + 1)
        base = {"pid": 1, "tid": thread, "ts": entry["t"] / 1000, "args": rest}
        if entry["what"] in {"gate", "request"} and "phase" in rest:
            name = rest.get("name", entry["what"])
            events.append({**base, "name": name, "ph": rest["phase"]})
        else:
            events.append({**base, "name": entry["what"], "ph": "i", "s": "t"})
    names = [
        {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": track}}
        for track, thread in tracks.items()
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}
