"""Windows -> the figures that are recorded, each with the aim it is held against.

``table`` shows all conditions side by side. Next step: ``run_record`` writes both down.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from bench.guard import analysis
from bench.guard.analysis import Interval
from bench.guard.measured import Window
from bench.guard.results import Results
from bench.guard.windows import GUARDED, SEARCHED, SHARES, WITHOUT
from bench.record import Figure, figure
from rose_core.stats import quantile

# Name, which latency, quantile, aim of ours / alone on bursty loads.
LATENCIES = (
    ("TTFT p50", "TTFT", 0.5, 1.05),
    ("TTFT p90", "TTFT", 0.9, 1.05),
    ("TTFT p99", "TTFT", 0.99, 1.05),
    ("TPOT p99", "TPOT", 0.99, 1.02),
)
QUIET = 0.05
"""More of the machine in other hands than this, and the figures describe them."""
MANY, MANY_AT_TAIL = 30, 100
"""Pairs from which a ratio of quantiles decides anything."""
_REACTIONS = (
    ("permit closed", "closed_s", None, None),
    ("last rollout token", "token_s", 5.0, 25.0),
    ("every thread stopped", "stopped_s", None, None),
)


def figures(results: Results) -> list[Figure]:
    """What is recorded."""
    others = statistics.fmean(w.strangers for w in results.windows) if results.windows else 0.0
    rows: list[Figure] = [
        figure("machine: share used by other processes", others, "share", at_most=QUIET),
        figure("rollout engines that ended", float(results.ended), "", at_most=0),
        figure("windows that crashed", float(len(results.crashes)), "", at_most=0),
        figure("rollouts alone", results.solo.rollout_rate, "tokens/s"),
        figure("serving saturated", results.solo.serving_rate, "tokens/s"),
    ]
    for load in results.loads:
        for condition in results.conditions(load):
            rows += _condition(results, load, condition)
        if load.startswith("steady"):
            rows += _never_idle(results, load)
    for condition in ("ours", "polled"):
        rows += _reactions(results, condition)
    return rows + _cost(results)


def compared(name: str, found: Interval | None, q: float, limit: float | None) -> list[Figure]:
    """A ratio of latencies, held against its aim once enough pairs are behind it."""
    if found is None:
        return []
    enough = found.pairs >= (MANY_AT_TAIL if q > 0.95 else MANY)
    ends = (found.low, found.high)
    made = figure(name, found.value, "ratio", interval=ends, at_most=limit)
    return [made if enough else msgspec.structs.replace(made, met=None)]


def _condition(results: Results, load: str, condition: str) -> list[Figure]:
    windows, alone = results.of(load, condition), results.of(load, "alone")
    bursty_ours = condition == "ours" and not load.startswith("steady")
    rows = [figure(f"{load}, {condition}: harvest", analysis.harvest(windows), "tokens/s")]
    if condition in WITHOUT:
        idle = sum(w.idle_s for w in windows) / sum(w.seconds for w in windows)
        rows = [figure(f"{load}, {condition}: time without a request", idle, "share")]
    for name, what, q, aim in LATENCIES:
        values = [value for window in windows for value in window.values(what)]
        if values:
            rows.append(figure(f"{load}, {condition}: {name}", 1e3 * quantile(values, q), "ms"))
        if condition != "alone":
            found = analysis.ratio(analysis.pairs(alone, windows, what), q)
            limit = aim if bursty_ours else None
            rows += compared(f"{load}, {condition} / alone: {name}", found, q, limit)
    if condition not in WITHOUT and not load.startswith("steady"):
        rows += _idle_time(results, load, condition)
    failed = sum(w.failed for w in windows)
    return [*rows, figure(f"{load}, {condition}: failed requests", failed, "count")]


def _idle_time(results: Results, load: str, condition: str) -> list[Figure]:
    """What became of the idle time of a bursty load."""
    windows, alone = results.of(load, condition), results.of(load, "alone")
    solo, name = results.solo.rollout_rate, f"{load}, {condition}"
    rows = []
    least = 0.95 if condition == "ours" else None
    share = analysis.of_idle(windows, alone, solo)
    if share is not None:
        ends = (share.low, share.high)
        text = f"{name}: harvest of idle time"
        rows.append(figure(text, share.value, "share", at_least=least, interval=ends))
    rate = analysis.in_idle(windows, alone, solo)
    if rate is not None:
        text = f"{name}: rate while no request is under way / solo rate"
        rows.append(figure(text, rate.value, "share", interval=(rate.low, rate.high)))
    ceiling = analysis.in_idle(results.of(load, "unguarded"), alone, solo)
    if share is not None and ceiling is not None and ceiling.value and condition == "ours":
        text = f"{name}: harvest of idle time / unguarded's rate in it"
        rows.append(figure(text, share.value / ceiling.value, "ratio"))
    if condition in GUARDED:
        rows += _lost(windows, alone, solo, name)
    return rows


def _lost(
    windows: Sequence[Window], alone: Sequence[Window], solo: float, name: str
) -> list[Figure]:
    lost, opened = analysis.lost(windows, alone, solo), analysis.open_of_idle(windows)
    rows = [] if opened is None else [figure(f"{name}: open gate / idle time", opened, "share")]
    if lost is None:
        return rows
    parts = (
        ("serving took longer than alone", lost.longer),
        ("gate still closed", lost.shut),
        ("open gate, no token yet", lost.waking),
        ("slower than alone while open", lost.slower),
    )
    return rows + [figure(f"{name}: lost, {text}", value, "share") for text, value in parts]


def _never_idle(results: Results, load: str) -> list[Figure]:
    goal, alone = results.goals.get(load), results.of(load, "alone")
    if goal is None or not alone:
        return []
    aims = (goal.ttft_s, goal.tpot_s)
    rows = [
        figure(f"{load}: SLO, TTFT", 1e3 * goal.ttft_s, "ms"),
        figure(f"{load}: SLO, TPOT", 1e3 * goal.tpot_s, "ms"),
    ]
    for condition in results.conditions(load):
        if condition != "alone":
            found = analysis.compared(results.of(load, condition), alone, aims)
            limit = 0.0 if condition == "ours" else None
            name, ends = f"{load}, {condition}: added violations", (found.net.low, found.net.high)
            rows += [
                figure(name, found.net.value, "count", at_most=limit, interval=ends),
                figure(f"{name}, not so alone", found.fresh, "count"),
                figure(f"{name}, only so alone", found.spared, "count"),
            ]
    rows += _positions(results, load)
    return rows + _against_search(results, load, aims) + _against_paper(results, load)


def _positions(results: Results, load: str) -> list[Figure]:
    """Where ours' gate stood, and why: share of the measured time."""
    windows = results.of(load, "ours")
    spent: Counter[str] = Counter()
    for window in windows:
        spent.update(window.gate_s)
    seconds, name = sum(w.seconds for w in windows), f"{load}, ours: gate"
    return [figure(f"{name} {at}", spent[at] / seconds, "share") for at in sorted(spent)]


def _against_search(results: Results, load: str, aims: tuple[float, float]) -> list[Figure]:
    """Ours beside the best fixed share, in the rounds in which the search was made."""
    alone, ours = results.of(load, "alone"), results.of(load, "ours")
    candidates = [results.of(load, share) for share in SHARES]
    searched = [w for share in SEARCHED for w in results.of(load, share)]
    candidates.append(results.of(load, "unguarded"))
    if searched:
        candidates = [analysis.same_rounds(c, searched) for c in candidates]
    rows = []
    same = analysis.same_rounds(ours, searched) if searched else ours
    more = analysis.compared(same, alone, aims).fresh if same else 0
    for text, allowed in (("no request over", 0), ("as many over as ours", more)):
        best = analysis.oracle(candidates, alone, aims, allowed)
        name = f"{load}: best fixed share, {text}"
        found = analysis.harvest(best) if best else 0.0
        rows.append(figure(name, found, "tokens/s"))
        if found and same and text == "no request over":
            share = analysis.harvest(same) / found
            rows.append(figure(f"{load}: ours / best fixed share", share, "ratio", at_least=0.9))
    return rows


def _against_paper(results: Results, load: str) -> list[Figure]:
    paper, ours = results.of(load, "rose-paper"), results.of(load, "ours")
    if not (paper and ours):
        return []
    share = analysis.harvest(ours) / max(1e-9, analysis.harvest(paper))
    return [figure(f"{load}: ours / rose-paper, harvest", share, "ratio", at_least=1.0)]


def _reactions(results: Results, condition: str) -> list[Figure]:
    windows = [w for w in results.windows if w.condition == condition]
    rows = []
    for text, field, p50, p99 in _REACTIONS:
        values = [1e3 * value for w in windows for value in getattr(w, field)]
        if values:
            aims = (p50, p99) if condition == "ours" else (None, None)
            name = f"{condition}: arrival to {text}"
            rows += [
                figure(f"{name}, p50", statistics.median(values), "ms", at_most=aims[0]),
                figure(f"{name}, p99", quantile(values, 0.99), "ms", at_most=aims[1]),
                figure(f"{name}, samples", len(values), "count"),
            ]
    released = [1e3 * value for w in windows for value in w.released_s]
    if released:
        limit = 40.0 if condition == "ours" else None
        name = f"{condition}: open gate to first rollout token"
        rows += [
            figure(f"{name}, p50", statistics.median(released), "ms", at_most=limit),
            figure(f"{name}, samples", len(released), "count"),
        ]
    return rows


def _cost(results: Results) -> list[Figure]:
    costs = [w.cost for w in results.windows if w.cost is not None]
    tokens = sum(cost.tokens for cost in costs)
    if not tokens:
        return []
    cpu = sum(cost.cpu_s for cost in costs)
    share = 100 * cpu / sum(cost.elapsed_s for cost in costs)
    pss = max(cost.pss_bytes for cost in costs) / 1e6
    name = "guard and tap"
    apart = analysis.parted(costs)
    rows = (
        []
        if apart is None
        else [
            figure(f"{name}: fixed", 100 * apart.fixed, "% of a core"),
            figure(f"{name}: 1,000 tokens/s more", 1e5 * apart.per_token_s, "% of a core"),
            figure(f"{name}: at 1,000 tokens/s", 100 * apart.at(1000), "% of a core", at_most=3.0),
        ]
    )
    return [
        *rows,
        figure(f"{name}: share of a core", share, "%"),
        figure(f"{name}: core per 1,000 tokens/s", 1e5 * cpu / tokens, "%", at_most=3.0),
        figure(f"{name}: memory (PSS)", pss, "MB", at_most=100.0),
        figure(f"{name}: memory (RSS)", max(c.rss_bytes for c in costs) / 1e6, "MB"),
    ]


def table(results: Results) -> str:
    """All conditions side by side."""
    lines = []
    for load in results.loads:
        alone = results.of(load, "alone")
        count = sum(len(w.measured) for w in alone)
        lines.append(f"{load}: {count} requests in {len(alone)} rounds, ms and ratio to alone")
        heads = "".join(f"{name:>18}" for name, *_ in LATENCIES)
        ends = f"{'rollout tok/s':>15}{'of idle':>9}{'in idle':>9}"
        lines.append(f"  {'':<12}{heads}{ends}  added [95 %] (new, spared)")
        lines += [_line(results, load, condition) for condition in results.conditions(load)]
    return "\n".join(lines) + "\n"


def _line(results: Results, load: str, condition: str) -> str:
    windows, alone = results.of(load, condition), results.of(load, "alone")
    cells = []
    for _, what, q, _ in LATENCIES:
        values = [value for window in windows for value in window.values(what)]
        found = analysis.ratio(analysis.pairs(alone, windows, what), q)
        value = f"{1e3 * quantile(values, q):.1f}" if values else "-"
        cells.append(f"{value:>10} {f'x{found.value:.2f}' if found else '':>7}")
    return f"  {condition:<12}{''.join(cells)}{_harvested(results, load, condition)}"


def _harvested(results: Results, load: str, condition: str) -> str:
    windows, alone = results.of(load, condition), results.of(load, "alone")
    solo, aims = results.solo.rollout_rate, results.aims(load)
    bursty = condition not in WITHOUT and aims is None
    shares = [kind(windows, alone, solo) for kind in (analysis.of_idle, analysis.in_idle)]
    cells = "".join(f"{f'{s.value:.2f}' if s and bursty else '':>9}" for s in shares)
    more = ""
    if aims is not None and condition != "alone":
        found = analysis.compared(windows, alone, aims)
        ends = f"[{found.net.low:.0f}, {found.net.high:.0f}]"
        more = f"  {found.net.value:.0f} {ends} ({found.fresh}, {found.spared})"
    return f"{analysis.harvest(windows):>15.0f}{cells}{more}"
