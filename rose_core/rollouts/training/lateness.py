"""How many groups of a round may be late with their rewards: as few as hide what rewards take.

A round ends with its last reward, and nothing of the round hides that (decision 0551). Groups whose
rewards it does not wait for are trained on one step late (``rounds``). So of what was seen the
fewest late groups are chosen that keep both aims:

| aim | of |
|---|---|
| a round waits at most ``ADDED`` after its last token | a step, from one opening to the next |
| and at most ``SHOWN`` | what it would wait with no group late |

Nobody is late while the first holds without: there is nothing to win by older groups. None is late
before one round was seen whole. Where no number below half of the batch does, half are late. More
are where half was seen not to be enough: the fewest that would have been, and never all of a batch.

By the second aim a number is judged as if one round more had waited with it in full (the rule of
succession). The fewest that were enough in a few rounds are too few: rare rounds, in which several
groups end at once, make most of the wait, and the number is chosen because it was lucky so far. So
nine rounds have to be seen before fewer than half can be enough. The first aim takes no such round:
rewards that are long beside a step would fail it by that round alone, whatever was seen. Nor do
more than half: they need what was seen against half, and not only that nothing speaks for it.

What a round would have waited with so many late is known once all its groups have their rewards:
the next later one, counted from the last. That the number changes which groups a round samples is
left out, and what the last ``_ROUNDS`` say together is used for the next. Next step: ``rounds``
tells of groups, and asks when it opens a round.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

ADDED: Final = 0.01
SHOWN: Final = 0.1
_ROUNDS: Final = 16
"""Three of these are long ones or so, and a change of the task is followed within as many steps."""


def fewest_late(
    waits: Sequence[Sequence[float]], step_s: float, half: int, most: int | None = None
) -> int:
    """The fewest groups of a round that keep both aims when they are late.

    Args:
        waits: of rounds that were seen: how long after the round's last token each of its groups
            had its rewards, in seconds; negative = before.
        step_s: usual length of a step.
        half: fewer have to prove themselves, and more are taken only where so many were too few.
        most: no more than so many; None = ``half``.
    """
    if not waits:
        return 0
    whole_s = _waited(waits, 0)
    if whole_s <= ADDED * step_s:
        return 0
    most = half if most is None else most
    seen = len(waits)

    def keeps(late: int) -> bool:
        waited_s = _waited(waits, late)
        one_more = late < half
        # The product of numbers of rounds first: a tenth of ten is one, whatever the seconds.
        judged_s = SHOWN * (seen + one_more) * whole_s
        return waited_s <= ADDED * step_s and seen * waited_s + one_more * whole_s <= judged_s

    return next(filter(keeps, range(most)), most)


def _waited(waits: Sequence[Sequence[float]], late: int) -> float:
    """Mean wait of a round after its last token with so many groups late."""
    ordered = (sorted(one, reverse=True) for one in waits)
    return statistics.fmean(max(0.0, one[late]) if late < len(one) else 0.0 for one in ordered)


@dataclass
class _Round:
    """Groups of a round that closed: when each had its rewards; some have yet to have them."""

    last_token_s: float
    ready_s: list[float]
    missing: set[str]


@dataclass
class Lateness:
    """What was seen of a job's rounds.

    Attributes:
        half: groups that may be late without a round that says that fewer are too few.
        most: groups that may be late.
        clock: seconds at which what is told has happened.
    """

    half: int
    most: int
    clock: Callable[[], float]
    _token_s: dict[str, float] = field(default_factory=dict)
    _ready_s: dict[str, float] = field(default_factory=dict)
    _last: _Round | None = None
    _opened_s: float | None = None
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_ROUNDS))
    _waits: deque[list[float]] = field(default_factory=lambda: deque(maxlen=_ROUNDS))

    def open(self) -> int:
        """A round opens; how many of its groups may be late."""
        at_s = self.clock()
        if self._opened_s is not None:
            self._steps_s.append(at_s - self._opened_s)
        self._opened_s = at_s
        if not self._steps_s:
            return 0
        return fewest_late(self._waits, statistics.fmean(self._steps_s), self.half, self.most)

    def sampled(self, prompt: str) -> None:
        """A group has its last token."""
        self._token_s[prompt] = self.clock()

    def ready(self, prompt: str) -> None:
        """A group has its rewards; its last token came with them where none was told of."""
        at_s = self.clock()
        self._token_s.setdefault(prompt, at_s)
        self._ready_s[prompt] = at_s
        if self._last is not None and prompt in self._last.missing:
            self._last.missing.remove(prompt)
            self._last.ready_s.append(at_s)
            self._learn_when_whole()

    def drop(self, prompt: str) -> None:
        """A group is given up."""
        self._token_s.pop(prompt, None)
        self._ready_s.pop(prompt, None)
        if self._last is not None:
            self._last.missing.discard(prompt)
            self._learn_when_whole()

    def close(self, groups: Collection[str]) -> None:
        """A round closes; these it has sampled and does not put off."""
        tokens = [self._token_s[one] for one in groups if one in self._token_s]
        if tokens:
            ready = [self._ready_s[one] for one in groups if one in self._ready_s]
            missing = {one for one in groups if one not in self._ready_s}
            self._last = _Round(max(tokens), ready, missing)
            self._learn_when_whole()
        self._token_s.clear()
        self._ready_s.clear()

    def _learn_when_whole(self) -> None:
        if self._last is not None and not self._last.missing:
            self._waits.append([one - self._last.last_token_s for one in self._last.ready_s])
            self._last = None
