"""What the scheduler remembers of trajectories, and what it expects of them.

Turns come one by one; whether a turn should risk a borrowed engine depends on the trajectory they
belong to, on its siblings and on everything else in flight. This is that memory:

    begins --turns placed and ended--> lives --concluded by the trainer--> counted
                                             --silent for too long-------> lost, length kept
                                             --its caller says so--------> over, length kept
                                             --idle, see ``inference``---> over (inferred)
    over (inferred) --another turn of it--> lives, and the inference was a mistake

Lengths come from ``lengths``, time left from ``freshness``, quotas from ``shares``; ``inclusion``
counts how it ended, and assigns groups to the arms it compares. Who names neither groups nor ends
has them inferred.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from rose_core.identity import WeightVersion
from rose_core.rollouts.placement.guards import RolloutOutlook
from rose_core.rollouts.placement.views import EngineView, TurnView
from rose_core.rollouts.trajectories.freshness import Cadence, budget_seconds
from rose_core.rollouts.trajectories.inclusion import (
    Arm,
    Fate,
    Inclusion,
    TrajectoryOutcome,
    assigned,
)
from rose_core.rollouts.trajectories.inference import Idle, InferredGroups, Pauses, is_over
from rose_core.rollouts.trajectories.lengths import Lengths
from rose_core.rollouts.trajectories.shares import ContactShares, stratum
from rose_core.rollouts.versions import age
from rose_core.wire.routing import EngineKind

SILENT_SECONDS = 1800.0
_SAFE_SECONDS = 1.0  # how long an answer of ``survives`` is good for
_INFER_SECONDS = 1.0  # between two looks for trajectories that are over
_SWAP_SECONDS = 10.0  # after a publish, engines with the new weights are worth waiting for so long

# Named once: an enum's member is slow to find.
_BORROWED, _CONTROL = EngineKind.BORROWED, Arm.CONTROL


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """What a trajectory in flight still needs.

    Attributes:
        context: tokens to prefill on its next engine.
        rest_tokens: output it still makes, its median.
        budget_seconds: time left until it is too old; infinite = no bound.
    """

    context: int
    rest_tokens: float
    budget_seconds: float


def survives(work: Iterable[RemainingWork], engines: Sequence[EngineView]) -> bool:
    """Whether the dedicated engines alone would finish the work in time; without any: no.

    Load bursts hit all replicas of a service at once, so borrowed engines do not leave one by one.
    A trajectory is only begun on one of them while the dedicated engines could finish what is in
    flight, contexts prefilled anew, before it is too old: earliest deadline first (Liu and
    Layland, 1973), places as one fluid.
    """
    ours = [engine for engine in engines if engine.kind is EngineKind.DEDICATED and engine.cap]
    if not ours:
        return False
    places = sum(engine.cap for engine in ours)
    step = sum(engine.speed.step_seconds * engine.cap for engine in ours) / places
    prefill = sum(engine.speed.prefill_seconds_per_token for engine in ours) / len(ours)
    taken = 0.0
    for one in sorted(work, key=lambda one: one.budget_seconds):
        alone = one.context * prefill + one.rest_tokens * step
        # One prefill occupies its whole engine, decoding one of its places.
        taken += one.context * prefill / len(ours) + one.rest_tokens * step / places
        if max(alone, taken) > one.budget_seconds:
            return False
    return True


class Deadline(msgspec.Struct, frozen=True, gc=False):
    """When a trajectory is too old, counted from its beginning: in publishes, in seconds, or both.

    Attributes:
        publishes: ``None`` = no such bound.
        seconds: infinite = no such bound.
    """

    publishes: int | None = None
    seconds: float = math.inf


NO_DEADLINE = Deadline()


class Hint(msgspec.Struct, frozen=True, gc=False):
    """What a caller says of the trajectory that a turn belongs to.

    Attributes:
        group: trajectories that answer the same prompt; empty = none.
        deadline: ``None`` = as the lease says.
        turn: its number from 1; 0 = not said.
    """

    group: str = ""
    deadline: Deadline | None = None
    turn: int = 0


NO_HINT = Hint()


class Trajectory(msgspec.Struct, eq=False):
    """One trajectory in memory.

    Attributes:
        born: how many began before it.
        began, began_with: when it began, and the newest version then.
        live: turns of it in flight or waiting.
        since_move: turns since it last left a home by choice.
        moves: engines that its turns left before their end.
        over: no turn of it is expected, although the trainer has not said what became of it.
        inferred: nobody has said that it is over.
        learned: siblings know its length.
        arm: what its group was assigned to.
        ended, ended_at: when its last turn ended, and how many publishes had been seen then;
            -1 before any has.
        run: whose publishes it grows old by; empty = the lease's first.
    """

    group: str
    born: int
    began: float
    began_with: WeightVersion | None
    deadline: Deadline
    seen: float
    turns: int = 0
    live: int = 0
    tokens: int = 0
    context: int = 0
    borrowed: bool = False
    since_move: int = 1_000_000
    moves: int = 0
    over: bool = False
    inferred: bool = False
    learned: bool = False
    arm: Arm = Arm.ANY
    ended: float = 0.0
    ended_at: int = -1
    run: str = ""


@dataclass(frozen=True, slots=True)
class _Publishes:
    """How often one run publishes, learned from when it did.

    Attributes:
        count: seen so far.
    """

    cadence: Cadence = field(default_factory=Cadence)
    count: int = 0

    def observe(self, head: WeightVersion | None, now: float) -> _Publishes:
        """Take the newest version as it is now, and count a publish."""
        before, cadence = self.cadence.head, self.cadence.observe(head, now)
        if cadence is self.cadence:
            return self
        # Before the first publish engines with another checkpoint may come: nobody published it.
        came = before is not None and cadence.head is not None and not cadence.head.is_base
        return _Publishes(cadence, self.count + came)


_UNSEEN = _Publishes()


class Prospects:
    """The memory.

    Args:
        deadline: for trajectories whose caller names none.
        most: trajectories remembered; a forgotten one counts as beginning anew.
        control: share of groups that run on dedicated engines alone, for ``inclusion``.

    Attributes:
        inclusion: of what the trainer reported, and of what it never did.
        in_time: of trajectories whose end was inferred: whether they ended before the deadline,
            which is the most that can be known where nobody reports.
        inferred_ends, mistaken_ends: ends inferred, and those that another turn has disproved.
    """

    def __init__(
        self, deadline: Deadline = NO_DEADLINE, most: int = 65536, *, control: float = 0.0
    ) -> None:
        self.deadline = deadline
        self._most, self._control = most, control
        self._trajectories: OrderedDict[str, Trajectory] = OrderedDict()
        self._live: dict[str, Trajectory] = {}  # those with turns in flight; few of all remembered
        self._published: dict[str, _Publishes] = {"": _UNSEEN}  # by run; the lease's first is ""
        self._safe: tuple[float, bool] = (-math.inf, True)
        self.lengths = Lengths()
        self.shares = ContactShares()
        self.inclusion = Inclusion()
        self.in_time = Inclusion()
        self.groups = InferredGroups()
        self._pauses = Pauses()
        # By run, each in the order in which their last turns ended.
        self._idle: dict[str, OrderedDict[str, Trajectory]] = {}
        self._inferred_at = self._headed_at = -math.inf
        self.forgotten = self.inferred_ends = self.mistaken_ends = 0
        self._born = 0

    def __len__(self) -> int:
        return len(self._trajectories)

    def note_head(self, head: WeightVersion | None, now: float, run: str = "") -> None:
        """Note the newest version of a run; of the lease's first without a name."""
        known = self._published.get(run, _UNSEEN)
        self._published[run] = seen = known.observe(head, now)
        if seen is not known:
            self._headed_at = now

    def _of(self, run: str) -> _Publishes:
        """Publishes of a run; nothing is known of one that nobody has told of."""
        # Asked at every look: what began before the lease's first head is kept under its own name.
        return self._published.get(run and self._known_as(run), _UNSEEN)

    def _known_as(self, run: str) -> str:
        """A run as it is kept here: a turn may name the lease's first, or may not."""
        head = self._published[""].cadence.head
        return "" if head is not None and head.run == run else run

    def begin_turn(
        self,
        name: str,
        hint: Hint,
        context: int,
        now: float,
        *,
        prompt: Sequence[int] | None = None,
        job: str = "",
        run: str = "",
    ) -> int:
        """Note a turn of the trajectory that begins.

        Args:
            name: the trajectory's.
            hint: what its caller says of it.
            context: tokens of the turn's prompt.
            now: seconds.
            prompt: the tokens; where the caller names no group, equal ones make one.
            job: whose it is.
            run: whose versions sample it; empty = the lease's first.

        Returns:
            What it ranks by: the number of its trajectory in order of beginning. A turn that comes
            beside another of its trajectory gets a number of its own, as if one had begun: being
            old is no right to any number of places at once.
        """
        known = self._trajectories.get(name)
        if known is None:
            deadline = hint.deadline or self.deadline
            self._born += 1
            run = self._known_as(run)
            seen = self._published.get(run, _UNSEEN)
            group = hint.group or self._inferred_group(
                prompt, (job, run), deadline, seen.count, now
            )
            began_with = seen.cadence.head
            known = Trajectory(group, self._born, now, began_with, deadline, now, run=run)
            if self._control:  # a draw by the name, which a hash makes
                known.arm = assigned(group or name, self._control)
            known.turns = max(0, hint.turn - 1)
            self._trajectories[name] = known
            self._make_room()
        else:
            self._trajectories.move_to_end(name)
            self._stir(name, known)
            if known.ended_at >= 0 and not known.live:
                self._disprove_end(known, now)
        known.turns += 1
        known.live += 1
        self._live[name] = known
        known.context, known.seen = context, now
        if known.live == 1:
            return known.born
        self._born += 1
        return self._born

    def born(self, name: str) -> int | None:
        """Number of the trajectory in order of beginning; ``None`` when it is not known."""
        known = self._trajectories.get(name)
        return known.born if known is not None else None

    def with_expectation(self, name: str, view: TurnView, now: float) -> TurnView:
        """The turn's view with what its trajectory adds to it."""
        known = self._trajectories.get(name)
        if known is None:
            return view
        rest = self.lengths.rest(known.group, known.tokens)
        cadence = self._of(known.run).cadence
        budget = self._budget(known, cadence, now)
        return replace(
            view,
            begins=known.turns <= 1 and not known.tokens,
            since_move=known.since_move,
            rest_tokens=max(rest.median, float(view.expected)),
            tail_tokens=rest.tail,
            budget_seconds=budget,
            stratum=self._stratum(known, cadence.head),
            tail=rest.in_tail,
            from_version=None if known.deadline.publishes is None else known.began_with,
            control=known.arm is _CONTROL,
        )

    def note_placement(
        self, name: str, kind: EngineKind, *, left_home: bool, stratum: str = ""
    ) -> None:
        """Note the engine of a turn.

        Args:
            name: its trajectory's.
            kind: the engine's.
            left_home: its home could have taken it.
            stratum: that its view said; empty = found out again.
        """
        known = self._trajectories.get(name)
        if known is None:
            return
        self.shares.record(stratum or self._stratum(known, self._of(known.run).cadence.head), kind)
        known.borrowed = known.borrowed or kind is _BORROWED
        known.since_move = 0 if left_home else known.since_move + 1

    def end_turn(self, name: str, tokens: int, context: int, now: float, *, moves: int = 0) -> None:
        """Note the end of a turn: its output tokens, and how many engines it left."""
        known = self._trajectories.get(name)
        if known is not None:
            known.live = max(0, known.live - 1)
            if not known.live:
                self._live.pop(name, None)
                known.ended, known.ended_at = now, self._of(known.run).count
                idle = self._idle.setdefault(known.run, OrderedDict())
                idle[name] = known
                idle.move_to_end(name)
            known.tokens += tokens
            known.moves += moves
            known.context, known.seen = context, now

    def end_trajectory(self, name: str) -> None:
        """End the trajectory; siblings learn from its length before it is trained on."""
        known = self._trajectories.get(name)
        if known is not None and not known.live and (not known.over or known.inferred):
            known.over, known.inferred = True, False
            self._stir(name, known)
            self._learn(known)

    def infer_ends(self, now: float) -> int:
        """Take trajectories that have been idle for too long for over; their number."""
        if now - self._inferred_at < _INFER_SECONDS:
            return 0
        self._inferred_at, pause, ended = now, self._pauses.usual(), 0
        for run, idle in list(self._idle.items()):
            # Who has been idle for longer has seen as many publishes since, or more: the first that
            # is not over says so of all after it. To look at each, every second until it is over,
            # would cost a turn 50 us.
            while idle:
                name, known = next(iter(idle.items()))
                published = known.ended_at < self._of(run).count
                if not is_over(Idle(known.ended, published), pause, now):
                    break
                del idle[name]
                known.over = known.inferred = True
                self._learn(known)
                self.in_time.add(self._outcome(name, known, self._in_time(known), None))
                ended += 1
            if not idle:
                del self._idle[run]
        self.inferred_ends += ended
        return ended

    def _stir(self, name: str, known: Trajectory) -> None:
        """It is idle no longer, or of no interest."""
        if (idle := self._idle.get(known.run)) is not None:
            idle.pop(name, None)

    def conclude(
        self, name: str, *, trained: bool, reward: float | None = None
    ) -> TrajectoryOutcome | None:
        """Record what became of it, as the trainer reports.

        Returns:
            What was counted; ``None`` when the trajectory is not known here (any more).
        """
        known = self._pop(name)
        if known is None:
            return None
        self._learn(known)
        fate = Fate.TRAINED if trained else Fate.DROPPED
        outcome = self._outcome(name, known, fate, reward)
        self.inclusion.add(outcome)
        return outcome

    def forget(self, name: str) -> None:
        """Drop a trajectory that the trainer has withdrawn: its length would teach nothing."""
        self._pop(name)

    def outlook(
        self, engines: Callable[[], Sequence[EngineView]], dice: float, now: float
    ) -> RolloutOutlook:
        """What is known of all trajectories together."""
        at, safe = self._safe
        if now - at >= _SAFE_SECONDS:
            safe = survives(self._work(now), engines())
            self._safe = (now, safe)
        swapping: frozenset[str] = frozenset()
        if now - self._headed_at < _SWAP_SECONDS:
            swapping = frozenset(
                cadence.head.run
                for one in self._published.values()
                if (cadence := one.cadence).head is not None and now - cadence.since < _SWAP_SECONDS
            )
        return RolloutOutlook(self.shares.overall, self.shares.by_stratum(), safe, dice, swapping)

    def forget_silent(self, now: float, after: float = SILENT_SECONDS) -> int:
        """Forget trajectories that nothing was heard of for so long; their number."""
        silent = 0
        while self._trajectories:
            name, oldest = next(iter(self._trajectories.items()))
            if oldest.live or now - oldest.seen < after:
                break
            self._forget(name)
            silent += 1
        return silent

    def _make_room(self) -> None:
        if len(self._trajectories) > self._most:
            self._forget(next(iter(self._trajectories)))

    def _forget(self, name: str) -> None:
        known = self._pop(name)
        if known is not None:
            self._learn(known)
            self.inclusion.add(self._outcome(name, known, Fate.LOST, None))
        self.forgotten += 1

    def _learn(self, known: Trajectory) -> None:
        """Its length is known, to its siblings as well; once."""
        if not known.learned:
            known.learned = True
            self.lengths.record(known.group, known.tokens)

    def _outcome(
        self, name: str, known: Trajectory, fate: Fate, reward: float | None
    ) -> TrajectoryOutcome:
        return TrajectoryOutcome(
            fate,
            known.arm,
            known.group or name,
            known.tokens,
            known.borrowed,
            reward,
            _stale(known, self._of(known.run).cadence.head),
            known.moves,
        )

    def _in_time(self, known: Trajectory) -> Fate:
        """Whether its last turn ended before its deadline, as far as publishes tell."""
        most = known.deadline.publishes
        if most is None or known.began_with is None:
            return Fate.TRAINED
        seen = self._of(known.run)
        stale = _stale(known, seen.cadence.head)
        since = seen.count - known.ended_at  # that came when it was over already
        return Fate.TRAINED if stale is not None and stale - since <= most else Fate.DROPPED

    def _inferred_group(
        self,
        prompt: Sequence[int] | None,
        whose: tuple[str, str],
        deadline: Deadline,
        publishes: int,
        now: float,
    ) -> str:
        if prompt is None:
            return ""
        most = 1 if deadline.publishes is None else deadline.publishes
        job, run = whose
        return self.groups.of(prompt, job, publishes, now, most, run=run)

    def _disprove_end(self, known: Trajectory, now: float) -> None:
        self._pauses.record(now - known.ended)
        if known.over:
            self.mistaken_ends += known.inferred
            if known.learned:  # it will be longer
                self.lengths.forget(known.group, known.tokens)
                known.learned = False
            known.over = known.inferred = False

    def _pop(self, name: str) -> Trajectory | None:
        self._live.pop(name, None)
        known = self._trajectories.pop(name, None)
        if known is not None:
            self._stir(name, known)
        return known

    @staticmethod
    def _budget(known: Trajectory, cadence: Cadence, now: float) -> float:
        deadline = known.deadline
        left = known.began + deadline.seconds - now
        if deadline.publishes is None:
            return left
        return min(budget_seconds(known.began_with, deadline.publishes, cadence, now), left)

    def _stratum(self, known: Trajectory, head: WeightVersion | None) -> str:
        # By what it began with: a trajectory must not drift into another stratum as it is counted.
        rest, left = self.lengths.rest(known.group, 0), math.inf
        most = known.deadline.publishes
        if most is not None and (behind := _stale(known, head)) is not None:
            left = float(most + 1 - behind)
        return stratum(rest.median, left)

    def _work(self, now: float) -> list[RemainingWork]:
        """What is in flight and has a deadline: the rest comes after it, and is never too late."""
        live = [
            (one, self._budget(one, self._of(one.run).cadence, now)) for one in self._live.values()
        ]
        return [
            RemainingWork(one.context, self.lengths.rest(one.group, one.tokens).median, budget)
            for one, budget in live
            if budget < math.inf
        ]


def _stale(known: Trajectory, head: WeightVersion | None) -> int | None:
    """Publishes up to this head since it began."""
    began = known.began_with
    return age(began, head) if began and head else None
