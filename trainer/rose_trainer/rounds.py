"""Tail batching for a trainer whose rollouts are coroutines: ``async for batch in batches(...)``.

The trainer gives its prompts and a coroutine that samples one trajectory through the router; it
gets batches of whole groups, stragglers having been put off to rounds of their own
(``rose_core.rollouts.rounds`` holds the state and the reasons). A trajectory that is put off or cut
is cancelled; its connection closes, and the router ends the turn on its engine.

With ``stream`` a round comes in parts, each group as soon as it is ready: the trainer adds its
gradients while the round's tail still runs, and steps at the part that is the ``last``. The weights
are the same for all parts, and the parts one after the other are the batch that the round would
have given, in its order: whoever adds gradients group by group gets the same step, bit for bit.
What ends while the trainer is busy with a part counts in the order in which it ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rose_core.rollouts.rounds import Closing, Deferral, RoundKind, Rounds, RoundShape, Tally

Prompt = TypeVar("Prompt")
Sample = TypeVar("Sample")

__all__ = ["Batch", "Batches", "Deferral", "RoundKind", "RoundShape", "Tally"]


@dataclass(frozen=True)
class Batch(Generic[Prompt, Sample]):
    """What one round gave: every prompt with the samples of its group, in order of finishing.

    Attributes:
        deferred: known with the last part.
        last: the round gives no more; False of parts before it.
    """

    kind: RoundKind
    groups: list[tuple[Prompt, list[Sample]]]
    deferred: tuple[Deferral, ...]
    last: bool = True


@dataclass
class _Group(Generic[Prompt, Sample]):
    prompt: Prompt
    tasks: list[asyncio.Task[Sample]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class Batches(Generic[Prompt, Sample]):
    """Batches of groups, round by round; iterate it once.

    Args:
        prompts: drawn from as rounds need them, each once.
        rollout: samples one trajectory: ``await rollout(prompt, member)``. What it raises drops the
            prompt, counted in ``tally`` and kept in ``failures``; it is not asked again.
        shape: sizes.
        put_off: what ``Batches.put_off`` was when the trainer saved the checkpoint it resumes from.
        stream: give groups as they become ready; the last part may be empty.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        rollout: Callable[[Prompt, int], Awaitable[Sample]],
        shape: RoundShape,
        put_off: Iterable[Prompt] = (),
        *,
        stream: bool = False,
    ) -> None:
        self._prompts, self._rollout = iter(prompts), rollout
        self._rounds = Rounds(shape)
        self._groups: dict[str, _Group[Prompt, Sample]] = {}
        self._names = map(str, itertools.count(1))
        for prompt in put_off:
            self._rounds.put_off(self._named(prompt))
        self._last = False
        self._stream = stream
        self._ready: list[str] = []  # groups of this round that nobody was given yet
        # In the order in which they ended: a trainer that is busy with a part looks later.
        self._ends: asyncio.Queue[tuple[str, asyncio.Task[Sample]]] = asyncio.Queue()
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
        checkpoint, or they are lost when it resumes.
        """
        return [self._groups[one.prompt].prompt for one in self._rounds.deferred]

    async def __aiter__(self) -> AsyncGenerator[Batch[Prompt, Sample], None]:
        """One batch per round, until no prompt is left; a group dropped whole leaves it smaller."""
        try:
            while (opening := self._rounds.open(last=self._last)) is not None:
                self._members = opening.members
                closing = self._fill(opening.fresh)
                for name in opening.resumed:
                    self._start(name)
                given = False
                while closing is None:
                    closing = await self._next()
                    if closing is None and self._stream and self._ready:
                        given = True
                        yield Batch(opening.kind, self._take_ready(), (), last=False)
                made = await self._close(closing)
                if made.groups or given:
                    yield made
        finally:
            await self._stop(list(self._groups.values()))

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
        starts = (self._rollout(group.prompt, member) for member in range(self._members))
        group.tasks = [asyncio.ensure_future(start) for start in starts]
        for task in group.tasks:
            task.add_done_callback(lambda ended: self._ends.put_nowait((name, ended)))

    async def _next(self) -> Closing | None:
        """Wait for a trajectory; tell the rounds of those that have ended."""
        closing = await self._ended(*await self._ends.get())
        while closing is None and not self._ends.empty():
            closing = await self._ended(*self._ends.get_nowait())
        return closing

    async def _ended(self, name: str, task: asyncio.Task[Sample]) -> Closing | None:
        group = self._groups.get(name)
        if group is None or task not in group.tasks:
            return None  # it was stopped, or ended after its round would have
        group.tasks.remove(task)
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if failure is not None:
            self.failures.append((group.prompt, failure))
            await self._stop([self._groups.pop(name)])
            return self._rounds.drop(name)
        group.samples.append(task.result())
        closing = self._rounds.finished(name)
        if len(group.samples) >= self._rounds.shape.members:
            self._ready.append(name)
            await self._stop([group])  # what a short round started beyond them is cut
        return closing

    async def _close(self, closing: Closing) -> Batch[Prompt, Sample]:
        late = [self._groups[one.prompt] for one in closing.deferred]
        await self._stop(late)
        for group in late:
            group.samples.clear()
        return Batch(closing.kind, self._take_ready(), closing.deferred)

    def _take_ready(self) -> list[tuple[Prompt, list[Sample]]]:
        names, self._ready = self._ready, []
        groups = [self._groups.pop(name) for name in names]
        return [(group.prompt, group.samples) for group in groups]

    @staticmethod
    async def _stop(groups: list[_Group[Prompt, Sample]]) -> None:
        tasks = [task for group in groups for task in group.tasks]
        for group in groups:
            group.tasks = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
