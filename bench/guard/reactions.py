"""How fast a guard reacted in one window: its flight recorder beside the rollout engine's tokens.

Both are stamped by the same clock. Next step: ``report`` turns the times into figures.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from bench.guard.gates import Spans
from bench.guard.measured import Window
from bench.guard.rollouts import Rollouts

Entry = dict[str, Any]
"""An entry of the flight recorder, as ``/trace`` has it."""


def read(noted: list[Entry], window: Window, rollouts: Rollouts) -> None:
    """Fill in when the gate stood open, and how fast rollouts stopped and came back."""
    end_s = window.began_s + window.seconds
    window.opened = spans(noted, end_s)
    window.gate_s = positions(noted, window.began_s, end_s)
    entries = [e for e in noted if window.began_s <= e["t"] / 1e9 < end_s]
    for what, into in (("closed", window.closed_s), ("stopped", window.stopped_s)):
        into += [e["after_ns"] / 1e9 for e in entries if e["what"] == what]
    stops(entries, window, rollouts)
    releases(entries, window, rollouts)


def stops(entries: list[Entry], window: Window, rollouts: Rollouts) -> None:
    """From each arrival that closed the permit to the last token before the gate opened again."""
    end_s = window.began_s + window.seconds
    opened = [e["t"] / 1e9 for e in entries if e["what"] == "gate" and e["open"]]
    # A pause inside a duty cycle stops nothing: the iteration under way is paid from slack.
    closings = [e for e in entries if e["what"] == "closed" and e["reason"] != "Slack"]
    for arrival in (e["arrival"] / 1e9 for e in closings):
        until = next((moment for moment in opened if moment > arrival), end_s)
        last = rollouts.last_before(arrival, until)
        window.token_s.append(last - arrival if last is not None else 0.0)


def releases(entries: list[Entry], window: Window, rollouts: Rollouts) -> None:
    """From each gate that opened for want of requests to the first token; how long it was open."""
    turns = [e for e in entries if e["what"] == "gate"]
    # Before its first change in the window the gate stood the other way.
    if turns and turns[0]["reason"] == "ServingBusy":
        window.open_s += turns[0]["t"] / 1e9 - window.began_s
    for turn, following in zip_longest(turns, turns[1:]):
        if not turn["open"] or turn["reason"] != "Idle":
            continue
        until = following["t"] / 1e9 if following else window.began_s + window.seconds
        window.open_s += until - turn["t"] / 1e9
        first = rollouts.first_after(turn["t"] / 1e9)
        if first is not None and first < until:
            window.released_s.append(first - turn["t"] / 1e9)


def spans(entries: list[Entry], end_s: float) -> Spans:
    """When the gate stood open, seconds."""
    turns = [e for e in entries if e["what"] == "gate"]
    return [
        (turn["t"] / 1e9, following["t"] / 1e9 if following else max(end_s, turn["t"] / 1e9))
        for turn, following in zip_longest(turns, turns[1:])
        if turn["open"]
    ]


def positions(entries: list[Entry], began_s: float, end_s: float) -> dict[str, float]:
    """Seconds between the two moments in each position of the gate, by its reason."""
    turns = [e for e in entries if e["what"] == "gate"]
    found: dict[str, float] = {}
    for turn, following in zip_longest(turns, turns[1:]):
        start, stop = turn["t"] / 1e9, following["t"] / 1e9 if following else end_s
        spent = min(stop, end_s) - max(start, began_s)
        if spent > 0:
            name = f"{'open' if turn['open'] else 'closed'}, {turn['reason']}"
            found[name] = round(found.get(name, 0.0) + spent, 4)
    return found
