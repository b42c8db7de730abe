"""A run on disk after each window: its figures for readers, its windows to go on from.

``NAME-windows.json`` holds what every window measured and what the probes found, so that a run that
was cut off goes on with the same arrivals and the same SLO. Next step: ``report`` makes figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.guard.measured import Window
from bench.guard.pace import Plan
from bench.guard.report import figures, table
from bench.guard.results import Crash, Results
from bench.guard.windows import Goal, Solo
from bench.record import FOLDER, save
from rose_core.stats import quantile
from rose_demo.plots import Chart, cumulative

_COLOURS = {
    "alone": "#111827",
    "control": "#4b9b6e",
    "unguarded": "#c2263f",
    "static-duty": "#8a94a3",
    "polled": "#d97706",
    "rose-paper": "#7c3aed",
    "ours": "#2563eb",
}
_STYLE = """<style>
svg { background:#fff } text { font:11px system-ui, "DejaVu Sans", sans-serif; fill:#1c2430 }
.title { font-size:12.5px; font-weight:600 } .tick, .legend { fill:#6b7482 }
.grid { stroke:#e5e8ec } .axis { stroke:#6b7482 }
:root { %s }
</style>"""
_WIDTH, _HEIGHT = 640, 260


def picture(results: Results) -> str:
    """The SVG document."""
    charts = [chart for load in results.loads for chart in _row(results, load)]
    height = _HEIGHT * ((len(charts) + 1) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {height}" '
        f'width="{2 * _WIDTH}" height="{height}">',
        _STYLE % "; ".join(f"--{_variable(n)}:{c}" for n, c in _COLOURS.items()),
    ]
    for index, chart in enumerate(charts):
        x, y = _WIDTH * (index % 2), _HEIGHT * (index // 2)
        place = f'<svg x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" '
        parts.append(chart.svg().replace("<svg ", place, 1))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _variable(condition: str) -> str:
    return condition.replace("-", "_")


def _row(results: Results, load: str) -> list[Chart]:
    shown = [c for c in results.conditions(load) if c in _COLOURS]
    charts = []
    for what in ("TTFT", "TPOT"):
        values = {c: [1e3 * v for w in results.of(load, c) for v in w.values(what)] for c in shown}
        longest = max((quantile(v, 0.99) for v in values.values() if v), default=1.0)
        chart = Chart(
            f"{load}: {what}",
            (0.0, 1.05 * longest),
            (0.0, 1.0),
            x_title="milliseconds",
            y_title="share of requests",
        )
        for condition, found in values.items():
            chart.line(cumulative(found), _variable(condition), condition)
        charts.append(chart)
    return charts


class RunRecord(msgspec.Struct, frozen=True):
    """Everything a run has measured.

    Attributes:
        of: what must be the same for the windows to belong together.
    """

    of: dict[str, str]
    solo: Solo
    goals: dict[str, Goal]
    windows: list[Window]
    ended: int
    crashes: list[Crash]


class NotTheSame(Exception):
    """The windows on disk are of another run; the message says in what they differ."""


def name_of(plan: Plan) -> str:
    """Stem of the names of a run's files."""
    name = plan.serving.name
    return "guard" if name == "sglang" else f"guard-{name}"


def _of(plan: Plan) -> dict[str, str]:
    return {
        "model": plan.model,
        "seconds": f"{plan.seconds:g}",
        "seed": str(plan.seed),
        "serving": f"{plan.serving.name} {plan.serving.version}",
    }


def _path(plan: Plan, folder: Path) -> Path:
    return folder / f"{name_of(plan)}-windows.json"


def keep(plan: Plan, results: Results, notes: Sequence[str], folder: Path = FOLDER) -> None:
    """Write figures, table, picture and windows as they are now."""
    kept = RunRecord(
        *(_of(plan), results.solo, results.goals, results.windows),
        *(results.ended, results.crashes),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(plan, folder)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(kept))
    fresh.replace(path)
    name = name_of(plan)
    save(name, figures(results), notes=notes, folder=folder)
    (folder / f"{name}.svg").write_text(picture(results))
    (folder / f"{name}.txt").write_text(table(results))


def again(plan: Plan, folder: Path = FOLDER) -> Results | None:
    """What an earlier run measured; None when there was none.

    Raises:
        NotTheSame: it was run with other knobs.
    """
    path = _path(plan, folder)
    if not path.exists():
        return None
    kept = msgspec.json.decode(path.read_bytes(), type=RunRecord)
    other = [f"{key} {value}" for key, value in kept.of.items() if _of(plan).get(key) != value]
    if other:
        raise NotTheSame(f"{path} was measured with {', '.join(other)}: run without --resume")
    results = Results(kept.windows, kept.goals, kept.solo)
    results.ended, results.crashes = kept.ended, kept.crashes
    return results
