"""The operator's shell on virtual time: a snapshot for ``rose_core.lending.plan`` every 5 s.

The paper's rule (section 4.3) is instead: once, the serving GPUs with the lowest recent KV use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rose_core.lending import (
    Lease,
    LendingPlan,
    Memory,
    Policy,
    Pool,
    Replica,
    Slot,
    Snapshot,
    plan,
)
from rose_core.wire.sync import SignalSource
from rose_simulate.model.clock import Clock
from rose_simulate.model.lent import LentReplica
from rose_simulate.model.scenario import RolloutJob, Scenario, Service

_PLAN_SECONDS = 5.0


class Planner:
    """Plans for every pool and job.

    Args:
        lend: carries out one loan (None = take back).
        signal: the source that the regime's gates listen to.
        silence: seconds since each node that is off was heard.
    """

    def __init__(
        self,
        clock: Clock,
        scenario: Scenario,
        replicas: list[LentReplica],
        lend: Callable[[LentReplica, RolloutJob | None], None],
        *,
        signal: SignalSource,
        silence: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._clock, self._lend, self._signal = clock, lend, signal
        self._silence, self._policy = silence, Policy()
        self._replicas = {replica.name: replica for replica in replicas}
        self._jobs = {job.name: job for job in scenario.jobs if job.borrowed}
        self._pools = tuple(_pool(service, signal) for service in scenario.services)
        self._leases = tuple(_lease(job) for job in self._jobs.values())
        self._slots: dict[str, Slot] = {}
        self._memory = Memory()
        self.last: LendingPlan | None = None

    def run(self) -> None:
        """Plan now and every 5 s."""
        now, silence = self._clock.now_s, self._silence()
        stale = {node for node, since in silence.items() if since > self._policy.stale_seconds}
        nodes = frozenset(one.machine.name for one in self._replicas.values())
        snapshot = Snapshot(
            pools=self._pools,
            replicas=tuple(
                self._report(one, stale=one.machine.name in stale)
                for one in self._replicas.values()
            ),
            leases=self._leases,
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
        self._clock.after(_PLAN_SECONDS, self.run)

    def _slot(self, replica: str, lease: str, now: float) -> Slot:
        one = self._replicas[replica]
        pool, node = one.service.name, one.machine.name
        return Slot(replica, replica, lease, lease, pool, node, replica, (replica,), now)

    def _report(self, one: LentReplica, *, stale: bool) -> Replica:
        return Replica(
            uid=one.name,
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


def _pool(service: Service, signal: SignalSource) -> Pool:
    return Pool(
        service.name,
        service.max_replicas_percent,
        service.min_unlent_replicas,
        frozenset({signal.value}),
    )


def _lease(job: RolloutJob) -> Lease:
    return Lease(job.name, job.name, job.borrows_from, 0, 0.0, 0, job.borrowed)
