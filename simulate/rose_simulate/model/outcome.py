"""What one run gives: serving latency, rollout throughput, a ledger; and pairs of runs compared."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import msgspec

from rose_core.stats import Interval, paired_ratio, quantile

__all__ = (
    "Interval",
    "JobOutcome",
    "RunOutcome",
    "ServingOutcome",
    "paired_ratio",
    "percentile_ms",
)


class ServingOutcome(msgspec.Struct, frozen=True):
    """Live requests of one service; milliseconds.

    Attributes:
        added_violations: requests that violate here and do not in the serving-alone run.
        unfinished: still under way at the end; late if past their limit by then.
        ttft_paired: median over requests of TTFT here / TTFT alone; None = nothing to pair.
        slower_5, slower_25: share of the requests whose TTFT is longer than alone by more than
            5 %, 25 %.
        allowed_hundredths: violations that the SLO allows; see ``accounting.ledger``.
        input_tokens, output_tokens: of the requests; 0 = an older version did not say.
    """

    name: str
    requests: int
    unfinished: int
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p99: float
    violations: int
    added_violations: int
    busy_share: float
    allowed_hundredths: int = 0
    ttft_paired: float | None = None
    slower_5: float | None = None
    slower_25: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0


class JobOutcome(msgspec.Struct, frozen=True):
    """One RL job.

    Attributes:
        useful_tokens_per_s: sampled, less redone and discarded.
        step_s: mean seconds from one publish to the next.
        moves: turns that left an engine before their end.
        prefilled_tokens: of prompts, computed because no keys of them were there;
            ``borrowed_prefilled_tokens`` of them on borrowed engines.
        warmed_tokens: of prompts, computed before their turn came.
        new_tokens: of prompts, that were in no earlier turn of their trajectory.
        fetched_tokens: of prompts, whose keys came from the job's tier.
        causes: why those of prompts were computed, warmed ones among them (``gpus.recomputed``).
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
    warmed_tokens: int = 0
    new_tokens: int = 0
    fetched_tokens: int = 0
    causes: dict[str, int] = {}


class RunOutcome(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        borrowed_*_ms: GPU-milliseconds held by slots, and in which rollouts were let compute.
        shared_ms: GPU-milliseconds in which serving and rollouts computed at once.
        reclaims: gate closings.
        recoveries_s: after each burst, seconds until nine tenths of the gates that were open before
            it are open again.
        node_failures: nodes that went off.
        slowdown: of serving while both compute (``Interference``).
        restarted: serving requests that began anew because their node went.
        serving_gpu_ms: GPU-milliseconds of the services; 0 = an older version did not say.
        reserved_ms: those held by slots, by the share of memory that serving did without.
        unlent_reserved_ms: the same of the other GPUs of services that lend; None = an older
            version did not say.
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
    slowdown: float = 2.0
    serving_gpu_ms: int = 0
    reserved_ms: int = 0
    unlent_reserved_ms: int | None = None

    @property
    def useful_tokens_per_s(self) -> float:
        """Over all jobs."""
        return sum(job.useful_tokens_per_s for job in self.jobs)

    @property
    def added_violations(self) -> int:
        """Over all services."""
        return sum(service.added_violations for service in self.services)


def gpu_hours_won(gpus: float, seconds: float, ours: float, base: float) -> float:
    """Dedicated GPU-hours that what was won over the fixed pool stands for.

    A dedicated GPU gives what one of the fixed pool gives, so the pool's own waiting is in it.

    Args:
        gpus: of the fixed pool.
        seconds: that were counted.
        ours: useful tokens per second.
        base: those of the fixed pool.
    """
    return gpus * seconds / 3600 * (ours / base - 1) if base else 0.0


def percentile_ms(values: Rows[float], q: float) -> float:
    """A quantile of seconds, in milliseconds; 0 without values."""
    return 1e3 * quantile(list(values), q) if values else 0.0
