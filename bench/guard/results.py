"""Every window of a run, by load and condition.

Next step: ``report`` turns them into figures and a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.guard import analysis
from bench.guard.measured import Window
from bench.guard.windows import CONDITIONS, SHARES, Goal, Solo


class Crash(msgspec.Struct, frozen=True):
    """A window that came to no end, and why."""

    load: str
    condition: str
    round: int
    why: str


class Results:
    """Every window of a run, by load and condition.

    Attributes:
        ended: windows in which the rollout engine ended.
        crashes: windows that came to no end.
    """

    def __init__(self, windows: Sequence[Window], goals: dict[str, Goal], solo: Solo) -> None:
        self.windows, self.goals, self.solo = list(windows), goals, solo
        self.ended = 0
        self.crashes: list[Crash] = []

    def knows(self, key: tuple[str, str, int]) -> bool:
        """The window of that load, condition and round was measured, or has crashed."""
        measured = ((one.load, one.condition, one.round) for one in self.windows)
        crashed = ((one.load, one.condition, one.round) for one in self.crashes)
        return key in {*measured, *crashed}

    @property
    def loads(self) -> list[str]:
        """In the order they were run."""
        return list(dict.fromkeys(w.load for w in self.windows))

    def of(self, load: str, condition: str) -> list[Window]:
        """The windows of one cell, by round."""
        return [w for w in self.windows if w.load == load and w.condition == condition]

    def conditions(self, load: str) -> list[str]:
        """Conditions this load was run under, in the table's order."""
        known = {w.condition for w in self.windows if w.load == load}
        return [c for c in dict.fromkeys((*CONDITIONS, *SHARES)) if c in known]

    def aims(self, load: str) -> tuple[float, float] | None:
        """The SLO of a steady load, seconds."""
        goal = self.goals.get(load)
        return (goal.ttft_s, goal.tpot_s) if goal and load.startswith("steady") else None

    def harmless(self, load: str) -> dict[str, bool]:
        """Fixed shares that were tried, and whether each brought no request over the SLO."""
        aims, alone = self.aims(load), self.of(load, "alone")
        if aims is None or not alone:
            return {}
        tried = {share: self.of(load, share) for share in SHARES}
        return {s: not analysis.compared(w, alone, aims).fresh for s, w in tried.items() if w}
