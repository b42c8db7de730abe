"""A trainer whose steps overlap, as ``docs/rl-team.md`` says to write one; over HTTP alone.

It begins groups on the newest weights as far as the bound allows, takes the oldest first
(``consumption.next_batch``), drops what has become too old, publishes after every step and says to
the router what became of every trajectory. What is long has more turns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rose_core.identity import WeightVersion
from rose_core.rollouts.training.consumption import ConsumptionBound, next_batch
from rose_core.rollouts.trajectories.inclusion import Fate, InclusionCell
from rose_core.wire.routing import EngineKind
from rose_router.engines.fleet import Fleet
from rose_trainer.adapters.report import report_async
from rose_trainer.adapters.turns import Turns

STEP_SECONDS = 0.2
"""What a step of training takes: little, so that engines are what everybody waits for."""


@dataclass(frozen=True)
class Kind:
    """How long a trajectory is: so many turns of so many tokens."""

    name: str
    turns: int
    tokens: int


SHORT, LONG = Kind("short", 1, 12), Kind("long", 4, 30)


@dataclass(eq=False)
class Group:
    """Trajectories that answer one prompt.

    Attributes:
        oldest: sequence of the oldest version that sampled a token of it.
        moves: engines that its turns left.
    """

    number: int
    kind: Kind
    oldest: int
    left: int
    sessions: list[str] = field(default_factory=list)
    moves: int = 0


class Trainer:
    """The trainer.

    Args:
        url: the lease's.
        publish: brings the weights of a step to the store, and returns when the router knows it.
        bound: batch and staleness.
        members: of a group.
        groups: how many are begun in all; half of them are long, in a random order.
    """

    def __init__(
        self,
        url: str,
        publish: Callable[[int], Awaitable[None]],
        bound: ConsumptionBound,
        members: int,
        groups: int,
    ) -> None:
        self._url, self._publish = url, publish
        self._bound, self._members = bound, members
        kinds = [SHORT, LONG] * (groups // 2)
        random.Random(17).shuffle(kinds)
        self._kinds = kinds
        self._turns = Turns(url)
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: list[Group] = []
        self._ready: list[Group] = []
        self._begun = 0
        self.version = 0
        self.cells = {SHORT: InclusionCell(), LONG: InclusionCell()}
        self.moves = 0

    async def train(self) -> None:
        """Train until every group was taken or dropped."""
        self._begin()
        while self._under_way or self._ready:
            chosen = await self._next_batch()
            await self._conclude(chosen, Fate.TRAINED)
            await asyncio.sleep(STEP_SECONDS)
            self.version += 1
            await self._publish(self.version)
            self._begin()
        await self._turns.close()

    @property
    def under_way(self) -> set[Kind]:
        """Which kinds are being sampled."""
        return {one.kind for one in self._under_way}

    def _begin(self) -> None:
        bound = self._bound
        most = (bound.staleness + self.version + 1) * bound.batch
        while self._begun < min(most, len(self._kinds)):
            kind = self._kinds[self._begun]
            one = Group(self._begun, kind, self.version, self._members)
            self._begun += 1
            self._under_way.append(one)
            for member in range(self._members):
                task = asyncio.create_task(self._sample(one, f"{one.number}.{member}"))
                self._tasks.add(task)
                task.add_done_callback(lambda _: self._ended.set())

    async def _sample(self, one: Group, session: str) -> None:
        one.sessions.append(session)
        context = [5, 17, 42, 200 + one.number]
        for _ in range(one.kind.turns):
            sampling = {"max_new_tokens": one.kind.tokens, "ignore_eos": True, "temperature": 1.0}
            turn = await self._turns.ask(session, context, sampling, f"group-{one.number}")
            assert len(turn.tokens) == one.kind.tokens
            versions = (WeightVersion.parse(span["version"]) for span in turn.spans)
            one.oldest = min(one.oldest, *(version.sequence for version in versions))
            one.moves += turn.moves
            context = [*context, *turn.tokens, 7]
        await self._turns.end([session])
        one.left -= 1
        if not one.left:
            self._under_way.remove(one)
            self._ready.append(one)
            self._ended.set()

    async def _next_batch(self) -> list[Group]:
        """What the next step trains on; waits for it, and drops what is too old."""
        while True:
            self._ended.clear()
            for task in [task for task in self._tasks if task.done()]:
                self._tasks.remove(task)
                task.result()  # a trajectory that failed fails the test
            least = self.version - self._bound.staleness
            old = [one for one in self._ready if one.oldest < least]
            self._ready = [one for one in self._ready if one.oldest >= least]
            await self._conclude(old, Fate.DROPPED)
            last = not self._under_way and len(self._ready) < self._bound.batch
            if last and self._begun == len(self._kinds):
                batch, self._ready = self._ready, []
                return batch
            ready, under_way = (
                [one.oldest for one in ones] for ones in (self._ready, self._under_way)
            )
            chosen = next_batch(ready, under_way, self.version, self._bound)
            if chosen:
                batch = [self._ready[index] for index in chosen]
                self._ready = [one for one in self._ready if one not in batch]
                return batch
            await self._ended.wait()

    async def _conclude(self, groups: list[Group], fate: Fate) -> None:
        for one in groups:
            self.moves += one.moves
            for _ in one.sessions:
                self.cells[one.kind].add(str(one.number), fate)
            outcomes = dict.fromkeys(one.sessions)
            trained, dropped = (outcomes, {}) if fate is Fate.TRAINED else ({}, outcomes)
            assert await report_async(self._url, trained, dropped)


def writing(fleet: Fleet) -> bool:
    """Whether every borrowed engine has begun to write turns."""
    borrowed = [one for one in fleet if one.update.kind is EngineKind.BORROWED]
    return all(any(leg.tokens for leg in one.legs.values()) for one in borrowed)
