"""For which share of its time a request ran beside an open gate, and which share may be lent.

Under a duty cycle nothing runs wholly alone or wholly shared. With a cost ``a`` alone and ``k a``
beside a rollout engine, a request that met an open gate for a share ``f`` of its time took

    a / (1 - f (1 - 1/k))

so ``k`` can be learned from finished requests (``predictor.Mixture``), and with it the largest
share that keeps the average inside a budget (``lendable``). Next step: ``slack`` asks for that.
"""

from __future__ import annotations

from collections import deque

LEAST_SHARE = 0.1
"""With a smaller share than this, a slow request is not put down to rollouts."""


_REMEMBERED = 32
"""Notes: what waits for a heartbeat was a moment ago, which is a dozen of a guard's steps."""


class OpenTime:
    """How long the gate has stood open, as an integral over time; single-threaded."""

    def __init__(self, now_ns: int) -> None:
        self._until_ns = self._noted_ns = now_ns
        self._total_ns = 0
        self._before: deque[tuple[int, int, int]] = deque(maxlen=_REMEMBERED)

    def note(self, until_ns: int, now_ns: int) -> None:
        """The gate is open from now until then; 0 = closed."""
        total_ns = self.at(now_ns)
        self._before.append((self._noted_ns, self._total_ns, self._until_ns))
        self._total_ns = total_ns
        self._noted_ns, self._until_ns = now_ns, until_ns

    def is_open(self, now_ns: int) -> bool:
        """Whether the gate stands open at that moment, as far as it was noted."""
        return now_ns < self._until_ns

    def at(self, now_ns: int) -> int:
        """Nanoseconds with an open gate up to then: now, or a moment ago."""
        if now_ns >= self._noted_ns:
            return self._total_ns + max(0, min(now_ns, self._until_ns) - self._noted_ns)
        for noted_ns, total_ns, until_ns in reversed(self._before):
            if now_ns >= noted_ns:
                return total_ns + max(0, min(now_ns, until_ns) - noted_ns)
        return self._before[0][1] if self._before else self._total_ns


def lendable(alone_s: float, shared_s: float, budget_s: float, saved: float = 0.0) -> float:
    """Largest open share (0..1) of a period that keeps a cost inside its budget.

    Args:
        alone_s: the cost alone.
        shared_s: the cost wholly beside a rollout engine.
        budget_s: what it may be on average.
        saved: what was left of the budget so far and may be used up, in periods.
    """
    if alone_s <= 0 or budget_s < alone_s:
        return 0.0
    if shared_s <= budget_s or saved >= 1:
        return 1.0
    needed = alone_s / budget_s * (1 - max(0.0, saved))
    return min(1.0, (1 - needed) / (1 - alone_s / shared_s))
