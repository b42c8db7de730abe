"""Which windows are still to run, and how long they will take; pure.

Next step: ``run`` carries them out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.guard.load import Load
from bench.guard.serving import SERVING, Serving
from bench.guard.windows import GUARDED, SHARES

_FIRST_GUESS_SECONDS = 6.0  # around a window's own seconds, before anything was seen


@dataclass(frozen=True)
class Cell:
    """One window to run."""

    load: Load
    condition: str
    round: int

    @property
    def name(self) -> str:
        """For people."""
        return f"round {self.round + 1} {self.load.name} {self.condition}"

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes it this one and no other."""
        return self.load.name, self.condition, self.round


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        seconds: measured seconds of a window.
        rounds: how many; with ``minutes`` the most.
        oracle: also search the best fixed share on steady loads.
        minutes: no round is begun that would not be over by then; 0 = all rounds are run.
    """

    model: str
    seconds: float
    rounds: int
    loads: tuple[Load, ...]
    conditions: tuple[str, ...]
    seed: int
    oracle: bool
    serving: Serving = SERVING["sglang"]
    minutes: float = 0.0

    def order(self, load: Load, number: int) -> list[str]:
        """Conditions of one round: those with guard and tap together, everything else drawn.

        Guard and tap are started and ended between the two groups, so that nothing of them runs
        beside the others.
        """
        draw = random.Random(f"{self.seed} {load.name} {number}")
        chosen = list(self.conditions)
        if load.steady and self.oracle and not number:
            chosen += [share for share in SHARES if share not in chosen]
        groups = [
            [c for c in chosen if c in GUARDED],
            [c for c in chosen if c not in GUARDED],
        ]
        for group in groups:
            draw.shuffle(group)
        draw.shuffle(groups)
        return [condition for group in groups for condition in group]

    def round(self, number: int) -> list[Cell]:
        """The windows of one round, in order."""
        return [
            Cell(load, condition, number)
            for load in self.loads
            for condition in self.order(load, number)
        ]

    def rounds_after(self, number: int) -> Iterator[list[Cell]]:
        """Each round that may follow."""
        return (self.round(later) for later in range(number + 1, self.rounds))


@dataclass
class Pace:
    """How long windows take beyond their own seconds, as seen so far.

    Attributes:
        seconds: measured seconds of a window.
        began_s: when the run began.
        minutes: its budget; 0 = none.
    """

    seconds: float
    began_s: float
    minutes: float = 0.0
    _around_s: list[float] = field(default_factory=list)

    def took(self, cell: Cell, elapsed_s: float) -> None:
        """Note a window."""
        self._around_s.append(max(0.0, elapsed_s - self.seconds - cell.load.lead_s))

    def needed_s(self, cells: list[Cell]) -> float:
        """How long these will take."""
        seen = self._around_s
        around = sum(seen) / len(seen) if seen else _FIRST_GUESS_SECONDS
        return sum(self.seconds + cell.load.lead_s + around for cell in cells)

    def fits(self, cells: list[Cell], now_s: float) -> bool:
        """A round would be over within the budget."""
        return not self.minutes or (
            now_s + self.needed_s(cells) <= self.began_s + 60 * self.minutes
        )

    def left_s(self, plan: Plan, number: int, cells: list[Cell], now_s: float) -> float:
        """Until the end: these cells of round ``number``, and every later round that fits."""
        end_s = now_s + self.needed_s(cells)
        for later in plan.rounds_after(number):
            if not self.fits(later, end_s):
                break
            end_s += self.needed_s(later)
        return end_s - now_s


def clock(seconds: float) -> str:
    """A duration for people."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
