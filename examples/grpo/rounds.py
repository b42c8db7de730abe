"""Tail batching as a source of groups: ``--rounds``, the rule of RollPacker on this trainer.

A step's groups are those of one round (``rose_trainer.rounds``), handed out as they become ready:
gradients are added while the round's tail is sampled, and the step comes with the last of them.
Nothing samples between two rounds, so all of a round is sampled by the same weights. A short round
starts more prompts and more episodes of each than the step takes.

With ``score`` rewards come from elsewhere (``scoring``). With ``RoundShape.late`` a round does not
wait for the last of them: up to so many groups are trained on in the next step, by weights that are
one publish newer than those that sampled them.

| an episode is | when | reported as |
|---|---|---|
| trained on | among the first ``members`` of its group, which is fresh | trained |
| unscored | a member of its group has no reward that may be used | dropped, without a reward |
| too old | its group is ready but older than the bound, as in ``rollouts`` | dropped |
| cut | its group was ready without it | dropped, without a reward |
| put off | its group was not ready when the short round ended; sampled anew | withdrawn |
| under way | the run ends | withdrawn |

Cut is reported as dropped because it is a filter by length: the first to end are the short ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from examples.grpo.client import LeaseClient
from examples.grpo.errors import OutOfTime, Unscored
from examples.grpo.rollouts import Group, Part, SamplerStatistics, Trajectory, fresh, play
from examples.grpo.task import Task, draw
from rose_core.identity import WeightVersion
from rose_trainer.rounds import Batch, Batches, RoundKind, RoundShape


class Write(Protocol):
    """``Progress.write``."""

    def __call__(self, event: str, **fields: object) -> None:
        """Write one record."""


@dataclass(frozen=True)
class _Prompt:
    """A task that was drawn; equal tasks are drawn more than once."""

    group: str
    task: Task


@dataclass
class _RoundCounts:
    """Of the round that runs: groups, of which late, and episodes by what became of them."""

    groups: int = 0
    late: int = 0
    unscored: int = 0
    trained: int = 0
    cut: int = 0
    stale: int = 0


class RoundSampler:
    """Hands out the groups of one round after the other; has the methods of ``Sampler``.

    Args:
        client: asks for turns.
        shape: sizes of a round; its batch is what a step takes.
        bound: highest age at consumption, in publishes.
        head: returns the version last published.
        seed: of the task sequence.
        write: is given a record of every round.
        score: gives an episode its rewards, given its group too; None = it has them.
    """

    def __init__(
        self,
        client: LeaseClient,
        *,
        shape: RoundShape,
        bound: int,
        head: Callable[[], WeightVersion | None],
        seed: int,
        write: Write,
        score: Callable[[Trajectory, str], Awaitable[Trajectory]] | None = None,
    ) -> None:
        self._client, self._bound, self._head, self._write = client, bound, head, write
        self._random = random.Random(seed)
        self._episodes = itertools.count()
        self._score = score
        reward = None if score is None else self._scored
        self._batches = Batches(self._prompts(), self._play, shape, stream=True, reward=reward)
        self._iterator = self._batches.__aiter__()
        self._open: dict[str, set[str]] = {}  # group -> keys of which nothing was said yet
        self._stale: dict[str, float] = {}
        self._cut: list[str] = []
        self._withdrawn: list[str] = []
        self._correct: list[str] = []
        self._round = _RoundCounts()
        self._given = False
        self.statistics = SamplerStatistics()

    async def take(self) -> Part:
        """Wait for the next fresh groups of a round; the last part of one may have none.

        A round without any fresh group is passed over.

        Raises:
            OutOfTime: the time limit came first.
            TrainerError: sampling failed for good.
        """
        async for batch in self._iterator:
            if self._failures():
                break
            groups = self._sorted_out(batch)
            given = self._given or bool(groups)
            self._given = given and not batch.last
            if groups or (batch.last and given):
                return Part(groups, batch.last)
        raise self._failure()

    async def report(self, groups: Sequence[Group]) -> None:
        """Say what became of the episodes of this round and of those before that gave no group."""
        trained = {member.key: member.reward for group in groups for member in group}
        self._correct = [member.key for group in groups for member in group if member.correct]
        await self._report_trained(trained)

    async def close(self) -> None:
        """End everything in flight; what its turns had sampled is counted by nobody here."""
        self._client.leaving = True
        await self._iterator.aclose()
        self._withdrawn += sorted(key for keys in self._open.values() for key in keys)
        self._open.clear()
        await self._report_trained({})

    async def _report_trained(self, trained: dict[str, float]) -> None:
        stale, self._stale = self._stale, {}
        correct, self._correct = self._correct, []
        cut, self._cut = self._cut, []
        withdrawn, self._withdrawn = self._withdrawn, []
        await self._client.report(trained, stale, withdrawn, cut, correct)

    def _prompts(self) -> Iterator[_Prompt]:
        """Fresh tasks until something fails for good: the rounds then come to their end."""
        while not self._failures():
            group = f"group-{self.statistics.groups:06d}"
            self.statistics.groups += 1
            yield _Prompt(group, draw(self._random))

    async def _play(self, prompt: _Prompt, _member: int) -> Trajectory:
        # A number of its own: a group that was put off is sampled anew under other keys.
        key = f"{prompt.group}-{next(self._episodes):06d}."
        self._open.setdefault(prompt.group, set()).add(key)
        return await play(self._client, prompt.task, key, prompt.group)

    async def _scored(self, prompt: _Prompt, member: Trajectory) -> Trajectory:
        assert self._score is not None  # noqa: S101  # else nobody asks
        return await self._score(member, prompt.group)

    def _failures(self) -> list[BaseException]:
        """What ends the run; a group that has no reward is left out, and nothing more."""
        errors: list[BaseException] = []
        for prompt, error in self._batches.failures:
            if not isinstance(error, Unscored):
                errors.append(error)
            elif (keys := self._open.pop(prompt.group, None)) is not None:
                self._cut += sorted(keys)
                self._round.unscored += len(keys)
        return errors

    def _sorted_out(self, batch: Batch[_Prompt, Trajectory]) -> list[Group]:
        """The groups to train on; notes what is to be said of all other episodes."""
        groups: list[Group] = []
        counts = self._round
        counts.late += batch.late
        for prompt, samples in batch.groups:
            group, began = tuple(samples), self._open.pop(prompt.group)
            cut = sorted(began - {member.key for member in group})
            self._cut += cut
            counts.cut += len(cut)
            if fresh(group, self._head(), self._bound):
                groups.append(group)
            else:
                self.statistics.dropped_groups += 1
                counts.stale += len(group)
                self._stale |= {member.key: member.reward for member in group}
        counts.groups += len(groups)
        counts.trained += sum(map(len, groups))
        if batch.last:
            self._end_round(batch.kind)
        return groups

    def _end_round(self, kind: RoundKind) -> None:
        """Note what was put off, and write the round down."""
        counts, self._round = self._round, _RoundCounts()
        put_off = [
            key
            for prompt in self._batches.put_off
            for key in sorted(self._open.pop(prompt.group, ()))
        ]
        self._withdrawn += put_off
        every = counts.trained + counts.cut + counts.stale + counts.unscored
        self._write(
            "round",
            kind=str(kind),
            groups=counts.groups,
            trained=counts.trained,
            cut=counts.cut,
            stale=counts.stale,
            late=counts.late,
            unscored=counts.unscored,
            put_off=len(put_off),
            inclusion=counts.trained / every if every else 1.0,
        )

    def _failure(self) -> BaseException:
        """Why there is no more; a real failure says more than the time limit around it."""
        errors = self._failures()
        real = (error for error in errors if not isinstance(error, OutOfTime))
        return next(real, errors[0])
