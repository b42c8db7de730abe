"""Tells whether a replica has idle gaps worth using or is never idle, and how long gaps last.

Only *usable* idle time counts: of a gap, what is left after the emptiness that opens the gate. A
steady load with a short gap now and then is therefore still never idle, and a burst is taken for a
steady load only after a whole ``window`` of it.

| usable share of the last window | regime | the gate uses |
|---|---|---|
| at least ``GateLimits.on_off_share`` | bursty | idle gaps only |
| below | never idle | slack of each request, in a duty cycle |
| below, and a slack is not positive | saturated | nothing |

The gaps also say how long to wait before opening: after the last request of a train, not between
two of them. Waiting protects only the requests that come meanwhile, because what an arrival at an
open gate costs does not depend on how long the gate has been open. So the cool-down is the shortest
emptiness that was followed by another ``reopen`` of emptiness three times in four; with too few
gaps to tell, it is ``reopen`` itself.

Next step: ``gate`` takes both as ``ReplicaFacts.idle_share`` and ``cool_down_ns``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

REMEMBERED = 64  # gaps: some minutes of a bursty load, so a new habit shows soon
FEWEST = 8  # gaps below which "three times in four" is chance
_STEPS_NS = (5_000_000, 10_000_000, 20_000_000)
_EARLY_SHARE = 0.25  # of gaps that end soon after the gate would have opened: one in four


def cool_down(gaps_ns: Sequence[int], longest_ns: int) -> int:
    """Emptiness after which the gate may open, from the lengths of recent gaps.

    Args:
        gaps_ns: how long the replica was empty, each time.
        longest_ns: never more than this, and this while too little is known.
    """
    for step in _STEPS_NS:
        lasted = [gap for gap in gaps_ns if gap >= step]
        early = sum(gap < step + longest_ns for gap in lasted)
        if step < longest_ns and len(lasted) >= FEWEST and early <= _EARLY_SHARE * len(lasted):
            return step
    return longest_ns


class Gaps:
    """Usable idle time of the last window, and the lengths of gaps; single-threaded.

    Args:
        now_ns: the beginning; the time before counts as idle.
        reopen_ns: emptiness that opens the gate.
        window_ns: memory.
    """

    def __init__(self, now_ns: int, *, reopen_ns: int, window_ns: int) -> None:
        self._reopen_ns, self._window_ns = reopen_ns, window_ns
        self._idle_since_ns: int | None = now_ns - window_ns - reopen_ns
        self._gaps: deque[tuple[int, int]] = deque()
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        self.cool_down_ns = reopen_ns

    def note(self, *, busy: bool, now_ns: int) -> None:
        """A request is under way now, or none is."""
        if busy and self._idle_since_ns is not None:
            if now_ns - self._idle_since_ns < self._window_ns:
                self._lengths.append(now_ns - self._idle_since_ns)
                self.cool_down_ns = cool_down(self._lengths, self._reopen_ns)
            usable = self._idle_since_ns + self._reopen_ns
            if now_ns > usable:
                self._gaps.append((usable, now_ns))
            self._idle_since_ns = None
        elif not busy and self._idle_since_ns is None:
            self._idle_since_ns = now_ns

    def share(self, now_ns: int) -> float:
        """Usable idle share of the last window, 0..1."""
        low = now_ns - self._window_ns
        while self._gaps and self._gaps[0][1] <= low:
            self._gaps.popleft()
        total = 0
        for start, end in self._gaps:  # a handful, asked for at every step: no generator
            total += end - max(start, low)
        if self._idle_since_ns is not None:
            total += max(0, now_ns - max(self._idle_since_ns + self._reopen_ns, low))
        return min(1.0, total / self._window_ns)
