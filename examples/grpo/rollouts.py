"""Trajectories, groups in flight and bounded staleness.

Sampling runs ahead of learning: ``Sampler`` keeps as many groups in flight as the staleness bound
can still use. A trajectory's age is counted in publishes, between the oldest version that sampled
one of its tokens and the head when it is consumed; a group with a member above the bound is
dropped whole, because a group with holes would bias its own baseline.

| a group is | from | left by |
|---|---|---|
| in flight | ``Sampler`` has room | every member has its last turn |
| ready | all turns finished | ``take``, or dropped as too old |
| consumed | ``take`` | - |
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from examples.grpo.client import LeaseClient, Turn
from examples.grpo.errors import OutOfTime
from examples.grpo.task import ANSWER_TOKENS, TURNS, Task, draw, right
from rose_core.identity import WeightVersion
from rose_core.rollouts import versions

_LEAVE_SECONDS = 20.0
"""For turns in flight when the run ends: their tokens are then counted on both sides."""


@dataclass(frozen=True)
class Trajectory:
    """One episode of the environment.

    Attributes:
        context: all token ids, prompts, answers and observations in order.
        turns: the sampled turns; ``starts`` says where each begins in ``context``.
        rewards: one per turn.
        key: its session key.
    """

    task: Task
    context: tuple[int, ...]
    starts: tuple[int, ...]
    turns: tuple[Turn, ...]
    rewards: tuple[float, ...]
    key: str = ""

    @property
    def reward(self) -> float:
        """Mean over the turns."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def correct(self) -> bool:
        """Whether every turn was right, as the environment told it."""
        return all(right(reward) for reward in self.rewards)

    def versions(self) -> set[str]:
        """Labels of every version that sampled a token."""
        return {span.version for turn in self.turns for span in turn.spans}


Group = tuple[Trajectory, ...]


@dataclass(frozen=True)
class Part:
    """Groups of a step.

    Attributes:
        last: the step has all its groups with these.
    """

    groups: Sequence[Group]
    last: bool = True


def age(trajectory: Trajectory, head: WeightVersion | None) -> int | None:
    """Publishes between the oldest version in the trajectory and the head.

    Returns:
        None when a label is no version of the head's run and incarnation (another trainer's, or
        ``unknown``); before the first publish everything is 0. The checkpoint that engines were
        started from is one publish older than the first.
    """
    if head is None:
        return 0
    ages = []
    for label in trajectory.versions():
        version = versions.parse(label)
        behind = versions.age(version, head) if version is not None else None
        if behind is None:
            return None
        ages.append(behind)
    return max(ages)


def fresh(group: Group, head: WeightVersion | None, bound: int) -> bool:
    """Whether every member's age is known and within the bound."""
    ages = [age(member, head) for member in group]
    return all(value is not None and value <= bound for value in ages)


def room(in_flight: int, ready: int, per_step: int, bound: int) -> int:
    """Groups that may be started: one step's worth now plus ``bound`` steps' worth ahead."""
    return max(per_step * (bound + 1) - in_flight - ready, 0)


async def play(client: LeaseClient, task: Task, key: str, group: str = "") -> Trajectory:
    """Run one episode; every turn is asked of the lease's URL, and its end is told there."""
    context = task.opening()
    starts: list[int] = []
    turns: list[Turn] = []
    rewards: list[float] = []
    for number in range(TURNS):
        turn = await client.turn(context, session_key=key, max_tokens=ANSWER_TOKENS, group=group)
        starts.append(len(context))
        turns.append(turn)
        rewards.append(task.reward(number, turn.tokens))
        context += turn.tokens
        if number + 1 < TURNS:
            context += task.observation(number, turn.tokens)
    await client.finished(key)
    return Trajectory(task, tuple(context), tuple(starts), tuple(turns), tuple(rewards), key)


@dataclass
class SamplerStatistics:
    """Counts since the start."""

    groups: int = 0
    dropped_groups: int = 0


class Sampler:
    """Keeps groups in flight and hands out fresh ones.

    Args:
        client: asks for turns.
        group_size: episodes per task.
        per_step: groups the learner consumes at once.
        bound: highest age at consumption, in publishes.
        concurrency: most groups in flight.
        head: returns the version last published.
        seed: of the task sequence.
    """

    def __init__(
        self,
        client: LeaseClient,
        *,
        group_size: int,
        per_step: int,
        bound: int,
        concurrency: int,
        head: Callable[[], WeightVersion | None],
        seed: int,
    ) -> None:
        self._client = client
        self._group_size = group_size
        self._per_step = per_step
        self._bound = bound
        self._concurrency = concurrency
        self._head = head
        self._random = random.Random(seed)
        self._in_flight: set[asyncio.Task[None]] = set()
        self._ready: deque[Group] = deque()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._open: set[str] = set()
        self._stale: dict[str, float] = {}
        self.statistics = SamplerStatistics()

    def fill(self) -> None:
        """Start as many groups as the bound leaves room for."""
        start = room(len(self._in_flight), len(self._ready), self._per_step, self._bound)
        for _ in range(min(start, self._concurrency - len(self._in_flight))):
            task = asyncio.create_task(self._run_group(draw(self._random)))
            self._in_flight.add(task)
            task.add_done_callback(self._finished)

    async def take(self) -> Part:
        """Wait for one step's worth of fresh groups, oldest first.

        Raises:
            OutOfTime: the time limit came first.
            TrainerError: sampling failed for good.
        """
        while True:
            self._drop_stale()
            self.fill()
            if len(self._ready) >= self._per_step:
                return Part([self._ready.popleft() for _ in range(self._per_step)])
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    async def report(self, groups: Sequence[Group]) -> None:
        """Say that these groups are trained on, and which were too old for it since the last time.

        The router compares the two by where trajectories ran: its bias meter.
        """
        trained = {member.key: member.reward for group in groups for member in group}
        dropped, self._stale = self._stale, {}
        self._open -= trained.keys() | dropped.keys()
        correct = [member.key for group in groups for member in group if member.correct]
        await self._client.report(trained, dropped, correct=correct)

    async def close(self) -> None:
        """End everything in flight: turns that run end, none begins; the rest is withdrawn."""
        self._client.leaving = True
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=_LEAVE_SECONDS)
        await self._cancel()
        dropped, self._stale = self._stale, {}
        await self._client.report(dropped=dropped, withdrawn=sorted(self._open - dropped.keys()))
        self._open.clear()

    async def _cancel(self) -> None:
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    def _drop_stale(self) -> None:
        head = self._head()
        kept = [group for group in self._ready if fresh(group, head, self._bound)]
        self._stale |= {
            member.key: member.reward
            for group in self._ready
            if group not in kept
            for member in group
        }
        self.statistics.dropped_groups += len(self._ready) - len(kept)
        self._ready = deque(kept)

    async def _run_group(self, task: Task) -> None:
        number = self.statistics.groups
        self.statistics.groups += 1
        group = f"group-{number:06d}"
        keys = [f"{group}-{member:03d}." for member in range(self._group_size)]
        self._open.update(keys)
        plays = (play(self._client, task, key, group) for key in keys)
        # Every member is waited for: one that fails must not leave its siblings' turns to nobody.
        results = await asyncio.gather(*plays, return_exceptions=True)
        members: list[Trajectory] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            members.append(result)
        self._ready.append(tuple(members))

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        error = None if task.cancelled() else task.exception()
        # A real failure says more than the time limit that ends its neighbours.
        if error is not None and (self._failure is None or isinstance(self._failure, OutOfTime)):
            self._failure = error
        self._changed.set()
