"""How often turns met a borrowed engine lately, over all and by stratum; makes the quota's figures.

A stratum joins trajectories that ought to be treated alike: about as long, about as fresh. Counts
fade with every turn, so the shares follow the last few hundred. Next: ``guards`` reads them.
"""

from __future__ import annotations

from bisect import bisect_right

from rose_core.wire.routing import EngineKind

_LEAST = 8.0  # a share of fewer turns says nothing
_MOST_WEIGHT = 1e100  # far from where floats end
_LENGTHS = (1_000, 4_000, 16_000)
_BORROWED = EngineKind.BORROWED  # named once: an enum's member is slow to find
_BUCKETS = ("<1k", "<4k", "<16k", "16k+")


def stratum(total_tokens: float, publishes_left: float) -> str:
    """The stratum of a trajectory.

    Args:
        total_tokens: output it is expected to have in the end; 0 = no idea.
        publishes_left: until it is too old to train on; infinite = no bound.
    """
    length = "?" if total_tokens <= 0 else length_bucket(total_tokens)
    fresh = "late" if publishes_left < 1 else "tight" if publishes_left < 2 else "fresh"
    return f"{length}/{fresh}"


def length_buckets() -> tuple[str, ...]:
    """All of them, from short to long."""
    return _BUCKETS


def length_bucket(tokens: float) -> str:
    """``<1k``, ``<4k``, ``<16k`` or ``16k+``."""
    return _BUCKETS[bisect_right(_LENGTHS, tokens)]


class ContactShares:
    """Fading counts of turns by stratum and kind of engine.

    Args:
        memory_turns: about so many turns count.
    """

    def __init__(self, memory_turns: float = 256.0) -> None:
        # Counts do not fade with each turn: each counts for more than the one before.
        self._growth = 1.0 / (1.0 - 1.0 / memory_turns)
        self._weight = 1.0
        self._all: dict[str, float] = {}
        self._borrowed: dict[str, float] = {}

    def record(self, name: str, kind: EngineKind) -> None:
        """Count a turn of that stratum on an engine of that kind."""
        self._weight *= self._growth
        if self._weight > _MOST_WEIGHT:
            for counts in (self._all, self._borrowed):
                for key in counts:
                    counts[key] /= self._weight
            self._weight = 1.0
        self._all[name] = self._all.get(name, 0.0) + self._weight
        if kind is _BORROWED:
            self._borrowed[name] = self._borrowed.get(name, 0.0) + self._weight

    @property
    def overall(self) -> float:
        """Borrowed share of all turns; 0 before any."""
        total = sum(self._all.values())
        return sum(self._borrowed.values()) / total if total else 0.0

    def by_stratum(self) -> dict[str, float]:
        """Borrowed share of every stratum that was seen often enough."""
        least, borrowed = _LEAST * self._weight, self._borrowed
        return {
            name: borrowed.get(name, 0.0) / count
            for name, count in self._all.items()
            if count >= least
        }
