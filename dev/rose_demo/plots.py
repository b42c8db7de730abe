"""Charts as inline SVG: no library, no external asset, colours from the page's CSS variables.

A chart is a frame with axes plus marks in data coordinates. Every function returns SVG text and
depends on its arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from rose_simulate.pages.charts import ticks

Point = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 30, 38


def label(value: float) -> str:
    """A tick's text, short."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.10g}" if abs(value) < 1e-12 or abs(value) >= 0.001 else f"{value:.0e}"


@dataclass
class Chart:
    """One chart.

    Attributes:
        x, y: data ranges.
        title, x_title, y_title: texts; units belong into them.
    """

    title: str
    x: tuple[float, float]
    y: tuple[float, float]
    x_title: str = ""
    y_title: str = ""
    width: int = 640
    height: int = 260
    _marks: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str, str]] = field(default_factory=list)

    def _px(self, value: float) -> float:
        low, high = self.x
        share = (value - low) / max(high - low, 1e-12)
        return round(_LEFT + share * (self.width - _LEFT - _RIGHT), 1)

    def _py(self, value: float) -> float:
        low, high = self.y
        share = (min(max(value, low), high) - low) / max(high - low, 1e-12)
        return round(self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM), 1)

    def bands(self, spans: Sequence[Point], colour: str, name: str = "") -> None:
        """Shade intervals of x over the full height."""
        top, height = _TOP, self.height - _TOP - _BOTTOM
        self._marks += [
            f'<rect x="{self._px(a)}" y="{top}" width="{max(self._px(b) - self._px(a), 0.5):.1f}" '
            f'height="{height}" fill="var(--{colour})" opacity="0.16"/>'
            for a, b in spans
        ]
        self._name(name, colour, "band")

    def bars(self, spans: Sequence[Point], y: float, thickness: float, colour: str) -> None:
        """Horizontal bars at ``y``, ``thickness`` in data units."""
        top, bottom = self._py(y + thickness / 2), self._py(y - thickness / 2)
        self._marks += [
            f'<rect x="{self._px(a)}" y="{top}" width="{max(self._px(b) - self._px(a), 0.6):.1f}" '
            f'height="{bottom - top:.1f}" fill="var(--{colour})"/>'
            for a, b in spans
        ]

    def line(
        self, points: Sequence[Point], colour: str, name: str = "", *, dashed: bool = False
    ) -> None:
        """A polyline."""
        if points:
            text = " ".join(f"{self._px(x)},{self._py(y)}" for x, y in points)
            dash = ' stroke-dasharray="5 4"' if dashed else ""
            self._marks.append(
                f'<polyline points="{text}" fill="none" stroke="var(--{colour})" '
                f'stroke-width="1.8" stroke-linejoin="round"{dash}/>'
            )
        self._name(name, colour, "dash" if dashed else "line")

    def dots(
        self, points: Sequence[Point], colour: str, name: str = "", radius: float = 2.4
    ) -> None:
        """Unconnected points."""
        self._marks += [
            f'<circle cx="{self._px(x)}" cy="{self._py(y)}" r="{radius}" '
            f'fill="var(--{colour})" opacity="0.75"/>'
            for x, y in points
        ]
        self._name(name, colour, "dot")

    def ranges(self, points: Sequence[tuple[float, float, float]], colour: str) -> None:
        """Vertical error bars: (x, low, high)."""
        self._marks += [
            f'<line x1="{self._px(x)}" x2="{self._px(x)}" y1="{self._py(low)}" '
            f'y2="{self._py(high)}" stroke="var(--{colour})" stroke-width="1.2" opacity="0.6"/>'
            for x, low, high in points
        ]

    def level(self, y: float, colour: str, name: str) -> None:
        """A dashed horizontal line, for a limit."""
        self.line([(self.x[0], y), (self.x[1], y)], colour, name, dashed=True)

    def row_labels(self, names: Sequence[tuple[str, float]]) -> None:
        """Texts in place of y ticks: (text, y)."""
        self._marks += [
            f'<text x="{_LEFT - 8}" y="{self._py(y) + 4}" class="tick" '
            f'text-anchor="end">{escape(text)}</text>'
            for text, y in names
        ]

    def _name(self, name: str, colour: str, shape: str) -> None:
        if name and (name, colour, shape) not in self._legend:
            self._legend.append((name, colour, shape))

    def svg(self, *, y_ticks: bool = True) -> str:
        """The chart as an ``<svg>`` element."""
        parts = [
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}">',
            f'<text x="{_LEFT}" y="16" class="title">{escape(self.title)}</text>',
            *(self._grid() if y_ticks else []),
            *self._marks,
            *self._axes(),
            *self._legend_items(),
            "</svg>",
        ]
        return "\n".join(parts)

    def _grid(self) -> list[str]:
        right = self.width - _RIGHT
        return [
            f'<line x1="{_LEFT}" x2="{right}" y1="{self._py(v)}" y2="{self._py(v)}" class="grid"/>'
            f'<text x="{_LEFT - 8}" y="{self._py(v) + 4}" class="tick" text-anchor="end">'
            f"{label(v)}</text>"
            for v in ticks(*self.y)
        ]

    def _axes(self) -> list[str]:
        bottom = self.height - _BOTTOM
        middle = (_TOP + bottom) / 2
        return [
            f'<line x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{bottom}" y2="{bottom}" '
            'class="axis"/>',
            *(
                f'<text x="{self._px(v)}" y="{bottom + 15}" class="tick" text-anchor="middle">'
                f"{label(v)}</text>"
                for v in ticks(*self.x, 6)
            ),
            f'<text x="{(self.width + _LEFT) / 2}" y="{self.height - 6}" class="tick" '
            f'text-anchor="middle">{escape(self.x_title)}</text>',
            f'<text transform="translate(13,{middle}) rotate(-90)" class="tick" '
            f'text-anchor="middle">{escape(self.y_title)}</text>',
        ]

    def _legend_items(self) -> list[str]:
        parts: list[str] = []
        right = float(self.width - _RIGHT)
        for name, colour, shape in reversed(self._legend):
            right -= 6.1 * len(name)
            parts.append(f'<text x="{right:.0f}" y="16" class="legend">{escape(name)}</text>')
            parts.append(_swatch(right - 18, colour, shape))
            right -= 32
        return parts


def _swatch(x: float, colour: str, shape: str) -> str:
    if shape == "dot":
        return f'<circle cx="{x + 8:.0f}" cy="12" r="3.5" fill="var(--{colour})"/>'
    if shape == "band":
        return (
            f'<rect x="{x:.0f}" y="7" width="13" height="10" fill="var(--{colour})" opacity="0.3"/>'
        )
    dash = ' stroke-dasharray="4 3"' if shape == "dash" else ""
    return (
        f'<line x1="{x:.0f}" x2="{x + 13:.0f}" y1="12" y2="12" stroke="var(--{colour})" '
        f'stroke-width="2.4"{dash}/>'
    )


def steps(points: Sequence[Point], end: float) -> list[Point]:
    """Points of a step function that holds each value until the next, and the last until ``end``.

    Returns:
        Corner points for ``Chart.line``.
    """
    corners: list[Point] = []
    for index, (x, y) in enumerate(points):
        following = points[index + 1][0] if index + 1 < len(points) else end
        corners += [(x, y), (following, y)]
    return corners


def cumulative(values: Sequence[float]) -> list[Point]:
    """Empirical distribution: (value, share of values at or below it), from 0 to 1."""
    ordered = sorted(values)
    points = [(value, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]
    return [(ordered[0], 0.0), *points] if points else []
