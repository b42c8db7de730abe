"""An owner's limit on compute under time-slicing: a share of every second, whoever would have room.

``maxComputePercent`` is a share of the multiprocessors under MPS, where the driver keeps it. Under
time-slicing nothing but the permit does: rollouts have the whole GPU or none of it. So the guard
counts for how long permits stood open in the last ``WINDOW_NS``, and opens none beyond the share.
No window of that length, wherever it begins, holds more; so neither does any longer one.

| permit | left in the window | verdict |
|---|---|---|
| open | something | open, at most for what is left |
| closed | a control period's worth, or the whole share where that is less | open |
| closed | less | closed, ``ComputeLimit``, until that much is left |

The border keeps engines from being let go for a millisecond at a time. This is a sliding window log
over spans; a token bucket would let two shares follow each other where a window begins. What an
engine has launched when its permit ends still runs, as after every other stop (``docs/guard.md``).
Next step: ``gate`` asks for every verdict; ``rose_agent.guard.loop`` notes what was permitted.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_NS = 1_000_000_000
"""Short, so that turns wait out a pause in place; long beside what a stop and a continue cost."""

_LEAST_NS = 100_000_000  # one control period, above the guard's tick: an open permit is renewed
_PERCENT = 100

Span = tuple[int, int]


@dataclass(frozen=True)
class ComputeWindow:
    """When permits on one replica's GPUs stood open in the last window.

    Attributes:
        spans: begin and end of each stretch, oldest first; the last may end in the future.
        percent: most of any window; 0 = the owner has set no limit.
    """

    spans: tuple[Span, ...] = ()
    percent: int = 0

    def opened(self, until_ns: int, now_ns: int) -> ComputeWindow:
        """After a step: permits are open from now until then, 0 = closed.

        What was promised before is cut here: a permit is replaced by the next, never added to it.
        """
        if not self.percent:
            return self
        horizon = now_ns - WINDOW_NS
        kept = [(begin, min(end, now_ns)) for begin, end in self.spans if end > horizon]
        kept = [(begin, end) for begin, end in kept if begin < end]
        if until_ns > now_ns:
            joins = bool(kept) and kept[-1][1] == now_ns
            begin = kept.pop()[0] if joins else now_ns
            kept.append((begin, until_ns))
        return ComputeWindow(tuple(kept), self.percent)

    def spent_ns(self, now_ns: int) -> int:
        """Open time in the window that ends now."""
        horizon = now_ns - WINDOW_NS
        return sum(max(0, min(end, now_ns) - max(begin, horizon)) for begin, end in self.spans)

    def share(self, now_ns: int) -> float:
        """Part of the window that was open (0..1)."""
        return self.spent_ns(now_ns) / WINDOW_NS

    def left_ns(self, now_ns: int) -> int:
        """For how long permits may stand open from now on without a pause; 0 = not now."""
        left = self._budget_ns - self.spent_ns(now_ns)
        runs = bool(self.spans) and self.spans[-1][1] >= now_ns
        return left if left > 0 and (runs or left >= self._least_ns) else 0

    def again_ns(self, now_ns: int) -> int:
        """When enough is left for a closed permit to be opened."""
        lacking = self._least_ns - (self._budget_ns - self.spent_ns(now_ns))
        at = now_ns
        for begin, end in self.spans:
            leaving = min(end, now_ns) - max(begin, now_ns - WINDOW_NS)
            if leaving <= 0 or lacking <= 0:
                continue
            at = max(begin + WINDOW_NS, now_ns) + min(leaving, lacking)
            lacking -= leaving
        return at

    @property
    def _budget_ns(self) -> int:
        return WINDOW_NS * self.percent // _PERCENT

    @property
    def _least_ns(self) -> int:
        return min(_LEAST_NS, self._budget_ns)
