"""A dashboard as one SVG, drawn from what a Prometheus answers to the panels' own queries.

Grafana cannot be had without its makers' builds, so pages that show dashboards show these: the
panels, places, units and legends of the generated JSON, with Grafana's variables at "all".
``picture`` is pure; ``last`` asks a Prometheus for the series.
"""

from __future__ import annotations

import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from rose_dev.dashboards.model import Dashboard, text
from rose_dev.errors import DevelopmentError

_THOUSANDS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_PARTS = ((1e-3, "ms", 1e3), (1e-6, "µs", 1e6), (0.0, "ns", 1e9))
_LONG = ((86400.0, "d"), (3600.0, "h"), (120.0, "min"))
_SUFFIXES = {"ops": " op/s", "reqps": " req/s", "pps": " p/s", "Bps": "B/s", "bytes": "B"}

_COLOURS = ("#3b7dd8", "#d9822b", "#2f9e5b", "#b14fc5", "#c9302c", "#0f9fa8", "#8a6d3b", "#6b7280")
_LEGENDS = 6
_GAP_STEPS = 1.5
STEP_COLOURS = {"green": "#2f9e5b", "orange": "#d9822b", "red": "#c9302c"}
_LEGEND = re.compile(r"{{(\w+)}}")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.h{font-weight:600}.s{fill:#6b7280;"
    "font-size:11px}.v{font-size:26px;font-weight:600}"
)

Json = dict[str, Any]
# What Grafana fills in.
FILLED = {"$__rate_interval": "30s", "$__range": "5m", "$job": ".+", "$instance": ".+"}
_POINTS = 200.0


def written(value: float, unit: str) -> str:
    """A value as people read it: with Grafana's unit, three digits at most."""
    if not math.isfinite(value):
        return "-"
    if unit == "s":
        return _time(value)
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    return f"{_short(value, spaced=unit in {'Bps', 'bytes'})}{_SUFFIXES.get(unit, '')}"


def _short(value: float, *, spaced: bool) -> str:
    space = " " if spaced else ""
    for size, letter in _THOUSANDS:
        if abs(value) >= size:
            return f"{_digits(value / size)}{' '}{letter}"
    return f"{_digits(value)}{space}"


def _time(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    for size, name in _LONG:
        if abs(seconds) >= size:
            return f"{_digits(seconds / (60.0 if name == 'min' else size))} {name}"
    if abs(seconds) >= 1:
        return f"{_digits(seconds)} s"
    for size, name, factor in _PARTS:
        if abs(seconds) >= size:
            return f"{_digits(seconds * factor)} {name}"
    return f"{_digits(seconds)} s"


def _digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


_CELL, _LINE, _GAP, _TOP = 50, 30, 6, 46


@dataclass(frozen=True)
class Series:
    """One line: a legend's labels, and (time, value) in order."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]


Ask = Callable[[str], Sequence[Series]]


@dataclass(frozen=True)
class Line:
    """A series under the name that the legend gives it."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Span:
    """The time that all panels of a picture show, whatever each has values of."""

    since: float
    until: float


def picture(board: Dashboard, ask: Ask) -> str:
    """The dashboard as SVG text."""
    panels = json.loads(text(board))["panels"]
    shown = {panel["id"]: lines(panel, ask) for panel in panels if panel["type"] != "row"}
    times = [at for found in shown.values() for line in found for at, _ in line.points]
    span = Span(min(times, default=0.0), max(times, default=0.0))
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width, height = 24 * _CELL + 2 * _GAP, _TOP + bottom * _LINE + _GAP
    drawn = "".join(_panel(panel, shown.get(panel["id"], []), span) for panel in panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img"><title>{escape(board.title)}</title>'
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" fill="#f4f5f7"/>'
        f'<text x="14" y="24" class="h" style="font-size:17px">{escape(board.title)}</text>'
        f'<text x="14" y="40" class="s">{escape(board.description)}</text>{drawn}</svg>\n'
    )


def lines(panel: Json, ask: Ask) -> list[Line]:
    """Every line of a panel, under its legend."""
    return [
        Line(_named(target["legendFormat"], series.labels), series.points)
        for target in panel["targets"]
        for series in ask(target["expr"])
        if series.points
    ]


def _named(legend: str, labels: dict[str, str]) -> str:
    if legend == "__auto":
        return ", ".join(labels[name] for name in sorted(labels))
    return _LEGEND.sub(lambda found: labels.get(found[1], ""), legend).strip()


def _panel(panel: Json, found: list[Line], span: Span) -> str:
    at = panel["gridPos"]
    x, y = at["x"] * _CELL + _GAP, _TOP + at["y"] * _LINE
    if panel["type"] == "row":
        return f'<text x="{x + 8}" y="{y + 21}" class="h">{escape(panel["title"])}</text>'
    width, height = at["w"] * _CELL - _GAP, at["h"] * _LINE - _GAP
    if panel["type"] == "stat":
        inside = _stat(panel, found, width, height)
    else:
        inside = _chart(panel, found, span, width, height)
    return (
        f'<g transform="translate({x},{y})"><rect width="{width}" height="{height}" rx="4" '
        f'fill="#fff" stroke="#d8dbe0"/><text x="10" y="19" class="h">{escape(panel["title"])}'
        f"</text>{inside}</g>"
    )


def _stat(panel: Json, found: Sequence[Line], width: int, height: int) -> str:
    shown = _unit(panel, found[0].points[-1][1]) if found else "No data"
    place = f'x="{width / 2:.0f}" y="{height / 2 + 18:.0f}" text-anchor="middle"'
    colour = _step(panel, found[0].points[-1][1]) if found else ""
    return f'<text {place} class="{"v" if found else "s"}"{colour}>{escape(shown)}</text>'


def _step(panel: Json, value: float) -> str:
    """The colour of a value as an attribute; nothing where no value is better than another."""
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {"steps": []})["steps"]
    reached = [s["color"] for s in steps if s["value"] is None or value >= s["value"]]
    return f' style="fill:{STEP_COLOURS[reached[-1]]}"' if reached else ""


def _unit(panel: Json, value: float) -> str:
    return written(value, panel["fieldConfig"]["defaults"]["unit"])


def _chart(panel: Json, found: list[Line], span: Span, width: int, height: int) -> str:
    if not found:
        return (
            f'<text x="{width / 2:.0f}" y="{height / 2:.0f}" text-anchor="middle" class="s">'
            "No data: it did not happen in this time</text>"
        )
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    if stacked:
        found = list(_stacked(found))
    frame = Frame.around(found, span, width, height)
    marks = [_mark(line, frame, colour) for line, colour in _coloured(found)]
    return "".join(
        [*_axes(panel, frame), *(reversed(marks) if stacked else marks), *_legend(found, frame)]
    )


def _stacked(found: Sequence[Line]) -> Iterator[Line]:
    """Each line on top of those before it."""
    below: dict[float, float] = {}
    for line in found:
        below = {**below, **{at: below.get(at, 0.0) + value for at, value in line.points}}
        yield Line(line.name, tuple((at, below[at]) for at, _ in line.points))


def _coloured(found: Sequence[Line]) -> Iterator[tuple[Line, str]]:
    for number, line in enumerate(found):
        yield line, _COLOURS[number % len(_COLOURS)]


@dataclass(frozen=True)
class Frame:
    """Where times and values lie in a panel; longer without a value than ``gap`` is a gap."""

    since: float
    until: float
    gap: float
    top: float
    width: int
    height: int

    @classmethod
    def around(cls, found: Sequence[Line], span: Span, width: int, height: int) -> Frame:
        """The frame that holds every value, from zero, as the panels say."""
        high = max((value for line in found for _, value in line.points), default=0.0)
        steps = [b - a for line in found for (a, _), (b, _) in pairwise(line.points)]
        gap = _GAP_STEPS * min(steps, default=0.0)
        return cls(span.since, span.until, gap, _round_up(high), width, height)

    def x(self, at: float) -> float:
        """Horizontal position of a time."""
        share = (at - self.since) / max(self.until - self.since, 1e-9)
        return round(74 + share * (self.width - 90), 1)

    def y(self, value: float) -> float:
        """Vertical position of a value."""
        return round(self.height - 56 - value / self.top * (self.height - 90), 1)


def _round_up(high: float) -> float:
    """A top that is round, and whose half is."""
    if high <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(high))
    return next(power * part for part in (1, 2, 4, 5, 6, 8, 10, 20) if power * part >= high)


def _axes(panel: Json, frame: Frame) -> Iterator[str]:
    left, right = frame.x(frame.since), frame.x(frame.until)
    for quarter in range(0, 5, 2):
        value = frame.top * quarter / 4
        y = frame.y(value)
        yield f'<path d="M{left} {y}H{right}" stroke="#e4e6ea"/>'
        yield (
            f'<text x="{left - 6}" y="{y + 4}" text-anchor="end" class="s">'
            f"{escape(_unit(panel, value))}</text>"
        )
    minutes = (frame.until - frame.since) / 60
    y = frame.height - 40
    yield f'<text x="{left}" y="{y}" class="s">-{minutes:.1f} min</text>'
    yield f'<text x="{right}" y="{y}" text-anchor="end" class="s">now</text>'


def _mark(line: Line, frame: Frame, colour: str) -> str:
    pieces: list[list[str]] = [[]]
    before = line.points[0][0]
    for at, value in line.points:
        if at - before > frame.gap > 0:
            pieces.append([])
        pieces[-1].append(f"{frame.x(at)},{frame.y(value)}")
        before = at
    return "".join(
        f'<polyline points="{" ".join(piece)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        for piece in pieces
    )


def _legend(found: Sequence[Line], frame: Frame) -> Iterator[str]:
    """Names below the chart, in three columns; how many more there are."""
    for number, (line, colour) in enumerate(list(_coloured(found))[:_LEGENDS]):
        column, row = number % 3, number // 3
        x, y = 14 + column * (frame.width - 20) / 3, frame.height - 22 + row * 15
        more = len(found) - _LEGENDS
        last = number == _LEGENDS - 1 and more > 0
        name = f"{line.name or 'value'}{f' and {more} more' if last else ''}"
        yield f'<rect x="{x:.0f}" y="{y - 8}" width="10" height="3" fill="{colour}"/>'
        yield f'<text x="{x + 15:.0f}" y="{y}" class="s">{escape(name)}</text>'


def filled(query: str) -> str:
    """The query with every variable at "all"."""
    for name, value in FILLED.items():
        query = query.replace(name, value)
    return query


def ask(url: str, path: str, **parameters: str) -> list[dict[str, Any]]:
    """The result of a query of Prometheus' HTTP API.

    Raises:
        DevelopmentError: nobody answers there, or the query is refused.
    """
    where = f"{url.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(where, timeout=30) as answer:  # noqa: S310
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        message = f"Prometheus at {url} refuses the query: {error.read().decode()[:300]}"
        raise DevelopmentError(message) from error
    except (OSError, ValueError) as error:
        message = f"no Prometheus at {url}: {error}; give its address with --prometheus"
        raise DevelopmentError(message) from error
    return found


def last(url: str, seconds: float) -> Ask:
    """Asks what a query was in the time up to now."""
    now = time.time()
    step = max(seconds / _POINTS, 1.0)
    span = {"start": f"{now - seconds:.3f}", "end": f"{now:.3f}", "step": f"{step:.3f}"}

    def history(query: str) -> list[Series]:
        return [_series(item) for item in ask(url, "query_range", query=filled(query), **span)]

    return history


def _series(item: dict[str, Any]) -> Series:
    values = ((float(at), float(value)) for at, value in item["values"])
    labels = {name: value for name, value in item["metric"].items() if name != "__name__"}
    return Series(labels, tuple(point for point in values if math.isfinite(point[1])))
