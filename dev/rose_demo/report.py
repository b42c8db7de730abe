"""``report.html`` and ``summary.json``: pure functions of a recording and its findings.

The page stands alone: inline SVG, no script, no font, no network. It says which figures come from a
CPU stand-in, because two engines on one core prove the control path and not GPU interference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

from rose_demo.charts import all_charts
from rose_demo.costs import costs, section
from rose_demo.records import Agents, Recording
from rose_demo.statistics import Attainment, Comparison
from rose_demo.verdicts import CheckResult, Findings, PromiseVerdict, of_event, show
from rose_demo.waterfall import CAPTION, waterfall

_MARKS = {
    CheckResult.KEPT: "good",
    CheckResult.BROKEN: "bad",
    CheckResult.UNPROVEN: "muted",
    CheckResult.MEASURED: "muted",
}
UNKNOWN = "unknown"


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
        section(costs(recording, findings.attainments)),
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
