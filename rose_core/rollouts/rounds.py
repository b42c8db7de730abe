"""Tail batching: short rounds start more than they train on; the stragglers wait together.

A synchronous step lasts as long as its longest trajectory. Rounds are of two kinds (RollPacker,
arXiv 2509.21009). A *short* one speculates: it starts a surplus of prompts, and of trajectories of
each, keeps the first ``members`` of the first ``batch`` prompts and ends. Prompts that are not
ready then are *deferred*, as whole groups. Once a batch of them has gathered, a *long* round runs
them alone, without any surplus and to the end. So no prompt is deferred twice, and prompts with
long answers are trained on as often as those with short ones.

A *group* is the trajectories of one prompt; it is ready when ``members`` of them ended. Those that
a short round started beyond these are *cut*: nobody samples them again. The first to end are the
short ones, so this is a filter by length inside the group. It is off unless asked for
(``member_surplus``); prompts of long rounds are free of it.

| prompt | on | next |
|---|---|---|
| (none) | ``begin`` while a round is open | running |
| running | ``finished`` for as many as ``members``; its others are cut | ready |
| running | its short round has a batch: ``Closing.deferred`` | deferred |
| (none) | ``put_off``: an earlier run of the trainer had deferred it | deferred |
| ready | its round closes: ``Closing.batch`` | trained |
| deferred | ``open`` makes a long round: ``Opening.resumed`` | running |
| running, ready, deferred | ``drop`` | dropped |

| round | opened when | starts | closes when ready are |
|---|---|---|---|
| short | fewer than ``batch`` are deferred | ``started`` x ``started_members`` | ``batch`` |
| long | ``batch`` are, or none is left to draw | oldest ``batch`` x ``members`` | all |

Every prompt that was begun is trained or dropped exactly once, or still counted as under way.
Next step: ``rose_trainer.rounds`` drives it for a trainer, ``simulate.job`` on virtual time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from rose_core.rollouts.errors import InvalidRound


class RoundKind(StrEnum):
    """Of a round."""

    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class RoundShape:
    """Sizes.

    Attributes:
        batch: prompts trained on in a round.
        members: trajectories of a prompt that are trained on.
        surplus: prompts that a short round starts beyond the batch, as a share of it.
        member_surplus: trajectories that it starts beyond ``members`` for each prompt, likewise.
            RollPacker's eta is 1 + surplus for both.
    """

    batch: int
    members: int
    surplus: float = 0.25
    member_surplus: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes that no round could have."""
        if self.batch < 1 or self.members < 1:
            message = f"batch {self.batch} and members {self.members} must be at least 1"
            raise InvalidRound(message)
        for name, share in (("surplus", self.surplus), ("member_surplus", self.member_surplus)):
            if not 0 <= share < math.inf:
                message = f"{name} {share:g} must be 0 or more, and finite"
                raise InvalidRound(message)

    @property
    def started(self) -> int:
        """Prompts that a short round runs."""
        return _with_surplus(self.batch, self.surplus)

    @property
    def started_members(self) -> int:
        """Trajectories that a short round runs for each of them."""
        return _with_surplus(self.members, self.member_surplus)


def _with_surplus(count: int, share: float) -> int:
    # Rounded first, because 70 * 0.1 is 7.000000000000001 and would start an eighth.
    return count + math.ceil(round(count * share, 9))


@dataclass(frozen=True, slots=True)
class Opening:
    """A round that begins: run the resumed prompts anew, draw so many fresh ones.

    Attributes:
        members: trajectories to start for each prompt.
    """

    number: int
    kind: RoundKind
    resumed: tuple[str, ...]
    fresh: int
    members: int


@dataclass(frozen=True, slots=True)
class Deferral:
    """A whole group put off to a long round; what its members have written does not count."""

    prompt: str
    round: int
    finished: int


@dataclass(frozen=True, slots=True)
class Closing:
    """A round that ends: train on the batch, stop the deferred groups' members."""

    number: int
    kind: RoundKind
    batch: tuple[str, ...]
    deferred: tuple[Deferral, ...]


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of every prompt begun; the last three add up to the first."""

    begun: int
    trained: int
    dropped: int
    under_way: int


class Rounds:
    """The state of one job's rounds.

    Args:
        shape: sizes.
    """

    def __init__(self, shape: RoundShape) -> None:
        self.shape = shape
        self._number = self._fresh = self._trained = self._dropped = 0
        self._kind: RoundKind | None = None
        self._running: OrderedDict[str, int] = OrderedDict()
        self._ready: list[str] = []
        self._deferred: OrderedDict[str, Deferral] = OrderedDict()

    @property
    def kind(self) -> RoundKind | None:
        """Of the round that is open; None between two."""
        return self._kind

    @property
    def deferred(self) -> tuple[Deferral, ...]:
        """Groups that wait for a long round, oldest first."""
        return tuple(self._deferred.values())

    @property
    def tally(self) -> Tally:
        """The account."""
        under_way = len(self._running) + len(self._ready) + len(self._deferred)
        begun = under_way + self._trained + self._dropped
        return Tally(begun, self._trained, self._dropped, under_way)

    def put_off(self, prompt: str) -> None:
        """A group that an earlier run of the trainer has deferred waits for a long round here.

        Raises:
            InvalidRound: the name is under way.
        """
        self._check_new(prompt)
        self._deferred[prompt] = Deferral(prompt, self._number, 0)

    def open(self, *, last: bool = False) -> Opening | None:
        """Open the next round.

        Args:
            last: no prompt is left to draw; what is deferred is run even if it is no batch.

        Returns:
            The round; None when there is nothing left to run.

        Raises:
            InvalidRound: a round is open already.
        """
        if self._kind is not None:
            message = f"round {self._number} is still open"
            raise InvalidRound(message)
        if last and not self._deferred:
            return None
        self._number += 1
        if last or len(self._deferred) >= self.shape.batch:
            return self._open_long()
        self._kind, self._fresh = RoundKind.SHORT, self.shape.started
        return Opening(self._number, RoundKind.SHORT, (), self._fresh, self.shape.started_members)

    def _open_long(self) -> Opening:
        self._kind, self._fresh = RoundKind.LONG, 0
        resumed = tuple(self._deferred)[: self.shape.batch]
        for prompt in resumed:
            del self._deferred[prompt]
            self._running[prompt] = 0
        return Opening(self._number, RoundKind.LONG, resumed, 0, self.shape.members)

    def begin(self, prompt: str) -> None:
        """A fresh prompt was drawn for the open round; its name must be new.

        Raises:
            InvalidRound: the round takes no fresh prompt any more, or the name is under way.
        """
        if not self._fresh:
            message = f"prompt {prompt!r}: round {self._number} takes no fresh prompt any more"
            raise InvalidRound(message)
        self._check_new(prompt)
        self._fresh -= 1
        self._running[prompt] = 0

    def _check_new(self, prompt: str) -> None:
        if prompt in self._running or prompt in self._ready or prompt in self._deferred:
            message = f"prompt {prompt!r} is under way already; give every draw its own name"
            raise InvalidRound(message)

    def exhausted(self) -> Closing | None:
        """No fresh prompt is left for the open round: it makes do with those begun."""
        self._fresh = 0
        return self._maybe_close()

    def finished(self, prompt: str) -> Closing | None:
        """A member of the prompt's group has ended; the closing when that ends the round.

        A member of a group that is ready, deferred or dropped changes nothing: it was under way
        when that happened. The caller stops those of a ready group that are under way still.
        """
        if prompt not in self._running:
            return None
        self._running[prompt] += 1
        if self._running[prompt] < self.shape.members:
            return None
        del self._running[prompt]
        self._ready.append(prompt)
        return self._maybe_close()

    def drop(self, prompt: str) -> Closing | None:
        """Give the prompt up, knowingly: it is counted, and the round goes on without it.

        Raises:
            InvalidRound: the prompt is not under way.
        """
        if self._deferred.pop(prompt, None) is None and self._running.pop(prompt, None) is None:
            if prompt not in self._ready:
                message = f"prompt {prompt!r} is not under way"
                raise InvalidRound(message)
            self._ready.remove(prompt)
        self._dropped += 1
        return self._maybe_close()

    def _maybe_close(self) -> Closing | None:
        if self._kind is None:
            return None
        full = len(self._ready) >= self.shape.batch
        if not full and (self._running or self._fresh):
            return None
        kind, self._kind = self._kind, None
        put_off = tuple(
            Deferral(prompt, self._number, done) for prompt, done in self._running.items()
        )
        self._deferred.update((one.prompt, one) for one in put_off)
        batch = tuple(self._ready)
        self._running.clear()
        self._ready.clear()
        self._fresh, self._trained = 0, self._trained + len(batch)
        return Closing(self._number, kind, batch, put_off)
