"""A fleet of thousands of GPUs in bins of seconds: curves instead of events, production's planner.

| what | how |
|---|---|
| load of a replica | the trace's counts per bin over their mean, a phase per service |
| live requests of a replica | Poisson per bin; the planner and the counts see these |
| what a replica gives, which requests are late | ``curves`` at the load; they hold its randomness |
| which replicas are lent | ``rose_core.lending.plan``, for all pools, every ``plan_s`` |
| what a lease wants | its job's turns by bin, as its router says (``rollouts.training.rhythm``) |
| rollouts of a job | ``FluidJob``: those that have a place all progress alike; no turn is placed |

Against the event level its throughput is checked in ``tests/simulate/test_fleet.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from rose_core.identity import LeaseUid, PodUid, SlotUid
from rose_core.lending import (
    Lease,
    PlannerMemory,
    PlannerPolicy,
    PoolTerms,
    Replica,
    Slot,
    Snapshot,
    plan,
)
from rose_core.lending.demand import ReceivedNote, together
from rose_core.rollouts.training.rhythm import Rhythm, TurnTraffic, note, observe
from rose_core.wire.sync import SignalSource
from rose_simulate.model.cluster.planner import lease_of
from rose_simulate.model.fleets.curves import USUAL_CONTEXT, Curve
from rose_simulate.model.jobs.workload import ALIKE, Episode, ServingArrival, Shape
from rose_simulate.model.regimes import RULES, LendingMode
from rose_simulate.model.scenarios.costs import ModelCosts, costs_of, kv_tokens
from rose_simulate.model.scenarios.fleet_scenario import FleetScenario
from rose_simulate.model.scenarios.scenario import Regime, RolloutJob

Floats = NDArray[np.float64]
Steps = Callable[[float], float]
_SOURCE = SignalSource.WIRE_TAP.value
_SUMS = ("requests", "alone", "added", "inside", "spared", "lent", "open", "hours", "given")


@dataclass(frozen=True)
class EngineSupply:
    """What the engines of one job are in one bin.

    Attributes:
        most: tokens per second when every slot is full.
        slots: turns at a time.
    """

    most: float
    slots: float
    engines: float


@dataclass(frozen=True)
class FluidWork:
    """What the tanks of equal jobs share.

    Attributes:
        lengths: output tokens of the episodes that trajectories are drawn from.
        active: share of a trajectory's life in which it is at an engine.
        by_age: where there are more than places, old trajectories have them, as production's queue
            and the paper's with ages give them; otherwise all take turns, first come, first served.
    """

    job: RolloutJob
    own: ModelCosts
    lengths: Floats
    active: float
    by_age: bool = True


@dataclass
class FluidJob:
    """The rollouts of one job: a tank of trajectories, per bin.

    | what | how |
    |---|---|
    | speed | what the engines give when full, less where trajectories under way do not fill them |
    | who progresses | all alike; where there are more than places, the oldest (``by_age``) or all |
    | groups, staleness, training | as in ``job`` |

    That all take turns costs no keys here, which flatters rules without ages.

    Attributes:
        left: tokens that each trajectory still has to write, oldest first.
        ready: version and tokens of the groups that a trainer can take.
        tokens, most: that engines made, and would have made with full batches.
        discarded: tokens of the groups that were dropped.
    """

    work: FluidWork
    draw: np.random.Generator
    left: Floats = field(default_factory=lambda: np.empty(0))
    group: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    born: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    waiting: dict[int, int] = field(default_factory=dict)
    written: dict[int, float] = field(default_factory=dict)
    ready: list[tuple[int, float]] = field(default_factory=list)
    version: int = 0
    groups: int = 0
    numbered: int = 0
    training_until: float = -1.0
    finished: int = 0
    accepted: int = 0
    dropped: int = 0
    steps: int = 0
    tokens: float = 0.0
    most: float = 0.0
    discarded: float = 0.0

    @property
    def useful(self) -> float:
        """Tokens less those of dropped groups, as where turns are placed."""
        return self.tokens - self.discarded

    @property
    def turns(self) -> int:
        """Trajectories that are at an engine or would be, now."""
        return round(len(self.left) * self.work.active)

    def advance(self, supply: EngineSupply, now: float, bin_s: float) -> None:
        """One bin."""
        self._start()
        active = len(self.left) * self.work.active
        made = rate(active, supply, self._step) * bin_s
        self.most += supply.most * bin_s
        if len(self.left):
            placed = self._placed(supply)
            self.left[:placed] -= made / placed
            self.tokens += made
        self._finish()
        if 0 <= self.training_until <= now:
            self.training_until = -1.0
            self.version += 1
            self.steps += 1
        if self.training_until < 0:
            self._train(now)

    def _placed(self, supply: EngineSupply) -> int:
        """How many trajectories progress, from the oldest on."""
        if not self.work.by_age:
            return len(self.left)
        return min(len(self.left), max(1, math.ceil(supply.slots / self.work.active)))

    def _step(self, batch: float) -> float:
        return self.work.own.step(round(batch), round(batch * USUAL_CONTEXT))[0]

    def _start(self) -> None:
        job = self.work.job
        wanted = (job.staleness + self.version + 1) * job.batch_groups - self.groups
        if wanted <= 0:
            return
        size = wanted * job.group
        fresh = np.arange(self.numbered, self.numbered + wanted)
        numbers = np.repeat(fresh, job.group)
        self.waiting.update(dict.fromkeys(fresh.tolist(), job.group))
        self.groups += wanted
        self.numbered += wanted
        alike = self.draw.random(size) < ALIKE
        base = np.repeat(self.draw.choice(self.work.lengths, wanted), job.group)
        lengths = np.where(alike, base, self.draw.choice(self.work.lengths, size))
        sums = lengths.reshape(wanted, job.group).sum(axis=1)
        self.written.update(zip(fresh.tolist(), sums.tolist(), strict=True))
        self.left = np.concatenate([self.left, lengths])
        self.group = np.concatenate([self.group, numbers])
        self.born = np.concatenate([self.born, np.full(size, self.version)])

    def _finish(self) -> None:
        done = self.left <= 0
        if not done.any():
            return
        ended = zip(self.group[done].tolist(), self.born[done].tolist(), strict=True)
        for number, born in ended:
            self.waiting[number] -= 1
            if self.waiting[number] == 0:
                del self.waiting[number]
                self.ready.append((born, self.written.pop(number)))
        self.finished += int(done.sum())
        self.left, self.group, self.born = self.left[~done], self.group[~done], self.born[~done]

    def _train(self, now: float) -> None:
        job = self.work.job
        fresh = [one for one in self.ready if self.version - one[0] <= job.staleness]
        lost = len(self.ready) - len(fresh)
        self.discarded += sum(tokens for _, tokens in self.ready)
        self.discarded -= sum(tokens for _, tokens in fresh)
        self.dropped += lost * job.group
        self.groups -= lost  # as in ``job``: a dropped group is started anew
        self.ready = fresh
        if len(fresh) >= job.batch_groups:
            self.ready = fresh[job.batch_groups :]
            self.accepted += job.batch_groups * job.group
            self.training_until = now + job.train_s


def active_share(pool: Rows[Episode], job: RolloutJob) -> float:
    """Share of a trajectory's life in which it is at an engine, at 15 ms per token."""
    gaps = sum(turn.gap_s for one in pool for turn in one) * job.gap_scale
    work = sum(turn.output for one in pool for turn in one) * 0.015
    return work / (work + gaps)


def rate(active: float, supply: EngineSupply, step: Steps) -> float:
    """Tokens per second of ``active`` trajectories over engines that give ``most`` when full.

    Beside the decode step, a token of a full batch of ``slots / engines`` costs the time that
    prefills of the others take; that part shrinks with the batch.
    """
    if active <= 0.0 or supply.most <= 0.0:
        return 0.0
    if active >= supply.slots:
        return supply.most
    full = supply.slots / supply.engines
    batch = max(1.0, active / supply.engines)
    others = max(0.0, supply.slots / supply.most - step(full)) / full
    return min(supply.most, active / (step(batch) + others * batch))


class FleetOutcome(msgspec.Struct, frozen=True):
    """One run over a fleet.

    Attributes:
        tokens_per_s: useful ones, over all jobs: sampled, less those of dropped groups.
        violations_alone: expected of all services with nothing lent.
        added_violations: expected of lent replicas: late when lent, and not alone.
        added_inside: those of them in bins in which serving alone keeps its SLO.
        spared_violations: expected of lent replicas: late alone, and not when lent.
        lent_hours: GPU-hours that leases held.
        dedicated_gpus: of all jobs; 0 = an older version did not say.
        full_share: tokens made, of those that the engines would have made with full batches; less
            than 1 where they lack trajectories.
        lent_worth: what a lent engine would have made with a full batch, of a dedicated one.
    """

    regime: str
    seed: int
    gpus: int
    seconds: float
    tokens_per_s: float
    finished: int
    accepted: int
    dropped: int
    steps: int
    requests: int
    violations_alone: float
    added_violations: float
    lent_share: float
    open_share: float
    hourly_tokens: tuple[float, ...] = ()
    derate: float = 0.0
    added_inside: float = 0.0
    spared_violations: float = 0.0
    lent_hours: float = 0.0
    dedicated_gpus: int = 0
    full_share: float = 0.0
    lent_worth: float = 0.0


@dataclass(frozen=True)
class _ByBin:
    """A curve at the load of each bin."""

    tokens_per_s: Floats
    open_share: Floats
    late_alone: Floats
    late_added: Floats
    late_spared: Floats

    @classmethod
    def of(cls, seen: Curve, loads: Floats) -> _ByBin:
        late = seen.late_alone, seen.late_added, seen.late_spared
        rows = seen.tokens_per_s, seen.open_share, *late
        return cls(*(np.interp(loads, seen.loads, row) for row in rows))


@dataclass
class _Lent:
    """One service's replicas: what came by bin, and what the planner has made of them.

    Attributes:
        at: what a replica gives by bin, at the load that is to be expected.
        loads: by replica and bin, requests per second that came.
    """

    at: _ByBin
    loads: Floats
    since: Floats
    job: NDArray[np.int64]
    kind: int


@dataclass
class _JobDemand:
    """What one job's router has seen of its turns, and what it says now."""

    rhythm: Rhythm = field(default_factory=Rhythm)
    received: ReceivedNote | None = None

    def look(self, seen: TurnTraffic, version: int, now: float) -> None:
        """Once per bin."""
        self.rhythm = observe(self.rhythm, seen.turns, str(version), now)
        self.received = ReceivedNote(note(self.rhythm, seen, now, now), now)


class FleetRun:
    """One run.

    Args:
        curves: per kind of service what a replica gives.
        dedicated: tokens per second of one dedicated engine with a full batch.
    """

    def __init__(
        self,
        scenario: FleetScenario,
        regime: Regime,
        seed: int,
        *,
        curves: Rows[Curve],
        dedicated: float,
        traces: Mapping[str, Rows[ServingArrival]],
        episodes: Rows[Episode],
        shapes: Mapping[str, Shape] | None = None,
    ) -> None:
        self._shapes = shapes or {}
        self._hours: list[float] = [0.0] * (int(scenario.seconds // 3600) + 1)
        self._scenario, self._regime, self._seed = scenario, regime, seed
        self._draw = np.random.default_rng(seed)
        self._curves, self._dedicated = curves, dedicated
        self._bins = round(scenario.seconds / scenario.bin_s)
        self._services = [
            self._service(kind, traces)
            for kind, one in enumerate(scenario.services)
            for _ in range(one.count)
        ]
        job = scenario.jobs.job
        lengths = np.array([sum(t.output for t in one) for one in episodes], dtype=float)
        own = costs_of(job, job.device, job.gpus_per_engine, scenario.derate)
        rules = RULES[regime]
        by_age = rules.waits or rules.oldest_first
        work = FluidWork(job, own, lengths, active_share(episodes, job), by_age)
        self._tanks = [FluidJob(work, self._draw) for _ in range(scenario.jobs.count)]
        self._sums = dict.fromkeys(_SUMS, 0.0)
        room = kv_tokens(job.device, job.model, 0.9, job.gpus_per_engine)
        self._own_slots = max(1, min(job.dedicated_cap, room // USUAL_CONTEXT))
        lender = scenario.services[0].service
        share, gpus = lender.rollout_memory_share, lender.gpus_per_replica
        room = kv_tokens(lender.device, job.model, share, gpus)
        self._lent_slots = max(1, min(job.cap, room // USUAL_CONTEXT))
        self._demand = [_JobDemand() for _ in self._tanks]
        self._leases = [self._lease(number) for number in range(scenario.jobs.count)]
        self._slots: dict[str, Slot] = {}
        self._memory = PlannerMemory()
        self._names = frozenset(one.name for one in self._reports(0))

    def _service(self, kind: int, traces: Mapping[str, Rows[ServingArrival]]) -> _Lent:
        service = self._scenario.services[kind].service
        trace = traces[service.load.trace]
        bin_s = self._scenario.bin_s
        period = max(1, int(trace[-1].at_s / bin_s))
        counts = np.bincount(
            [min(period - 1, int(row.at_s / bin_s)) for row in trace], minlength=period
        )
        shape = counts / counts.mean()
        phase = int(self._draw.integers(period))
        mean = (service.load.requests_per_s or 1.0) / service.replicas * bin_s
        means = mean * shape[(np.arange(self._bins) + phase) % period]
        if service.load.shape:
            means *= self._trend(self._shapes[service.load.shape])
        loads = self._draw.poisson(means, size=(service.replicas, self._bins)) / bin_s
        size = service.replicas
        at = _ByBin.of(self._curves[kind], means / bin_s)
        return _Lent(at, loads, np.full(size, np.inf), np.full(size, -1, dtype=np.int64), kind)

    def _trend(self, shape: Shape) -> Floats:
        """The shape by bin, mean 1 over its own length."""
        times, rates = np.array(shape, dtype=float).T
        seconds = np.arange(self._bins) * self._scenario.bin_s
        trend: Floats = np.interp(seconds, times, rates) / rates.mean()
        return trend

    def run(self) -> FleetOutcome:
        """Work through the bins."""
        scenario = self._scenario
        every = max(1, round(scenario.plan_s / scenario.bin_s))
        for index in range(self._bins):
            now = index * scenario.bin_s
            if RULES[self._regime].lends is not LendingMode.NOTHING and index % every == 0:
                self._plan(now, index)
            given, engines = self._give(index, now)
            before = sum(tank.useful for tank in self._tanks)
            for number, tank in enumerate(self._tanks):
                supply = self._supply(float(given[number]), float(engines[number]))
                tank.advance(supply, now, scenario.bin_s)
                carried = scenario.jobs.job.dedicated * (self._own_slots // 2)
                seen = TurnTraffic(tank.turns, dedicated_turns=carried)
                self._demand[number].look(seen, tank.version, now)
            made = sum(tank.useful for tank in self._tanks) - before
            self._hours[int(now // 3600)] += made / 3600
        return self._outcome()

    # --- lending

    def _plan(self, now: float, index: int) -> None:
        """Production's planner, once for all pools and leases."""
        snapshot = Snapshot(
            pools=tuple(self._pool(number) for number in range(len(self._services))),
            replicas=tuple(self._reports(index)),
            leases=tuple(self._wants(lease, now) for lease in self._leases),
            slots=tuple(self._slots.values()),
            reporting=self._names,
            memory=self._memory,
            policy=PlannerPolicy(by_gain=RULES[self._regime].by_gain),
        )
        answer = plan(snapshot, now)
        self._memory = answer.memory
        for release in answer.releases:
            one, number = self._at(self._slots.pop(release.slot).replica)
            one.job[number], one.since[number] = -1, np.inf
        for loan in answer.lends:
            name, pool = loan.replica, loan.replica.partition("/")[0]
            self._slots[name] = Slot(
                name,
                SlotUid(name),
                loan.lease,
                LeaseUid(loan.lease),
                pool,
                name,
                name,
                (name,),
                now,
            )
            one, number = self._at(name)
            one.job[number], one.since[number] = int(loan.lease), now

    def _pool(self, number: int) -> PoolTerms:
        service = self._scenario.services[self._services[number].kind].service
        percent, unlent = service.max_replicas_percent, service.min_unlent_replicas
        return PoolTerms(str(number), percent, unlent, frozenset({_SOURCE}))

    def _reports(self, index: int) -> Iterator[Replica]:
        for pool, one in enumerate(self._services):
            used = np.minimum(1000, one.loads[:, index] * 100).astype(int).tolist()
            for number, permille in enumerate(used):
                yield _report(str(pool), number, permille)

    def _at(self, replica: str) -> tuple[_Lent, int]:
        pool, _, number = replica.partition("/")
        return self._services[int(pool)], int(number)

    def _lease(self, number: int) -> Lease:
        """The job's lease, over the services whose turn it is."""
        jobs = self._scenario.jobs
        first = number * jobs.pools
        named = [str((first + one) % len(self._services)) for one in range(jobs.pools)]
        job = jobs.job.model_copy(update={"name": str(number), "borrows_from": named[0]})
        return replace(
            lease_of(job),
            created=float(number),
            max_slots=jobs.job.borrowed * jobs.pools,
            more_pools=tuple(named[1:]),
        )

    def _wants(self, lease: Lease, now: float) -> Lease:
        """The lease with what its router says, where the regime's planner hears it."""
        received, rules = self._demand[int(lease.key)].received, RULES[self._regime]
        if received is None or not rules.by_demand or rules.lends is not LendingMode.PLANNER:
            return lease
        return replace(lease, demand=together([received], now))

    def _give(self, index: int, now: float) -> tuple[Floats, Floats]:
        """Tokens per second and number of borrowed engines, by job, in this bin."""
        count = self._scenario.jobs.count
        given, engines = np.zeros(count), np.zeros(count)
        for one in self._services:
            came, at = one.loads[:, index] * self._scenario.bin_s, one.at
            self._sums["requests"] += float(came.sum())
            self._sums["alone"] += float(came.sum()) * float(at.late_alone[index])
            lent = float((one.job >= 0).sum())
            if not lent:
                continue
            self._sums["lent"] += lent
            gpus = self._scenario.services[one.kind].service.gpus_per_replica
            self._sums["hours"] += lent * gpus * self._scenario.bin_s / 3600
            works = (one.job >= 0) & (now - one.since >= self._scenario.start_s)
            exposed, service = float(came[works].sum()), self._scenario.services[one.kind].service
            self._sums["added"] += exposed * float(at.late_added[index])
            self._sums["spared"] += exposed * float(at.late_spared[index])
            if at.late_alone[index] <= 1 - service.percentile / 100:
                self._sums["inside"] += exposed * float(at.late_added[index])
            self._sums["open"] += float(works.sum()) * float(at.open_share[index])
            np.add.at(given, one.job[works], at.tokens_per_s[index])
            np.add.at(engines, one.job[works], 1.0)
        self._sums["given"] += float(given.sum())
        return given, engines

    def _supply(self, borrowed: float, engines: float) -> EngineSupply:
        dedicated = self._scenario.jobs.job.dedicated
        return EngineSupply(
            borrowed + dedicated * self._dedicated,
            engines * self._lent_slots + dedicated * self._own_slots,
            engines + dedicated,
        )

    def _outcome(self) -> FleetOutcome:
        scenario, sums, tanks = self._scenario, self._sums, self._tanks
        replicas = sum(one.count * one.service.replicas for one in scenario.services)
        gpus = sum(
            one.count * one.service.replicas * one.service.gpus_per_replica
            for one in scenario.services
        )
        dedicated = (
            scenario.jobs.count * scenario.jobs.job.dedicated * scenario.jobs.job.gpus_per_engine
        )
        return FleetOutcome(
            regime=self._regime.value,
            seed=self._seed,
            gpus=gpus + dedicated,
            seconds=scenario.seconds,
            tokens_per_s=sum(tank.useful for tank in tanks) / scenario.seconds,
            finished=sum(tank.finished for tank in tanks),
            accepted=sum(tank.accepted for tank in tanks),
            dropped=sum(tank.dropped for tank in tanks),
            steps=sum(tank.steps for tank in tanks),
            requests=round(sums["requests"]),
            violations_alone=sums["alone"],
            added_violations=sums["added"],
            lent_share=sums["lent"] / self._bins / replicas,
            open_share=sums["open"] / max(1e-9, sums["lent"]),
            hourly_tokens=tuple(self._hours[: int(scenario.seconds // 3600)]),
            derate=scenario.derate,
            added_inside=sums["inside"],
            spared_violations=sums["spared"],
            lent_hours=sums["hours"],
            dedicated_gpus=dedicated,
            full_share=sum(tank.tokens for tank in tanks) / sum(tank.most for tank in tanks),
            lent_worth=sums["given"] / max(1e-9, sums["lent"]) / self._dedicated,
        )


def _report(pool: str, number: int, used: int) -> Replica:
    name = f"{pool}/{number}"
    return Replica(
        uid=PodUid(name),
        name=name,
        node=name,
        pool=pool,
        gpus=(name,),
        ready=True,
        stopped=False,
        signal=_SOURCE,
        verified=True,
        kv_permille=used,
    )
