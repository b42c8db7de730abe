"""Tail batching as a source of groups: ``--rounds``, the rule of RollPacker on this trainer.

A step's groups are those of one round (``rose_trainer.rounds``): nothing is in flight while the
step is computed, so sampling is synchronous, and a short round starts more prompts and more
episodes of each than the step takes.

| an episode is | when | reported as |
|---|---|---|
| trained on | among the first ``members`` of its group, which is fresh | trained |
| too old | its group is ready but older than the bound, as in ``rollouts`` | dropped |
| cut | its group was ready without it | dropped, without a reward |
| put off | its group was not ready when the short round ended; sampled anew | withdrawn |
| under way | the run ends | withdrawn |

Cut is reported as dropped because it is a filter by length: the first to end are the short ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from examples.grpo.client import LeaseClient
from examples.grpo.errors import OutOfTime
from examples.grpo.rollouts import Group, SamplerStatistics, Trajectory, fresh, play
from examples.grpo.task import Task, draw
from rose_core.identity import WeightVersion
from rose_trainer.rounds import Batch, Batches, RoundShape


class Tell(Protocol):
    """``Progress.write``."""

    def __call__(self, event: str, **fields: object) -> None:
        """Write one record."""


@dataclass(frozen=True)
class _Prompt:
    """A task that was drawn; equal tasks are drawn more than once."""

    group: str
    task: Task


class RoundSampler:
    """Hands out the groups of one round after the other; has the methods of ``Sampler``.

    Args:
        client: asks for turns.
        shape: sizes of a round; its batch is what a step takes.
        bound: highest age at consumption, in publishes.
        head: returns the version last published.
        seed: of the task sequence.
        tell: is given a record of every round.
    """

    def __init__(
        self,
        client: LeaseClient,
        *,
        shape: RoundShape,
        bound: int,
        head: Callable[[], WeightVersion | None],
        seed: int,
        tell: Tell,
    ) -> None:
        self._client, self._bound, self._head, self._tell = client, bound, head, tell
        self._random = random.Random(seed)
        self._episodes = itertools.count()
        self._batches = Batches(self._prompts(), self._play, shape)
        self._iterator = self._batches.__aiter__()
        self._open: dict[str, set[str]] = {}  # group -> keys of which nothing was said yet
        self._stale: dict[str, float] = {}
        self._cut: list[str] = []
        self._withdrawn: list[str] = []
        self.statistics = SamplerStatistics()

    async def take(self) -> Sequence[Group]:
        """Wait for a round that leaves at least one fresh group; a long one may be smaller.

        Raises:
            OutOfTime: the time limit came first.
            TrainerError: sampling failed for good.
        """
        async for batch in self._iterator:
            if self._batches.failures:
                break
            if groups := self._sorted_out(batch):
                return groups
        raise self._failure()

    async def report(self, groups: Sequence[Group]) -> None:
        """Say what became of the episodes of this round and of those before that gave no group."""
        trained = {member.key: member.reward for group in groups for member in group}
        await self._say(trained)

    async def close(self) -> None:
        """End everything in flight; what its turns had sampled is counted by nobody here."""
        self._client.leaving = True
        await self._iterator.aclose()
        self._withdrawn += sorted(key for keys in self._open.values() for key in keys)
        self._open.clear()
        await self._say({})

    async def _say(self, trained: dict[str, float]) -> None:
        stale, self._stale = self._stale, {}
        cut, self._cut = self._cut, []
        withdrawn, self._withdrawn = self._withdrawn, []
        await self._client.report(trained, stale, withdrawn, cut)

    def _prompts(self) -> Iterator[_Prompt]:
        """Fresh tasks until something fails for good: the rounds then come to their end."""
        while not self._batches.failures:
            group = f"group-{self.statistics.groups:06d}"
            self.statistics.groups += 1
            yield _Prompt(group, draw(self._random))

    async def _play(self, prompt: _Prompt, _member: int) -> Trajectory:
        # A number of its own: a group that was put off is sampled anew under other keys.
        key = f"{prompt.group}-{next(self._episodes):06d}."
        self._open.setdefault(prompt.group, set()).add(key)
        return await play(self._client, prompt.task, key, prompt.group)

    def _sorted_out(self, batch: Batch[_Prompt, Trajectory]) -> list[Group]:
        """The groups to train on; notes what is to be said of all other episodes."""
        groups: list[Group] = []
        cut: list[str] = []
        stale = 0
        for prompt, samples in batch.groups:
            group, began = tuple(samples), self._open.pop(prompt.group)
            cut += sorted(began - {member.key for member in group})
            if fresh(group, self._head(), self._bound):
                groups.append(group)
            else:
                self.statistics.dropped_groups += 1
                stale += len(group)
                self._stale |= {member.key: member.reward for member in group}
        put_off = [
            key
            for prompt in self._batches.put_off
            for key in sorted(self._open.pop(prompt.group, ()))
        ]
        self._cut += cut
        self._withdrawn += put_off
        trained = sum(map(len, groups))
        self._tell(
            "round",
            kind=str(batch.kind),
            groups=len(groups),
            trained=trained,
            cut=len(cut),
            stale=stale,
            put_off=len(put_off),
            inclusion=trained / (trained + len(cut) + stale),
        )
        return groups

    def _failure(self) -> BaseException:
        """Why there is no more; a real failure says more than the time limit around it."""
        errors = [error for _, error in self._batches.failures]
        real = (error for error in errors if not isinstance(error, OutOfTime))
        return next(real, errors[0])
