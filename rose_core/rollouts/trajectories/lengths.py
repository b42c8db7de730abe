"""How much a trajectory will still write, from its finished siblings and from all before it.

Siblings (answers to the same prompt) resemble each other, and what is old is likely to get older:
both are read off the lengths of finished trajectories, those not longer than what this one has
written already left out. No model is trained.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict

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


class _Recent:
    """The last so many lengths, which are also kept in order of size.

    Sorting them when one is asked for would cost a turn 200 us where each turn ends a trajectory.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._last: list[int] = []  # an empty deque takes 760 bytes, and there is one a group
        self.ordered: list[int] = []

    def add(self, tokens: int) -> None:
        if len(self._last) == self._most:
            self._take_out(self._last.pop(0))
        self._last.append(tokens)
        insort(self.ordered, tokens)

    def remove(self, tokens: int) -> None:
        """Forget one; of one that is not here any more there is nothing to forget."""
        with contextlib.suppress(ValueError):
            self._last.remove(tokens)
            self._take_out(tokens)

    def _take_out(self, tokens: int) -> None:
        del self.ordered[bisect_left(self.ordered, tokens)]


class Lengths:
    """Lengths of finished trajectories.

    Args:
        most: trajectories remembered in all, and of a group: who sends one prompt all day, and
            names no group, has all of them in one. ``groups`` as many groups.
    """

    def __init__(self, most: int = 512, groups: int = 4096) -> None:
        self._all = _Recent(most)
        self._groups: OrderedDict[str, _Recent] = OrderedDict()
        self._most, self._most_groups = most, groups
        self._rests: dict[tuple[str, int], RemainingLength] = {}

    def record(self, group: str, tokens: int) -> None:
        """Learn the output tokens of a trajectory that has ended."""
        self._rests.clear()
        self._all.add(tokens)
        if not group:
            return
        siblings = self._groups.get(group)
        if siblings is None:
            siblings = self._groups[group] = _Recent(self._most)
        siblings.add(tokens)
        self._groups.move_to_end(group)
        if len(self._groups) > self._most_groups:
            self._groups.popitem(last=False)

    def forget(self, group: str, tokens: int) -> None:
        """One taken for ended with so many goes on: nobody learns from that length."""
        self._rests.clear()
        self._all.remove(tokens)
        if (siblings := self._groups.get(group)) is not None:
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
        known = self._all.ordered
        if not known:
            return RemainingLength()
        siblings = self._groups.get(group) if group else None
        longer = _Longer(known, siblings.ordered if siblings is not None else [], written)
        if not longer.count:
            # Longer than anything seen: of such the expected rest grows with age.
            return RemainingLength(written / 2, float(written), in_tail=True)
        median, tail = longer.quantile(0.5), longer.quantile(0.9)
        in_tail = median >= _Longer(known, [], -1).quantile(0.9) and len(known) >= 10
        return RemainingLength(median - written, tail - written, in_tail)


class _Longer:
    """Lengths above what has been written, of which a sibling's counts ``_SIBLING_WEIGHT`` times.

    Both lists are in order, and neither is copied.
    """

    def __init__(self, known: list[int], siblings: list[int], written: int) -> None:
        self._known, self._siblings = known, siblings
        self._start, self._first = bisect_right(known, written), bisect_right(siblings, written)
        weighted = _SIBLING_WEIGHT * (len(siblings) - self._first)
        self.count = len(known) - self._start + weighted

    def quantile(self, share: float) -> float:
        """The nearest rank; ``stats.quantile`` would copy, sort and interpolate."""
        rank = min(self.count - 1, int(share * self.count))
        if self._first == len(self._siblings):
            return float(self._known[self._start + rank])
        # The shortest of either list up to which there are more than ``rank``.
        found = (
            (self._known, bisect_right(self._known, rank, self._start, key=self._up_to)),
            (self._siblings, bisect_right(self._siblings, rank, self._first, key=self._up_to)),
        )
        return float(min(lengths[at] for lengths, at in found if at < len(lengths)))

    def _up_to(self, tokens: int) -> int:
        """How many are no longer than that."""
        weighted = _SIBLING_WEIGHT * (bisect_right(self._siblings, tokens) - self._first)
        return bisect_right(self._known, tokens) - self._start + weighted
