"""Whether enough receivers serve a version: what a trainer's barrier waits for.

Nobody reporting is no quorum: a share of nothing is never met.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rose_core.identity import WeightVersion


class Reach(NamedTuple):
    """Receivers by whether they serve a version (or a later one) or are behind it."""

    serving: tuple[str, ...]
    behind: tuple[str, ...]

    def meets(self, quorum: float) -> bool:
        """Whether they are enough.

        Args:
            quorum: an integer = that many receivers; a fraction of at most 1 = that share of all.
        """
        if not self.serving:
            return False
        if isinstance(quorum, int):
            return len(self.serving) >= quorum
        return len(self.serving) >= quorum * (len(self.serving) + len(self.behind))


def reach(wanted: WeightVersion, held: Mapping[str, WeightVersion]) -> Reach:
    """Split receivers of a run by whether they serve the wanted version or a later one."""
    serving = tuple(sorted(name for name, version in held.items() if version >= wanted))
    return Reach(serving, tuple(sorted(held.keys() - set(serving))))


def check(quorum: float) -> None:
    """Refuse a quorum that nothing or everything meets.

    Raises:
        ValueError: it is not a positive number of receivers or a share of at most 1.
    """
    if quorum <= 0 or (not isinstance(quorum, int) and quorum > 1):
        message = f"quorum {quorum!r}: give a number of receivers (1, 2, ...) or a share (0.5, 1.0)"
        raise ValueError(message)
