"""Metrics of a pass: the same words as in the conditions, and what serving alone does."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable

from prometheus_client import Gauge

from rose_core.accounting.cost import MICRO
from rose_core.accounting.late import LateSource, ServedTraffic, TokenRevenue, late_price
from rose_core.api import LeaseStatus, PoolStatus, RolloutLease, ServingPool
from rose_core.api.rolloutlease import Totals
from rose_core.lending import LendingPlan
from rose_core.wire.sync import ReplicaReport
from rose_operator import metrics
from rose_operator.plan.cluster_state import ClusterState
from rose_operator.plan.load_history import LoadHistory
from rose_operator.status.pool_status import unwanted_gpus

_PERMILLE = 1000
_LONGEST_SECONDS = 60.0


class PassMetrics:
    """One publication after the other: ``begin``, every pool and lease, ``end``.

    Series are kept from one to the next, because finding a thousand of them by label costs more
    than setting them, and because a scrape in between must not miss any.
    """

    def __init__(self) -> None:
        self._published_at: float | None = None
        self._before: dict[tuple[Gauge, tuple[str, ...]], Gauge] = {}
        self._now: dict[tuple[Gauge, tuple[str, ...]], Gauge] = {}

    def begin(self, world: ClusterState, plan: LendingPlan, loads: LoadHistory) -> None:
        """Everything but the leases."""
        for pool, verdicts in plan.members.items():
            for reason, count in Counter(found.reason for found in verdicts).items():
                self._set(metrics.REPLICAS, count, pool, reason)
        for key, refusal in world.refusals.items():
            self._set(metrics.REFUSALS, 1, key, refusal.reason)
        for key, refusal in world.pool_refusals.items():
            self._set(metrics.POOL_REFUSALS, 1, key, refusal.reason)
        passed = self._passed(world.monotonic)
        for key, one in world.pools.good.items():
            unwanted = unwanted_gpus(one, world, plan)
            self._set(metrics.UNWANTED_GPUS, unwanted, key)
            metrics.UNWANTED_SECONDS.labels(key).inc(unwanted * passed)
            self._serving(key, [report for _, report in world.reports_of(key)])
            coming = loads.outlook(key, one.spec.lending.forecast, world.now.timestamp())
            if coming is not None:
                self._set(metrics.EXPECTED_BUSY, coming.peak_permille / _PERMILLE, key)

    def publish_pool(self, pool: ServingPool, status: PoolStatus) -> None:
        """Publish one pool's totals."""
        unlent = status.totals.unlent_reserved_milliseconds / 1000
        self._set(metrics.UNLENT_RESERVED_SECONDS, unlent, pool.metadata.key)

    def publish_lease(
        self, lease: RolloutLease, status: LeaseStatus, revenue: TokenRevenue | None
    ) -> None:
        """Publish one lease's figures; ``revenue`` is what its pools say that tokens earn."""
        key = lease.metadata.key
        self._set(metrics.SLOTS, status.slots_wanted, key, "wanted")
        self._set(metrics.SLOTS, status.slots_granted, key, "granted")
        self._set(metrics.SLOTS, status.slots_ready, key, "ready")
        self._set(metrics.HARVESTED_TOKENS, status.totals.harvested_tokens, key)
        accepted, correct = status.totals.accepted_trajectories, status.totals.correct_answers
        self._set(metrics.ACCEPTED_TRAJECTORIES, accepted, key)
        self._set(metrics.CORRECT_ANSWERS, correct, key)
        self._set(metrics.DEDICATED_TOKENS, status.totals.dedicated_tokens, key)
        self._set(metrics.TRAINED_TOKENS, status.totals.trained_tokens, key)
        self._set(metrics.LENT_SECONDS, status.totals.lent_milliseconds / 1000, key)
        self._set(metrics.RESERVED_SECONDS, status.totals.reserved_milliseconds / 1000, key)
        late = _late_revenue(status.totals, revenue)
        if late is not None:
            self._set(metrics.LATE_REVENUE, late / MICRO, key)

    def end(self) -> None:
        """Series of what is gone go."""
        for gauge, labels in self._before.keys() - self._now.keys():
            gauge.remove(*labels)
        self._before, self._now = self._now, {}

    def _passed(self, now: float) -> float:
        """Seconds since the last publication; a longer silence is not counted as time seen."""
        before, self._published_at = self._published_at, now
        return 0.0 if before is None else min(now - before, _LONGEST_SECONDS)

    def _serving(self, pool: str, reports: list[ReplicaReport]) -> None:
        running = [r.running_requests for r in reports if r.running_requests is not None]
        if running:
            self._set(metrics.SERVING_REQUESTS, sum(running), pool)
        self._set_mean(metrics.SERVING_BUSY, pool, (report.busy_permille for report in reports))
        self._set_mean(metrics.SERVING_KV, pool, (report.kv_used_permille for report in reports))

    def _set_mean(self, gauge: Gauge, pool: str, values: Iterable[int | None]) -> None:
        known = [value for value in values if value is not None]
        if known:
            self._set(gauge, sum(known) / len(known) / _PERMILLE, pool)

    def _set(self, gauge: Gauge, value: float, *labels: str) -> None:
        key = gauge, labels
        series = self._now[key] = self._before.get(key) or gauge.labels(*labels)
        series.set(value)


def _late_revenue(totals: Totals, revenue: TokenRevenue | None) -> float | None:
    """Micro-units that late requests earn; None where no pool says it: no price is guessed here."""
    served = ServedTraffic(
        totals.serving_requests,
        0.0,
        totals.serving_input_tokens,
        totals.serving_output_tokens,
        totals.serving_requests_with_tokens,
    )
    price = late_price(served, 0, revenue)
    if price.source is not LateSource.REVENUE or price.micros is None:
        return None
    return price.micros * totals.slo_violations


def drop_node(node: str) -> None:
    """Forget the series of a node that is gone."""
    with contextlib.suppress(KeyError):
        metrics.GRANTS.remove(node)
