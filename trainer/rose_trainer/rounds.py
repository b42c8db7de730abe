"""Tail batching for a trainer whose rollouts are coroutines: ``async for batch in batches(...)``.

The trainer gives its prompts and a coroutine that samples one trajectory through the router; it
gets batches of whole groups, stragglers having been put off to rounds of their own
(``rose_core.rollouts.training.rounds`` holds the state and the reasons). A trajectory that is put
off or cut is cancelled; its connection closes, and the router ends the turn on its engine.

With ``stream`` a round comes in parts, each group as soon as it is ready: the trainer adds its
gradients while the round's tail still runs, and steps at the part that is the ``last``. The parts
one after the other are the batch that the round would have given, in its order, and the weights do
not change meanwhile: a trainer that adds gradients group by group gets the same step, bit for bit.
What ends while the trainer is busy with a part counts in the order in which it ended.

With ``reward`` a trajectory's reward is a coroutine of its own, and a group has its tokens before
it has its rewards. With ``RoundShape.late`` a round then ends without the rewards of up to so many
groups, or of the fewest that hide what rewards take (``rose_core.rollouts.training.lateness``).
They are in the next batch for certain, one step after those that were sampled with them
(``Batch.late``).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rose_core.rollouts.errors import InvalidRound
from rose_core.rollouts.training.rounds import (
    Closing,
    Deferral,
    Late,
    RoundKind,
    Rounds,
    RoundShape,
    Tally,
)

Prompt = TypeVar("Prompt")
Sample = TypeVar("Sample")

__all__ = ["Batch", "Batches", "Deferral", "Late", "RoundKind", "RoundShape", "Tally"]


@dataclass(frozen=True)
class Batch(Generic[Prompt, Sample]):
    """What one round gave: every prompt with the samples of its group, in order of finishing.

    Attributes:
        deferred: known with the last part.
        last: the round gives no more; False of parts before it.
        late: how many of the groups were sampled in the round before, with the weights of then.
    """

    kind: RoundKind
    groups: list[tuple[Prompt, list[Sample]]]
    deferred: tuple[Deferral, ...]
    last: bool = True
    late: int = 0


@dataclass
class _Group(Generic[Prompt, Sample]):
    """A prompt under way.

    Attributes:
        tasks: of members that have not ended: whether one has its tokens and waits for its reward.
    """

    prompt: Prompt
    tasks: dict[asyncio.Task[Sample], bool] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


class Batches(Generic[Prompt, Sample]):
    """Batches of groups, round by round; iterate it once.

    Args:
        prompts: drawn from as rounds need them, each once.
        rollout: samples one trajectory: ``await rollout(prompt, member)``. What it raises drops the
            prompt, counted in ``tally`` and kept in ``failures``; it is not asked again.
        shape: sizes.
        put_off: what ``Batches.carried`` and ``put_off`` were when the trainer saved the checkpoint
            that it resumes from; all of it is sampled anew.
        stream: give groups as they become ready; the last part may be empty.
        reward: gives a trajectory its reward: ``await reward(prompt, sample)`` is the sample that
            is trained on. What it raises drops the prompt too. None = ``rollout`` gives it.

    Raises:
        InvalidRound: ``shape.late`` without ``reward``: no group has its tokens before its rewards.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        rollout: Callable[[Prompt, int], Awaitable[Sample]],
        shape: RoundShape,
        put_off: Iterable[Prompt] = (),
        *,
        stream: bool = False,
        reward: Callable[[Prompt, Sample], Awaitable[Sample]] | None = None,
    ) -> None:
        if shape.late and reward is None:
            message = (
                f"late {shape.late} needs reward=: without it a group has its rewards with its "
                "last token, and none is late"
            )
            raise InvalidRound(message)
        self._prompts, self._rollout, self._reward = iter(prompts), rollout, reward
        self._now_s = 0.0  # when what the rounds are told of has happened
        self._rounds = Rounds(shape, lambda: self._now_s)
        self._groups: dict[str, _Group[Prompt, Sample]] = {}
        self._names = map(str, itertools.count(1))
        for prompt in put_off:
            self._rounds.put_off(self._named(prompt))
        self._last = False
        self._stream = stream
        self._given: set[str] = set()  # groups of this round's batch that the trainer has
        self._carried: tuple[str, ...] = ()  # into this round
        # In the order in which it happened: a trainer that is busy with a part looks later. A
        # member has its tokens (False), or has ended (True), and when.
        self._ends: asyncio.Queue[tuple[str, asyncio.Task[Sample], bool, float]] = asyncio.Queue()
        self._members = 0
        self.failures: list[tuple[Prompt, BaseException]] = []

    @property
    def tally(self) -> Tally:
        """What became of every prompt drawn."""
        return self._rounds.tally

    @property
    def put_off(self) -> list[Prompt]:
        """Prompts that wait for a long round, oldest first; of interest between two batches.

        They were drawn and are neither trained on nor dropped: save them with the trainer's
        checkpoint, or they are lost when it resumes. So are those of ``carried``.
        """
        return [self._groups[one.prompt].prompt for one in self._rounds.deferred]

    @property
    def carried(self) -> list[Prompt]:
        """Prompts that the last round sampled and did not train on: they are in the next batch."""
        return [self._groups[name].prompt for name in self._rounds.carried]

    async def __aiter__(self) -> AsyncGenerator[Batch[Prompt, Sample], None]:
        """One batch per round, until no prompt is left; a group dropped whole leaves it smaller."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._now_s = loop.time()
                opening = self._rounds.open(last=self._last)
                if opening is None:
                    break
                self._members = opening.members
                self._given, self._carried = set(), self._rounds.carried
                closing = self._fill(opening.fresh)
                for name in opening.resumed:
                    self._start(name)
                if not opening.fresh and not opening.resumed:
                    closing = self._rounds.exhausted()
                while closing is None:
                    groups, late = self._take(self._rounds.taken if self._stream else ())
                    if groups:
                        yield Batch(opening.kind, groups, (), last=False, late=late)
                    closing = await self._next()
                given = bool(self._given)
                made = await self._close(closing)
                if made.groups or given:
                    yield made
        finally:
            await self._stop(task for group in self._groups.values() for task in group.tasks)

    def _fill(self, fresh: int) -> Closing | None:
        drawn = list(itertools.islice(self._prompts, fresh))
        for prompt in drawn:
            name = self._named(prompt)
            self._rounds.begin(name)
            self._start(name)
        self._last = self._last or len(drawn) < fresh
        return self._rounds.exhausted() if fresh and len(drawn) < fresh else None

    def _named(self, prompt: Prompt) -> str:
        name = next(self._names)
        self._groups[name] = _Group(prompt)
        return name

    def _start(self, name: str) -> None:
        group = self._groups[name]
        starts = (self._member(name, group.prompt, member) for member in range(self._members))
        group.tasks = {asyncio.ensure_future(start): False for start in starts}
        for task in group.tasks:
            task.add_done_callback(lambda task: self._report(name, task, ended=True))

    def _report(self, name: str, task: asyncio.Task[Sample], *, ended: bool) -> None:
        self._ends.put_nowait((name, task, ended, asyncio.get_running_loop().time()))

    async def _member(self, name: str, prompt: Prompt, member: int) -> Sample:
        sample = await self._rollout(prompt, member)
        task = asyncio.current_task()
        if self._reward is None or task is None:
            return sample
        self._report(name, task, ended=False)
        return await self._reward(prompt, sample)

    async def _next(self) -> Closing | None:
        """Wait for a trajectory; tell the rounds of what has happened."""
        closing = await self._record(*await self._ends.get())
        while closing is None and not self._ends.empty():
            closing = await self._record(*self._ends.get_nowait())
        return closing

    async def _record(
        self,
        name: str,
        task: asyncio.Task[Sample],
        ended: bool,
        at_s: float,
    ) -> Closing | None:
        self._now_s = at_s
        group = self._groups.get(name)
        if group is None or task not in group.tasks:
            return None  # it was stopped, or ended after its round would have
        if ended:
            return await self._ended(name, group, task)
        group.tasks[task] = True
        closing = self._rounds.sampled(name)
        if self._rounds.has_tokens(name):  # what a short round started beyond them is cut
            await self._cut(group, [one for one, done in group.tasks.items() if not done])
        return closing

    async def _ended(
        self, name: str, group: _Group[Prompt, Sample], task: asyncio.Task[Sample]
    ) -> Closing | None:
        del group.tasks[task]
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if failure is not None:
            self.failures.append((group.prompt, failure))
            del self._groups[name]
            await self._stop(group.tasks)
            return self._rounds.drop(name)
        group.samples.append(task.result())
        closing = self._rounds.finished(name)
        if len(group.samples) >= self._rounds.shape.members:
            await self._cut(group, list(group.tasks))
        return closing

    async def _cut(
        self, group: _Group[Prompt, Sample], tasks: Sequence[asyncio.Task[Sample]]
    ) -> None:
        """Stop members that their round does not need."""
        for task in tasks:
            del group.tasks[task]
        await self._stop(tasks)

    async def _close(self, closing: Closing) -> Batch[Prompt, Sample]:
        for one in closing.deferred:
            group = self._groups[one.prompt]
            await self._cut(group, list(group.tasks))
            group.samples.clear()
        groups, late = self._take(closing.batch)
        return Batch(closing.kind, groups, closing.deferred, late=late)

    def _take(self, batch: Iterable[str]) -> tuple[list[tuple[Prompt, list[Sample]]], int]:
        """What of it the trainer has not been given yet, and how many of these were carried."""
        names = [name for name in batch if name not in self._given]
        self._given.update(names)
        groups = [self._groups.pop(name) for name in names]
        late = sum(name in self._carried for name in names)
        return [(group.prompt, group.samples) for group in groups], late

    @staticmethod
    async def _stop(tasks: Iterable[asyncio.Task[Sample]]) -> None:
        """Cancel and wait."""
        stopped = list(tasks)
        for task in stopped:
            task.cancel()
        await asyncio.gather(*stopped, return_exceptions=True)
