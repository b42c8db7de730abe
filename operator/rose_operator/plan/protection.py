"""Does live traffic of a pool meet its objective? One answer for the condition and the breaker."""

from __future__ import annotations

from collections.abc import Sequence

from rose_core.api import ServingPool
from rose_core.wire.sync import ReplicaReport
from rose_operator.plan.telemetry import NodeTelemetry

# Fewer requests than this say nothing about a percentile.
MIN_REQUESTS = 50

Reports = Sequence[tuple[str, ReplicaReport]]


def finished(reports: Reports, telemetry: NodeTelemetry) -> tuple[int, int]:
    """Finished requests of the last minutes, and those slower than the objective."""
    recent = [telemetry.recent(report.pod_uid) for _, report in reports]
    return sum(requests for requests, _ in recent), sum(slow for _, slow in recent)


def is_within(pool: ServingPool, requests: int, slow: int) -> bool | None:
    """Whether the objective holds; None when the pool has none or too few requests were seen."""
    if pool.spec.slo is None or requests < MIN_REQUESTS:
        return None
    return slow * 100 <= requests * (100 - pool.spec.slo.percentile)


def misses_objective(pool: ServingPool, reports: Reports, telemetry: NodeTelemetry) -> bool:
    """Whether enough requests were seen, and too many of them were slow."""
    return is_within(pool, *finished(reports, telemetry)) is False
