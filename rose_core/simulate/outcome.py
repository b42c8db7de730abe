"""What one run gives: serving latency, rollout throughput, a ledger; and pairs of runs compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence as Rows

import msgspec

from rose_core.guard.crossover import quantile

# Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class ServingOutcome(msgspec.Struct, frozen=True):
    """Live requests of one service; milliseconds.

    Attributes:
        added_violations: requests that violate here and do not in the serving-alone run.
        unfinished: still under way at the end.
        allowed_hundredths: violations that the SLO allows; see ``accounting.ledger``.
    """

    name: str
    requests: int
    unfinished: int
    ttft_p50: float
    ttft_p99: float
    tpot_p99: float
    violations: int
    added_violations: int
    busy_share: float
    allowed_hundredths: int = 0


class JobOutcome(msgspec.Struct, frozen=True):
    """One RL job.

    Attributes:
        useful_tokens_per_s: sampled, less redone and discarded.
        step_s: mean seconds from one publish to the next.
        moves: turns that left an engine before their end.
        prefilled_tokens: of prompts, computed because no keys of them were there;
            ``borrowed_prefilled_tokens`` of them on borrowed engines.
    """

    name: str
    steps: int
    step_s: float
    started: int
    finished: int
    accepted: int
    dropped: int
    tokens: int
    borrowed_tokens: int
    redone_tokens: int
    discarded_tokens: int
    useful_tokens_per_s: float
    moves: int
    turns: int
    queue_s_per_turn: float
    prefilled_tokens: int
    borrowed_prefilled_tokens: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        borrowed_*_ms: GPU-milliseconds held by slots, and in which rollouts were let compute.
        shared_ms: GPU-milliseconds in which serving and rollouts computed at once.
        reclaims: gate closings.
        recoveries_s: after each burst, seconds until nine tenths of the gates that were open before
            it are open again.
        node_failures: nodes that went off.
        restarted: serving requests that began anew because their node went.
    """

    regime: str
    seed: int
    derate: float
    seconds: float
    services: tuple[ServingOutcome, ...]
    jobs: tuple[JobOutcome, ...]
    dedicated_held_ms: int
    borrowed_held_ms: int
    borrowed_computing_ms: int
    shared_ms: int
    reclaims: int
    weight_bytes: int
    events: int
    recoveries_s: tuple[float, ...] = ()
    node_failures: int = 0
    restarted: int = 0

    @property
    def useful_tokens_per_s(self) -> float:
        """Over all jobs."""
        return sum(job.useful_tokens_per_s for job in self.jobs)

    @property
    def added_violations(self) -> int:
        """Over all services."""
        return sum(service.added_violations for service in self.services)


class Interval(msgspec.Struct, frozen=True):
    """A mean with its 95 % interval; the ends are None with a single pair."""

    mean: float
    low: float | None
    high: float | None
    pairs: int


def paired_ratio(ours: Rows[float], others: Rows[float]) -> Interval:
    """Geometric mean of ``ours / others`` of paired seeds, Student's interval of the log.

    Raises:
        ValueError: the lists differ in length, are empty or hold a value that is not positive.
    """
    if len(ours) != len(others) or not ours or min(*ours, *others) <= 0:
        message = f"pairs of positive values expected, got {list(ours)} and {list(others)}"
        raise ValueError(message)
    logs = [math.log(a / b) for a, b in zip(ours, others, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Interval(math.exp(mean), None, None, 1)
    t = _T95[min(len(logs) - 2, len(_T95) - 1)]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def percentile_ms(values: Rows[float], q: float) -> float:
    """A quantile of seconds, in milliseconds; 0 without values."""
    return 1e3 * quantile(list(values), q) if values else 0.0
