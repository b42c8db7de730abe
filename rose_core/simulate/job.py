"""One RL job: groups of trajectories, a staleness bound, a trainer that publishes.

| a group is | when |
|---|---|
| started | fewer than ``(staleness + version + 1) * batch`` groups were started and not dropped |
| accepted | all are finished and the oldest version in it lags at most ``staleness`` |
| dropped | otherwise; the trainer would drop the whole group for one stale member |

A training step takes ``batch`` accepted groups, in the order in which they finished, lasts
``train_s`` and publishes the next version. The bound on starts is AReaL's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from rose_core.simulate.clock import SECOND, Clock
from rose_core.simulate.router import Router, Turn
from rose_core.simulate.workload import Episode, group


@dataclass(frozen=True)
class JobFacts:
    """What a job is."""

    members: int
    batch: int
    staleness: int
    train_s: float
    gap_scale: float = 1.0


@dataclass(eq=False)
class Group:
    """A group under way."""

    number: int
    left: int
    oldest: int
    tokens: int = 0
    finished: int = 0


@dataclass
class JobCounts:
    """What came of it."""

    started: int = 0
    finished: int = 0
    accepted: int = 0
    dropped: int = 0
    accepted_tokens: int = 0
    discarded_tokens: int = 0
    steps: int = 0
    step_s: list[float] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)


class Job:
    """One job; ``publish`` is called with every new version."""

    def __init__(
        self,
        clock: Clock,
        facts: JobFacts,
        router: Router,
        pool: Rows[Episode],
        *,
        draw: random.Random,
        publish: Callable[[int], None],
    ) -> None:
        self._clock, self._facts, self._router = clock, facts, router
        self._pool, self._draw, self._publish = pool, draw, publish
        self.version = 0
        self._groups = self._turns = 0
        self._ready: list[Group] = []
        self._training = False
        self._step_ns = 0
        self.counts = JobCounts()

    def start(self) -> None:
        """Start as many groups as the bound allows."""
        facts = self._facts
        most = (facts.staleness + self.version + 1) * facts.batch
        while self._groups < most:
            self._groups += 1
            chosen = group(self._pool, facts.members, self._draw)
            one = Group(self._groups, facts.members, self.version)
            self.counts.started += facts.members
            for member, episode in enumerate(chosen):
                Trajectory(self, one, f"{self._groups}.{member}", episode).next()

    def take_turn(self, turn: Turn, gap_s: float) -> None:
        """Send a turn to the router when the environment has answered."""
        self._turns += 1
        turn.number = self._turns
        gap_s *= self._facts.gap_scale
        if gap_s > 0:
            self._clock.after(gap_s, lambda: self._router.submit(turn))
        else:
            self._router.submit(turn)

    def finished(self, one: Group, tokens: int, oldest: int) -> None:
        """A trajectory has ended."""
        one.left -= 1
        one.tokens += tokens
        one.oldest = min(one.oldest, oldest)
        self.counts.finished += 1
        self.counts.finish_s.append(self._clock.now_s)
        if one.left == 0:
            self._ready.append(one)
            self._train()

    def _train(self) -> None:
        if self._training:
            return
        fresh: list[Group] = []
        for one in self._ready:
            if self.version - one.oldest <= self._facts.staleness:
                fresh.append(one)
            else:
                self._groups -= 1
                self.counts.dropped += self._facts.members
                self.counts.discarded_tokens += one.tokens
        self._ready = fresh
        if len(fresh) >= self._facts.batch:
            batch, self._ready = fresh[: self._facts.batch], fresh[self._facts.batch :]
            self.counts.accepted += self._facts.batch * self._facts.members
            self.counts.accepted_tokens += sum(one.tokens for one in batch)
            self._training = True
            self._clock.after(self._facts.train_s, self._trained)
        self.start()

    def _trained(self) -> None:
        self._training = False
        self.version += 1
        now = self._clock.now_ns
        self.counts.steps += 1
        self.counts.step_s.append((now - self._step_ns) / SECOND)
        self._step_ns = now
        self._publish(self.version)
        self._train()


class Trajectory:
    """One trajectory: its turns one after the other, with the environment between them."""

    def __init__(self, job: Job, one: Group, session: str, episode: Episode) -> None:
        self._job, self._group, self._session, self._episode = job, one, session, episode
        self._index = self._context = self._tokens = 0
        self._oldest = one.oldest
        self._turn: Turn | None = None

    def next(self) -> None:
        """Ask for the next turn, or end."""
        if self._turn is not None:
            self._oldest = min([self._oldest, *self._turn.versions])
            self._tokens += self._turn.output
        if self._index >= len(self._episode):
            self._job.finished(self._group, self._tokens, self._oldest)
            return
        planned = self._episode[self._index]
        self._index += 1
        self._context += planned.new
        before = self._turn
        turn = Turn(self._session, self._context, planned.output, 0, self.next)
        if before is not None:
            turn.home, turn.cached = before.home, before.cached
            turn.home_version = before.home_version
        self._context += planned.output
        self._turn = turn
        self._job.take_turn(turn, planned.gap_s)
