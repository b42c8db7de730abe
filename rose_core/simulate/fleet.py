"""A fleet of thousands of GPUs in bins of seconds: curves instead of events, production's planner.

| what | how |
|---|---|
| live requests of a replica | Poisson per bin; mean from the trace's counts, a phase per service |
| what a lent replica gives | ``curves`` of its kind at the bin's load |
| which replicas are lent | ``rose_core.lending.plan``, per pool, every ``plan_s`` |
| rollouts of a job | one tank of trajectories, all progressing alike; no turn is placed |
| groups, staleness, training | as in ``job``, per bin |

Against the event level its throughput is checked in ``tests/simulate/test_fleet.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from rose_core.lending import Lease, Memory, Pool, Replica, Slot, Snapshot, plan
from rose_core.simulate.costs import costs, kv_tokens
from rose_core.simulate.curves import USUAL_CONTEXT, Curve
from rose_core.simulate.fleet_scenario import FleetScenario
from rose_core.simulate.regimes import RULES, Lends
from rose_core.simulate.scenario import Regime, RolloutJob
from rose_core.simulate.workload import ALIKE, Arrival, Episode, Shape
from rose_core.wire.sync import SignalSource

Floats = NDArray[np.float64]
Steps = Callable[[float], float]
_SOURCE = SignalSource.WIRE_TAP.value


class FleetOutcome(msgspec.Struct, frozen=True):
    """One run over a fleet; tokens are of finished work, per second over all jobs."""

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
    expected_violations: float
    lent_share: float
    open_share: float
    hourly_tokens: tuple[float, ...] = ()


@dataclass
class _Lent:
    """One service's replicas: loads by bin, and what the planner has made of them."""

    loads: Floats
    since: Floats
    job: NDArray[np.int64]
    kind: int
    slots: dict[str, Slot] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)


@dataclass
class _Tank:
    """The trajectories of one job."""

    left: Floats
    group: NDArray[np.int64]
    born: NDArray[np.int64]
    waiting: dict[int, int] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)
    version: int = 0
    groups: int = 0
    numbered: int = 0
    training_until: float = -1.0
    finished: int = 0
    accepted: int = 0
    dropped: int = 0
    steps: int = 0
    tokens: float = 0.0


class Fleet:
    """One run.

    Args:
        curves: per kind of service what a lent replica gives; empty for the fixed pool.
        dedicated: tokens per second of one dedicated engine with a full batch.
    """

    def __init__(
        self,
        told: FleetScenario,
        regime: Regime,
        seed: int,
        *,
        curves: Rows[Curve],
        dedicated: float,
        traces: Mapping[str, Rows[Arrival]],
        episodes: Rows[Episode],
        shapes: Mapping[str, Shape] | None = None,
    ) -> None:
        self._shapes = shapes or {}
        self._hours: list[float] = [0.0] * (int(told.seconds // 3600) + 1)
        self._told, self._regime, self._seed = told, regime, seed
        self._draw = np.random.default_rng(seed)
        self._curves, self._dedicated = curves, dedicated
        self._bins = round(told.seconds / told.bin_s)
        self._lengths = np.array([sum(t.output for t in one) for one in episodes], dtype=float)
        self._active = _active_share(episodes, told.jobs.job)
        self._services = [
            self._service(kind, traces)
            for kind, one in enumerate(told.services)
            for _ in range(one.count)
        ]
        empty, none = np.empty(0), np.empty(0, dtype=np.int64)
        self._tanks = [_Tank(empty, none, none) for _ in range(told.jobs.count)]
        self._sums = {"requests": 0.0, "violations": 0.0, "lent": 0.0, "open": 0.0}
        job = told.jobs.job
        room = kv_tokens(job.device, job.model, 0.9, job.gpus_per_engine)
        self._own_slots = max(1, min(job.dedicated_cap, room // USUAL_CONTEXT))
        lender = told.services[0].service
        share, gpus = lender.rollout_memory_share, lender.gpus_per_replica
        room = kv_tokens(lender.device, job.model, share, gpus)
        self._lent_slots = max(1, min(job.cap, room // USUAL_CONTEXT))

    def _service(self, kind: int, traces: Mapping[str, Rows[Arrival]]) -> _Lent:
        service = self._told.services[kind].service
        trace = traces[service.load.trace]
        bin_s = self._told.bin_s
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
        return _Lent(loads, np.full(size, np.inf), np.full(size, -1, dtype=np.int64), kind)

    def _trend(self, shape: Shape) -> Floats:
        """The shape by bin, mean 1 over its own length."""
        times, rates = np.array(shape, dtype=float).T
        seconds = np.arange(self._bins) * self._told.bin_s
        trend: Floats = np.interp(seconds, times, rates) / rates.mean()
        return trend

    def run(self) -> FleetOutcome:
        """Work through the bins."""
        told = self._told
        every = max(1, round(told.plan_s / told.bin_s))
        for index in range(self._bins):
            now = index * told.bin_s
            if RULES[self._regime].lends is not Lends.NOTHING and index % every == 0:
                for number, one in enumerate(self._services):
                    self._plan(number, one, now, index)
            given, engines = self._give(index, now)
            before = sum(tank.tokens for tank in self._tanks)
            for number, tank in enumerate(self._tanks):
                self._advance(tank, float(given[number]), float(engines[number]), now)
            made = sum(tank.tokens for tank in self._tanks) - before
            self._hours[int(now // 3600)] += made / 3600
        return self._outcome()

    # --- lending

    def _plan(self, number: int, one: _Lent, now: float, index: int) -> None:
        """Production's planner for one pool; leases on different pools do not meet."""
        told, jobs = self._told, self._told.jobs
        service = told.services[one.kind].service
        mine = [j for j in range(jobs.count) if number in self._lenders(j)]
        if not mine:
            return
        used = np.minimum(1000, one.loads[:, index] * 100).astype(int)
        snapshot = Snapshot(
            pools=(
                Pool(
                    "pool",
                    service.max_replicas_percent,
                    service.min_unlent_replicas,
                    frozenset({_SOURCE}),
                ),
            ),
            replicas=tuple(_report(n, int(used[n])) for n in range(service.replicas)),
            leases=tuple(
                Lease(str(j), str(j), "pool", 0, float(j), 0, jobs.job.borrowed) for j in mine
            ),
            slots=tuple(one.slots.values()),
            reporting=frozenset(map(str, range(service.replicas))),
            memory=one.memory,
        )
        answer = plan(snapshot, now)
        one.memory = answer.memory
        for release in answer.releases:
            slot = one.slots.pop(release.slot)
            one.job[int(slot.replica)], one.since[int(slot.replica)] = -1, np.inf
        for loan in answer.lends:
            name = loan.replica
            one.slots[name] = Slot(
                name, name, loan.lease, loan.lease, "pool", name, name, (name,), now
            )
            one.job[int(name)], one.since[int(name)] = int(loan.lease), now

    def _lenders(self, job: int) -> range:
        leases = self._told.jobs.leases
        return range(job * leases, (job + 1) * leases)

    def _give(self, index: int, now: float) -> tuple[Floats, Floats]:
        """Tokens per second and number of borrowed engines, by job, in this bin."""
        count = self._told.jobs.count
        given, engines = np.zeros(count), np.zeros(count)
        for one in self._services:
            load = one.loads[:, index]
            self._sums["requests"] += float(load.sum()) * self._told.bin_s
            self._sums["lent"] += float((one.job >= 0).sum())
            if not self._curves:
                continue
            seen = self._curves[one.kind]
            works = (one.job >= 0) & (now - one.since >= self._told.start_s)
            if not works.any():
                continue
            tokens = np.interp(load[works], seen.loads, seen.tokens_per_s)
            late = np.interp(load[works], seen.loads, seen.violations)
            self._sums["violations"] += float((late * load[works]).sum()) * self._told.bin_s
            self._sums["open"] += float(np.interp(load[works], seen.loads, seen.open_share).sum())
            np.add.at(given, one.job[works], tokens)
            np.add.at(engines, one.job[works], 1.0)
        return given, engines

    # --- rollouts

    def _advance(self, tank: _Tank, borrowed: float, engines: float, now: float) -> None:
        told, job = self._told, self._told.jobs.job
        self._start(tank)
        slots = engines * self._lent_slots + job.dedicated * self._own_slots
        most = borrowed + job.dedicated * self._dedicated
        active = len(tank.left) * self._active
        own = costs(job.device, job.model, told.derate, job.gpus_per_engine)
        rate = _rate(
            active,
            most,
            slots,
            engines + job.dedicated,
            lambda batch: own.step(round(batch), round(batch * USUAL_CONTEXT))[0],
        )
        if len(tank.left):
            tank.left -= rate * told.bin_s / len(tank.left)
            tank.tokens += rate * told.bin_s
        self._finish(tank)
        if 0 <= tank.training_until <= now:
            tank.training_until = -1.0
            tank.version += 1
            tank.steps += 1
        if tank.training_until < 0:
            self._train(tank, now)

    def _start(self, tank: _Tank) -> None:
        job = self._told.jobs.job
        wanted = (job.staleness + tank.version + 1) * job.batch_groups - tank.groups
        if wanted <= 0:
            return
        size = wanted * job.group
        fresh = np.arange(tank.numbered, tank.numbered + wanted)
        numbers = np.repeat(fresh, job.group)
        tank.waiting.update(dict.fromkeys(fresh.tolist(), job.group))
        tank.groups += wanted
        tank.numbered += wanted
        alike = self._draw.random(size) < ALIKE
        base = np.repeat(self._draw.choice(self._lengths, wanted), job.group)
        lengths = np.where(alike, base, self._draw.choice(self._lengths, size))
        tank.left = np.concatenate([tank.left, lengths])
        tank.group = np.concatenate([tank.group, numbers])
        tank.born = np.concatenate([tank.born, np.full(size, tank.version)])

    def _finish(self, tank: _Tank) -> None:
        done = tank.left <= 0
        if not done.any():
            return
        for number, born in zip(tank.group[done], tank.born[done], strict=True):
            tank.waiting[int(number)] -= 1
            if tank.waiting[int(number)] == 0:
                del tank.waiting[int(number)]
                tank.ready.append(int(born))
        tank.finished += int(done.sum())
        tank.left, tank.group, tank.born = tank.left[~done], tank.group[~done], tank.born[~done]

    def _train(self, tank: _Tank, now: float) -> None:
        job = self._told.jobs.job
        fresh = [born for born in tank.ready if tank.version - born <= job.staleness]
        lost = len(tank.ready) - len(fresh)
        tank.dropped += lost * job.group
        tank.groups -= lost  # as in ``job``: a dropped group is started anew
        tank.ready = fresh
        if len(fresh) >= job.batch_groups:
            tank.ready = fresh[job.batch_groups :]
            tank.accepted += job.batch_groups * job.group
            tank.training_until = now + job.train_s

    def _outcome(self) -> FleetOutcome:
        told, sums, tanks = self._told, self._sums, self._tanks
        replicas = sum(one.count * one.service.replicas for one in told.services)
        gpus = sum(
            one.count * one.service.replicas * one.service.gpus_per_replica for one in told.services
        )
        gpus += told.jobs.count * told.jobs.job.dedicated * told.jobs.job.gpus_per_engine
        return FleetOutcome(
            regime=self._regime.value,
            seed=self._seed,
            gpus=gpus,
            seconds=told.seconds,
            tokens_per_s=sum(tank.tokens for tank in tanks) / told.seconds,
            finished=sum(tank.finished for tank in tanks),
            accepted=sum(tank.accepted for tank in tanks),
            dropped=sum(tank.dropped for tank in tanks),
            steps=sum(tank.steps for tank in tanks),
            requests=round(sums["requests"]),
            expected_violations=sums["violations"],
            lent_share=sums["lent"] / self._bins / replicas,
            open_share=sums["open"] / max(1e-9, sums["lent"]),
            hourly_tokens=tuple(self._hours[: int(told.seconds // 3600)]),
        )


def _report(number: int, used: int) -> Replica:
    name = str(number)
    return Replica(
        uid=name,
        name=name,
        node=name,
        pool="pool",
        gpus=(name,),
        ready=True,
        stopped=False,
        signal=_SOURCE,
        verified=True,
        kv_permille=used,
    )


def _active_share(pool: Rows[Episode], job: RolloutJob) -> float:
    """Share of a trajectory's life in which it is at an engine, at 15 ms per token."""
    gaps = sum(turn.gap_s for one in pool for turn in one) * job.gap_scale
    work = sum(turn.output for one in pool for turn in one) * 0.015
    return work / (work + gaps)


def _rate(active: float, most: float, slots: float, engines: float, step: Steps) -> float:
    """Tokens per second of ``active`` trajectories over engines that give ``most`` when full.

    Beside the decode step, a token of a full batch of ``slots / engines`` costs the time that
    prefills of the others take; that part shrinks with the batch.
    """
    if active <= 0.0 or most <= 0.0:
        return 0.0
    if active >= slots:
        return most
    full = slots / engines
    batch = max(1.0, active / engines)
    others = max(0.0, slots / most - step(full)) / full
    return min(most, active / (step(batch) + others * batch))
