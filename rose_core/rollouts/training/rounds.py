"""Tail batching: short rounds start more than they train on; the stragglers wait together.

A synchronous step lasts as long as its longest trajectory. Rounds are of two kinds (RollPacker,
arXiv 2509.21009). A *short* one speculates: it starts a surplus of prompts, and of trajectories of
each, keeps the first ``members`` of the first ``batch`` prompts and ends. Prompts that are not
ready then are *deferred*, as whole groups. Once a batch of them has gathered, a *long* round runs
them alone, without any surplus and to the end. So no prompt is deferred twice, and prompts with
long answers are trained on as often as those with short ones.

A *group* is the trajectories of one prompt. It is *sampled* when ``members`` of them have their
last token, and ready when these have their rewards. Those that a short round started beyond them
are *cut*: nobody samples them again. The first to end are the short ones, so this is a filter by
length inside the group. It is off unless asked for (``member_surplus``); prompts of long rounds are
free of it.

The last reward of a round comes after its last token, and nothing of the round hides it. With
``late`` a round closes without the rewards of up to so many groups. They are *carried* into the
next round, whose rollouts hide them, and are in its batch for certain: what is carried is trained
on one step late, never two; an engine that was a version behind makes it two versions. So that a
batch is always ``batch`` groups, the first round that may carry starts ``late`` more. With 0, the
default, a round waits for every reward and carries nothing. A learned number is chosen as each
round opens (``lateness``).

| prompt | on | next |
|---|---|---|
| (none) | ``begin`` while a round is open | running |
| running | ``sampled`` for as many as ``members``; its others are cut | sampled |
| running, sampled | ``finished`` for as many as ``members``; its others are cut | ready |
| running | its short round has a batch: ``Closing.deferred`` | deferred |
| sampled, ready | its round closes without it: ``Closing.carried`` | the same, carried |
| sampled, ready | likewise, and ``late`` are carried: ``Closing.deferred`` | deferred |
| (none) | ``put_off``: an earlier run of the trainer had deferred it | deferred |
| ready | its round closes: ``Closing.batch`` | trained |
| deferred | ``open`` makes a long round: ``Opening.resumed`` | running |
| running, sampled, ready, deferred | ``drop`` | dropped |

| round | opened when | starts | closes when it has a batch, and sampled or ready are |
|---|---|---|---|
| short | fewer than ``due`` are deferred | ``due`` and a surplus x ``started_members`` | ``due`` |
| long | ``due`` are, or none is left to draw | oldest ``due`` x ``members`` | all |

``due`` is ``batch + late`` of the round, less what is carried into it; ``batch`` where both are 0.

Every prompt that was begun is trained or dropped exactly once, or still counted as under way.
Next step: ``rose_trainer.rounds`` drives it for a trainer, ``simulate.job`` on virtual time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from rose_core.rollouts.errors import InvalidRound
from rose_core.rollouts.training.lateness import Lateness

Late: TypeAlias = int | Literal["learned"]
"""Of ``RoundShape``."""


class RoundKind(StrEnum):
    """Whether a round leaves its slowest prompts behind, or takes up those that were left."""

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
        late: groups whose rewards a round need not wait for; they are in the next round's batch.
            "learned" = the fewest that hide the rewards: at most half of the batch, and more only
            where half was seen not to be enough (``lateness``).
    """

    batch: int
    members: int
    surplus: float = 0.25
    member_surplus: float = 0.0
    late: Late = 0

    def __post_init__(self) -> None:
        """Refuse sizes that no round could have."""
        if self.batch < 1 or self.members < 1:
            message = f"batch {self.batch} and members {self.members} must be at least 1"
            raise InvalidRound(message)
        if self.late != "learned" and not 0 <= self.late <= self.batch:
            message = (
                f"late {self.late} must be 0 to batch, {self.batch}: what is carried into a round "
                "is a part of its batch"
            )
            raise InvalidRound(message)
        for name, share in (("surplus", self.surplus), ("member_surplus", self.member_surplus)):
            if not 0 <= share < math.inf:
                message = f"{name} {share:g} must be 0 or more, and finite"
                raise InvalidRound(message)

    @property
    def most_late(self) -> int:
        """Groups of a round that may be late at most."""
        return self.batch - 1 if self.late == "learned" else self.late

    @property
    def more_late(self) -> int:
        """Groups by which a round may be late with more than the one before it, at most."""
        return self.batch // 2 if self.late == "learned" else self.late

    @property
    def started(self) -> int:
        """Prompts that a short round runs at most."""
        return self.started_for(self.batch + self.more_late)

    def started_for(self, due: int) -> int:
        """Prompts that a short round runs to have so many sampled."""
        return _with_surplus(due, self.surplus)

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
    """A round that ends: train on the batch, stop the deferred groups' members.

    Attributes:
        carried: sampled in this round and in the next one's batch; their rewards go on.
    """

    number: int
    kind: RoundKind
    batch: tuple[str, ...]
    deferred: tuple[Deferral, ...]
    carried: tuple[str, ...] = ()


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
        clock: seconds at which what is told has happened; asked where ``shape.late`` is learned.

    Raises:
        InvalidRound: it is learned, and nobody tells the time.
    """

    def __init__(self, shape: RoundShape, clock: Callable[[], float] | None = None) -> None:
        self._lateness: Lateness | None = None
        self._late = 0  # of the round that is open, or was last
        if shape.late != "learned":
            self._late = shape.late
        elif clock is None:
            message = "late learned needs a clock: it is learned from what rewards take"
            raise InvalidRound(message)
        else:
            self._lateness = Lateness(shape.more_late, shape.most_late, clock)
        self.shape = shape
        self._number = self._fresh = self._trained = self._dropped = 0
        self._kind: RoundKind | None = None
        self._running: OrderedDict[str, _Ended] = OrderedDict()
        self._sampled: OrderedDict[str, _Ended] = OrderedDict()
        self._ready: list[str] = []
        self._batch: list[str] = []
        self._carried: tuple[str, ...] = ()
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
    def carried(self) -> tuple[str, ...]:
        """Groups of the round before that are in this one's batch; between two, in the next's."""
        return self._carried

    @property
    def taken(self) -> tuple[str, ...]:
        """Ready groups that are in the open round's batch for certain, as they became ready.

        Those that were carried into it have their places, ready or not. None between two rounds.
        """
        return tuple(self._batch)

    def _take(self) -> None:
        """What is ready goes into the batch while there are places.

        Whenever that may change, asked for or not: the order of the batch is that of its parts.
        """
        for prompt in self._ready if self._kind is not None else ():
            fresh = sum(one not in self._carried for one in self._batch)
            places = self.shape.batch - len(self._carried) - fresh
            if prompt not in self._batch and (prompt in self._carried or places > 0):
                self._batch.append(prompt)

    def has_tokens(self, prompt: str) -> bool:
        """Whether as many members as its group needs have their last token."""
        return prompt in self._sampled or prompt in self._ready

    @property
    def _due(self) -> int:
        return self.shape.batch + self._late - len(self._carried)

    @property
    def tally(self) -> Tally:
        """The account."""
        under_way = sum(map(len, (self._running, self._sampled, self._ready, self._deferred)))
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
        if last and not self._deferred and not self._carried:
            return None
        self._number += 1
        if self._lateness is not None:
            # A round never starts more than half a batch beyond its own.
            self._late = min(self._lateness.open(), len(self._carried) + self.shape.more_late)
        long = last or len(self._deferred) >= self._due
        self._kind = RoundKind.LONG if long else RoundKind.SHORT
        self._take()
        if long:
            return self._open_long()
        self._fresh = self.shape.started_for(self._due)
        return Opening(self._number, RoundKind.SHORT, (), self._fresh, self.shape.started_members)

    def _open_long(self) -> Opening:
        self._fresh = 0
        resumed = tuple(self._deferred)[: self._due]
        for prompt in resumed:
            del self._deferred[prompt]
            self._running[prompt] = _Ended()
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
        self._running[prompt] = _Ended()

    def _check_new(self, prompt: str) -> None:
        known = (self._running, self._sampled, self._ready, self._deferred)
        if any(prompt in names for names in known):
            message = f"prompt {prompt!r} is under way already; give every draw its own name"
            raise InvalidRound(message)

    def exhausted(self) -> Closing | None:
        """No fresh prompt is left for the open round: it makes do with those begun."""
        self._fresh = 0
        return self._maybe_close()

    def sampled(self, prompt: str) -> Closing | None:
        """A member of the prompt's group has its last token, and its reward is still to come.

        Whoever tells this of a member tells it of each; a group's others are cut as soon as
        ``has_tokens``.
        """
        ended = self._running.get(prompt)
        if ended is None:
            return None
        ended.sampled += 1
        if ended.sampled < self.shape.members:
            return None
        self._sampled[prompt] = self._running.pop(prompt)
        if self._lateness is not None:
            self._lateness.sampled(prompt)
        return self._maybe_close()

    def finished(self, prompt: str) -> Closing | None:
        """A member of the prompt's group has ended; the closing when that ends the round.

        A member of a group that is ready, deferred or dropped changes nothing: it was under way
        when that happened. The caller stops those of a ready group that are under way still.
        """
        ended = self._running.get(prompt) or self._sampled.get(prompt)
        if ended is None:
            return None
        ended.rewarded += 1
        if ended.rewarded < self.shape.members:
            return None
        self._running.pop(prompt, None)
        self._sampled.pop(prompt, None)
        self._ready.append(prompt)
        if self._lateness is not None:
            self._lateness.ready(prompt)
        self._take()
        return self._maybe_close()

    def drop(self, prompt: str) -> Closing | None:
        """Give the prompt up, knowingly: it is counted, and the round goes on without it.

        Raises:
            InvalidRound: the prompt is not under way.
        """
        holders = (self._deferred, self._running, self._sampled)
        if all(names.pop(prompt, None) is None for names in holders):
            if prompt not in self._ready:
                message = f"prompt {prompt!r} is not under way"
                raise InvalidRound(message)
            self._ready.remove(prompt)
            self._batch = [one for one in self._batch if one != prompt]
        self._carried = tuple(one for one in self._carried if one != prompt)
        if self._lateness is not None:
            self._lateness.drop(prompt)
        self._take()
        self._dropped += 1
        return self._maybe_close()

    def _maybe_close(self) -> Closing | None:
        if self._kind is None or not self._is_complete():
            return None
        kind, self._kind = self._kind, None
        return self._close(kind)

    def _is_complete(self) -> bool:
        """Whether as many are sampled as the round takes, or as it will get, and enough ready."""
        sampled = len(self._sampled) + len(self._ready)
        more_come = bool(self._running or self._fresh)
        if sampled < self.shape.batch + self._late and more_come:
            return False
        return len(self._batch) >= min(self.shape.batch, sampled)

    def _close(self, kind: RoundKind) -> Closing:
        """Train on the batch; of the rest some are carried into the next round, others put off."""
        batch, self._batch = tuple(self._batch), []
        rest = [one for one in self._ready if one not in batch] + list(self._sampled)
        before = self._carried
        self._carried, beyond = tuple(rest[: self._late]), rest[self._late :]
        if self._lateness is not None:
            self._lateness.close({*batch, *self._carried}.difference(before))
        members = self.shape.members
        put_off = tuple(
            Deferral(prompt, self._number, self._sampled[prompt].rewarded)
            if prompt in self._sampled
            else Deferral(prompt, self._number, members)
            for prompt in beyond
        ) + tuple(
            Deferral(prompt, self._number, ended.rewarded)
            for prompt, ended in self._running.items()
        )
        self._deferred.update((one.prompt, one) for one in put_off)
        self._running.clear()
        for prompt in beyond:
            self._sampled.pop(prompt, None)
        self._ready = [prompt for prompt in self._ready if prompt in self._carried]
        self._fresh, self._trained = 0, self._trained + len(batch)
        return Closing(self._number, kind, batch, put_off, self._carried)


@dataclass(slots=True)
class _Ended:
    """Members of a group by how far they came."""

    sampled: int = 0
    rewarded: int = 0
