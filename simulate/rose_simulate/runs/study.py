"""One scenario: every regime, seed and derate; serving alone first, because others compare with it.

The result holds no time and no machine, so that equal seeds give equal bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from rose_core.accounting.cost import Prices, break_even_lent_hour, per_accepted
from rose_simulate.model.outcome import Interval, RunOutcome, gpu_hours_won, paired_ratio
from rose_simulate.model.run import ledger
from rose_simulate.model.scenarios.scenario import Interference, Regime, Scenario
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.runs.runner import Case, Runner

# Micro-units per hour; only their ratio matters. A lent hour is free here, so that the break-even
# price is what can be asked for it at most.
PRICES = Prices(dedicated_hour=1_000_000, lent_hour=0)


READINGS = (Regime.ROSE_PAPER, Regime.ROSE_PAPER_DEDICATED)
"""The two readings of the paper's placement; see ``rose_simulate.model.gpus.paper``."""


class StudyRow(msgspec.Struct, frozen=True):
    """One regime at one derate, over all seeds.

    Attributes:
        throughput: useful tokens per second relative to the fixed pool, paired by seed.
        against_paper: the same, relative to ``rose-paper``.
        against_best: the same, relative to the better reading of the paper's placement, which is
            ``best``; None where either of the two was not run.
        slowdown: of serving while both compute.
        ttft_paired, slower_5, slower_25: see ``ServingOutcome``; means over seeds, of the worst
            service.
        gpu_hours: dedicated GPU-hours that would have given the useful tokens won over the fixed
            pool; per_violation: of them, for each request that lending made late; None where it
            made none late.
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
    ttft_p50_ratio: float | None
    ttft_p90_ratio: float | None
    ttft_p99_ratio: float | None
    tpot_p99_ratio: float | None
    redone_share: float
    cost_per_accepted: float | None
    break_even: float | None
    slowdown: float = 2.0
    against_best: Interval | None = None
    best: str | None = None
    ttft_paired: float | None = None
    slower_5: float | None = None
    slower_25: float | None = None
    gpu_hours: float | None = None
    per_violation: float | None = None


class Result(msgspec.Struct, frozen=True):
    """Everything of one scenario."""

    scenario: str
    seconds: float
    seeds: tuple[int, ...]
    rows: tuple[StudyRow, ...]
    outcomes: tuple[RunOutcome, ...]


def study(
    scenario: Scenario,
    material: SimulationInputs,
    derates: Sequence[float],
    progress: Callable[[RunOutcome], None],
    runner: Runner | None = None,
    *,
    band: Sequence[Interference] = (),
) -> Result:
    """Run everything the scenario names; ``runner`` None = here, one run after the other."""
    cells = [
        scenario.model_copy(update={"derate": derate, "interference": interference})
        for derate in derates
        for interference in band or (scenario.interference,)
    ]
    cases = [Case(cell, seed) for cell in cells for seed in scenario.seeds]
    answers = (runner or Runner()).run(cases, material, progress)
    outcomes: list[RunOutcome] = []
    rows: list[StudyRow] = []
    for cell in cells:
        found: dict[str, list[RunOutcome]] = {}
        for case, ones in zip(cases, answers, strict=True):
            if case.scenario is cell:
                for one in ones:
                    found.setdefault(one.regime, []).append(one)
        rows += [_row(regime, ones, found, cell) for regime, ones in found.items()]
        outcomes += [one for ones in found.values() for one in ones]
    return Result(scenario.name, scenario.seconds, scenario.seeds, tuple(rows), tuple(outcomes))


def _row(
    regime: str, ones: list[RunOutcome], found: dict[str, list[RunOutcome]], cell: Scenario
) -> StudyRow:
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
    best = _better(found)
    won, added = _won(ones, fixed, cell), sum(one.added_violations for one in ones)
    return StudyRow(
        regime=regime,
        derate=ones[0].derate,
        throughput=_ratio(ones, fixed),
        against_paper=_ratio(ones, found.get(Regime.ROSE_PAPER, [])),
        useful_tokens_per_s=sum(one.useful_tokens_per_s for one in ones) / len(ones),
        accepted=whole.trajectories.accepted,
        dropped_share=dropped / max(1, dropped + whole.trajectories.accepted),
        recovery_s=statistics.median(recovered) if recovered else None,
        added_violations=added,
        requests=sum(service.requests for one in ones for service in one.services),
        ttft_p50_ratio=_latency(ones, fixed, "ttft_p50"),
        ttft_p90_ratio=_latency(ones, fixed, "ttft_p90"),
        ttft_p99_ratio=_latency(ones, fixed, "ttft_p99"),
        tpot_p99_ratio=_latency(ones, fixed, "tpot_p99"),
        redone_share=redone / max(1, tokens),
        cost_per_accepted=None if price is None else price / PRICES.dedicated_hour,
        break_even=None if even is None else even / PRICES.dedicated_hour,
        slowdown=ones[0].slowdown,
        against_best=None if best is None else _ratio(ones, found[best]),
        best=best,
        ttft_paired=worst_mean(ones, "ttft_paired"),
        slower_5=worst_mean(ones, "slower_5"),
        slower_25=worst_mean(ones, "slower_25"),
        gpu_hours=None if ones is fixed else won,
        per_violation=won / added if added and ones is not fixed else None,
    )


def _better(found: dict[str, list[RunOutcome]]) -> str | None:
    """The reading of the paper's placement that gives more useful tokens; the best is compared."""
    if not all(one in found for one in READINGS):
        return None
    return max(READINGS, key=lambda one: sum(o.useful_tokens_per_s for o in found[one])).value


def _won(ones: list[RunOutcome], fixed: list[RunOutcome], cell: Scenario) -> float:
    """Dedicated GPU-hours that the useful tokens won over the fixed pool stand for."""
    seconds = sum(one.seconds for one in ones)
    gpus = sum(job.dedicated * job.gpus_per_engine for job in cell.jobs)
    base = sum(one.useful_tokens_per_s for one in fixed)
    return gpu_hours_won(gpus, seconds, sum(one.useful_tokens_per_s for one in ones), base)


def worst_mean(ones: Sequence[RunOutcome], field: str) -> float | None:
    """The worst service's mean over seeds; None where a run was compared with nothing."""
    means: list[float] = []
    for index in range(len(ones[0].services)):
        values: list[float] = [
            value for one in ones if (value := getattr(one.services[index], field)) is not None
        ]
        if values:
            means.append(sum(values) / len(values))
    return max(means) if means else None


def _ratio(ones: list[RunOutcome], others: list[RunOutcome]) -> Interval | None:
    ours = [one.useful_tokens_per_s for one in ones]
    base = [one.useful_tokens_per_s for one in others]
    if ones is others or not base or min(*ours, *base) <= 0:
        return None
    return paired_ratio(ours, base)


def _latency(ones: list[RunOutcome], fixed: list[RunOutcome], field: str) -> float | None:
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
        "derate  slower  regime                useful tok/s  x fixed [95 %]         "
        "x paper's best [95 %]  added viol.    TTFT p50, p90, p99     TPOT p99  "
        "slower >5%, >25%  redone  break-even  GPU-h won, per violation"
    )
    return "\n".join([head, *map(_line, result.rows)])


def _line(row: StudyRow) -> str:
    added = f"{row.added_violations}/{row.requests}"
    ttft = " ".join(map(_times, (row.ttft_p50_ratio, row.ttft_p90_ratio, row.ttft_p99_ratio)))
    slower = ", ".join(
        "-" if one is None else f"{one:.0%}" for one in (row.slower_5, row.slower_25)
    )
    won = "-" if row.gpu_hours is None else f"{row.gpu_hours:.1f}, {per_violation(row)}"
    even = "-" if row.break_even is None else f"{row.break_even:.2f}"
    return (
        f"{row.derate:<7.2g} {row.slowdown:<7g} {row.regime:<21} "
        f"{row.useful_tokens_per_s:>12.0f}  {_shown(row.throughput):<22} "
        f"{_shown(row.against_best or row.against_paper):<22} {added:<14} {ttft:<22} "
        f"{_times(row.tpot_p99_ratio):<9} {slower:<17} {row.redone_share:<7.1%} {even:<11} {won}"
    )


def per_violation(row: StudyRow) -> str:
    """GPU-hours won for each request that lending made late, in words."""
    return price_of_violation(row.per_violation)


def price_of_violation(hours: float | None) -> str:
    """The shadow price of a violation in words: GPU-hours won for each; None = there was none."""
    return "none late" if hours is None else f"{hours:.2f}"


def _shown(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    if interval.low is None:
        return f"{interval.mean:.2f}"
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"x{ratio:.2f}"
