"""Charts as SVG files that stand alone: intervals by row, and lines over time. No library.

Every function depends on its arguments alone, so equal results give equal files. Colours are fixed
and readable on white and on dark pages, because the files lie in the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2f6fde", "#d9822b", "#3b9d6a", "#b5484f", "#8157c2", "#6b7a8f")
_INK, _GRID = "#5a6472", "#c9d0d9"
_ROW, _TOP, _BOTTOM, _RIGHT = 22, 34, 34, 70


@dataclass(frozen=True)
class ChartRow:
    """One row of an interval chart; without ends only the value is drawn."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: int = 0


@dataclass(frozen=True)
class ChartLine:
    """One line; points ascend in x."""

    name: str
    points: Sequence[tuple[float, float]]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover ``low`` to ``high``."""
    raw = max(high - low, 1e-12) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def intervals(title: str, rows: Sequence[ChartRow], *, unit: str, reference: float | None) -> str:
    """Values with their intervals, one row each, and a line to compare with."""
    left = 12 + max((len(row.label) for row in rows), default=0) * 6.6
    width, height = 760.0, _TOP + _BOTTOM + _ROW * max(1, len(rows))
    ends = [
        end for row in rows for end in (row.low, row.value, row.high, reference) if end is not None
    ]
    low, high = _range(ends)

    def at(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - _RIGHT)

    parts = _grid(ticks(low, high), at, height, unit, (left + width - _RIGHT) / 2)
    if reference is not None:
        parts.append(_rule(at(reference), height, _INK, dashed=True))
    for index, row in enumerate(rows):
        y = _TOP + _ROW * (index + 0.5)
        colour = COLOURS[row.colour % len(COLOURS)]
        parts.append(_text(left - 8, y + 4, row.label, "end"))
        if row.low is not None and row.high is not None:
            parts.append(
                f'<line x1="{at(row.low):.1f}" x2="{at(row.high):.1f}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="{colour}" stroke-width="5" opacity="0.35"/>'
            )
        parts.append(f'<circle cx="{at(row.value):.1f}" cy="{y:.1f}" r="4.2" fill="{colour}"/>')
        parts.append(_text(width - _RIGHT + 10, y + 4, _short(row.value), "start"))
    return _page(title, width, height, parts)


def lines(title: str, series: Sequence[ChartLine], *, x: str, y: str) -> str:
    """Lines over a common axis."""
    width, height, left, right = 760.0, 280.0, 64.0, 20.0
    xs = [point[0] for one in series for point in one.points] or [0.0, 1.0]
    ys = [point[1] for one in series for point in one.points] or [0.0, 1.0]
    x0 = min(xs)
    x1 = max(*xs, x0 + 1e-9)
    low, high = _range([0.0, *ys])

    def across(value: float) -> float:
        return left + (value - x0) / (x1 - x0) * (width - left - right)

    def up(value: float) -> float:
        return height - _BOTTOM - (value - low) / (high - low) * (height - _TOP - _BOTTOM - 14)

    parts = _grid(ticks(x0, x1, 8), across, height, x, (left + width) / 2)
    for value in ticks(low, high, 4):
        parts.append(_text(left - 6, up(value) + 4, _short(value), "end"))
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{up(value):.1f}" y2="{up(value):.1f}" '
            f'stroke="{_GRID}" stroke-width="0.6"/>'
        )
    parts.append(_text(left, _TOP + 6, y, "start"))
    place = width - right
    for index, one in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in one.points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
        parts.append(_text(place, _TOP + 6, one.name, "end", colour))
        place -= 7.0 * len(one.name) + 18
    return _page(title, width, height, parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    pad = (high - low) * 0.06 or 0.5
    return (0.0 if 0 <= low < 0.4 * high else low - pad), high + pad


def _grid(
    values: Sequence[float], at: object, height: float, unit: str, middle: float
) -> list[str]:
    parts: list[str] = []
    assert callable(at)  # noqa: S101  # a scale
    for value in values:
        parts.append(_rule(at(value), height, _GRID))
        parts.append(_text(at(value), height - _BOTTOM + 15, _short(value), "middle"))
    parts.append(_text(middle, height - 4, unit, "middle"))
    return parts


def _rule(x: float, height: float, colour: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{height - _BOTTOM}" '
        f'stroke="{colour}" stroke-width="0.8"{dash}/>'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = _INK) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{escape(text)}</text>'


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:.4g}k"
    return f"{value:.3g}"


def _page(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="system-ui, sans-serif" font-size="11" role="img" '
        f'aria-label="{escape(title)}">'
    )
    name = (
        f'<text x="8" y="18" font-size="13" font-weight="600" fill="{_INK}">{escape(title)}</text>'
    )
    return "\n".join([head, name, *parts, "</svg>"]) + "\n"
