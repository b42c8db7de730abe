"""Reward curves of training runs, from their progress files: pure.

| figure | of one pair of runs with the same seed |
|---|---|
| reward at a step | of the fixed tasks, between two evaluations by a straight line |
| difference | with rounds less plain, at the last step that both have evaluated |
| difference of means | the same, over all steps up to there: each evaluation's chance counts less |
| tokens per step | sampled for it, what was cut and put off included |

Runs of a pair share their seed and so their start; intervals are Student's over pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from bench.record import Figure, figure
from rose_core.stats import Interval, mean_of

PLAIN: Final = "plain"
ROUNDS: Final = "rounds"
KEEPS: Final = 0.05
"""Reward by which the curve with rounds may lie below: what a control may drift by chance."""


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        points: (step, reward on the fixed tasks), ascending.
        seconds: of training, from the first evaluation to the last.
        trained, cut, put_off: episodes of its rounds; 0 without.
    """

    arm: str
    seed: int
    points: tuple[tuple[int, float], ...]
    seconds: float
    tokens: int
    trained: int = 0
    cut: int = 0
    put_off: int = 0

    @property
    def steps(self) -> int:
        """Gradient steps until the last evaluation."""
        return self.points[-1][0]

    def mean_reward(self, last: int) -> float:
        """Over the steps from 0 to this one: the area under the curve by its length."""
        return sum(self.reward(step) for step in range(last + 1)) / (last + 1)

    def reward(self, step: float) -> float:
        """At a step between its first and its last evaluation."""
        for (before, low), (after, high) in pairwise(self.points):
            if before <= step <= after and after > before:
                return low + (high - low) * (step - before) / (after - before)
        return self.points[0][1] if step <= self.points[0][0] else self.points[-1][1]


def curve_of(arm: str, seed: int, records: Iterable[Mapping[str, Any]]) -> Curve:
    """One run's curve from the records of its progress file.

    Raises:
        ValueError: it was never evaluated.
    """
    events = list(records)
    found = [one for one in events if one["event"] == "evaluation"]
    if not found:
        message = f"the run {arm}, seed {seed}, was never evaluated; give it more --seconds"
        raise ValueError(message)
    rounds = [one for one in events if one["event"] == "round"]
    end: Mapping[str, Any] = next((one for one in reversed(events) if one["event"] == "end"), {})
    return Curve(
        arm,
        seed,
        tuple({int(one["step"]): float(one["trained"]) for one in found}.items()),
        float(found[-1]["seconds"]) - float(found[0]["seconds"]),
        int(end.get("tokens", 0)),
        *(sum(int(one[name]) for one in rounds) for name in ("trained", "cut", "put_off")),
    )


def pairs(found: Sequence[Curve]) -> list[tuple[Curve, Curve]]:
    """(plain, rounds) of each seed that has both."""
    by = {(one.seed, one.arm): one for one in found}
    seeds = sorted({one.seed for one in found})
    both = [seed for seed in seeds if {(seed, PLAIN), (seed, ROUNDS)} <= by.keys()]
    return [(by[seed, PLAIN], by[seed, ROUNDS]) for seed in both]


def figures(found: Sequence[Curve]) -> list[Figure]:
    """What the pairs show."""
    both = pairs(found)
    last = [min(plain.steps, rounds.steps) for plain, rounds in both]
    made = []
    for arm, number in ((PLAIN, 0), (ROUNDS, 1)):
        mine = [pair[number] for pair in both]
        rewards = [one.reward(step) for one, step in zip(mine, last, strict=True)]
        made += [
            _figure(f"{arm}: reward before training", [one.points[0][1] for one in mine], "reward"),
            _figure(f"{arm}: reward at the last common step", rewards, "reward"),
            _figure(f"{arm}: steps per minute", [_pace(one) for one in mine], "1/min"),
            _figure(
                f"{arm}: tokens sampled per step",
                [one.tokens / max(1, one.steps) for one in mine],
                "tokens",
            ),
        ]
    paired = list(zip(both, last, strict=True))
    made += [
        _difference("at the last common step", [b.reward(n) - a.reward(n) for (a, b), n in paired]),
        _difference(
            "mean of all common steps",
            [b.mean_reward(n) - a.mean_reward(n) for (a, b), n in paired],
        ),
    ]
    cut = [one.cut / max(1, one.cut + one.trained) for _, one in both]
    made.append(_figure("rounds: share of episodes that were cut", cut, "share"))
    made.append(Figure("last common step", min(last), "steps"))
    return made


def table(found: Sequence[Curve], every: int = 10) -> str:
    """Mean reward by step over the pairs, side by side, as far as all have come."""
    both = pairs(found)
    most = min(min(plain.steps, rounds.steps) for plain, rounds in both)
    lines = ["| step | plain | rounds |", "|---|---|---|"]
    for step in sorted({*range(0, most + 1, every), most}):
        means = [sum(pair[arm].reward(step) for pair in both) / len(both) for arm in range(2)]
        lines.append(f"| {step} | {means[0]:.3f} | {means[1]:.3f} |")
    return "\n".join(lines)


def _pace(one: Curve) -> float:
    return 60 * (one.steps - one.points[0][0]) / max(1e-9, one.seconds)


def _figure(name: str, values: Sequence[float], unit: str) -> Figure:
    shown = mean_of(values)
    return figure(name, shown.mean, unit, interval=_ends(shown))


def _difference(what: str, values: Sequence[float]) -> Figure:
    shown, name = mean_of(values), f"reward, rounds less plain, {what}"
    return figure(name, shown.mean, "reward", at_least=-KEEPS, interval=_ends(shown))


def _ends(shown: Interval) -> tuple[float, float] | None:
    return None if shown.low is None or shown.high is None else (shown.low, shown.high)
