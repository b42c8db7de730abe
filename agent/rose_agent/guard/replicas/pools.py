"""What the replicas of one pool share on this node.

Error budget, breaker, latencies of replicas that lend nothing, and what requests have taught. Next
step: ``outcomes`` fills it in.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from rose_agent.guard import metrics
from rose_core.guard.budget import ErrorBudget
from rose_core.guard.crossover import Meter
from rose_core.guard.experience import Lessons
from rose_core.guard.trial import added
from rose_core.wire.sync import PoolPolicy, Trial


@dataclass
class PoolState(ErrorBudget):
    """State of one pool.

    Attributes:
        unlent: latencies of replicas beside which nothing runs.
        judged: what the relative limit was last judged against; empty = not judged.
        trial: slow busy periods of lent and of withheld cycles.
        lessons: predictor and margin; a new replica begins with what the others have taught.
        unlent_reserved_ns: GPU time in which nobody borrowed, by the share of the GPU's memory that
            serving did without so that it could be lent.
    """

    name: str = ""
    unlent: Meter = field(default_factory=Meter)
    judged: str = ""
    trial: Trial = field(default_factory=Trial)
    lessons: Lessons = field(default_factory=Lessons)
    unlent_reserved_ns: int = 0


class Pools:
    """Every pool that has, or had, a replica here."""

    def __init__(self) -> None:
        self._states: dict[str, PoolState] = {}

    def state(self, name: str) -> PoolState:
        """The pool's state, made when it is first asked for."""
        return self._states.setdefault(name, PoolState(name=name))

    def match(self, policies: Iterable[PoolPolicy]) -> None:
        """Forget pools that are gone, and publish how fast the others' budgets burn."""
        now_ns = time.monotonic_ns()
        known = list(policies)
        percentiles = {policy.pool: policy.percentile for policy in known}
        by_name = {policy.pool: policy for policy in known}
        for name in set(self._states) - set(percentiles):
            del self._states[name]
            for gauge in (
                metrics.ERROR_BUDGET_BURN,
                metrics.ALLOWED_MISSES,
                metrics.CERTIFICATE_HOLDS,
                metrics.ADDED_MISSES,
                metrics.TRIAL_PERIODS,
            ):
                with contextlib.suppress(KeyError):
                    gauge.remove(name)
            for part in ("next", "stop"):
                with contextlib.suppress(KeyError):
                    metrics.CERTIFICATE_SECONDS.remove(name, part)
        for name, pool in self._states.items():
            metrics.ALLOWED_MISSES.labels(name).set(1 - percentiles[name] / 100)
            burn = pool.burn.burn(percentiles[name], pool.limits.long_ns, now_ns)
            if burn.rate is not None:
                metrics.ERROR_BUDGET_BURN.labels(name).set(burn.rate)
            self._certificate(name, pool, by_name[name])

    def is_burning(self, policies: Iterable[PoolPolicy], now_ns: int) -> bool:
        """Whether any pool burns its error budget on this node now."""
        return any(
            pool.burn.burning(policy.percentile, now_ns)
            for policy in policies
            if (pool := self._states.get(policy.pool)) is not None
        )

    @staticmethod
    def _certificate(name: str, pool: PoolState, policy: PoolPolicy) -> None:
        if not policy.ttft_milliseconds:
            return
        harm = added(pool.trial)
        if harm is not None:
            metrics.ADDED_MISSES.labels(name).set(harm.most)
            metrics.TRIAL_PERIODS.labels(name).set(harm.periods)
        certificate = pool.lessons.envelope.certificate(
            policy.ttft_milliseconds / 1000,
            policy.percentile,
            policy.ttft_alone_milliseconds / 1000,
        )
        metrics.CERTIFICATE_HOLDS.labels(name).set(certificate.holds)
        metrics.CERTIFICATE_SECONDS.labels(name, "next").set(certificate.next_s)
        metrics.CERTIFICATE_SECONDS.labels(name, "stop").set(certificate.stop_s)
