"""Metrics of a pass: the same words as in the conditions, and what serving alone does."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable

from prometheus_client import Gauge

from rose_core.api import LeaseStatus, RolloutLease
from rose_core.lending import Plan
from rose_core.wire.sync import ReplicaReport
from rose_operator import metrics
from rose_operator.loads import Loads
from rose_operator.world import World

_PERMILLE = 1000
_CLEARED = (
    metrics.REPLICAS,
    metrics.SLOTS,
    metrics.REFUSALS,
    metrics.POOL_REFUSALS,
    metrics.HARVESTED_TOKENS,
    metrics.LENT_SECONDS,
    metrics.SERVING_REQUESTS,
    metrics.SERVING_BUSY,
    metrics.SERVING_KV,
    metrics.EXPECTED_BUSY,
)


def publish(world: World, plan: Plan, loads: Loads) -> None:
    """Everything but the leases; series of what is gone go."""
    for gauge in _CLEARED:
        gauge.clear()
    for pool, verdicts in plan.members.items():
        for reason, count in Counter(found.reason for found in verdicts).items():
            metrics.REPLICAS.labels(pool, reason).set(count)
    for key, refusal in world.refusals.items():
        metrics.REFUSALS.labels(key, refusal.reason).set(1)
    for key, refusal in world.pool_refusals.items():
        metrics.POOL_REFUSALS.labels(key, refusal.reason).set(1)
    for key, one in world.pools.good.items():
        _publish_serving(key, [report for _, report in world.reports_of(key)])
        coming = loads.outlook(key, one.spec.lending.forecast, world.now.timestamp())
        if coming is not None:
            metrics.EXPECTED_BUSY.labels(key).set(coming.peak_permille / _PERMILLE)


def _publish_serving(pool: str, reports: list[ReplicaReport]) -> None:
    running = [r.running_requests for r in reports if r.running_requests is not None]
    if running:
        metrics.SERVING_REQUESTS.labels(pool).set(sum(running))
    _set_mean(metrics.SERVING_BUSY, pool, (report.busy_permille for report in reports))
    _set_mean(metrics.SERVING_KV, pool, (report.kv_used_permille for report in reports))


def _set_mean(gauge: Gauge, pool: str, values: Iterable[int | None]) -> None:
    known = [value for value in values if value is not None]
    if known:
        gauge.labels(pool).set(sum(known) / len(known) / _PERMILLE)


def publish_lease(lease: RolloutLease, status: LeaseStatus) -> None:
    """One lease."""
    key = lease.metadata.key
    metrics.SLOTS.labels(key, "wanted").set(status.slots_wanted)
    metrics.SLOTS.labels(key, "granted").set(status.slots_granted)
    metrics.SLOTS.labels(key, "ready").set(status.slots_ready)
    metrics.HARVESTED_TOKENS.labels(key).set(status.totals.harvested_tokens)
    metrics.LENT_SECONDS.labels(key).set(status.totals.lent_milliseconds / 1000)


def drop_node(node: str) -> None:
    """Forget the series of a node that is gone."""
    with contextlib.suppress(KeyError):
        metrics.GRANTS.remove(node)
