"""A study's result as a page with plots. Equal results give equal pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from rose_core.accounting.cost import per_accepted
from rose_core.accounting.ledger import total
from rose_core.accounting.statement import SWEEP, statement
from rose_core.stats import mean_of
from rose_simulate.model.fleets.fleet import FleetOutcome
from rose_simulate.model.gpus.recomputed import Cause
from rose_simulate.model.outcome import Interval, RunOutcome, paired_ratio
from rose_simulate.model.run import ledger
from rose_simulate.model.scenarios.scenario import Regime
from rose_simulate.pages.charts import ChartLine, intervals, lines
from rose_simulate.pages.charts import ChartRow as Bar
from rose_simulate.runs.fleets import FleetResult, against, won
from rose_simulate.runs.study import (
    PRICES,
    READINGS,
    Result,
    StudyRow,
    per_violation,
    price_of_violation,
)

# Studies whose scenarios differ in one thing.
_ACROSS = frozenset({"agents", "attention", "eager", "freshness", "tail", "mps"})
_KINDS = frozenset({"mixed"})  # studies in which dedicated and borrowed devices differ
_BRIEF = frozenset({"rewards"})  # studies of many scenarios, of which two tables say it all
_STREAMS = "-streams"  # how a scenario ends that differs from another one in that alone
_SHARED = frozenset({"supply"})  # studies of who gets what is lent
_GATES = frozenset({"attribution"})  # studies that compare at equal harm to serving
_ORDER = ("fixed", "rose-paper", "rose-paper-dedicated", "ours")


@dataclass
class StudyPage:
    """Markdown and the plots it shows, by file name."""

    text: str
    plots: dict[str, str] = field(default_factory=dict)


def page(
    name: str, title: str, summary: str, found: Sequence[Result | FleetResult], chosen: str = ""
) -> StudyPage:
    """The page of one study; ``chosen`` are the flags that made it."""
    made = StudyPage(
        f"# Study {title}\n\n{summary} Made by `rose simulate study {name}{chosen}`.\n"
    )
    if name in _BRIEF:
        _brief([one for one in found if isinstance(one, Result)], made)
        return made
    for one in found:
        if isinstance(one, FleetResult):
            _fleet(name, one, made)
        else:
            _events(name, one, made)
    events = [one for one in found if isinstance(one, Result)]
    if len(events) > 1 and name in _ACROSS:
        _across(events, made)
    return made


def _brief(found: Sequence[Result], made: StudyPage) -> None:
    """Production against the paper's rules, and what a trainer that streams brings each regime."""
    listed = dict.fromkeys((one.seconds, one.seeds) for one in found)
    made.text += "".join(
        f"\n{seconds:g} s counted, seeds {', '.join(map(str, seeds))}.\n"
        for seconds, seeds in listed
    )
    made.text += (
        "\n## `ours`\n\nRatios of useful tokens, paired by seed, with 95 % intervals. Of the "
        "paper's rules the better reading that was run.\n\n"
        "| scenario | derate, slower | useful tok/s | step | x fixed | x the paper's rules "
        "| added violations | TTFT p50, P99 x alone; with the paper's rules |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    above = below = cells = 0
    for one in found:
        for row in one.rows:
            if row.regime != Regime.OURS:
                continue
            cells += 1
            ours, best = _of(one, row), _paper(one, row)
            ratio = None if best is None else _compared(ours, _of(one, best), _useful)
            above += ratio is not None and (ratio.low or 0.0) > 1
            below += ratio is not None and ratio.high is not None and ratio.high < 1
            read = "" if best is None or ratio is None else f"{_shown(ratio)} (`{best.regime}`)"
            made.text += (
                f"| {one.scenario} | {row.derate:g}, {row.slowdown:g} "
                f"| {row.useful_tokens_per_s:.0f} "
                f"| {_step(ours)} | {_shown(row.throughput)} | {read} "
                f"| {row.added_violations} of {row.requests} "
                f"| {'; '.join(map(_ttft, filter(None, (row, best))))} |\n"
            )
    made.text += (
        f"\nMore tokens than the paper's rules are shown in {above} of {cells} rows, fewer in "
        f"{below}: there the interval does not hold 1.\n"
    )
    _streamed(found, made)


def _streamed(found: Sequence[Result], made: StudyPage) -> None:
    """A trainer that streams beside one that does not, regime by regime."""
    by_name = {one.scenario: one for one in found}
    regimes = list(dict.fromkeys(row.regime for one in found for row in one.rows))
    made.text += (
        "\n## A trainer that streams\n\nUseful tokens, x the same trainer that takes the whole "
        "batch, paired by seed.\n\n"
        f"| scenario | derate, slower | {' | '.join(f'`{one}`' for one in regimes)} "
        f"| step of `ours`, whole and streamed |\n|---|---|{'---|' * len(regimes)}---|\n"
    )
    gains = cells = 0
    for name, whole in by_name.items():
        parts = by_name.get(name + _STREAMS)
        if parts is None:
            continue
        for derate, slower in dict.fromkeys((row.derate, row.slowdown) for row in whole.rows):
            shown, steps = [], ""
            for regime in regimes:
                base, ours = (_in(one, regime, derate, slower) for one in (whole, parts))
                ratio = _compared(ours, base, _useful) if len(base) == len(ours) else None
                shown.append(_shown(ratio))
                if ratio is None:
                    continue
                cells, gains = cells + 1, gains + ((ratio.low or 0.0) > 1)
                if regime == Regime.OURS:
                    steps = f"{_step(base)}, {_step(ours)}"
            made.text += f"| {name} | {derate:g}, {slower:g} | {' | '.join(shown)} | {steps} |\n"
    made.text += f"\nA gain is shown in {gains} of {cells} cells.\n"


def _ttft(row: StudyRow) -> str:
    return f"{_times(row.ttft_p50_ratio)}, {_times(row.ttft_p99_ratio)}"


def _paper(one: Result, row: StudyRow) -> StudyRow | None:
    """The reading of the paper's rules that gave more useful tokens there; None = none was run."""
    cell = [r for r in one.rows if (r.derate, r.slowdown) == (row.derate, row.slowdown)]
    read = [r for r in cell if r.regime in READINGS]
    return max(read, key=lambda r: r.useful_tokens_per_s, default=None)


def _step(ones: Sequence[RunOutcome]) -> str:
    """Mean over seeds of the first job's step."""
    steps = [one.jobs[0].step_s for one in ones if one.jobs[0].step_s]
    return f"{sum(steps) / len(steps):.0f} s" if steps else ""


def _across(found: Sequence[Result], made: StudyPage) -> None:
    """The later scenarios relative to the first, regime by regime, paired by seed."""
    first = found[0]
    made.text += (
        f"\n## Relative to {first.scenario}\n\nPaired by seed, with 95 % intervals.\n\n"
        "| scenario | derate, slower | regime | useful tok/s, x | accepted, x |\n"
        "|---|---|---|---|---|\n"
    )
    for other in found[1:]:
        for row in other.rows:
            ours, base = _of(other, row), _of(first, _cell(first, row))
            if len(ours) == len(base) and ours:
                made.text += (
                    f"| {other.scenario} | {row.derate:g}, {row.slowdown:g} | `{row.regime}` "
                    f"| {_ratio(ours, base, _useful)} | {_ratio(ours, base, _accepted)} |\n"
                )


def _cell(first: Result, row: StudyRow) -> StudyRow:
    """The row's place in another scenario, which may have other factors: then its largest one."""
    factors = {one.slowdown for one in first.rows}
    if row.slowdown in factors:
        return row
    return msgspec.structs.replace(row, slowdown=max(factors))


def _of(result: Result, row: StudyRow) -> list[RunOutcome]:
    return _in(result, row.regime, row.derate, row.slowdown)


def _in(result: Result, *cell: object) -> list[RunOutcome]:
    """Runs of one regime, derate and slowdown."""
    return [one for one in result.outcomes if (one.regime, one.derate, one.slowdown) == cell]


def _useful(one: RunOutcome) -> float:
    return one.useful_tokens_per_s


def _accepted(one: RunOutcome) -> float:
    return float(sum(job.accepted for job in one.jobs))


def _ratio(
    ours: list[RunOutcome], base: list[RunOutcome], figure: Callable[[RunOutcome], float]
) -> str:
    return _shown(_compared(ours, base, figure))


def _compared(
    ours: list[RunOutcome], base: list[RunOutcome], figure: Callable[[RunOutcome], float]
) -> Interval | None:
    """Paired by seed; None where there is nothing, or nothing was made, to compare."""
    pairs = [figure(one) for one in ours], [figure(one) for one in base]
    made = all(pairs) and min((*pairs[0], *pairs[1])) > 0
    return paired_ratio(*pairs) if made else None


def _events(name: str, one: Result, made: StudyPage) -> None:
    seeds = ", ".join(map(str, one.seeds))
    made.text += (
        f"\n## {one.scenario}\n\n{one.seconds:g} s counted, seeds {seeds}. Ratios are paired by "
        "seed, with 95 % intervals.\n\n"
        "| derate | slower | regime | useful tok/s | x fixed | x `rose-paper` "
        "| x best of the paper's | accepted | dropped | redone | cost | break-even |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    made.text += "".join(map(_row, one.rows))
    made.text += _harm(one) + _unpaid(one)
    made.text += _recovered(one) + _nodes(one)
    made.text += _affinity(one) if name in _KINDS else ""
    made.text += _same_gate(one) if name in _GATES else ""
    keeps = any(row.regime == Regime.OURS_KEPT for row in one.rows)
    made.text += _refilled(one) if keeps else ""
    made.text += _by_job(one) if name in _SHARED else ""
    made.text += _sensitivity(one)
    bars = [
        Bar(
            f"{row.regime}, {row.derate:g}, {row.slowdown:g}",
            *_ends(row.against_best or row.against_paper),
            colour=_colour(row.regime),
        )
        for row in one.rows
        if (row.against_best or row.against_paper) is not None
    ]
    if bars:
        file = f"{name}-{one.scenario}.svg"
        title = f"{one.scenario}: useful tokens, x the paper's rules at their best (95 %)"
        made.plots[file] = intervals(title, bars, unit="x the paper's rules", reference=1.0)
        made.text += f"\n![{title}]({file})\n"


def _recovered(one: Result) -> str:
    """How long the gates took after bursts; per derate, in the order of the table."""
    found: dict[str, list[str]] = {}
    for row in one.rows:
        if row.recovery_s is not None:
            found.setdefault(row.regime, []).append(f"{row.recovery_s:.1f}")
    if not found:
        return ""
    shown = ", ".join(f"`{who}` {' / '.join(values)}" for who, values in found.items())
    return f"\nSeconds until nine tenths of the gates are open again, median: {shown}.\n"


def _nodes(one: Result) -> str:
    """How many nodes were lost, and what serving had to begin anew; nothing where none was."""
    lost = {(o.derate, o.seed): o.node_failures for o in one.outcomes}
    if not any(lost.values()):
        return ""
    again: dict[str, int] = {}
    for outcome in one.outcomes:
        again[outcome.regime] = again.get(outcome.regime, 0) + outcome.restarted
    shown = ", ".join(f"`{who}` {count}" for who, count in again.items())
    return (
        f"\nNodes lost, over seeds and derates: {sum(lost.values())}. Serving requests that began "
        f"anew because of it: {shown}.\n"
    )


def _affinity(one: Result) -> str:
    """Prefill to decode on either kind of engine: which kind of work went where, per derate."""
    shown: dict[str, list[str]] = {}
    for row in one.rows:
        jobs = [job for outcome in _of(one, row) for job in outcome.jobs]
        lent, prompts = sum(o.borrowed_tokens for o in jobs), sum(o.prefilled_tokens for o in jobs)
        lent_prompts = sum(o.borrowed_prefilled_tokens for o in jobs)
        own = sum(o.tokens for o in jobs) - lent
        if own and lent:
            ratios = f"{(prompts - lent_prompts) / own:.1f} and {lent_prompts / lent:.1f}"
            shown.setdefault(row.regime, []).append(ratios)
    if not shown:
        return ""
    listed = ", ".join(f"`{who}` {' / '.join(ratios)}" for who, ratios in shown.items())
    head = "Prompt tokens computed per output token, on dedicated and on borrowed engines"
    return f"\n{head}: {listed}.\n"


def _refilled(one: Result) -> str:
    """How many tokens of prompts are computed for each new one, and what fewer of them bring."""
    text = (
        "\nTokens of prompts for each that was in no earlier turn: computed (warmed ones among "
        "them), fetched.\n\n"
        "| derate | slower | regime | computed | fetched | useful tok/s, x `ours` |\n"
        "|---|---|---|---|---|---|\n"
    )
    for row in one.rows:
        mine = _of(one, row)
        jobs = [job for outcome in mine for job in outcome.jobs]
        new = sum(job.new_tokens for job in jobs)
        computed = sum(job.prefilled_tokens + job.warmed_tokens for job in jobs) / max(1, new)
        fetched = sum(job.fetched_tokens for job in jobs) / max(1, new)
        base = _of(one, msgspec.structs.replace(row, regime=Regime.OURS))
        ratio = "" if row.regime == Regime.OURS else _ratio(mine, base, _useful)
        text += (
            f"| {row.derate:g} | {row.slowdown:g} | `{row.regime}` | {computed:.2f} "
            f"| {fetched:.2f} | {ratio} |\n"
        )
    return text + _causes(one)


def _causes(one: Result) -> str:
    """Why tokens of prompts are computed."""
    text = (
        "\nThose that are computed, by who has computed their keys before: nobody, engines with "
        "older weights alone, this engine (which gave them up for room), another of its node, one "
        "of another node; and those that the pool has, which are computed as quickly or by an "
        "engine that has not measured a pull yet.\n\n"
        "| derate | slower | regime | new | new weights | room | node | elsewhere | in the pool |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    order = (Cause.NEW, Cause.WEIGHTS, Cause.ROOM, Cause.NODE, Cause.ELSEWHERE, Cause.UNFETCHED)
    for row in one.rows:
        jobs = [job for outcome in _of(one, row) for job in outcome.jobs]
        new = max(1, sum(job.new_tokens for job in jobs))
        shares = [sum(job.causes.get(cause, 0) for job in jobs) / new for cause in order]
        text += (
            f"| {row.derate:g} | {row.slowdown:g} | `{row.regime}` | "
            f"{' | '.join(f'{share:.3f}' for share in shares)} |\n"
        )
    return text


def _by_job(one: Result) -> str:
    """What every job has of it, and all together, beside production's order."""
    text = (
        "\nUseful tokens of all jobs and of each, beside those under `ours`, paired by seed; what "
        "an open hour of a lent GPU won over the fixed pool, in hours of a dedicated one.\n\n"
        "| derate | slower | regime | job | useful tok/s | x `ours` | step | won per open hour |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    names = [job.name for job in one.outcomes[0].jobs]
    for row in one.rows:
        mine = _of(one, row)
        base = _of(one, msgspec.structs.replace(row, regime=Regime.OURS))
        head = f"| {row.derate:g} | {row.slowdown:g} | `{row.regime}`"
        hours = sum(run.borrowed_computing_ms for run in mine) / 3_600_000
        won = "" if row.gpu_hours is None or not hours else f"{row.gpu_hours / hours:.2f}"
        useful, ratio = f"{row.useful_tokens_per_s:.0f}", _ratio(mine, base, _useful)
        text += f"{head} | all | {useful} | {ratio} | | {won} |\n"
        for number, name in enumerate(names):

            def figure(run: RunOutcome, number: int = number) -> float:
                return run.jobs[number].useful_tokens_per_s

            steps = [run.jobs[number].step_s for run in mine if run.jobs[number].step_s]
            step = f"{sum(steps) / len(steps):.0f} s" if steps else ""
            mean = sum(map(figure, mine)) / len(mine)
            text += f"{head} | {name} | {mean:.0f} | {_ratio(mine, base, figure)} | {step} | |\n"
    return text


def _same_gate(one: Result) -> str:
    """Production against the paper's rules behind production's gate: equal harm to serving."""
    tap = {
        (row.derate, row.slowdown): row for row in one.rows if row.regime == Regime.ROSE_PAPER_TAP
    }
    found = [
        _ratio(_of(one, row), _of(one, tap[row.derate, row.slowdown]), _useful)
        for row in one.rows
        if row.regime == Regime.OURS and (row.derate, row.slowdown) in tap
    ]
    head = "Useful tokens, `ours` x `rose-paper-tap`, whose gate is the same"
    return f"\n{head}: {' / '.join(found)}.\n" if found else ""


def _sensitivity(one: Result) -> str:
    """What an accepted trajectory costs by the price of a lent hour, against dedicated-only."""
    lines_ = []
    for row in one.rows:
        base = total(map(ledger, _of(one, msgspec.structs.replace(row, regime=Regime.FIXED))))
        alone = per_accepted(base, PRICES)
        used = total(map(ledger, _of(one, row)))
        if row.regime == Regime.FIXED or not alone or not used.borrowed.held_milliseconds:
            continue
        costs = statement(row.regime, used, PRICES).sensitivity
        cells = " | ".join("" if cost is None else f"{cost / alone:.2f}" for _, cost in costs)
        lines_.append(f"| {row.derate:g} | {row.slowdown:g} | `{row.regime}` | {cells} |\n")
    if not lines_:
        return ""
    shares = " | ".join(f"{share:g}" for share in SWEEP)
    return (
        "\nCost per accepted trajectory, x dedicated-only, by the price of a lent hour "
        f"(dedicated = 1):\n\n| derate | slower | regime | {shares} |\n"
        f"|---|---|---|{'---|' * len(SWEEP)}\n" + "".join(lines_)
    )


def _row(row: StudyRow) -> str:
    cost = "" if row.cost_per_accepted is None else f"{1000 * row.cost_per_accepted:.2f}"
    even = "" if row.break_even is None else f"{row.break_even:.2f}"
    best = _shown(row.against_best)
    return (
        f"| {row.derate:g} | {row.slowdown:g} | `{row.regime}` | {row.useful_tokens_per_s:.0f} "
        f"| {_shown(row.throughput)} | {_shown(row.against_paper)} "
        f"| {f'{best}, `{row.best}`' if best else ''} | {row.accepted} | {row.dropped_share:.1%} "
        f"| {row.redone_share:.1%} | {cost} | {even} |\n"
    )


def _harm(one: Result) -> str:
    """What serving feels: quantiles relative to serving alone, and request by request."""
    head = (
        "\nWhat serving feels, relative to serving alone. *Paired*: median over requests of TTFT "
        "here / alone. *Won*: dedicated GPU-hours that would have given as many more useful tokens "
        "than the fixed pool; the last column is that for each added violation.\n\n"
        "| derate | slower | regime | TTFT p50, p90, p99 | TPOT p99 | paired | slower by > 5 %, "
        "> 25 % of requests | added violations | GPU-hours won | per violation |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(
        f"| {row.derate:g} | {row.slowdown:g} | `{row.regime}` | {_times(row.ttft_p50_ratio)}, "
        f"{_times(row.ttft_p90_ratio)}, {_times(row.ttft_p99_ratio)} "
        f"| {_times(row.tpot_p99_ratio)} | {_times(row.ttft_paired)} "
        f"| {_share(row.slower_5)}, {_share(row.slower_25)} "
        f"| {row.added_violations} of {row.requests} "
        f"| {'' if row.gpu_hours is None else f'{row.gpu_hours:.1f}'} | {per_violation(row)} |\n"
        for row in one.rows
        if row.regime != Regime.FIXED
    )


def _unpaid(one: Result) -> str:
    """The regimes that lend and whose gain over the fixed pool is not shown."""
    found = [
        f"`{row.regime}` ({row.derate:g}, {row.slowdown:g})"
        for row in one.rows
        if row.throughput is not None
        and any(o.borrowed_held_ms for o in _of(one, row))
        and (row.throughput.low is None or row.throughput.low <= 1)
    ]
    if not found:
        return ""
    return f"\nNo gain over the fixed pool is shown for: {', '.join(found)}.\n"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _fleet(name: str, one: FleetResult, made: StudyPage) -> None:
    made.text += (
        f"\n## {one.scenario}\n\n{one.outcomes[0].gpus} GPUs. Ratios are paired by seed, with 95 % "
        "intervals; the other figures are means over seeds, added violations with an interval: "
        "each seed has load curves of its own. *Inside*: added where serving alone keeps its SLO. "
        "*Spared*: late alone, and not when lent. *Won*: dedicated GPU-hours that would have given "
        "as many more tokens than the fixed pool, over all seeds; *per violation*: that for each "
        "added one, its shadow price. *Full*: tokens made, of those that the engines would have "
        "made with full batches. *Worth*: what a lent GPU would have made with a full batch, of a "
        "dedicated one.\n\n"
        "| derate | seeds | regime | useful tok/s | x fixed | x `ours-held` | x `rose-paper` "
        "| accepted | dropped | full | GPU-hours lent | open | worth | added violations | inside "
        "| spared | violations alone | GPU-hours won | per violation |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    cells = dict.fromkeys((outcome.derate, outcome.regime) for outcome in one.outcomes)
    for derate, regime in cells:
        same = [o for o in one.outcomes if (o.derate, o.regime) == (derate, regime)]
        made.text += _fleet_row(one, same)
    series = [
        ChartLine(
            outcome.regime, [(hour, value) for hour, value in enumerate(outcome.hourly_tokens)]
        )
        for outcome in one.outcomes
        if len(outcome.hourly_tokens) > 2 and _is_first(outcome, one)
    ]
    if series:
        file, title = f"{name}-{one.scenario}.svg", f"{one.scenario}: rollout tokens per second"
        made.plots[file] = lines(title, series, x="hour", y="tokens/s")
        made.text += f"\n![{title}]({file})\n"


def _fleet_row(result: FleetResult, same: Sequence[FleetOutcome]) -> str:
    """One regime at one derate."""

    def mean(figure: Callable[[FleetOutcome], float]) -> float:
        return sum(map(figure, same)) / len(same)

    one = same[0]
    return (
        f"| {one.derate:g} | {len(same)} | `{one.regime}` | {mean(lambda o: o.tokens_per_s):.0f} "
        f"| {_shown(against(result, one, Regime.FIXED))} "
        f"| {_shown(against(result, one, Regime.OURS_HELD))} "
        f"| {_shown(against(result, one, Regime.ROSE_PAPER))} "
        f"| {mean(lambda o: o.accepted):.0f} | {mean(lambda o: o.dropped):.0f} "
        f"| {mean(lambda o: o.full_share):.1%} | {mean(lambda o: o.lent_hours):.0f} "
        f"| {mean(lambda o: o.open_share):.1%} | {_worth(same)} "
        f"| {_counted([o.added_violations for o in same])} | {mean(lambda o: o.added_inside):.0f} "
        f"| {mean(lambda o: o.spared_violations):.0f} "
        f"| {mean(lambda o: o.violations_alone):.0f} of {mean(lambda o: o.requests):.0f} "
        f"| {_price(result, same)} |\n"
    )


def _worth(same: Sequence[FleetOutcome]) -> str:
    """Each seed's is of its own load curves, so the interval is of their error."""
    values = [one.lent_worth for one in same if one.lent_worth]
    return _shown(mean_of(values)) if values else ""


def _price(result: FleetResult, same: Sequence[FleetOutcome]) -> str:
    """Hours won and those for each violation, as two cells."""
    found = won(result, same)
    return " | " if found is None else f"{found[0]:.0f} | {price_of_violation(found[1])}"


def _is_first(one: FleetOutcome, result: FleetResult) -> bool:
    """Its line is drawn: of the first seed and the middle derate, which every line can share."""
    derates = sorted({outcome.derate for outcome in result.outcomes})
    first = min(outcome.seed for outcome in result.outcomes)
    return (one.seed, one.derate) == (first, derates[len(derates) // 2])


def _ends(interval: Interval | None) -> tuple[float, float | None, float | None]:
    return (1.0, None, None) if interval is None else (interval.mean, interval.low, interval.high)


def _colour(regime: str) -> int:
    return _ORDER.index(regime) if regime in _ORDER else 5


def _shown(interval: Interval | None) -> str:
    if interval is None:
        return ""
    if interval.low is None:
        return f"{interval.mean:.2f}"
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _counted(values: Sequence[float]) -> str:
    """A mean of counts over seeds with its interval, which does not go below 0."""
    found = mean_of(values)
    if found.low is None or found.high is None:
        return f"{found.mean:.0f}"
    return f"{found.mean:.0f} [{max(0.0, found.low):.0f}, {found.high:.0f}]"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
