"""For which share of its time a request ran beside an open gate; and what that says about cost.

Under a duty cycle nothing runs wholly alone or wholly shared. With a cost ``a`` alone and ``k a``
beside a rollout engine, a request that met an open gate for a share ``f`` of its time took

    a / (1 - f (1 - 1/k))

so ``k`` follows from what was seen. Next step: ``predictor`` learns it.
"""

from __future__ import annotations

LEAST_SHARE = 0.1
"""With less than this, noise would be divided by next to nothing."""
ALONE_SHARE = 0.02
_SLOWEST = 10.0


class OpenTime:
    """How long the gate has stood open, as an integral over time; single-threaded."""

    def __init__(self, now_ns: int) -> None:
        self._until_ns = self._noted_ns = now_ns
        self._total_ns = 0

    def note(self, until_ns: int, now_ns: int) -> None:
        """From now on open until then; 0 = closed."""
        self._total_ns = self.at(now_ns)
        self._noted_ns, self._until_ns = now_ns, until_ns

    def at(self, now_ns: int) -> int:
        """Nanoseconds with an open gate up to now."""
        return self._total_ns + max(0, min(now_ns, self._until_ns) - self._noted_ns)


def shared_cost(alone_s: float, seen_s: float, share: float) -> float:
    """Cost wholly beside a rollout engine, from one cost seen at an open share of ``share``.

    Returns:
        Seconds, at least ``alone_s`` and at most ten times it.
    """
    if alone_s <= 0 or seen_s <= alone_s or share <= 0:
        return alone_s
    lost = min(1 - 1 / _SLOWEST, (1 - alone_s / seen_s) / share)
    return alone_s / (1 - lost)


def lendable(alone_s: float, shared_s: float, budget_s: float) -> float:
    """Largest open share (0..1) that keeps a cost inside its budget."""
    if alone_s <= 0 or budget_s < alone_s:
        return 0.0
    if shared_s <= budget_s:
        return 1.0
    return min(1.0, (1 - alone_s / budget_s) / (1 - alone_s / shared_s))
