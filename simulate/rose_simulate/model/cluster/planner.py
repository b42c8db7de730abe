"""The operator's shell on virtual time: a snapshot for ``rose_core.lending.plan`` every 5 s.

A lease is what ``lease_of`` makes of a job, with its router's demand as ``demand`` heard it and
with what its loans have cost until they ran. The paper's rule (section 4.3) is instead: once, the
serving GPUs with the lowest recent KV use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rose_core.identity import LeaseUid, PodUid, SlotUid
from rose_core.lending import (
    Demand,
    Lease,
    LendingPlan,
    PlannerMemory,
    PlannerPolicy,
    PoolTerms,
    Replica,
    Slot,
    Snapshot,
    plan,
)
from rose_core.lending.gate import usual_start
from rose_core.wire.sync import SignalSource
from rose_simulate.model.clock import VirtualClock
from rose_simulate.model.cluster.lent import LentReplica
from rose_simulate.model.scenarios.scenario import RolloutJob, Scenario, Service

_PLAN_SECONDS = 5.0


def _no_demand(_job: str) -> Demand | None:
    return None


def _nothing_runs(_replica: str) -> bool:
    return False


@dataclass(frozen=True)
class PlannerInputs:
    """What the planner hears.

    Attributes:
        silence: seconds since each node that is off was heard.
        demand: what a job's router says; None = not heard, and the lease keeps its maximum.
        runs: whether a lent replica's engine has attested weights.
        policy: the planner's own figures.
    """

    silence: Callable[[], Mapping[str, float]] = dict
    demand: Callable[[str], Demand | None] = _no_demand
    runs: Callable[[str], bool] = _nothing_runs
    policy: PlannerPolicy = field(default_factory=PlannerPolicy)


class SimulatedPlanner:
    """Plans for every pool and job.

    Args:
        lend: carries out one loan (None = take back).
        signal: the source that the regime's gates listen to.
    """

    def __init__(
        self,
        clock: VirtualClock,
        scenario: Scenario,
        replicas: list[LentReplica],
        lend: Callable[[LentReplica, RolloutJob | None], None],
        *,
        signal: SignalSource,
        inputs: PlannerInputs | None = None,
    ) -> None:
        self._clock, self._lend, self._signal = clock, lend, signal
        self._inputs = inputs or PlannerInputs()
        self._policy = self._inputs.policy
        self._replicas = {replica.name: replica for replica in replicas}
        self._jobs = {job.name: job for job in scenario.jobs if job.borrowed}
        self._pools = tuple(_pool(service, signal) for service in scenario.services)
        self._leases = tuple(lease_of(job) for job in self._jobs.values())
        self._starts: dict[str, float] = {}
        self._slots: dict[str, Slot] = {}
        self._memory = PlannerMemory()
        self.last: LendingPlan | None = None

    def run(self) -> None:
        """Plan now and every 5 s."""
        self.plan()
        self._clock.after(_PLAN_SECONDS, self.run)

    def plan(self) -> None:
        """Plan once, now."""
        now, silence = self._clock.now_s, self._inputs.silence()
        self._see_starts(now)
        stale = {node for node, since in silence.items() if since > self._policy.stale_seconds}
        nodes = frozenset(one.machine.name for one in self._replicas.values())
        snapshot = Snapshot(
            pools=self._pools,
            replicas=tuple(
                self._report(one, stale=one.machine.name in stale)
                for one in self._replicas.values()
            ),
            leases=tuple(self._now(lease) for lease in self._leases),
            slots=tuple(self._slots.values()),
            silence=silence,
            reporting=nodes - stale,
            memory=self._memory,
            policy=self._policy,
        )
        self.last = answer = plan(snapshot, now)
        self._memory = answer.memory
        for release in answer.releases:
            slot = self._slots.pop(release.slot)
            self._lend(self._replicas[slot.replica], None)
        for loan in answer.lends:
            self._slots[loan.replica] = self._slot(loan.replica, loan.lease, now)
            self._lend(self._replicas[loan.replica], self._jobs[loan.lease])

    def held(self, job: str) -> int:
        """Slots of a job's lease."""
        return sum(slot.lease == job for slot in self._slots.values())

    def _now(self, lease: Lease) -> Lease:
        """The lease with what is known of it at the moment."""
        start = self._starts.get(lease.key)
        return replace(lease, demand=self._inputs.demand(lease.key), toggle_seconds=start)

    def _see_starts(self, now: float) -> None:
        """Slots whose engines have begun to run since the last pass."""
        for name, slot in self._slots.items():
            if not slot.running and self._inputs.runs(slot.replica):
                self._slots[name] = replace(slot, running=True)
                taken = now - slot.created
                self._starts[slot.lease] = usual_start(self._starts.get(slot.lease), taken)

    def _slot(self, replica: str, lease: str, now: float) -> Slot:
        one = self._replicas[replica]
        pool, node = one.service.name, one.machine.name
        return Slot(
            name=replica,
            uid=SlotUid(replica),
            lease=lease,
            lease_uid=LeaseUid(lease),
            pool=pool,
            node=node,
            replica=PodUid(replica),
            gpus=(replica,),
            created=now,
            running=False,
        )

    def _report(self, one: LentReplica, *, stale: bool) -> Replica:
        return Replica(
            uid=PodUid(one.name),
            name=one.name,
            node=one.machine.name,
            pool=one.service.name,
            gpus=(one.name,),
            ready=True,
            stopped=False,
            signal=self._signal.value,
            verified=True,
            kv_permille=min(1000, round(1000 * one.serving.kv_share)),
            stale=stale,
        )


def lend_once(
    scenario: Scenario,
    replicas: list[LentReplica],
    lend: Callable[[LentReplica, RolloutJob | None], None],
) -> None:
    """The paper's rule: lowest recent KV use first, at most one job per GPU, never moved."""
    taken: set[str] = set()
    for job in scenario.jobs:
        free = [
            one
            for one in replicas
            if one.service.name == job.borrows_from and one.name not in taken
        ]
        free.sort(key=lambda one: (one.serving.kv_share, one.number))
        for one in free[: job.borrowed]:
            taken.add(one.name)
            lend(one, job)


def _pool(service: Service, signal: SignalSource) -> PoolTerms:
    return PoolTerms(
        service.name,
        service.max_replicas_percent,
        service.min_unlent_replicas,
        frozenset({signal.value}),
    )


def lease_of(job: RolloutJob) -> Lease:
    """The lease that a job would write: its turns per slot, no minimum, the defaults of the API."""
    return Lease(
        key=job.name,
        uid=LeaseUid(job.name),
        pool=job.borrows_from,
        priority=0,
        created=0.0,
        min_slots=0,
        max_slots=job.borrowed,
        turns_per_slot=job.cap,
        idle_seconds=job.idle_seconds,
    )
