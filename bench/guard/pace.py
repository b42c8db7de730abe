"""Which windows are still to run, and how long they will take; pure.

Next step: ``run`` carries them out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bench.guard.load import Load
from bench.guard.serving import SERVING, Serving
from bench.guard.windows import GUARDED, SEARCHED, SHARES

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
        minutes: no load of a later round is begun that would not be over by then; 0 = all are run.
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

        The offline search comes last. Guard and tap are started and ended between the two groups,
        so that nothing of them runs beside the others.
        """
        draw = random.Random(f"{self.seed} {load.name} {number}")
        chosen = list(self.conditions)
        groups = [
            [c for c in chosen if c in GUARDED],
            [c for c in chosen if c not in GUARDED],
        ]
        for group in groups:
            draw.shuffle(group)
        draw.shuffle(groups)
        order = [condition for group in groups for condition in group]
        # The search knows by then what serving does alone, and what half of the time does.
        searching = load.steady and self.oracle and not number
        return order + [s for s in SEARCHED if searching and s not in order]

    def round(self, number: int) -> list[Cell]:
        """The windows of one round, in order."""
        return [cell for group in self.groups(number) for cell in group]

    def groups(self, number: int) -> list[list[Cell]]:
        """The same by load; another half of the loads comes first in every second round.

        A budget of minutes ends between two loads, so that way both halves get as many rounds.
        """
        half = number % 2 * (len(self.loads) // 2)
        return [
            [Cell(load, condition, number) for condition in self.order(load, number)]
            for load in (*self.loads[half:], *self.loads[:half])
        ]

    def groups_after(self, number: int) -> Iterator[list[Cell]]:
        """Each load of each round that may follow."""
        for later in range(number + 1, self.rounds):
            yield from self.groups(later)


def hopeless(share: str, harmless: Mapping[str, bool]) -> bool:
    """A fixed share need not be tried: a larger one does no harm, or a smaller one does.

    Args:
        share: the one in question.
        harmless: what is known of others.
    """
    if share not in SEARCHED:
        return False
    value = SHARES[share]
    return any(
        (fine and SHARES[other] > value) or (not fine and SHARES[other] < value)
        for other, fine in harmless.items()
        if other in SHARES
    )


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
        """These would be over within the budget."""
        return not self.minutes or (
            now_s + self.needed_s(cells) <= self.began_s + 60 * self.minutes
        )

    def left_s(self, plan: Plan, number: int, cells: list[Cell], now_s: float) -> float:
        """Until the end: these cells of round ``number``, and all of later rounds that fits."""
        end_s = now_s + self.needed_s(cells)
        for later in plan.groups_after(number):
            if not self.fits(later, end_s):
                break
            end_s += self.needed_s(later)
        return end_s - now_s


def clock(seconds: float) -> str:
    """A duration for people."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
