"""The report's charts, each from a recording."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rose_core.identity import published
from rose_demo.plots import Chart, Point, cumulative, steps
from rose_demo.records import Recording, Request, Role, Sample, Window
from rose_demo.statistics import latencies, split, windows
from rose_demo.verdicts import of_event

_TIME = "seconds since the start of the measurement"


def all_charts(recording: Recording) -> list[tuple[str, str]]:
    """(SVG, caption) in the order of the page."""
    return [
        (latency_over_time(recording, "ttft"), _LATENCY_CAPTION),
        (latency_over_time(recording, "tpot"), ""),
        (gate_timeline(recording, whole=True), _GATE_CAPTION),
        (gate_timeline(recording, whole=False), ""),
        (distribution(recording, "ttft"), _DISTRIBUTION_CAPTION),
        (distribution(recording, "tpot"), ""),
        (reward(recording), _REWARD_CAPTION),
        (harvest(recording), ""),
        (versions(recording), _VERSION_CAPTION),
        (density(recording), ""),
    ]


_LATENCY_CAPTION = (
    "Live requests on the lent replica. Shaded: crossover windows in which the guard lends nothing."
)
_GATE_CAPTION = (
    "When rollouts may compute beside the lent replica, and when live requests are in flight. "
    "Right: the busiest 20 seconds."
)
_DISTRIBUTION_CAPTION = "Lent against withheld windows on the same replica and core."
_REWARD_CAPTION = (
    "Sampled reward per step, and three policies on fixed tasks with the same random numbers: "
    "trained, frozen at the start, and trained on shuffled advantages."
)
_VERSION_CAPTION = (
    "Weight versions published and attested on engines, and the share of elements each changed."
)


def horizon(recording: Recording) -> float:
    """End of the time axis."""
    times = [sample.at_s for sample in recording.samples]
    times += [request.end_s for request in recording.requests]
    return max([*times, 1.0])


def _withheld(samples: Sequence[Sample]) -> list[Point]:
    return [(a, b) for a, b, kind in windows(samples) if kind is Window.WITHHELD]


def latency_over_time(recording: Recording, latency: str) -> str:
    """Every request's latency on both replicas, against the SLO."""
    settings = recording.settings
    limit = settings.ttft_slo_s if latency == "ttft" else settings.tpot_slo_s
    by_role = {role: _points(recording.requests, role, latency) for role in Role}
    highest = max([y for points in by_role.values() for _, y in points], default=0.0)
    chart = Chart(
        f"{latency.upper()} of live requests, ms",
        (0.0, horizon(recording)),
        (0.0, max(highest, limit * 1e3) * 1.08),
        _TIME,
    )
    chart.bands(_withheld(recording.samples), "muted", "withheld")
    chart.dots(by_role[Role.CONTROL], "muted", "never lent", 1.8)
    chart.dots(by_role[Role.LENT], "serving", "lent replica")
    chart.level(limit * 1e3, "bad", "SLO")
    return chart.svg()


def _points(requests: Sequence[Request], role: Role, latency: str) -> list[Point]:
    rows = [(r.at_s, r.ttft_s if latency == "ttft" else r.tpot_s, r.role) for r in requests]
    return [(at, value * 1e3) for at, value, of in rows if of is role and value is not None]


def busiest(requests: Sequence[Request], seconds: float = 20.0) -> Point:
    """The stretch in which most prompt tokens arrive at the lent replica."""
    rows = [request for request in requests if request.role is Role.LENT]
    starts = [request.at_s for request in rows] or [0.0]

    def load(start: float) -> int:
        return sum(r.prompt_tokens for r in rows if start <= r.at_s < start + seconds)

    start = max(starts, key=load)
    return start, start + seconds


def gate_timeline(recording: Recording, *, whole: bool) -> str:
    """Gate open, windows withheld, live requests in flight, as bars over time."""
    span = (0.0, horizon(recording)) if whole else busiest(recording.requests)
    title = "Gate and live requests" if whole else "The same in the busiest 20 seconds"
    chart = Chart(title, span, (0.0, 3.0), _TIME, height=190)
    live = [(r.at_s, r.end_s) for r in recording.requests if r.role is Role.LENT]
    chart.bars(_clip(live, span), 2.5, 0.6, "serving")
    chart.bars(_clip(recording.gate or opened(recording.samples), span), 1.5, 0.6, "rollout")
    chart.bars(_clip(_withheld(recording.samples), span), 0.5, 0.6, "muted")
    chart.row_labels([("serving", 2.5), ("rollouts", 1.5), ("withheld", 0.5)])
    return chart.svg(y_ticks=False)


def opened(samples: Sequence[Sample]) -> list[Point]:
    """Intervals in which the gate was seen open."""
    spans: list[Point] = []
    for sample, following in pairwise(samples):
        if not sample.gate_open:
            continue
        if spans and spans[-1][1] == sample.at_s:
            spans[-1] = (spans[-1][0], following.at_s)
        else:
            spans.append((sample.at_s, following.at_s))
    return spans


def _clip(spans: Iterable[Point], window: Point) -> list[Point]:
    low, high = window
    return [(max(a, low), min(b, high)) for a, b in spans if b > low and a < high]


def distribution(recording: Recording, latency: str) -> str:
    """Cumulative distributions in lent and withheld windows."""
    parts = split(recording.requests, windows(recording.samples), Role.LENT)
    values = {kind: latencies(parts[kind], latency) * 1e3 for kind in Window}
    joined = np.concatenate([*values.values(), [1.0]])
    chart = Chart(
        f"{latency.upper()}: share of requests at or below",
        (0.0, float(np.quantile(joined, 0.99)) * 1.05),
        (0.0, 1.0),
        "milliseconds",
    )
    for kind, colour in ((Window.WITHHELD, "muted"), (Window.LENT, "serving")):
        points = [p for p in cumulative(values[kind].tolist()) if p[0] <= chart.x[1]]
        chart.line(points, colour, f"{kind.value} ({len(values[kind])})")
    return chart.svg()


def _series(records: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    return [(float(r["seconds"]), float(r[name])) for r in records if r.get(name) is not None]


def reward(recording: Recording) -> str:
    """Reward of the sampled turns and of the three policies on the fixed tasks."""
    sampled = _series(of_event(recording.training, "step"), "reward")
    evaluations = of_event(recording.training, "evaluation")
    end = max([x for x, _ in sampled] + [float(e["seconds"]) for e in evaluations] + [1.0])
    chart = Chart("Reward", (0.0, end), (0.0, 1.0), "seconds since the trainer's start")
    chart.dots(sampled, "rollout", "sampled", 1.6)
    for name, colour in (("trained", "good"), ("frozen", "muted"), ("shuffled", "bad")):
        chart.line(_series(evaluations, name), colour, name)
    return chart.svg()


def harvest(recording: Recording) -> str:
    """Output tokens by kind of engine, from the start of the measurement."""
    series = {
        kind: _from_zero([(s.at_s, getattr(s, f"{kind}_tokens")) for s in recording.samples])
        for kind in ("borrowed", "dedicated")
    }
    top = max([y for points in series.values() for _, y in points] + [1.0])
    chart = Chart("Rollout tokens", (0.0, horizon(recording)), (0.0, top * 1.05), _TIME)
    chart.bands(_withheld(recording.samples), "muted", "withheld")
    chart.line(series["dedicated"], "muted", "dedicated engine")
    chart.line(series["borrowed"], "rollout", "borrowed")
    return chart.svg()


def _from_zero(points: Sequence[tuple[float, int | None]]) -> list[Point]:
    known = [(at, value) for at, value in points if value is not None]
    return [(at, float(value - known[0][1])) for at, value in known]


def sequence(version: str) -> float | None:
    """The sequence of a published version, or None for what nobody has published."""
    found = published(version)
    return None if found is None else float(found.sequence)


def versions(recording: Recording) -> str:
    """Sequence numbers attested on each engine over time."""
    names = sorted({name for sample in recording.samples for name in sample.versions})
    lines: dict[str, list[Point]] = {}
    for name in names:
        found = [(s.at_s, sequence(s.versions.get(name, ""))) for s in recording.samples]
        lines[name] = [(at, value) for at, value in found if value is not None]
    top = max([y for points in lines.values() for _, y in points] + [1.0])
    chart = Chart(
        "Version attested on engines", (0.0, horizon(recording)), (0.0, top * 1.05), _TIME
    )
    for name, colour in zip(names, ("rollout", "serving", "good", "bad"), strict=False):
        chart.line(steps(lines[name], horizon(recording)), colour, name)
    return chart.svg()


def density(recording: Recording) -> str:
    """Share of elements that each publish changed."""
    points = _series(of_event(recording.training, "publish"), "changed_share")
    end = max([x for x, _ in points] + [1.0])
    chart = Chart(
        "Share of elements changed per version",
        (0.0, end),
        (0.0, 1.0),
        "seconds since the trainer's start",
    )
    chart.dots(points, "good")
    return chart.svg()
