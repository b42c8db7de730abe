"""One scenario: every regime, seed and derate; serving alone first, because others compare with it.

The result holds no time and no machine, so that equal seeds give equal bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from rose_core.accounting.cost import Prices, break_even_lent_hour, per_accepted
from rose_core.simulate.outcome import Interval, Outcome, paired_ratio
from rose_core.simulate.run import ledger
from rose_core.simulate.scenario import Regime, Scenario
from rose_core.simulate.world import Material
from rose_simulate.runner import Case, Runner

# Micro-units per hour; only their ratio matters. A lent hour is free here, so that the break-even
# price is what can be asked for it at most.
PRICES = Prices(dedicated_hour=1_000_000, lent_hour=0)


class Row(msgspec.Struct, frozen=True):
    """One regime at one derate, over all seeds.

    Attributes:
        throughput: useful tokens per second relative to the fixed pool, paired by seed.
        against_paper: the same, relative to ``rose-paper``.
        dropped_share: of the trajectories that ended, how many were too old to train on.
        recovery_s: median over bursts; None where the scenario has none.
        cost_per_accepted: dedicated GPU-hours, lent hours being free.
        break_even: lent price per hour, dedicated = 1, at which an accepted trajectory costs as
            much as in the fixed pool; None when either accepted nothing.
    """

    regime: str
    derate: float
    throughput: Interval | None
    against_paper: Interval | None
    useful_tokens_per_s: float
    accepted: int
    dropped_share: float
    recovery_s: float | None
    added_violations: int
    requests: int
    ttft_p99_ratio: float | None
    tpot_p99_ratio: float | None
    redone_share: float
    cost_per_accepted: float | None
    break_even: float | None


class Result(msgspec.Struct, frozen=True):
    """Everything of one scenario."""

    scenario: str
    seconds: float
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    outcomes: tuple[Outcome, ...]


def study(
    scenario: Scenario,
    material: Material,
    derates: Sequence[float],
    progress: Callable[[Outcome], None],
    runner: Runner | None = None,
) -> Result:
    """Run everything the scenario names; ``runner`` None = here, one run after the other."""
    cases = [
        Case(scenario.model_copy(update={"derate": derate}), seed)
        for derate in derates
        for seed in scenario.seeds
    ]
    answers = (runner or Runner()).run(cases, material, progress)
    outcomes: list[Outcome] = []
    rows: list[Row] = []
    for derate in derates:
        found: dict[str, list[Outcome]] = {}
        for case, ones in zip(cases, answers, strict=True):
            if case.scenario.derate == derate:
                for one in ones:
                    found.setdefault(one.regime, []).append(one)
        rows += [_row(regime, ones, found) for regime, ones in found.items()]
        outcomes += [one for ones in found.values() for one in ones]
    return Result(scenario.name, scenario.seconds, scenario.seeds, tuple(rows), tuple(outcomes))


def _row(regime: str, ones: list[Outcome], found: dict[str, list[Outcome]]) -> Row:
    fixed = found[Regime.FIXED]
    whole, base = (
        sum(map(ledger, ones[1:]), ledger(ones[0])),
        sum(map(ledger, fixed[1:]), ledger(fixed[0])),
    )
    tokens = sum(job.tokens for one in ones for job in one.jobs)
    redone = sum(job.redone_tokens for one in ones for job in one.jobs)
    dropped = sum(job.dropped for one in ones for job in one.jobs)
    recovered = [seconds for one in ones for seconds in one.recoveries_s]
    even = break_even_lent_hour(whole, base, PRICES)
    price = per_accepted(whole, PRICES)
    return Row(
        regime=regime,
        derate=ones[0].derate,
        throughput=_ratio(ones, fixed),
        against_paper=_ratio(ones, found.get(Regime.ROSE_PAPER, [])),
        useful_tokens_per_s=sum(one.useful_tokens_per_s for one in ones) / len(ones),
        accepted=whole.trajectories.accepted,
        dropped_share=dropped / max(1, dropped + whole.trajectories.accepted),
        recovery_s=statistics.median(recovered) if recovered else None,
        added_violations=sum(one.added_violations for one in ones),
        requests=sum(service.requests for one in ones for service in one.services),
        ttft_p99_ratio=_latency(ones, fixed, "ttft_p99"),
        tpot_p99_ratio=_latency(ones, fixed, "tpot_p99"),
        redone_share=redone / max(1, tokens),
        cost_per_accepted=None if price is None else price / PRICES.dedicated_hour,
        break_even=None if even is None else even / PRICES.dedicated_hour,
    )


def _ratio(ones: list[Outcome], others: list[Outcome]) -> Interval | None:
    ours = [one.useful_tokens_per_s for one in ones]
    base = [one.useful_tokens_per_s for one in others]
    if ones is others or not base or min(*ours, *base) <= 0:
        return None
    return paired_ratio(ours, base)


def _latency(ones: list[Outcome], fixed: list[Outcome], field: str) -> float | None:
    """Worst service's mean ratio to serving alone."""
    if ones is fixed:
        return None
    ratios: list[float] = [
        sum(getattr(one.services[index], field) for one in ones)
        / max(1e-9, sum(getattr(one.services[index], field) for one in fixed))
        for index in range(len(ones[0].services))
    ]
    return max(ratios)


def table(result: Result) -> str:
    """The rows as text."""
    head = (
        "derate  regime            useful tok/s  x fixed [95 %]         x rose-paper [95 %]    "
        "added viol.    TTFT p99  TPOT p99  redone  break-even"
    )
    return "\n".join([head, *map(_line, result.rows)])


def _line(row: Row) -> str:
    added = f"{row.added_violations}/{row.requests}"
    even = "-" if row.break_even is None else f"{row.break_even:.2f}"
    return (
        f"{row.derate:<7.2g} {row.regime:<17} {row.useful_tokens_per_s:>12.0f}  "
        f"{_shown(row.throughput):<22} {_shown(row.against_paper):<22} {added:<14} "
        f"{_times(row.ttft_p99_ratio):<9} {_times(row.tpot_p99_ratio):<9} "
        f"{row.redone_share:<7.1%} {even}"
    )


def _shown(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    if interval.low is None:
        return f"{interval.mean:.2f}"
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"x{ratio:.2f}"
