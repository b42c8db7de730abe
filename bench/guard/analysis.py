"""Windows -> figures: paired ratios with intervals, harvest, added violations; pure.

Every condition of a round has the same arrivals, so request *i* under one condition is paired with
request *i* served alone. The interval of a ratio of quantiles comes from drawing *pairs* anew (the
same draw on both sides), round by round: what the load does to both sides cancels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.guard.load import Answer

DRAWS = 600


@dataclass(frozen=True)
class Cost:
    """What guard and tap used in a window, and what the node made meanwhile.

    Attributes:
        resting_s, resting_cpu_s: the same just before, while nobody asked serving for anything.
    """

    elapsed_s: float
    tokens: int
    cpu_s: float
    rss_bytes: int
    pss_bytes: int
    resting_s: float = 0.0
    resting_cpu_s: float = 0.0


@dataclass(frozen=True)
class Parted:
    """Costs of several windows, taken apart.

    Attributes:
        fixed: share of a core that guard and tap take whatever the node makes.
        per_token_s: CPU seconds that every token adds to it.
    """

    fixed: float
    per_token_s: float

    def at(self, tokens_per_s: float) -> float:
        """Share of a core on a node that makes so many."""
        return self.fixed + tokens_per_s * self.per_token_s


def parted(costs: Sequence[Cost]) -> Parted | None:
    """What of it was there before the first token; None where that was not measured."""
    resting_s, tokens = sum(c.resting_s for c in costs), sum(c.tokens for c in costs)
    if not resting_s or not tokens:
        return None
    fixed = sum(c.resting_cpu_s for c in costs) / resting_s
    more_s = sum(c.cpu_s for c in costs) - fixed * sum(c.elapsed_s for c in costs)
    return Parted(fixed, more_s / tokens)


@dataclass
class Window:
    """One condition in one round of one load.

    Attributes:
        harvested: rollout tokens that arrived in the measured seconds.
        closed_s: from an arrival's first segment to the closed permit.
        token_s: from there to the last rollout token before the gate opened again.
        stopped_s: to the host's word that every thread stands still.
        released_s: from the open gate to the first rollout token.
        open_s: how long the gate stood open for want of requests.
        strangers: share of the machine that processes other than the benchmark's used.
    """

    load: str
    condition: str
    round: int
    seconds: float
    began_s: float
    answers: list[Answer]
    failed: int
    harvested: int
    closed_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    stopped_s: list[float] = field(default_factory=list)
    released_s: list[float] = field(default_factory=list)
    open_s: float = 0.0
    cost: Cost | None = None
    strangers: float = 0.0

    @property
    def measured(self) -> list[Answer]:
        """Answers to arrivals of the measured window."""
        return [answer for answer in self.answers if answer.arrival.at_s >= 0]

    @property
    def idle_s(self) -> float:
        """Measured seconds in which no request was under way."""
        spans = sorted((a.sent_s, a.ended_s) for a in self.answers)
        until, end, idle = self.began_s, self.began_s + self.seconds, 0.0
        for start, stop in spans:
            idle += max(0.0, min(start, end) - until)
            until = max(until, min(stop, end))
        return idle + max(0.0, end - until)

    def values(self, what: str) -> list[float]:
        """TTFT or TPOT of the measured answers, seconds."""
        found = (a.ttft_s if what == "TTFT" else a.tpot_s for a in self.measured)
        return [value for value in found if value is not None]

    def violations(self, goal_s: tuple[float, float]) -> int:
        """Requests over the SLO; one that failed is over."""
        ttft, tpot = goal_s
        slow = sum(a.ttft_s > ttft or (a.tpot_s or 0.0) > tpot for a in self.measured)
        return slow + self.failed


Pairs = list[list[tuple[float, float]]]


def pairs(base: Sequence[Window], other: Sequence[Window], what: str) -> Pairs:
    """Per round: (base, other) of the requests that both answered."""
    found: Pairs = []
    for window in base:
        twin = next((w for w in other if w.round == window.round), None)
        if twin is None:
            continue
        here = {id_(a): _value(a, what) for a in window.measured}
        there = {id_(a): _value(a, what) for a in twin.measured}
        found.append(
            [
                (one, two)
                for key, one in here.items()
                if one is not None and (two := there.get(key)) is not None
            ]
        )
    return [group for group in found if group]


def id_(answer: Answer) -> tuple[float, int, int]:
    """What makes a request the same in every condition."""
    arrival = answer.arrival
    return arrival.at_s, arrival.prompt, arrival.output


def _value(answer: Answer, what: str) -> float | None:
    return answer.ttft_s if what == "TTFT" else answer.tpot_s


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval and the number of pairs behind it."""

    value: float
    low: float
    high: float
    pairs: int


def ratio(groups: Pairs, q: float, *, seed: int = 0) -> Interval | None:
    """Other / base at one quantile; None when there is no pair."""
    count = sum(map(len, groups))
    if not count:
        return None
    draw = np.random.default_rng(seed)
    both = [np.array(group) for group in groups]
    drawn = np.concatenate(
        [group[draw.integers(0, len(group), (DRAWS, len(group)))] for group in both], axis=1
    )
    base, other = np.quantile(drawn, q, axis=1).T
    low, high = np.quantile(other / np.maximum(base, 1e-9), (0.025, 0.975))
    one, two = np.quantile(np.concatenate(both), q, axis=0)
    return Interval(float(two / max(one, 1e-9)), float(low), float(high), count)


def harvest(windows: Sequence[Window]) -> float:
    """Rollout tokens per second."""
    seconds = sum(window.seconds for window in windows)
    return sum(window.harvested for window in windows) / seconds if seconds else 0.0


def of_idle(
    windows: Sequence[Window], alone: Sequence[Window], solo_rate: float, *, seed: int = 0
) -> Interval | None:
    """Harvest / (rollouts' solo rate x serving's idle time when alone), rounds drawn anew."""
    rounds = [
        (float(w.harvested), solo_rate * base.idle_s)
        for w in windows
        for base in alone
        if base.round == w.round
    ]
    possible = sum(b for _, b in rounds)
    if not possible:
        return None
    draw = random.Random(seed)
    drawn = []
    for _ in range(DRAWS):
        chosen = draw.choices(rounds, k=len(rounds))
        drawn.append(sum(a for a, _ in chosen) / max(1e-9, sum(b for _, b in chosen)))
    drawn.sort()
    value = sum(a for a, _ in rounds) / possible
    return Interval(value, drawn[DRAWS // 40], drawn[-1 - DRAWS // 40], len(rounds))


def open_of_idle(windows: Sequence[Window]) -> float | None:
    """Time with an open gate / time without a request, in the same windows.

    It tells what the policy leaves unused apart from what the shared core does not give.
    """
    idle = sum(window.idle_s for window in windows)
    return sum(window.open_s for window in windows) / idle if idle > 0 else None


def added(windows: Sequence[Window], alone: Sequence[Window], goal_s: tuple[float, float]) -> int:
    """Requests over the SLO beyond those that were over it when served alone."""
    rounds = {w.round for w in windows}
    base = sum(w.violations(goal_s) for w in alone if w.round in rounds)
    return sum(w.violations(goal_s) for w in windows) - base


def oracle(
    candidates: Sequence[Sequence[Window]], alone: Sequence[Window], goal_s: tuple[float, float]
) -> float | None:
    """Tokens per second of the best fixed share that an offline search finds.

    The search tries each candidate share on the very same arrivals and keeps those that add no
    violation. None when none of them does.
    """
    harmless = [c for c in candidates if c and added(c, alone, goal_s) <= 0]
    return max((harvest(c) for c in harmless), default=None)
