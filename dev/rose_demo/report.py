"""``report.html`` and ``summary.json``: pure functions of a recording and its findings.

The page stands alone: inline SVG, no script, no font, no network. It says which figures come from a
CPU stand-in, because two engines on one core prove the control path and not GPU interference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np

from rose_core.accounting.breakdown import CostBreakdown, breakdown, lines
from rose_core.accounting.correct import Sampled
from rose_core.accounting.cost import MICRO, Prices
from rose_core.accounting.late import ServedTraffic, late_price
from rose_core.accounting.ledger import GpuTier, GpuTime, Ledger, ServingImpact, Trajectories
from rose_core.identity import published
from rose_demo.plots import Chart, Point, cumulative, steps
from rose_demo.records import Agents, Recording, Request, Role, Sample, Window
from rose_demo.statistics import (
    LENT_WINDOWS,
    WITHHELD_WINDOWS,
    Attainment,
    Comparison,
    growth,
    latencies,
    split,
    windows,
)
from rose_demo.verdicts import CheckResult, Findings, PromiseVerdict, of_event, show
from rose_demo.waterfall import CAPTION, waterfall
from rose_simulate.pages.statement_page import table

_MARKS = {
    CheckResult.KEPT: "good",
    CheckResult.BROKEN: "bad",
    CheckResult.UNPROVEN: "muted",
    CheckResult.MEASURED: "muted",
}
UNKNOWN = "unknown"
_TIME = "seconds since the start of the measurement"
# The demo's parts: two serving replicas, of which one lends, a dedicated engine and the trainer.
REPLICAS: Final = 2
OWN_GPUS: Final = 2
# A stand-in's currency: one hour of a GPU's place is 1; a lent hour is half of that.
DEDICATED_HOUR, LENT_HOUR = MICRO, MICRO // 2
_MILLISECONDS, _HOUR_S = 1000, 3600.0


def summary(recording: Recording, findings: Findings) -> dict[str, Any]:
    """The machine-readable result; ``verdicts`` maps each promise to its result."""
    figures = asdict(findings)
    verdicts = {verdict.promise: verdict.result.value for verdict in findings.verdicts}
    evaluations = of_event(recording.training, "evaluation")
    publishes = of_event(recording.training, "publish")
    return figures | {
        "verdicts": verdicts,
        "evidence": {
            verdict.promise: [f"{check.result}: {check.text}" for check in verdict.checks]
            for verdict in findings.verdicts
        },
        "costs": costs(recording, findings.attainments),
        "exit_code": findings.exit_code,
        "requests": len(recording.requests),
        "evaluation": dict(evaluations[-1]) if evaluations else None,
        "versions_published": len(publishes),
        "mean_changed_share": mean_changed_share(publishes),
        "agents": msgspec.to_builtins(recording.agents),
        "settings": msgspec.to_builtins(recording.settings),
        "notes": recording.notes,
    }


def mean_changed_share(publishes: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean share of elements changed per version after the first, which is sent whole."""
    shares = [float(record["changed_share"]) for record in publishes[1:]]
    return sum(shares) / len(shares) if shares else None


def page(recording: Recording, findings: Findings) -> str:
    """The whole report."""
    style = (files("rose_demo") / "report.css").read_text()
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>ROSE demo</title><style>{style}</style></head><body><main>",
        _header(recording),
        "<section class='verdicts'>" + "".join(map(_verdict, findings.verdicts)) + "</section>",
        _tiles(recording, findings),
        *_figures(recording),
        _trajectory(recording),
        "<h2>Serving latency, lent against withheld</h2>",
        _comparisons(findings.comparisons),
        "<h2>Against the SLO</h2>",
        _attainments(findings.attainments),
        _classes(recording),
        _agents(recording.agents),
        costs_section(costs(recording, findings.attainments)),
        _story(recording),
        _notes(recording),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _header(recording: Recording) -> str:
    settings, notes = recording.settings, recording.notes
    serving, rollout = (
        escape(notes.get(f"{use} engine", "stock SGLang")) for use in ("serving", "rollout")
    )
    return (
        "<header><h1>ROSE demo</h1><p>Live traffic (a burst window of "
        f"<b>{escape(settings.trace)}</b>) on two serving replicas for {settings.seconds:.0f} s; "
        "one of them lent its idle time to a GRPO trainer's rollouts, the other never did. "
        f"Crossover windows of {settings.window_s:.0f} s.</p>"
        f"<p class='label'>CPU stand-in: {serving} serves and {rollout} runs rollouts, real "
        "processes that share one core. This shows signal, decision, stop, weights and accounting; "
        "it does not show interference on a GPU.</p></header>"
    )


def _verdict(verdict: PromiseVerdict) -> str:
    checks = "".join(
        f"<li class='{_MARKS[check.result]}'>{escape(check.text)}</li>" for check in verdict.checks
    )
    return (
        f"<article class='{_MARKS[verdict.result]}'><h3>{escape(verdict.promise)}</h3>"
        f"<p class='word'>{verdict.result}</p><ul>{checks}</ul></article>"
    )


def tiles(recording: Recording, findings: Findings) -> list[tuple[str, str]]:
    """(figure, what it is) for the row of large figures."""
    evaluations = of_event(recording.training, "evaluation")
    publishes = of_event(recording.training, "publish")
    median = next((c for c in findings.comparisons if c.latency == "ttft"), None)
    density = mean_changed_share(publishes)
    last = evaluations[-1] if evaluations else None
    return [
        (_ratio(median), "TTFT p50, lent / withheld"),
        (_number(findings.borrowed_tokens), "tokens harvested"),
        (_number(findings.open_seconds, "{:.0f} s"), "device time used by rollouts"),
        (_number(findings.borrowed_turn_share, "{:.0%}"), "of turns on borrowed engines"),
        (
            UNKNOWN if last is None else f"{last['frozen']:.2f} → {last['trained']:.2f}",
            "reward on fixed tasks",
        ),
        (f"{len(publishes)}", f"versions, {_number(density, '{:.0%}')} of elements changed"),
    ]


def _ratio(comparison: Comparison | None) -> str:
    if comparison is None or comparison.ratio is None:
        return UNKNOWN
    return f"{comparison.ratio.value:.2f} x"


def _number(value: float | None, form: str = "{:,}") -> str:
    return UNKNOWN if value is None else form.format(value)


def _tiles(recording: Recording, findings: Findings) -> str:
    cells = "".join(
        f"<div><b>{escape(figure)}</b><span>{escape(text)}</span></div>"
        for figure, text in tiles(recording, findings)
    )
    return f"<section class='tiles'>{cells}</section>"


def _figures(recording: Recording) -> list[str]:
    """Charts in rows of two; the caption of a row is that of its first chart."""
    charts = all_charts(recording)
    rows = [charts[i : i + 2] for i in range(0, len(charts), 2)]
    return [
        "<figure><div class='pair'>"
        + "".join(svg for svg, _ in row)
        + f"</div><figcaption>{escape(row[0][1])}</figcaption></figure>"
        for row in rows
    ]


def _trajectory(recording: Recording) -> str:
    if not recording.trajectory:
        return ""
    svg = waterfall(recording.trajectory, recording.gate)
    return f"<figure>{svg}<figcaption>{escape(CAPTION)}</figcaption></figure>"


def _milliseconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 1e3:.1f}"


def _comparisons(comparisons: Sequence[Comparison]) -> str:
    head = (
        "latency",
        "pairs",
        "lent ms",
        "withheld ms",
        "ratio",
        "control replica",
        "beyond the control",
    )
    rows = [
        (
            f"{c.latency.upper()} p{c.quantile * 100:.0f}",
            str(c.pairs),
            _milliseconds(c.lent_s),
            _milliseconds(c.withheld_s),
            show(c.ratio),
            show(c.control),
            show(c.excess),
        )
        for c in comparisons
    ]
    note = (
        "<p class='note'>Every request was sent twice, in a lent and in a withheld window; pairs "
        "lie whole inside their windows. Ratios of quantiles, 95 % bootstrap intervals over "
        "pairs. The control replica is never lent; its ratio over the same "
        "windows is the machine's own noise.</p>"
    )
    return _table(head, rows) + note


def _attainments(attainments: Mapping[str, Attainment]) -> str:
    head = ("replica and windows", "requests", "within SLO", "TTFT at percentile ms", "TPOT ms")
    rows = [
        (
            name,
            str(a.count),
            _number(a.met, "{:.1%}"),
            _milliseconds(a.ttft_s),
            _milliseconds(a.tpot_s),
        )
        for name, a in attainments.items()
    ]
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _classes(recording: Recording) -> str:
    """What each kind of GPU did; nothing where the router knows no kinds."""
    found = next((one.classes for one in reversed(recording.samples) if one.classes), {})
    if not found:
        return ""
    head = ("device class", "turns", "tokens read", "tokens written", "ms per token", "ms read")
    rows = [
        (
            name,
            _number(one.turns),
            _number(one.read),
            _number(one.written),
            _milliseconds(one.step_s),
            _number(None if one.prefill_s is None else one.prefill_s * 1e3, "{:.3f}"),
        )
        for name, one in found.items()
    ]
    note = (
        "<p class='note'>As the router counted and measured it: prompt tokens that no cache had, "
        "output tokens, and what one of each takes. Engines whose kind is unknown are in none.</p>"
    )
    return f"<h2>By device class</h2>{_table(head, rows)}{note}"


def _agents(agents: Agents | None) -> str:
    """What agents with a shell task lost when their host was killed, and what saving them took."""
    if agents is None:
        return ""
    title = "<h2>Agents whose sandbox host was killed</h2>"
    if agents.skipped:
        return f"{title}<p class='note'>Skipped: {escape(agents.skipped)}</p>"
    hidden = max(agents.saving_s - agents.held_s, 0.0)
    rows = [
        ("agents that ended as if nothing had happened", f"{agents.verified} of {agents.agents}"),
        ("turns; went on from turn", f"{agents.turns}; {', '.join(map(str, agents.restored))}"),
        *(
            (f"turns that saved: {name}", str(count))
            for name, count in sorted(agents.saved.items())
        ),
        ("bytes written", _number(agents.written_bytes)),
        ("of what full checkpoints would be", _share(agents.written_bytes, agents.state_bytes)),
        ("time of saving that the model's answers hid", _share(hidden, agents.saving_s)),
        ("seconds in all", f"{agents.seconds:.0f}"),
        *(("not as undisturbed", one) for one in agents.failed),
        *([("ended before all were looked at", agents.stopped)] if agents.stopped else []),
    ]
    note = (
        "<p class='note'>Each agent writes files, keeps a variable, a job in the background and a "
        "small service, and asks the lease's model after each command. After the measurement, so "
        "that it disturbs none of it.</p>"
    )
    return f"{title}{_table(('figure', 'value'), rows)}{note}"


def _share(part: float, whole: float) -> str:
    return UNKNOWN if not whole else f"{part / whole:.0%}"


def _story(recording: Recording) -> str:
    if not recording.story:
        return ""
    return f"<h2>kubectl get servpool,rlease,rslot</h2><pre>{escape(recording.story)}</pre>"


def _notes(recording: Recording) -> str:
    settings = msgspec.to_builtins(recording.settings)
    rows = [(name, str(value)) for name, value in {**recording.notes, **settings}.items()]
    licence = (
        "Traffic: Azure LLM inference trace 2023, Microsoft, CC-BY-4.0; "
        "Patel et al., Splitwise, ISCA 2024."
    )
    return f"<h2>Run</h2>{_table(('name', 'value'), rows)}<p class='note'>{licence}</p>"


def all_charts(recording: Recording) -> list[tuple[str, str]]:
    """(SVG, caption) in the order of the page."""
    return [
        (latency_over_time(recording, "ttft"), _LATENCY_CAPTION),
        (latency_over_time(recording, "tpot"), ""),
        (gate_timeline(recording, whole=True), _GATE_CAPTION),
        (gate_timeline(recording, whole=False), ""),
        (distribution(recording, "ttft"), _DISTRIBUTION_CAPTION),
        (distribution(recording, "tpot"), ""),
        (reward(recording), _REWARD_CAPTION),
        (harvest(recording), ""),
        (versions(recording), _VERSION_CAPTION),
        (density(recording), ""),
    ]


_LATENCY_CAPTION = (
    "Live requests on the lent replica. Shaded: crossover windows in which the guard lends nothing."
)


_GATE_CAPTION = (
    "When rollouts may compute beside the lent replica, and when live requests are in flight. "
    "Right: the busiest 20 seconds."
)


_DISTRIBUTION_CAPTION = "Lent against withheld windows on the same replica and core."


_REWARD_CAPTION = (
    "Sampled reward per step, and three policies on fixed tasks with the same random numbers: "
    "trained, frozen at the start, and trained on shuffled advantages."
)


_VERSION_CAPTION = (
    "Weight versions published and attested on engines, and the share of elements each changed."
)


def horizon(recording: Recording) -> float:
    """End of the time axis."""
    times = [sample.at_s for sample in recording.samples]
    times += [request.end_s for request in recording.requests]
    return max([*times, 1.0])


def _withheld(samples: Sequence[Sample]) -> list[Point]:
    return [(a, b) for a, b, kind in windows(samples) if kind is Window.WITHHELD]


def latency_over_time(recording: Recording, latency: str) -> str:
    """Every request's latency on both replicas, against the SLO."""
    settings = recording.settings
    limit = settings.ttft_slo_s if latency == "ttft" else settings.tpot_slo_s
    by_role = {role: _points(recording.requests, role, latency) for role in Role}
    highest = max([y for points in by_role.values() for _, y in points], default=0.0)
    chart = Chart(
        f"{latency.upper()} of live requests, ms",
        (0.0, horizon(recording)),
        (0.0, max(highest, limit * 1e3) * 1.08),
        _TIME,
    )
    chart.bands(_withheld(recording.samples), "muted", "withheld")
    chart.dots(by_role[Role.CONTROL], "muted", "never lent", 1.8)
    chart.dots(by_role[Role.LENT], "serving", "lent replica")
    chart.level(limit * 1e3, "bad", "SLO")
    return chart.svg()


def _points(requests: Sequence[Request], role: Role, latency: str) -> list[Point]:
    rows = [(r.at_s, r.ttft_s if latency == "ttft" else r.tpot_s, r.role) for r in requests]
    return [(at, value * 1e3) for at, value, of in rows if of is role and value is not None]


def busiest(requests: Sequence[Request], seconds: float = 20.0) -> Point:
    """The stretch in which most prompt tokens arrive at the lent replica."""
    rows = [request for request in requests if request.role is Role.LENT]
    starts = [request.at_s for request in rows] or [0.0]

    def load(start: float) -> int:
        return sum(r.prompt_tokens for r in rows if start <= r.at_s < start + seconds)

    start = max(starts, key=load)
    return start, start + seconds


def gate_timeline(recording: Recording, *, whole: bool) -> str:
    """Gate open, windows withheld, live requests in flight, as bars over time."""
    span = (0.0, horizon(recording)) if whole else busiest(recording.requests)
    title = "Gate and live requests" if whole else "The same in the busiest 20 seconds"
    chart = Chart(title, span, (0.0, 3.0), _TIME, height=190)
    live = [(r.at_s, r.end_s) for r in recording.requests if r.role is Role.LENT]
    chart.bars(_clip(live, span), 2.5, 0.6, "serving")
    chart.bars(_clip(recording.gate or opened(recording.samples), span), 1.5, 0.6, "rollout")
    chart.bars(_clip(_withheld(recording.samples), span), 0.5, 0.6, "muted")
    chart.row_labels([("serving", 2.5), ("rollouts", 1.5), ("withheld", 0.5)])
    return chart.svg(y_ticks=False)


def opened(samples: Sequence[Sample]) -> list[Point]:
    """Intervals in which the gate was seen open."""
    spans: list[Point] = []
    for sample, following in pairwise(samples):
        if not sample.gate_open:
            continue
        if spans and spans[-1][1] == sample.at_s:
            spans[-1] = (spans[-1][0], following.at_s)
        else:
            spans.append((sample.at_s, following.at_s))
    return spans


def _clip(spans: Iterable[Point], window: Point) -> list[Point]:
    low, high = window
    return [(max(a, low), min(b, high)) for a, b in spans if b > low and a < high]


def distribution(recording: Recording, latency: str) -> str:
    """Cumulative distributions in lent and withheld windows."""
    parts = split(recording.requests, windows(recording.samples), Role.LENT)
    values = {kind: latencies(parts[kind], latency) * 1e3 for kind in Window}
    joined = np.concatenate([*values.values(), [1.0]])
    chart = Chart(
        f"{latency.upper()}: share of requests at or below",
        (0.0, float(np.quantile(joined, 0.99)) * 1.05),
        (0.0, 1.0),
        "milliseconds",
    )
    for kind, colour in ((Window.WITHHELD, "muted"), (Window.LENT, "serving")):
        points = [p for p in cumulative(values[kind].tolist()) if p[0] <= chart.x[1]]
        chart.line(points, colour, f"{kind.value} ({len(values[kind])})")
    return chart.svg()


def _series(records: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    return [(float(r["seconds"]), float(r[name])) for r in records if r.get(name) is not None]


def reward(recording: Recording) -> str:
    """Reward of the sampled turns and of the three policies on the fixed tasks."""
    sampled = _series(of_event(recording.training, "step"), "reward")
    evaluations = of_event(recording.training, "evaluation")
    end = max([x for x, _ in sampled] + [float(e["seconds"]) for e in evaluations] + [1.0])
    chart = Chart("Reward", (0.0, end), (0.0, 1.0), "seconds since the trainer's start")
    chart.dots(sampled, "rollout", "sampled", 1.6)
    for name, colour in (("trained", "good"), ("frozen", "muted"), ("shuffled", "bad")):
        chart.line(_series(evaluations, name), colour, name)
    return chart.svg()


def harvest(recording: Recording) -> str:
    """Output tokens by kind of engine, from the start of the measurement."""
    series = {
        kind: _from_zero([(s.at_s, getattr(s, f"{kind}_tokens")) for s in recording.samples])
        for kind in ("borrowed", "dedicated")
    }
    top = max([y for points in series.values() for _, y in points] + [1.0])
    chart = Chart("Rollout tokens", (0.0, horizon(recording)), (0.0, top * 1.05), _TIME)
    chart.bands(_withheld(recording.samples), "muted", "withheld")
    chart.line(series["dedicated"], "muted", "dedicated engine")
    chart.line(series["borrowed"], "rollout", "borrowed")
    return chart.svg()


def _from_zero(points: Sequence[tuple[float, int | None]]) -> list[Point]:
    known = [(at, value) for at, value in points if value is not None]
    return [(at, float(value - known[0][1])) for at, value in known]


def sequence(version: str) -> float | None:
    """The sequence of a published version, or None for what nobody has published."""
    found = published(version)
    return None if found is None else float(found.sequence)


def versions(recording: Recording) -> str:
    """Sequence numbers attested on each engine over time."""
    names = sorted({name for sample in recording.samples for name in sample.versions})
    lines: dict[str, list[Point]] = {}
    for name in names:
        found = [(s.at_s, sequence(s.versions.get(name, ""))) for s in recording.samples]
        lines[name] = [(at, value) for at, value in found if value is not None]
    top = max([y for points in lines.values() for _, y in points] + [1.0])
    chart = Chart(
        "Version attested on engines", (0.0, horizon(recording)), (0.0, top * 1.05), _TIME
    )
    for name, colour in zip(names, ("rollout", "serving", "good", "bad"), strict=False):
        chart.line(steps(lines[name], horizon(recording)), colour, name)
    return chart.svg()


def density(recording: Recording) -> str:
    """Share of elements that each publish changed."""
    points = _series(of_event(recording.training, "publish"), "changed_share")
    end = max([x for x, _ in points] + [1.0])
    chart = Chart(
        "Share of elements changed per version",
        (0.0, end),
        (0.0, 1.0),
        "seconds since the trainer's start",
    )
    chart.dots(points, "good")
    return chart.svg()


def late_requests(attainments: Mapping[str, Attainment]) -> int:
    """Requests of the lent replica that are late beyond what is late while nothing is lent."""
    lent, held = attainments.get(LENT_WINDOWS), attainments.get(WITHHELD_WINDOWS)
    if lent is None or held is None or lent.met is None or held.met is None:
        return 0
    return max(0, round((held.met - lent.met) * lent.count))


def costs(recording: Recording, attainments: Mapping[str, Attainment]) -> CostBreakdown | None:
    """What the run cost; None where nothing is known of its tokens or its gate.

    Nobody types a count: the trainer says in its progress what it trained on and how much of it was
    right, the router counts tokens by kind of engine, the guard the time its gate was open.
    """
    trainings = [one for one in recording.training if one.get("event") == "step"]
    borrowed = growth(recording.samples, "borrowed_tokens")
    dedicated = growth(recording.samples, "dedicated_tokens")
    opened = growth(recording.samples, "open_s")
    if borrowed is None or dedicated is None or opened is None or not trainings:
        return None
    # Tokens, steps and the gate count from before the first turn, and so does the bill.
    seconds = recording.before_s + recording.samples[-1].at_s - recording.samples[0].at_s
    accepted, correct, trained = (
        _sum(trainings, field) for field in ("trained", "correct", "kept")
    )
    served = recording.settings.seconds / _HOUR_S  # the requests are those of the measurement
    requests = ServedTraffic(len(recording.requests), REPLICAS * served)
    violation = late_price(requests, DEDICATED_HOUR)
    late = late_requests(attainments)
    own = round(OWN_GPUS * seconds * _MILLISECONDS)
    ledger = Ledger(
        dedicated=GpuTime(own, own),
        borrowed=GpuTime(
            round(seconds * _MILLISECONDS),
            min(round(seconds * _MILLISECONDS), round(opened * _MILLISECONDS)),
        ),
        trajectories=Trajectories(None, None, accepted, correct),
        serving=ServingImpact(len(recording.requests), late),
    )
    return breakdown(
        ledger,
        Prices(DEDICATED_HOUR, LENT_HOUR, violation.whole, reserve_hour=DEDICATED_HOUR),
        Sampled({GpuTier.DEDICATED: int(dedicated), GpuTier.BORROWED: int(borrowed)}, trained),
        violation=violation,
    )


def costs_markdown(found: CostBreakdown | None) -> str:
    """The same lines as a table for a page of the documentation; empty where nothing is known."""
    if found is None:
        return ""
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines(found))
    return f"| | figure | |\n|---|---|---|\n{rows}"


def _sum(trainings: Sequence[Mapping[str, Any]], field: str) -> int:
    return sum(int(one.get(field, 0)) for one in trainings)


def costs_section(found: CostBreakdown | None) -> str:
    """The section of the page."""
    head = "<h2>What a correct answer cost</h2>"
    if found is None:
        return f"{head}<p class='note'>Unknown: tokens, gate or training were not recorded.</p>"
    note = (
        "<p class='note'>A GPU's hour is 1, a lent one 0.5: prices of a stand-in, to show how the "
        "parts make the bill. An accepted trajectory is one that was trained on; it is correct "
        "where each of its turns was. A stand-in has no GPU's memory, so none is counted as kept "
        "back.</p>"
    )
    return f"{head}{table(found)}{note}"
