"""A dump of the flight recorder as trace events, for ui.perfetto.dev and chrome://tracing.

One thread per pod and slot. Requests are asynchronous spans from arrival to end, with their first
token; gates are spans named after their reason; requests under way are a counter; everything else
is an instant. Times are microseconds of the node's monotonic clock.
"""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def perfetto(dump: dict[str, Any]) -> dict[str, Any]:
    """Trace-event form of ``Recorder.dump``."""
    entries: list[Event] = sorted(dump["entries"], key=lambda entry: entry["t"])
    tracks = {name: n for n, name in enumerate(dict.fromkeys(e["track"] for e in entries), 1)}
    events: list[Event] = [
        {"ph": "M", "pid": 1, "tid": n, "name": "thread_name", "args": {"name": name}}
        for name, n in tracks.items()
    ]
    events += _gates(entries, tracks)
    events += _requests(entries, tracks)
    events += [
        _event(entry, tracks, entry["what"], "i") | {"s": "t"}
        for entry in entries
        if entry["what"] not in {"gate", "arrived", "finished"}
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(entry: Event, tracks: dict[str, int], name: str, phase: str) -> Event:
    rest = {key: value for key, value in entry.items() if key not in {"t", "track", "what"}}
    place = {"pid": 1, "tid": tracks[entry["track"]], "ts": entry["t"] / 1000}
    return {**place, "name": name, "ph": phase, "cat": "rose", "args": rest}


def _gates(entries: list[Event], tracks: dict[str, int]) -> list[Event]:
    """A span from each change of a slot's gate to the next one."""
    found, last = [], max((entry["t"] for entry in entries), default=0)
    gates = [entry for entry in entries if entry["what"] == "gate"]
    ends: dict[str, int] = {}
    for entry in reversed(gates):
        end = ends.get(entry["track"], last)
        ends[entry["track"]] = entry["t"]
        name = ("open: " if entry["open"] else "closed: ") + str(entry["reason"])
        found.append(_event(entry, tracks, name, "X") | {"dur": (end - entry["t"]) / 1000})
    return found[::-1]


def _requests(entries: list[Event], tracks: dict[str, int]) -> list[Event]:
    found: list[Event] = []
    running: dict[str, set[int]] = {}
    for entry in entries:
        if entry["what"] not in {"arrived", "finished"}:
            continue
        track, number = entry["track"], entry["request"]
        here = running.setdefault(track, set())
        known = {"id": f"{track}/{number}"}
        if entry["what"] == "arrived":
            here.add(number)
            found.append(_event(entry, tracks, "request", "b") | known)
        elif number in here:
            here.discard(number)
            if entry.get("ttft"):
                first = {**entry, "t": entry["arrived"] + round(entry["ttft"] * 1e9)}
                found.append(_event(first, tracks, "first token", "n") | known)
            found.append(_event(entry, tracks, "request", "e") | known)
        counter = _event(entry, tracks, f"requests at {track}", "C")
        found.append(counter | {"args": {"under way": len(here)}})
    return found
