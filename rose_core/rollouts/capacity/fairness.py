"""Several jobs on one lease's engines: start-time fair queueing over the work each was given.

Goyal, Vin and Cheng (1996), in the form that Sheng et al. give it for LLM serving ("Fairness in
Serving Large Language Models", OSDI 2024: virtual token counters, lifted when a job comes back).

    served(job) += work of every turn placed (corrected when the turn has ended)
    next        =  the waiting job with the least ``served``; inside a job the usual order

A job that comes (back) starts level with the least served of those that are there: what it left
unused is not saved up, so a burst after a silence cannot lock the others out. A job alone pays
nothing for this. Next step: ``dispatch`` tries the turns in that order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

# A token read costs about so much of one written: prefill of 15 to 29 thousand tokens a second
# beside about 3 thousand written at a batch of 32 (cost model of the simulator).
_READ = 0.125
_REMEMBERED = 1024  # jobs; names come from callers, so memory must have a bound


class QueuedTurn(Protocol):
    """A turn that waits."""

    @property
    def job(self) -> str:
        """The job that the turn belongs to."""
        ...

    @property
    def key(self) -> tuple[bool, int, int]:
        """The turn's place in its job's queue: its ``admission.rank``."""
        ...


OneT = TypeVar("OneT", bound=QueuedTurn)


def work(uncached: int, written: float) -> float:
    """What a turn costs its engine, in tokens written.

    Args:
        uncached: tokens of its context that must be computed.
        written: tokens that it writes.
    """
    return uncached * _READ + written


class FairShares:
    """What each job was given."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, float] = OrderedDict()
        self._turns: Counter[str] = Counter()  # waiting or running

    def join(self, job: str) -> None:
        """Count a turn of the job that begins to wait; a job that comes back starts level."""
        if job not in self._turns:
            turns = self._turns  # without any, as between two turns, there is nothing to look at
            level = min([self._served[other] for other in turns]) if turns else 0.0
            self._served[job] = max(self._served.pop(job, 0.0), level)
            self._turns[job] = 0
            if len(self._served) > _REMEMBERED:
                self._forget(level)
        self._turns[job] += 1

    def charge(self, job: str, tokens: float) -> None:
        """Charge the job for so much work; a negative amount corrects a guess."""
        self._served[job] = max(0.0, self._served.get(job, 0.0) + tokens)

    def leave(self, job: str) -> None:
        """Take back one ``join``: the turn has left its engine, or gave up waiting."""
        self._turns[job] -= 1
        if self._turns[job] <= 0:
            del self._turns[job]

    def order(self, waiting: Sequence[OneT]) -> Sequence[OneT]:
        """Those who wait, given in the order of their rank, in the order they should be tried.

        Turns that hold tokens and turns of higher priority stay ahead whosever they are.
        """
        if len(self._turns) < 2:
            return waiting
        served = self._served
        return sorted(waiting, key=lambda one: (*one.key[:2], served.get(one.job, 0.0)))

    def _forget(self, level: float) -> None:
        """Forget jobs that are away, first those that would start at the level anyway."""
        for job in [job for job in self._served if job not in self._turns]:
            if self._served[job] <= level or len(self._served) > _REMEMBERED:
                del self._served[job]
