"""The limits to begin with: the most that stays inside a share of the error budget.

| known | recommended |
|---|---|
| requests at risk | the largest option whose interval's upper end fits the budget |
| not known | a canary: the smallest option that lends anything, to measure the harm with |
| nothing fits, or hardly anything is lendable | ``Observe``: go on watching, with the reason |

The error budget is what the percentile leaves (99 -> 1 %) less what is already slow; lending may
use ``budget_share`` of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rose_simulate.advice.estimate import LendingEstimate, Option

_LEAST_HOURS = 1.0
_LEAST_IDLE = 0.2  # of an hour of the day that is worth a time window
_LEAST_SHARE = 0.05  # below it the guard counts a replica as never idle


@dataclass(frozen=True)
class Goal:
    """What the owner says."""

    namespace: str
    name: str
    labels: Mapping[str, str]
    ttft_ms: int = 0
    tpot_ms: int = 0
    percentile: int = 99
    budget_share: float = 0.1


@dataclass(frozen=True)
class Advice:
    """A ServingPool and why it is so."""

    pool: dict[str, Any]
    option: Option | None
    reasons: tuple[str, ...]


def recommend(found: LendingEstimate, goal: Goal) -> Advice:
    """Choose the limits."""
    budget = (1 - goal.percentile / 100) - (found.slow_share or 0.0)
    allowed = goal.budget_share * budget
    lending = [one for one in found.options if one.lent and one.gpu_hours.low >= _LEAST_HOURS]
    if budget <= 0:
        return _observe(goal, f"the SLO is missed already: {found.slow_share:.2%} are slow")
    if not (goal.ttft_ms or goal.tpot_ms):
        return _observe(goal, "no SLO was given (--ttft, --tpot): nothing says what to protect")
    if not lending or found.idle.low < _LEAST_SHARE:
        return _observe(goal, f"hardly anything is lendable: {found.idle.value:.0%} idle")
    fitting = [one for one in lending if one.at_risk and one.at_risk.high <= allowed]
    if fitting:
        best = max(fitting, key=lambda one: one.percent)
        assert best.at_risk is not None  # noqa: S101  # that is what fitting means
        reason = (
            f"about {best.at_risk.high:.4%} of the requests may newly miss the SLO; "
            f"lending may use {allowed:.4%} ({goal.budget_share:.0%} of what the SLO leaves)"
        )
        return Advice(_pool(goal, best, found), best, (reason,))
    if any(one.at_risk for one in lending):
        return _observe(goal, f"every option puts more than {allowed:.4%} of the requests at risk")
    canary = min(lending, key=lambda one: one.percent)
    reason = (
        "the risk is not known, so this is a canary: lend to it, read the measured harm "
        "(rose_guard_serving_ttft_seconds, lent against withheld), then raise the percentage"
    )
    return Advice(_pool(goal, canary, found), canary, (reason,))


def _observe(goal: Goal, reason: str) -> Advice:
    return Advice(_pool(goal, None, None), None, (reason,))


def _pool(goal: Goal, option: Option | None, found: LendingEstimate | None) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "mode": "Observe" if option is None else "Lend",
        "selector": {"matchLabels": dict(goal.labels)},
    }
    slo: dict[str, Any] = {}
    if goal.ttft_ms:
        slo["ttftMilliseconds"] = goal.ttft_ms
    if goal.tpot_ms:
        slo["tpotMilliseconds"] = goal.tpot_ms
    if slo:
        spec["slo"] = slo | {"percentile": goal.percentile}
    if option is not None and found is not None:
        lending: dict[str, Any] = {
            "maxReplicasPercent": option.percent,
            "minUnlentReplicas": found.replicas - option.lent,
        }
        windows = _windows(found)
        if windows:
            lending["timeWindows"] = windows
        spec["lending"] = lending
    return {
        "apiVersion": "rose-gpu.dev/v1alpha1",
        "kind": "ServingPool",
        "metadata": {"namespace": goal.namespace, "name": goal.name},
        "spec": spec,
    }


def _windows(found: LendingEstimate) -> list[dict[str, str]]:
    """Stretches of hours in which lending pays; none when all do, or nothing is known of hours."""
    good = [hour for hour, idle in found.by_hour if idle.high >= _LEAST_IDLE]
    if len(found.by_hour) < 24 or len(good) in {0, 24}:
        return []
    starts = [hour for hour in good if (hour - 1) % 24 not in good]
    windows = []
    for start in starts:
        end = start
        while end % 24 in good:
            end += 1
        windows.append({"startTime": f"{start:02d}:00", "endTime": f"{end % 24:02d}:00"})
    return windows
