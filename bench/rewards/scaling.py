"""Workers that follow the wish beside a pool of a fixed size, on virtual time.

The job is the simulator's, and so are its steps: a reward that waits for a worker comes later, and
what nothing hides of that makes the step longer. How many workers are wished for, and whose reward
is next, is production's (``rose_core.rewards``). What makes workers of the wish is modelled on
KEDA and the horizontal autoscaler, with the chart's settings:

| workers | become | when |
|---|---|---|
| none | one | somebody is wished for: the gateway pushes |
| some | as many as are wished for, or one | the autoscaler looks; the youngest go, once done |
| some | none | nobody is wished for and the cool-down is over: the gateway pushes, or KEDA polls |

A worker is ready after its cold start, and counts from the moment it is asked for until it is done.
So KEDA 2.21 does it: a push that says inactive brings a target to zero once ``cooldownPeriod`` is
over since it was last seen active (``RequestScale``, ``scaleToZeroOrIdle``).
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from bench.record import Figure
from bench.rewards import steps
from rose_core.rewards.demand import RewardDemand, Scaling, wished
from rose_core.rewards.groups import GroupProgress
from rose_core.rewards.order import RewardQueue
from rose_core.rewards.results import Scored
from rose_simulate.model.clock import VirtualClock
from rose_simulate.model.jobs.job import Job, JobCounts, RunningGroup

_PUSH_S = 0.2  # between two looks of the gateway's own, which pushes what has changed
_P99 = 2.326  # standard deviations of a normal one
_SPREAD = 0.2  # of the lengths of rewards, log-normal
_TRAINER = "streams, late as learned"


@dataclass(frozen=True)
class Autoscaler:
    """When workers come and go; the chart's defaults, and KEDA's.

    Attributes:
        target_s: within which a reward shall have its result.
        patience_s: more for one whose group lacks others that are rolled out.
        look_s: between two looks of the autoscaler.
        poll_s: between two of KEDA's.
        cooldown_s: from when KEDA last saw it active until it brings a pool to zero.
        cold_s, cold_p99_s: until a new worker is ready, median and 99th percentile; log-normal.
        most: workers at a time.
        places: verifications at a time of one worker.
    """

    target_s: float = 10.0
    patience_s: float = 0.0
    look_s: float = 15.0
    poll_s: float = 15.0
    cooldown_s: float = 0.0
    cold_s: float = 1.5  # as it took where KEDA itself started thirty, the image being there
    cold_p99_s: float = 2.0
    most: int = 64
    places: int = 1


CHART: Final = Autoscaler()
SETTINGS: Final[Mapping[str, Autoscaler]] = {
    "the chart's": CHART,
    "patience of 5 s": replace(CHART, patience_s=5.0),
    "patience of 15 s": replace(CHART, patience_s=15.0),
    "a cool-down of 15 s": replace(CHART, cooldown_s=15.0),
    "a cold start of 3 s": replace(CHART, cold_s=3.0, cold_p99_s=3.0),
    "a look every second": replace(CHART, look_s=1.0),
    "target 30 s": replace(CHART, target_s=30.0),
    "2 places": replace(CHART, places=2),
    "4 places": replace(CHART, places=4),
}
USUAL: Final = tuple(name for name, one in SETTINGS.items() if one.places == 1)
"""Those of workers with one place, which is the chart's default."""


@dataclass(frozen=True)
class Pool:
    """What came of one pool.

    Attributes:
        busy_share: of the time for which workers were held, of each of its places.
        wait_p99_s: from a trajectory's end to the start of its reward.
        most: workers at a time.
        starts: of workers.
    """

    busy_share: float
    wait_p99_s: float
    most: int
    starts: int


@dataclass(eq=False)
class _Worker:
    """One worker; ``leaves`` once it is done, and ``gone`` = it has.

    Attributes:
        running: since when, by reward.
    """

    since_s: float
    ready: bool = False
    running: dict[int, float] = field(default_factory=dict)
    leaves: bool = False
    gone: bool = False


@dataclass(frozen=True, eq=False)
class _Taken:
    """One reward that waits or runs."""

    number: int
    group: str
    since_s: float
    takes_s: float
    end: Callable[[], None]


def lengths(count: int, mean_s: float, seed: int) -> list[float]:
    """Lengths of rewards, seconds: most lie within a fifth of the mean."""
    draw = random.Random(seed)
    return [_length(draw, mean_s) for _ in range(count)]


def _length(draw: random.Random, mean_s: float) -> float:
    return mean_s * draw.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)


@dataclass
class FollowingPool:
    """Workers that follow the wish.

    Args:
        clock: virtual.
        scaler: makes workers of the wish.
        takes: seconds of the next reward.
        cold: draws cold starts.

    Attributes:
        ends: when trajectories ended that it was given, in order, and what their rewards take.
        latencies: from there to the results, seconds.
    """

    clock: VirtualClock
    scaler: Autoscaler
    takes: Callable[[], float]
    cold: random.Random = field(default_factory=lambda: random.Random(1))
    ends: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    _waits: list[float] = field(default_factory=list)
    _waiting: dict[int, _Taken] = field(default_factory=dict)
    _order: RewardQueue[str] = field(default_factory=RewardQueue)
    _workers: list[_Worker] = field(default_factory=list)
    _groups: dict[str, GroupProgress] = field(default_factory=dict)
    _demand: RewardDemand = field(default_factory=RewardDemand)
    _held_s: float = 0.0
    _busy_s: float = 0.0
    _most: int = 0
    _starts: int = 0
    _active: bool = False  # as pushed last
    _active_s: float = -math.inf  # when KEDA last saw it so

    def start(self) -> None:
        """Begin to look."""
        self.clock.after(self.scaler.look_s, self._look)
        self.clock.after(self.scaler.poll_s, self._poll)
        self.clock.after(_PUSH_S, self._push)

    def verify(self, group: str, shape: GroupProgress, end: Callable[[], None]) -> None:
        """Take a reward; ``shape`` is what its group was begun as."""
        now = self.clock.now_s
        self._groups[group] = self._groups.get(group, shape).taking(now)
        self._demand.note_taken(now, group, self._groups[group])
        number, takes = len(self.ends), self.takes()
        self.ends.append(now)
        self.lengths.append(takes)
        self._waiting[number] = _Taken(number, group, now, takes, end)
        self._order.put(group, number)
        self._fill()

    def found(self) -> Pool:
        """What came of it; workers that are still held count until now."""
        held = self._held_s + sum(self.clock.now_s - one.since_s for one in self._workers)
        held *= self.scaler.places
        return Pool(self._busy_s / held, _p99(self._waits), self._most, self._starts)

    def _staying(self) -> list[_Worker]:
        return [one for one in self._workers if not one.leaves]

    def _wish(self) -> int:
        now = self.clock.now_s
        waiting = []
        for one in self._waiting.values():
            complete = self._groups[one.group].complete
            waiting.append((now - one.since_s, None if complete is None else now - complete))
        staying = self._staying()
        running = [now - began for worker in staying for began in worker.running.values()]
        scaler = self.scaler
        scaling = Scaling(scaler.target_s, scaler.patience_s, scaler.cold_s, scaler.most)
        idle = sum(one.ready and not one.running for one in staying)
        return wished([self._demand], scaling, now, waiting, running, idle=idle)

    def _look(self) -> None:
        if self._staying():
            self._scale(max(1, math.ceil(self._wish() / self.scaler.places)))
        self.clock.after(self.scaler.look_s, self._look)

    def _push(self) -> None:
        active = self._wish() > 0
        if active != self._active:
            self._active = active
            self._request(active)
        self.clock.after(_PUSH_S, self._push)

    def _poll(self) -> None:
        self._request(self._wish() > 0)
        self.clock.after(self.scaler.poll_s, self._poll)

    def _request(self, active: bool) -> None:
        now = self.clock.now_s
        if active:
            self._active_s = now
            if not self._staying():
                self._scale(1)
        elif now - self._active_s >= self.scaler.cooldown_s:
            self._scale(0)

    def _scale(self, wanted: int) -> None:
        staying = self._staying()
        # As Kubernetes does it: whoever is not ready goes first, then the youngest.
        youngest = sorted(staying, key=lambda one: (one.ready, -one.since_s))
        for one in youngest[: max(0, len(staying) - wanted)]:
            if one.running:
                one.leaves = True
            else:
                self._end(one)
        for _ in range(wanted - len(staying)):
            one = _Worker(self.clock.now_s)
            self._workers.append(one)
            self._starts += 1
            self.clock.after(self._cold_start(), partial(self._ready, one))
        self._most = max(self._most, len(self._workers))

    def _cold_start(self) -> float:
        scaler = self.scaler
        spread = math.log(scaler.cold_p99_s / scaler.cold_s) / _P99
        return scaler.cold_s * self.cold.lognormvariate(0.0, spread)

    def _end(self, one: _Worker) -> None:
        one.gone = True
        self._workers.remove(one)
        self._held_s += self.clock.now_s - one.since_s

    def _ready(self, one: _Worker) -> None:
        one.ready = not one.gone
        self._fill()

    def _free(self) -> _Worker | None:
        """The one with most room, as the gateway takes it."""
        ready = [one for one in self._staying() if one.ready]
        found = min(ready, key=lambda one: len(one.running), default=None)
        return None if found is None or len(found.running) == self.scaler.places else found

    def _fill(self) -> None:
        while self._waiting and (worker := self._free()) is not None:
            number = self._order.take(lambda group: self._groups[group].left, lambda _: True)
            assert number is not None  # noqa: S101  # some wait
            taken = self._waiting.pop(number)
            worker.running[taken.number] = self.clock.now_s
            self._waits.append(self.clock.now_s - taken.since_s)
            self.clock.after(taken.takes_s, partial(self._done, worker, taken))

    def _done(self, worker: _Worker, taken: _Taken) -> None:
        del worker.running[taken.number]
        self._busy_s += taken.takes_s
        self._demand.times.append(taken.takes_s)
        self.latencies.append(self.clock.now_s - taken.since_s)
        self._groups[taken.group] = self._groups[taken.group].after(Scored(1.0, True, 0.0))
        self._demand.note_progress(taken.group, self._groups[taken.group])
        if worker.leaves and not worker.running:
            self._end(worker)
        taken.end()
        self._fill()


def played(scaler: Autoscaler, seconds: float, seed: int) -> tuple[FollowingPool, JobCounts]:
    """A job whose rewards such a pool verifies."""
    draw = random.Random(f"{seed}/rewards")
    pools: list[FollowingPool] = []

    def follow(clock: VirtualClock, job: Job, keep: int) -> None:
        cold = random.Random(f"{seed}/cold starts")
        pool = FollowingPool(clock, scaler, lambda: _length(draw, steps.REWARD_S), cold)

        def verify(one: RunningGroup, end: Callable[[], None]) -> None:
            begun = len(one.members) + len(one.under_way)
            pool.verify(str(one.number), GroupProgress(begun, min(begun, keep)), end)

        job.verify = verify
        pool.start()
        pools.append(pool)

    counts = steps.played(_TRAINER, seconds, seed, steps.REWARD_S, follow)
    return pools[0], counts


@dataclass(frozen=True)
class Seed:
    """What came of one seed.

    Attributes:
        pool: workers that follow the wish.
        smallest: the smallest fixed pool with the same p99 wait.
        peak: a fixed pool of as many as ``pool`` had at most.
        per_start: rewards per start of a worker.
        added: what a step waits for its last reward, of a step without that.
        hidden: of a reward's time from its trajectory's end to the result, what no step waits for.
        stale: of the trajectories trained on, those sampled by an older version.
    """

    pool: Pool
    smallest: Pool
    peak: Pool
    per_start: float
    added: float
    hidden: float
    stale: float


def measured(scaler: Autoscaler, seconds: float, seed: int) -> Seed:
    """One seed, and pools of a fixed size that verify the same rewards."""
    following, counts = played(scaler, seconds, seed)
    pool = following.found()
    parts = steps.usual(counts.step_parts)
    shown = parts[steps.LAST_REWARD]
    return Seed(
        pool,
        smallest(following.ends, following.lengths, pool.wait_p99_s),
        fixed(following.ends, following.lengths, pool.most),
        len(following.ends) / pool.starts,
        shown / (sum(parts.values()) - shown),
        1 - shown / statistics.fmean(following.latencies),
        steps.stale_share(counts),
    )


_ROWS: Final[Sequence[tuple[str, Callable[[Seed], float], str, Mapping[str, float]]]] = (
    ("workers busy", lambda one: one.pool.busy_share, "share", {"at_least": 0.9}),
    (
        "a fixed pool with the same p99 wait, busy",
        lambda one: one.smallest.busy_share,
        "share",
        {},
    ),
    (
        "a fixed pool of as many as it had at most, busy",
        lambda one: one.peak.busy_share,
        "share",
        {},
    ),
    ("added to a step", lambda one: one.added, "share", {"at_most": 0.01}),
    ("hidden, of a reward's latency", lambda one: one.hidden, "share", {"at_least": 0.9}),
    ("a version old or more", lambda one: one.stale, "share", {}),
    ("wait of a reward, p99", lambda one: one.pool.wait_p99_s, "s", {}),
    ("most workers at a time", lambda one: one.pool.most, "workers", {}),
    ("rewards per start", lambda one: one.per_start, "rewards", {}),
    ("fixed pool", lambda one: one.smallest.most, "workers", {}),
)


def figures(
    seconds: float,
    seeds: Sequence[int],
    settings: Collection[str] = USUAL,
    spread: steps.Spread = map,
) -> list[Figure]:
    """How busy workers are under each setting, and what their rewards add to a step."""
    rows: list[Figure] = []
    for name, scaler in SETTINGS.items():
        if name in settings:
            found = list(spread(partial(measured, scaler, seconds), seeds))
            rows += [
                steps.mean(f"{name}: {row}", [value(one) for one in found], unit, **aim)
                for row, value, unit, aim in _ROWS
            ]
    return rows


def fixed(ends: Sequence[float], takes: Sequence[float], size: int) -> Pool:
    """A pool that is always there, from the first end to the last result."""
    free = [ends[0]] * size
    waits, last = [], ends[0]
    for end, take in zip(ends, takes, strict=True):
        start = max(end, heapq.heappop(free))
        heapq.heappush(free, start + take)
        waits.append(start - end)
        last = max(last, start + take)
    held = size * (last - ends[0])
    return Pool(sum(takes) / held, _p99(waits), size, size)


def smallest(ends: Sequence[float], takes: Sequence[float], wait_s: float) -> Pool:
    """The smallest fixed pool in which 99 of 100 rewards wait no longer than that."""
    size = 1
    while (found := fixed(ends, takes, size)).wait_p99_s > wait_s:
        size += 1
    return found


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
