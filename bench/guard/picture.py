"""One SVG of a run: distributions of TTFT and TPOT, a chart per load, a line per condition."""

from __future__ import annotations

from bench.guard.results import Results
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
