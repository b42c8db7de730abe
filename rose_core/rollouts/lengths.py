"""How much a trajectory will still write, from its finished siblings and from all before it.

Siblings (answers to the same prompt) resemble each other, and what is old is likely to get older:
both are read off the lengths of finished trajectories, those not longer than what this one has
written already left out. No model is trained.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import OrderedDict, deque

import msgspec

_SIBLING_WEIGHT = 4
_MOST_REMEMBERED = 4096
"""Answers of ``rest`` between two lengths: most of them are about what has written nothing yet."""


class RemainingLength(msgspec.Struct, frozen=True, gc=False):
    """Output tokens still to come.

    Attributes:
        median, tail: half, and nine in ten, of its like need no more; 0 = no idea.
        in_tail: it will be among the longest tenth.
    """

    median: float = 0.0
    tail: float = 0.0
    in_tail: bool = False


class Lengths:
    """Lengths of finished trajectories.

    Args:
        most: trajectories remembered in all, and of a group: who sends one prompt all day, and
            names no group, has all of them in one. ``groups`` as many groups.
    """

    def __init__(self, most: int = 512, groups: int = 4096) -> None:
        self._all: deque[int] = deque(maxlen=most)
        self._sorted: list[int] = []
        self._groups: OrderedDict[str, deque[int]] = OrderedDict()
        self._most, self._most_groups = most, groups
        self._rests: dict[tuple[str, int], RemainingLength] = {}

    def record(self, group: str, tokens: int) -> None:
        """Learn the output tokens of a trajectory that has ended."""
        self._all.append(tokens)
        self._sorted = []
        self._rests.clear()
        if not group:
            return
        self._groups.setdefault(group, deque(maxlen=self._most)).append(tokens)
        self._groups.move_to_end(group)
        if len(self._groups) > self._most_groups:
            self._groups.popitem(last=False)

    def forget(self, group: str, tokens: int) -> None:
        """One taken for ended with so many goes on: nobody learns from that length."""
        with contextlib.suppress(ValueError):  # so long ago that it is forgotten
            self._all.remove(tokens)
            self._sorted = []
        self._rests.clear()
        siblings = self._groups.get(group)
        if siblings is not None:
            with contextlib.suppress(ValueError):
                siblings.remove(tokens)

    def rest(self, group: str, written: int) -> RemainingLength:
        """What a trajectory of the group that has written so much will still write."""
        # Asked two or three times in a turn, and the same for every turn of a group that begins.
        found = self._rests.get((group, written))
        if found is None:
            if len(self._rests) >= _MOST_REMEMBERED:
                self._rests.clear()
            found = self._rests[group, written] = self._rest(group, written)
        return found

    def _rest(self, group: str, written: int) -> RemainingLength:
        if not self._all:
            return RemainingLength()
        if not self._sorted:
            self._sorted = sorted(self._all)
        # Nothing is copied where no sibling has ended.
        known, start = self._sorted, bisect_right(self._sorted, written)
        siblings = [n for n in self._groups.get(group, ()) if n > written] if group else []
        if siblings:
            known, start = sorted(known[start:] + siblings * _SIBLING_WEIGHT), 0
        if start == len(known):
            # Longer than anything seen: of such the expected rest grows with age.
            return RemainingLength(written / 2, float(written), in_tail=True)
        median, tail = _quantile(known, 0.5, start), _quantile(known, 0.9, start)
        in_tail = median >= _quantile(self._sorted, 0.9) and len(self._sorted) >= 10
        return RemainingLength(median - written, tail - written, in_tail)


def _quantile(ordered: list[int], share: float, start: int = 0) -> float:
    """Of the entries from ``start`` on, the nearest rank.

    Asked for every turn: ``stats.quantile`` would copy and sort what is sorted already.
    """
    count = len(ordered) - start
    return float(ordered[start + min(count - 1, int(share * count))])
