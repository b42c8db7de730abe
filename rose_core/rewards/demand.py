"""What is known of one team's rewards, and the workers that it wishes for.

No I/O, and the time is given. Rewards that are to come are foreseen in two ways, and the larger
number counts:

| of | is known | expected within a while |
|---|---|---|
| groups that lack members | how many are rolled out | as many as came so long after their first |
| all | when the last one came | one, as often as a gap that lasted so long ended |

The second is the histogram of idle times by which Shahrad et al. keep functions alive (Serverless
in the Wild, USENIX ATC 2020), for trainers that name no groups: rewards of a tenth of a second
that come every second have one worker, and not a cold start each.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rose_core.rewards.groups import GroupProgress
from rose_core.rewards.scale import promised_age, wish

# Of each kind: some steps of a job, and quickly sorted at each look.
_REMEMBERED = 256
# Groups that lack members, the newest: one that its trainer gave up is never whole.
_GROUPS = 1024
# Fewer say nothing of when the next comes.
_LEAST = 8


@dataclass(frozen=True)
class Scaling:
    """By what the wish goes.

    Attributes:
        target_s: in which a reward should have its result, from when it was taken.
        patience_s: more for one whose group lacks others that are rolled out.
        cold_start_s: until a new worker is ready.
        most: workers at a time.
    """

    target_s: float
    patience_s: float
    cold_start_s: float
    most: int


def _times() -> deque[float]:
    return deque(maxlen=_REMEMBERED)


@dataclass
class RewardDemand:
    """What is known of the rewards of one team.

    Attributes:
        times: what its last verifications took, seconds.
    """

    times: deque[float] = field(default_factory=_times)
    _gaps: deque[float] = field(default_factory=_times)
    _after_first: deque[float] = field(default_factory=_times)
    _last: float | None = None
    _open: OrderedDict[Hashable, tuple[float, int]] = field(default_factory=OrderedDict)

    def note_taken(
        self, now: float, group: Hashable = None, progress: GroupProgress | None = None
    ) -> None:
        """A reward was taken; ``progress`` is its group's with it, None = of no group."""
        if self._last is not None:
            self._gaps.append(now - self._last)
        self._last = now
        if progress is not None and progress.first is not None:
            if progress.first < now:
                self._after_first.append(now - progress.first)
            self.note_progress(group, progress)

    def note_progress(self, group: Hashable, progress: GroupProgress) -> None:
        """A group lacks more or fewer than it did."""
        self._open.pop(group, None)
        if progress.to_come and progress.first is not None:
            self._open[group] = progress.first, progress.to_come
            if len(self._open) > _GROUPS:
                self._open.popitem(last=False)

    def expected(self, now: float, within: float) -> float:
        """Rewards that are to come within so many seconds: a mean."""
        if self._last is None:
            return 0.0
        gap = partial(_share_ending, sorted(self._gaps), within=within)
        later = partial(_share_ending, sorted(self._after_first), within=within)
        of_groups = sum(count * later(now - first) for first, count in self._open.values())
        return max(gap(now - self._last), of_groups)


def _share_ending(lasted: Sequence[float], age: float, within: float) -> float:
    """Of what lasted longer than ``age``, in order, how much ended ``within`` seconds more."""
    ended = bisect_right(lasted, age)
    if len(lasted) < _LEAST or ended == len(lasted):
        return 0.0
    return (bisect_right(lasted, age + within) - ended) / (len(lasted) - ended)


def p50(teams: Iterable[RewardDemand]) -> float | None:
    """Median seconds of a verification; None while none has ended."""
    times = [one for team in teams for one in team.times]
    return statistics.median(times) if times else None


def wished(
    teams: Sequence[RewardDemand],
    scaling: Scaling,
    now: float,
    waiting: Iterable[tuple[float, float | None]],
    running: Sequence[float],
    *,
    idle: int,
) -> int:
    """Workers for these teams' rewards.

    Args:
        teams: whose.
        scaling: by what it goes.
        now: monotonic seconds.
        waiting: of each reward that waits, its age and, once its group lacks none but what was
            taken, for how long that has been so; seconds.
        running: seconds for which each reward has been verified that runs on a worker which was
            not told to go.
        idle: workers that are there and have nothing to do.
    """
    ages = [promised_age(age, complete, scaling.patience_s) for age, complete in waiting]
    expected = sum(team.expected(now, scaling.cold_start_s) for team in teams)
    return wish(
        ages, p50(teams), scaling.target_s, scaling.most, running, idle=idle, expected=expected
    )
