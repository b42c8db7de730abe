"""Windows -> figures: paired ratios with intervals, harvest, added violations; pure.

Every condition of a round has the same arrivals, so request *i* under one condition is paired with
request *i* served alone. The interval of a ratio of quantiles comes from drawing *pairs* anew (the
same draw on both sides), round by round: what the load does to both sides cancels. Next step:
``report`` names the figures and holds the aims against them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.guard.load import Answer
from bench.guard.measured import Cost, Window, key_of, violates

DRAWS = 600
BLOCK = 5
"""Requests drawn together where they are slow together."""


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


Pairs = list[list[tuple[float, float]]]


def pairs(base: Sequence[Window], other: Sequence[Window], what: str) -> Pairs:
    """Per round: (base, other) of the requests that both answered."""
    found: Pairs = []
    for window in base:
        twin = next((w for w in other if w.round == window.round), None)
        if twin is None:
            continue
        here = {key_of(a): _value(a, what) for a in window.measured}
        there = {key_of(a): _value(a, what) for a in twin.measured}
        found.append(
            [
                (one, two)
                for key, one in here.items()
                if one is not None and (two := there.get(key)) is not None
            ]
        )
    return [group for group in found if group]


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


def rate_of(alone: Window, solo_rate: float) -> float:
    """The rollouts' solo rate beside that window, else of the beginning."""
    return alone.solo_rate or solo_rate


def of_idle(
    windows: Sequence[Window], alone: Sequence[Window], solo_rate: float, *, seed: int = 0
) -> Interval | None:
    """Harvest / (rollouts' solo rate x serving's idle time when alone), rounds drawn anew."""
    return _quotient(
        [
            (float(w.harvested), rate_of(base, solo_rate) * base.idle_s)
            for w in windows
            for base in alone
            if base.round == w.round
        ],
        seed,
    )


def in_idle(
    windows: Sequence[Window], alone: Sequence[Window], solo_rate: float, *, seed: int = 0
) -> Interval | None:
    """Tokens while no request was under way / (solo rate x that time), rounds drawn anew.

    Without a guard this is the most that any gate can get out of idle time on this machine.
    """
    return _quotient(
        [
            (float(w.idle_tokens), rate_of(base, solo_rate) * w.idle_s)
            for w in windows
            for base in alone
            if base.round == w.round
        ],
        seed,
    )


def _quotient(rounds: list[tuple[float, float]], seed: int) -> Interval | None:
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


@dataclass(frozen=True)
class Lost:
    """Where the harvest of idle time went, as shares of what it could have given.

    Attributes:
        longer: serving took longer than alone, so less time was idle.
        shut: idle, and the gate was not open yet (cool-down, reaction).
        waking: the gate was open, and no token had come yet.
        slower: what remains: tokens came more slowly than alone; negative when more came.
    """

    longer: float
    shut: float
    waking: float
    slower: float


def lost(windows: Sequence[Window], alone: Sequence[Window], solo_rate: float) -> Lost | None:
    """What the rollouts did not get of the idle time that serving has when alone."""
    both = [(w, base) for w in windows for base in alone if base.round == w.round]
    possible_s = sum(base.idle_s for _, base in both)
    if not possible_s:
        return None
    idle = sum(w.idle_s for w, _ in both) / possible_s
    opened = sum(w.open_s for w, _ in both) / possible_s
    waking = sum(sum(w.released_s) for w, _ in both) / possible_s
    got = of_idle(windows, alone, solo_rate)
    harvested = got.value if got else 0.0
    return Lost(1 - idle, idle - opened, waking, opened - waking - harvested)


def open_of_idle(windows: Sequence[Window]) -> float | None:
    """Time with an open gate / time without a request, in the same windows.

    It tells what the policy leaves unused apart from what the shared core does not give.
    """
    idle = sum(window.idle_s for window in windows)
    return sum(window.open_s for window in windows) / idle if idle > 0 else None


@dataclass(frozen=True)
class Added:
    """Requests over the SLO, each compared with the same one served alone.

    Attributes:
        fresh: over it here and not when alone.
        spared: the other way round.
        net: the difference, with a 95 % interval in which requests that follow one another are
            drawn together, since they are slow together.
    """

    fresh: int
    spared: int
    net: Interval


def compared(
    windows: Sequence[Window], alone: Sequence[Window], goal_s: tuple[float, float]
) -> Added:
    """Pairs of every round that both have; a request that failed is over its SLO."""
    groups = []
    for window in windows:
        base = next((w for w in alone if w.round == window.round), None)
        if base is not None:
            groups.append(_changes(window, base, goal_s))
    flat = [change for group in groups for change in group]
    low, high = _blocks(groups)
    fresh, spared = flat.count(1), flat.count(-1)
    return Added(fresh, spared, Interval(fresh - spared, low, high, len(flat)))


def _changes(window: Window, base: Window, goal_s: tuple[float, float]) -> list[int]:
    here = {key_of(a): violates(a, goal_s) for a in window.measured}
    there = {key_of(a): violates(a, goal_s) for a in base.measured}
    return [here.get(key, True) - there.get(key, True) for key in sorted({*here, *there})]


def _blocks(groups: list[list[int]]) -> tuple[float, float]:
    draw = np.random.default_rng(0)
    totals = np.zeros(DRAWS)
    for group in filter(None, groups):
        values, blocks = np.array(group), -(-len(group) // BLOCK)
        starts = draw.integers(0, len(group), (DRAWS, blocks))
        places = (starts[:, :, None] + np.arange(BLOCK)) % len(group)
        totals += values[places.reshape(DRAWS, -1)[:, : len(group)]].sum(axis=1)
    low, high = np.quantile(totals, (0.025, 0.975))
    return float(low), float(high)


def added(windows: Sequence[Window], alone: Sequence[Window], goal_s: tuple[float, float]) -> int:
    """Requests over the SLO beyond those that were over it when served alone."""
    return round(compared(windows, alone, goal_s).net.value)


def oracle(
    candidates: Sequence[Sequence[Window]],
    alone: Sequence[Window],
    goal_s: tuple[float, float],
    allowed: int = 0,
) -> Sequence[Window] | None:
    """The windows of the best fixed share that an offline search finds.

    The search tries each candidate share on the very same arrivals and keeps those that bring no
    more than ``allowed`` requests over the SLO that kept it alone. Violations that serving spares
    by chance do not pay for others. None when no share is harmless.
    """
    harmless = [c for c in candidates if c and compared(c, alone, goal_s).fresh <= allowed]
    return max(harmless, key=harvest, default=None)


def same_rounds(windows: Sequence[Window], others: Sequence[Window]) -> list[Window]:
    """Those of ``windows`` whose round the others have too."""
    rounds = {w.round for w in others}
    return [w for w in windows if w.round in rounds]
