"""One trajectory as a waterfall: its turns, their legs, moves, commits and reward, under the gate.

A row is a span, as the router exported it; what happened inside one is a mark on its row. Returns
SVG text like ``plots``, and depends on its arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from rose_demo.plots import Point, label
from rose_demo.spans import MOVE, REWARD, SYNC, TRAJECTORY, SpanEvent, SpanRecord
from rose_simulate.pages.charts import ticks

CAPTION = (
    "One trajectory, drawn from the spans that the lease's router exported. Pale: a turn waits in "
    "the queue. Shaded: the gate beside the lent replica was closed. A diamond is a move to "
    "another engine, a bar across a commit of new weights inside a turn, a dot the reward."
)
MOST_ROWS = 40
_PLOT, _ROW, _LEFT, _TOP, _BOTTOM = 700, 19, 150, 30, 34
# What a row tells stands beside the plot. It cannot be measured here: a letter counts as wide as
# a digit in the widest font of ``report.css``.
_LETTER, _GAP = 7, 12


def waterfall(spans: Sequence[SpanRecord], gate: Sequence[Point] = ()) -> str:
    """The chart.

    Args:
        spans: of one trajectory; at least one.
        gate: intervals in which the gate was open, on the same clock; empty = not known.
    """
    rows = _rows(spans)
    left_out = max(0, len(rows) - MOST_ROWS)
    rows = rows[:MOST_ROWS]
    # A reward may come minutes after the last turn: it stands at the edge.
    acting = [one for _, one in rows if one.name != REWARD] or [one for _, one in rows]
    low, high = min(one.began_s for one in acting), max(one.ended_s for one in acting)
    high = max(high, low + 0.001)
    height = _TOP + _ROW * len(rows) + _BOTTOM
    labels = [_label(one) for _, one in rows]
    width = _LEFT + _PLOT + 2 * _GAP + _LETTER * max(map(len, labels))

    def px(at: float) -> float:
        share = (min(max(at, low), high) - low) / (high - low)
        return round(_LEFT + share * _PLOT, 1)

    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="One trajectory">',
        f'<text x="{_LEFT}" y="16" class="title">One trajectory: {escape(_title(spans))}</text>',
        *(_closed(gate, (low, high), len(rows), px) if gate else []),
    ]
    for number, (depth, one) in enumerate(rows):
        y = _TOP + _ROW * number
        name, x = escape(_name(one)), 8 + 14 * depth
        parts.append(f'<text x="{x}" y="{y + 13}" class="tick">{name}</text>')
        parts += _bar(one, px(one.began_s), px(one.ended_s), y, px)
        parts += [_mark(event, px(event.at_s), y) for event in one.events]
        beside = f'<text x="{_LEFT + _PLOT + _GAP}" y="{y + 13}" class="tick">'
        parts.append(f"{beside}{escape(labels[number])}</text>")
    bottom = _TOP + _ROW * len(rows)
    parts += [
        f'<text x="{px(low + at)}" y="{bottom + 14}" class="tick" text-anchor="middle">'
        f"{label(at)}</text>"
        for at in ticks(0.0, high - low, 6)
    ]
    more = f"; {left_out} more spans are left out" if left_out else ""
    parts.append(
        f'<text x="{_LEFT}" y="{bottom + 28}" class="tick">seconds since its first turn{more}'
        "</text></svg>"
    )
    return "\n".join(parts)


def _rows(spans: Sequence[SpanRecord]) -> list[tuple[int, SpanRecord]]:
    """Spans with their depth, each below its parent, in order of beginning."""
    known = {one.span for one in spans}
    below: dict[str, list[SpanRecord]] = {}
    for one in sorted(spans, key=lambda one: (one.began_s, -one.ended_s)):
        below.setdefault(one.parent if one.parent in known else "", []).append(one)
    found: list[tuple[int, SpanRecord]] = []
    ahead = [(0, one) for one in reversed(below.get("", []))]
    while ahead:
        depth, one = ahead.pop()
        found.append((depth, one))
        ahead += [(depth + 1, child) for child in reversed(below.get(one.span, []))]
    return found


def _title(spans: Sequence[SpanRecord]) -> str:
    named = (one.attributes.get("rl.trajectory.id") for one in spans)
    return str(next((name for name in named if name), "unnamed"))


def _name(one: SpanRecord) -> str:
    if one.name == TRAJECTORY:
        return "trajectory"
    if one.name == REWARD:
        return "reward"
    if "rl.turn.number" in one.attributes:
        return f"turn {one.attributes['rl.turn.number']}"
    if "rose.leg.number" in one.attributes:
        return f"leg {one.attributes['rose.leg.number']}"
    return one.name.removeprefix("rose.")


def _label(one: SpanRecord) -> str:
    """What stands beside a row."""
    known = one.attributes
    if one.name == REWARD:
        return f"{known.get('rl.reward.value', 0):g}"
    if one.name == TRAJECTORY:
        parts = [f"{known.get('rl.trajectory.turns', '?')} turns", _tokens(known)]
        return ", ".join([*parts, str(known.get("rl.trajectory.outcome", "")) or "not reported"])
    if "rose.engine.name" in known:
        engine, kind = known["rose.engine.name"], str(known.get("rose.engine.kind", "")).lower()
        return f"{engine} ({kind}), {known.get('rl.policy.version', '?')}, {_tokens(known)}"
    if "rl.turn.number" in known:
        finish = ", ".join(map(str, known.get("gen_ai.response.finish_reasons", ())))
        moves = [event for event in one.events if event.name == MOVE]
        why = "".join(f", moved: {event.attributes.get('rose.move.reason')}" for event in moves)
        return f"{_tokens(known)}, {finish or 'no finish'}{why}"
    return ""


def _tokens(known: Mapping[str, object]) -> str:
    return f"{known.get('gen_ai.usage.output_tokens', '?')} tokens"


def _bar(
    one: SpanRecord, begins: float, ends: float, y: float, px: Callable[[float], float]
) -> list[str]:
    if one.name == REWARD:
        return [f'<circle cx="{begins}" cy="{y + 9}" r="4.5" fill="var(--good)"/>']
    queued = float(one.attributes.get("rose.queue_seconds", 0.0))
    runs = min(px(one.began_s + queued), ends) if queued else begins
    colour, opacity = _colour(one)
    pale = f'<rect x="{begins}" y="{y + 4}" width="{runs - begins:.1f}" height="11" '
    parts = [pale + f'fill="var(--{colour})" opacity="0.25"/>'] if runs > begins else []
    return [
        *parts,
        f'<rect x="{runs}" y="{y + 4}" width="{max(ends - runs, 1.2):.1f}" height="11" '
        f'fill="var(--{colour})" opacity="{opacity}"/>',
    ]


def _colour(one: SpanRecord) -> tuple[str, float]:
    kind = one.attributes.get("rose.engine.kind")
    if kind is not None:
        return ("rollout" if str(kind).lower() == "borrowed" else "serving"), 0.9
    if one.name == TRAJECTORY:
        return "muted", 0.5
    return ("ink", 0.55) if "rl.turn.number" in one.attributes else ("good", 0.6)


def _mark(event: SpanEvent, x: float, y: float) -> str:
    middle = y + 9.5
    labels = ", ".join(f"{name} {value}" for name, value in event.attributes.items())
    title = f"<title>{escape(f'{event.name}: {labels}')}</title>"
    if event.name == MOVE:
        edge = f"{x},{middle - 6} {x + 6},{middle} {x},{middle + 6} {x - 6},{middle}"
        return f'<polygon points="{edge}" fill="var(--bad)" data-event="{MOVE}">{title}</polygon>'
    colour = "good" if event.name == SYNC else "muted"
    return (
        f'<rect x="{x - 1.2:.1f}" y="{y + 1}" width="2.4" height="17" fill="var(--{colour})" '
        f'data-event="{escape(event.name)}">{title}</rect>'
    )


def _closed(
    gate: Sequence[Point], shown: Point, rows: int, px: Callable[[float], float]
) -> list[str]:
    """The intervals between those in which the gate was open."""
    at, high = shown
    edges: list[Point] = []
    for began, ended in sorted(gate):
        if ended > at and began < high:
            edges += [(at, began)] if began > at else []
            at = ended
    edges += [(at, high)] if at < high else []
    return [
        f'<rect x="{px(a)}" y="{_TOP}" width="{px(b) - px(a):.1f}" height="{_ROW * rows}" '
        'fill="var(--muted)" opacity="0.14" data-gate="closed"/>'
        for a, b in edges
    ]
