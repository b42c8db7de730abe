"""A dump of the flight recorder as one picture (SVG): requests, gates and closings over time.

One row per request, from arrival to end, dark until its first token; below them a row per slot with
its gate, coloured by position; marks where an arrival closed the permit. For a look without tools;
``perfetto`` has every detail.
"""

from __future__ import annotations

from html import escape
from typing import Any

_WIDTH, _LEFT, _ROW = 1200, 150, 12
_COLOURS = {"open": "#2f9e5b", "paced": "#9bd3ae", "closed": "#d7dbe0"}
_STYLE = (
    "<style>text{font:11px system-ui,'DejaVu Sans',sans-serif;fill:#1c2430}"
    ".small{fill:#6b7482}</style>"
)
_MOST_ROWS = 60


def timeline(dump: dict[str, Any]) -> str:
    """The SVG document; empty time at the ends is left out."""
    entries = sorted(dump["entries"], key=lambda entry: entry["t"])
    if not entries:
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="20"></svg>\n'
    begin = min(entry.get("arrived", entry["t"]) for entry in entries)
    return _Picture(entries, begin, max(entry["t"] for entry in entries)).svg()


class _Picture:
    def __init__(self, entries: list[dict[str, Any]], begin_ns: int, end_ns: int) -> None:
        self._entries, self._begin, self._end = entries, begin_ns, max(end_ns, begin_ns + 1)
        self._parts: list[str] = []
        self._y = 24

    def svg(self) -> str:
        self._requests()
        for track in dict.fromkeys(e["track"] for e in self._entries if e["what"] == "gate"):
            self._gate(track)
        self._axis()
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{self._y + 8}">'
        return "\n".join([head, _STYLE, *self._parts, "</svg>"]) + "\n"

    def _x(self, time_ns: float) -> float:
        share = (time_ns - self._begin) / (self._end - self._begin)
        return round(_LEFT + share * (_WIDTH - _LEFT - 10), 1)

    def _bar(self, start: float, end: float, colour: str, height: int, title: str) -> None:
        width = max(0.8, self._x(end) - self._x(start))
        self._parts.append(
            f'<rect x="{self._x(start)}" y="{self._y}" width="{width:.1f}" height="{height}" '
            f'fill="{colour}"><title>{escape(title)}</title></rect>'
        )

    def _label(self, text: str) -> None:
        self._parts.append(f'<text x="8" y="{self._y + 9}">{escape(text)}</text>')

    def _requests(self) -> None:
        done = [e for e in self._entries if e["what"] == "finished"]
        for entry in done[-_MOST_ROWS:]:
            arrived = entry["arrived"]
            title = f"request {entry['request']}: {_times(entry)}"
            first = arrived + round((entry.get("ttft") or 0.0) * 1e9)
            self._label(f"request {entry['request']}")
            self._bar(arrived, entry["t"], "#9db8f2", 9, title)
            self._bar(arrived, first, "#2563eb", 9, title)
            self._y += _ROW

    def _gate(self, track: str) -> None:
        self._y += 6
        self._label(track)
        turns = [e for e in self._entries if e["what"] == "gate" and e["track"] == track]
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            end = following["t"] if following else self._end
            position = "open" if turn["open"] else "closed"
            if turn["reason"] == "Slack" and turn["open"]:
                position = "paced"
            self._bar(turn["t"], end, _COLOURS[position], 16, f"{position}: {turn['reason']}")
        for entry in self._entries:
            if entry["what"] == "closed" and entry["track"] == track:
                title = f"closed {entry['after_ns'] / 1e6:.2f} ms after an arrival"
                self._bar(entry["t"], entry["t"], "#c2263f", 16, title)
        self._y += 18

    def _axis(self) -> None:
        seconds = (self._end - self._begin) / 1e9
        for step in range(11):
            x = self._x(self._begin + step * (self._end - self._begin) / 10)
            text = f"{seconds * step / 10:.2f} s"
            self._parts.append(
                f'<text class="small" x="{x}" y="14" text-anchor="middle">{text}</text>'
            )


def _times(entry: dict[str, Any]) -> str:
    ttft, tpot = entry.get("ttft"), entry.get("tpot")
    texts = [f"{entry['tokens']} tokens", entry["window"]]
    texts += [f"TTFT {1e3 * ttft:.1f} ms"] if ttft else []
    texts += [f"TPOT {1e3 * tpot:.2f} ms"] if tpot else []
    return ", ".join(texts)
