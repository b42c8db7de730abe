"""One RL job: groups of trajectories, a staleness bound, a trainer that publishes.

| a group is | when |
|---|---|
| started | fewer than ``(staleness + version + 1) * batch`` groups were started and not dropped |
| accepted | all are finished and the oldest version in it lags at most ``staleness`` |
| dropped | otherwise; the trainer would drop the whole group for one stale member |

A training step takes ``batch`` accepted groups, lasts ``train_s`` and publishes the next version.
Which ones: in the order in which they finished, as trainers do, or the oldest first
(``rollouts.training.consumption``). The bound on starts is AReaL's. With tail batching the
groups are started, put off and taken by ``rollouts.training.rounds`` instead; a group that is put
off is sampled anew in its long round, and what it has written is discarded, as is what a short
round's surplus members have written when their group is ready.

A trainer that *streams* adds the gradients of a round's groups one after the other, each as soon as
it is ready; its step ends when the last one's are added. A trajectory has ended when it has its
reward, ``reward_s`` after its last token. A round waits for that, but for the rewards of ``late``
groups, or of as many as it learns: these are carried into the next round's batch, and
trained on one step late.

A trainer that *awaits* its weights starts groups only when its dedicated engines have what it
published; one that does not starts them in the second in which it publishes, and engines that are
two seconds behind make them one version older than they need be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from rose_core.rollouts.training.consumption import ConsumptionBound, next_batch
from rose_core.rollouts.training.rounds import Closing, Late, RoundKind, Rounds, RoundShape
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.jobs.widths import RoundSeen, Written
from rose_simulate.model.jobs.workload import Episode, group
from rose_simulate.model.routing.router import Router
from rose_simulate.model.routing.turns import RoutedTurn


@dataclass(frozen=True)
class JobFacts:
    """What a job is; fields as of ``scenario.RolloutJob``."""

    members: int
    batch: int
    staleness: int
    train_s: float
    gap_scale: float = 1.0
    surplus: float | None = None
    oldest_first: bool = False
    awaits_weights: bool = False
    member_surplus: float = 0.0
    streams: bool = False
    reward_s: float = 0.0
    late: Late = 0

    @property
    def part_s(self) -> float:
        """What one group takes of a training step."""
        return self.train_s / self.batch


@dataclass(frozen=True, slots=True)
class TrajectoryFate:
    """What became of one trajectory: in a batch, dropped or cut, and how stale it was then.

    One that was cut has the tokens that it would have written; inclusion is by length.
    """

    session: str
    tokens: int
    trained: bool
    stale: int


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a step was made of, in seconds; from one publish to the next.

    Attributes:
        rollout_s: to the last token that the step waited for.
        reward_s: from there to the end of the round: the reward that nothing of the round hides.
        train_s: from there to the publish.
        long: its round was a long one.
    """

    rollout_s: float
    reward_s: float
    train_s: float
    long: bool = False


@dataclass(eq=False)
class RunningGroup:
    """A group under way; ``members`` are (session, output tokens) of those that ended.

    Attributes:
        last_token_s: when the latest of them had its last token.
    """

    number: int
    left: int
    oldest: int
    tokens: int = 0
    last_token_s: float = 0.0
    members: list[tuple[str, int]] = field(default_factory=list)
    episodes: tuple[Episode, ...] = ()
    under_way: list[SimulatedTrajectory] = field(default_factory=list)


@dataclass
class JobCounts:
    """What came of it."""

    started: int = 0
    finished: int = 0
    accepted: int = 0
    dropped: int = 0
    discarded_tokens: int = 0
    deferred: int = 0
    cut: int = 0
    steps: int = 0
    step_s: list[float] = field(default_factory=list)
    step_parts: list[StepParts] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)
    fates: list[TrajectoryFate] = field(default_factory=list)


class Job:
    """One job; ``publish`` is called with every new version."""

    def __init__(
        self,
        clock: VirtualClock,
        facts: JobFacts,
        router: Router,
        pool: Rows[Episode],
        *,
        draw: random.Random,
        publish: Callable[[int], None],
        round_over: Callable[[RoundKind, RoundSeen, RoundKind], None],
    ) -> None:
        self._clock, self._facts, self._router = clock, facts, router
        self._pool, self._draw, self._publish = pool, draw, publish
        self._round_over = round_over
        self._written: dict[int, Written] = {}  # of the round that is open, by trajectory
        self.version = 0
        self._rounds = None if facts.surplus is None else Rounds(_shape(facts), lambda: clock.now_s)
        self._named: dict[str, RunningGroup] = {}
        self._groups = self._drawn_ever = self._turns = self._born = self._in_gap = 0
        self._ready: list[RunningGroup] = []
        self._under_way: dict[int, int] = {}  # group -> version it began with
        self._training = self._awaiting = False
        self._step_ns = 0
        self._step_waited_s = (0.0, 0.0)  # for the last token, and for the end of the round
        self._round_token_s = 0.0  # the last one that a round has waited for
        self._round_long = False  # the last one that closed
        self._added: set[str] = set()  # groups whose gradients are in the step
        self._added_until_s = 0.0  # a trainer that streams is busy with groups that were ready
        self.counts = JobCounts()
        self.verify: Callable[[RunningGroup, Callable[[], None]], None] = self._verify
        """Begins a trajectory's reward and calls back when that is there."""

    def _verify(self, _: RunningGroup, end: Callable[[], None]) -> None:
        """As many rewards as there are run at a time."""
        self._clock.after(self._facts.reward_s, end)

    def start(self) -> None:
        """Start as many groups as the bound allows, or as the round asks for."""
        if self._awaiting:
            return
        if self._rounds is not None:
            self._start_round(self._rounds)
            return
        facts = self._facts
        most = (facts.staleness + self.version + 1) * facts.batch
        while self._groups < most:
            self._begin(self._drawn(facts.members))

    def _start_round(self, rounds: Rounds) -> None:
        if rounds.kind is not None or self._training:
            return
        opening = rounds.open()
        if opening is None:  # prompts never run out here
            return
        for name in opening.resumed:
            put_off = self._named.pop(name)
            again = RunningGroup(put_off.number, self._facts.members, self.version)
            # Any of them do: a group's episodes are drawn alike, and which ended is not looked at.
            again.episodes = put_off.episodes[: opening.members]
            self._named[name] = again
            self._begin(again)
        for _ in range(opening.fresh):
            one = self._drawn(opening.members)
            self._named[str(one.number)] = one
            rounds.begin(str(one.number))
            self._begin(one)
        self._add(rounds.taken)

    def _drawn(self, members: int) -> RunningGroup:
        """A fresh prompt."""
        self._groups += 1
        self._drawn_ever += 1  # a number of its own: ``_groups`` goes back when one is dropped
        one = RunningGroup(self._drawn_ever, members, self.version)
        one.episodes = group(self._pool, members, self._draw)
        return one

    def _begin(self, one: RunningGroup) -> None:
        self.counts.started += len(one.episodes)
        if self._rounds is None:
            self._under_way[one.number] = one.oldest
        for member, episode in enumerate(one.episodes):
            self._born += 1
            name = f"{one.number}.{member}@{self._born}"
            trajectory = SimulatedTrajectory(self, one, name, episode, self._born)
            one.under_way.append(trajectory)
            trajectory.next()

    def take_turn(self, turn: RoutedTurn, gap_s: float) -> None:
        """Send a turn to the router when the environment has answered."""
        self._turns += 1
        turn.number = self._turns
        gap_s *= self._facts.gap_scale
        if gap_s > 0:
            self._in_gap += 1
            self._clock.after(gap_s, lambda: self._answered(turn))
        else:
            self._router.submit(turn)

    def _answered(self, turn: RoutedTurn) -> None:
        self._in_gap -= 1
        if not turn.withdrawn:
            self._router.submit(turn)

    @property
    def inside(self) -> int:
        """Trajectories that are at an engine, in the queue, or in their environment."""
        return self._in_gap + self._router.inside

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._clock.now_s

    def on_last_turn(self, one: RunningGroup, end: Callable[[], None], session: str) -> None:
        """A trajectory has its last token; it ends when it has its reward."""
        self._router.end_trajectory(session)
        if not self._facts.reward_s:
            end()
            return
        self._in_gap += 1
        self.verify(one, end)
        if self._facts.late != 0 and self._rounds is not None:
            one.last_token_s = self._clock.now_s
            closing = self._rounds.sampled(str(one.number))
            if self._rounds.has_tokens(str(one.number)):
                self._cut(one, [other for other in one.under_way if not other.has_tokens])
            if closing is not None:
                self._close(closing)

    def leave_reward(self) -> None:
        """A trajectory waits for its reward no more: it has it, or nobody needs it."""
        if self._facts.reward_s:
            self._in_gap -= 1

    def on_trajectory_end(
        self,
        one: RunningGroup,
        trajectory: SimulatedTrajectory,
        session: str,
        tokens: int,
        oldest: int,
    ) -> None:
        """Count a trajectory that has ended; its group or round may be complete with it."""
        one.under_way.remove(trajectory)
        one.left -= 1
        one.tokens += tokens
        one.members.append((session, tokens))
        one.oldest = min(one.oldest, oldest)
        one.last_token_s = max(one.last_token_s, trajectory.last_token_s)
        self.counts.finished += 1
        self.counts.finish_s.append(self._clock.now_s)
        if self._rounds is not None:
            self._written[trajectory.number] = Written(tokens, trajectory.read, ended=True)
            if len(one.members) == self._facts.members:
                self._cut(one, list(one.under_way))
            closing = self._rounds.finished(str(one.number))
            self._add(self._rounds.taken if closing is None else closing.batch)
            if closing is not None:
                self._close(closing)
        elif one.left == 0:
            del self._under_way[one.number]
            self._ready.append(one)
            self._train()

    def _add(self, taken: Iterable[str]) -> None:
        """A trainer that streams adds what is in its batch, one group after the other."""
        for name in taken:
            if name not in self._added:
                self._added.add(name)
                begins = max(self._added_until_s, self._clock.now_s)
                self._added_until_s = begins + self._facts.part_s

    def _cut(self, one: RunningGroup, members: Rows[SimulatedTrajectory]) -> None:
        """A group has enough: members that it does not need stop, and nobody samples them again."""
        for trajectory in members:
            one.under_way.remove(trajectory)
            self.counts.cut += 1
            self._stop(trajectory)
            stale = self.version - one.oldest
            fate = TrajectoryFate(
                trajectory.session, trajectory.planned, trained=False, stale=stale
            )
            self.counts.fates.append(fate)

    def _stop(self, trajectory: SimulatedTrajectory) -> None:
        """Nobody samples it any further."""
        written = trajectory.withdraw(self._router)
        self.counts.finished += 1
        self.counts.discarded_tokens += written
        self._written[trajectory.number] = Written(written, trajectory.read, ended=False)

    def _report(self, kind: RoundKind) -> None:
        """Whoever runs the engines hears what the round was made of, and which comes next."""
        assert self._rounds is not None  # noqa: S101  # one of its rounds is over
        written = tuple(self._written[number] for number in sorted(self._written))
        self._written.clear()
        seen = RoundSeen(written, sum(one.ended for one in written))
        many = len(self._rounds.deferred) >= self._facts.batch
        coming = RoundKind.LONG if many else RoundKind.SHORT
        # An engine is in the middle of the step that ended the round.
        self._clock.after(0.0, lambda: self._round_over(kind, seen, coming))

    def _close(self, closing: Closing) -> None:
        """The round is over: what is put off stops, the batch is trained on."""
        for put_off in closing.deferred:
            one = self._named[put_off.prompt]
            self.counts.deferred += len(one.episodes)
            self.counts.discarded_tokens += one.tokens
            for trajectory in one.under_way:
                self._stop(trajectory)
            for session, _ in one.members:
                self._router.prospects.conclude(session, trained=False)
            one.under_way.clear()
        of_round = [self._named[name] for name in (*closing.batch, *closing.carried)]
        self._round_long = closing.kind is RoundKind.LONG
        self._round_token_s = max(one.last_token_s for one in of_round)
        self._ready += [self._named.pop(name) for name in closing.batch]
        self._added.clear()
        self._report(closing.kind)
        self._train()

    def _train(self) -> None:
        if self._training:
            return
        fresh: list[RunningGroup] = []
        for one in self._ready:
            if self.version - one.oldest <= self._facts.staleness + (self._facts.late != 0):
                fresh.append(one)
            else:
                self._groups -= 1
                self.counts.dropped += self._facts.members
                self.counts.discarded_tokens += one.tokens
                self._conclude(one, trained=False)
        chosen = self._next_batch(fresh)
        self._ready = [one for one in fresh if one not in chosen]
        if chosen:
            self.counts.accepted += self._facts.batch * self._facts.members
            for one in chosen:
                self._conclude(one, trained=True)
            now = self._clock.now_s
            # A trainer that was busy waited for no token of what it takes now.
            token_s = max(self._round_token_s, *(one.last_token_s for one in chosen))
            last = max(self._step_ns / SECOND, token_s)
            self._step_waited_s = (last, now)
            self._training = True
            self._clock.after(self._step_left_s(), self._trained)
        if self._rounds is None:
            self.start()

    def _step_left_s(self) -> float:
        """From the last group of a step to its end."""
        if not self._facts.streams:
            return self._facts.train_s
        return max(0.0, self._added_until_s - self._clock.now_s)

    def _next_batch(self, fresh: list[RunningGroup]) -> list[RunningGroup]:
        """What the trainer takes now; empty = it waits."""
        facts = self._facts
        if not facts.oldest_first:
            return fresh[: facts.batch] if len(fresh) >= facts.batch else []
        ready = [one.oldest for one in fresh]
        bound = ConsumptionBound(facts.batch, facts.staleness)
        found = next_batch(ready, list(self._under_way.values()), self.version, bound)
        return [fresh[index] for index in found]

    def _conclude(self, one: RunningGroup, *, trained: bool) -> None:
        for session, tokens in one.members:
            stale = self.version - one.oldest
            self.counts.fates.append(TrajectoryFate(session, tokens, trained, stale))
            self._router.prospects.conclude(session, trained=trained)

    def _trained(self) -> None:
        self._training = False
        self.version += 1
        now = self._clock.now_ns
        self.counts.steps += 1
        self.counts.step_s.append((now - self._step_ns) / SECOND)
        token_s, end_s = self._step_waited_s
        self.counts.step_parts.append(
            StepParts(
                token_s - self._step_ns / SECOND,
                end_s - token_s,
                now / SECOND - end_s,
                self._round_long,
            )
        )
        self._step_ns = now
        self._awaiting = self._facts.awaits_weights
        self._publish(self.version)
        self._train()
        if self._rounds is not None:
            self.start()

    def has_weights(self, version: int) -> None:
        """The dedicated engines have a version; another may have been published since."""
        if self._awaiting and version == self.version:
            self._awaiting = False
            self.start()


def _shape(facts: JobFacts) -> RoundShape:
    surplus = facts.surplus or 0.0
    return RoundShape(facts.batch, facts.members, surplus, facts.member_surplus, facts.late)


class SimulatedTrajectory:
    """One trajectory: its turns one after the other, with the environment between them."""

    def __init__(
        self, job: Job, one: RunningGroup, session: str, episode: Episode, number: int
    ) -> None:
        self._job, self._group, self.session, self._episode = job, one, session, episode
        self.number = number
        self.read = 0
        self._index = self._context = self._tokens = 0
        self._oldest = one.oldest
        self._turn: RoutedTurn | None = None
        self._withdrawn = False
        self.last_token_s = 0.0

    @property
    def has_tokens(self) -> bool:
        """It waits for its reward, or has it."""
        return bool(self.last_token_s)

    @property
    def planned(self) -> int:
        """Tokens that it writes when nobody stops it."""
        return sum(turn.output for turn in self._episode)

    def next(self) -> None:
        """Ask for the next turn, or end."""
        if self._turn is not None:
            self._oldest = min([self._oldest, *self._turn.versions])
            self._tokens += self._turn.output
        if self._index >= len(self._episode):
            self._turn = None
            self.last_token_s = self._job.now_s
            self._job.on_last_turn(self._group, self._end, self.session)
            return
        planned = self._episode[self._index]
        self._index += 1
        self.read += planned.new
        self._context += planned.new
        before = self._turn
        group = str(self._group.number)
        turn = RoutedTurn(
            self.session, self._context, planned.output, 0, self.next, group, self.number
        )
        if before is not None:
            turn.home, turn.cached = before.home, before.cached
            turn.home_version = before.home_version
        self._context += planned.output
        self._turn = turn
        self._job.take_turn(turn, planned.gap_s)

    def _end(self) -> None:
        if not self._withdrawn:
            self._job.leave_reward()
            self._job.on_trajectory_end(self._group, self, self.session, self._tokens, self._oldest)

    def withdraw(self, router: Router) -> int:
        """End it wherever it is; the tokens it had written."""
        if self._turn is None and not self._withdrawn:
            self._job.leave_reward()
        self._withdrawn = True
        if self._turn is None:
            return self._tokens
        self._turn.withdrawn = True
        return self._tokens + router.withdraw(self._turn)
