"""Loans of whole replicas, as Lyra makes them and as spot instances come and go: two baselines.

Serving keeps as many replicas as it needs at ``TARGET`` utilisation and lends the rest whole:

    serving --load falls--> draining --empty--> lent --load rises--> waking --> serving

A lent replica serves nobody; its rollout engine is cold when it comes and killed when it goes. The
load is what was measured over the last ``WINDOW_S``, as an autoscaler does. All figures are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.cluster.lent import LentReplica
from rose_simulate.model.scenarios.scenario import RolloutJob, Scenario, Service

# Utilisation (share of time with work) that autoscalers of serving aim at.
TARGET = 0.6
# Load is averaged over this and looked at so often.
WINDOW_S, LOOK_S = 60.0, 15.0
# Requests under way per serving replica from which lent replicas come back at once.
NEED = 8.0
# A sleeping serving engine loads its weights from host memory.
WAKE_S = 10.0


@dataclass
class _Pool:
    """One service's replicas by state."""

    service: Service
    serving: list[LentReplica]
    draining: list[LentReplica] = field(default_factory=list)
    lent: dict[str, int] = field(default_factory=dict)
    busy: list[tuple[int, int]] = field(default_factory=list)


class WholeLender:
    """Moves replicas between serving and rollouts.

    Args:
        lend: carries out one loan (None = take back).
        least_loan_s: a replica is not called back earlier, unless serving is in need.
    """

    def __init__(
        self,
        clock: VirtualClock,
        scenario: Scenario,
        replicas: list[LentReplica],
        lend: Callable[[LentReplica, RolloutJob | None], None],
        least_loan_s: float,
    ) -> None:
        self._clock, self._lend, self._least_ns = clock, lend, round(least_loan_s * SECOND)
        self._jobs = [job for job in scenario.jobs if job.borrowed]
        self._replicas = {one.name: one for one in replicas}
        self._pools = {
            service.name: _Pool(service, [one for one in replicas if one.service is service])
            for service in scenario.services
        }

    def serving(self, service: str) -> list[LentReplica]:
        """Replicas that take requests."""
        return self._pools[service].serving

    def run(self) -> None:
        """Look at every service now and again and again."""
        for pool in self._pools.values():
            self._look(pool)
        self._clock.after(LOOK_S, self.run)

    def _look(self, pool: _Pool) -> None:
        active = pool.serving + pool.draining
        for one in active:
            one.serving.settle()
        everyone = [self._replicas[name] for name in pool.lent] + active
        now = self._clock.now_ns
        pool.busy.append((now, sum(one.serving.busy_ns for one in everyone)))
        while pool.busy[0][0] < now - WINDOW_S * SECOND:
            pool.busy.pop(0)
        (since, before), (_, after) = pool.busy[0], pool.busy[-1]
        if now == since:
            return
        load = (after - before) / (now - since)
        needed = max(1, pool.service.min_unlent_replicas, math.ceil(load / TARGET))
        waiting = sum(one.serving.live for one in active) / max(1, len(pool.serving))
        if waiting > NEED:
            needed = pool.service.replicas
        self._call_back(pool, needed, in_need=waiting > NEED)
        self._drain(pool, needed)

    def _drain(self, pool: _Pool, needed: int) -> None:
        if self._clock.now_s < WINDOW_S:
            return
        wanted = sum(job.borrowed for job in self._jobs if job.borrows_from == pool.service.name)
        while len(pool.serving) > needed and len(pool.lent) + len(pool.draining) < wanted:
            one = min(pool.serving, key=lambda one: (one.serving.live, -one.number))
            pool.serving.remove(one)
            pool.draining.append(one)
        for one in [one for one in pool.draining if not one.serving.live]:
            pool.draining.remove(one)
            job = self._borrower(pool)
            if job is None:
                pool.serving.append(one)
                continue
            pool.lent[one.name] = self._clock.now_ns
            self._lend(one, job)

    def _borrower(self, pool: _Pool) -> RolloutJob | None:
        held = [self._replicas[name].job for name in pool.lent]
        for job in self._jobs:
            if job.borrows_from == pool.service.name and held.count(job) < job.borrowed:
                return job
        return None

    def _call_back(self, pool: _Pool, needed: int, *, in_need: bool) -> None:
        missing = needed - len(pool.serving)
        while missing > 0 and pool.draining:
            pool.serving.append(pool.draining.pop())
            missing -= 1
        for name, since in sorted(pool.lent.items(), key=lambda item: item[1]):
            if missing <= 0:
                return
            if in_need or self._clock.now_ns - since >= self._least_ns:
                del pool.lent[name]
                one = self._replicas[name]
                self._lend(one, None)
                self._clock.after(WAKE_S, partial(pool.serving.append, one))
                missing -= 1
