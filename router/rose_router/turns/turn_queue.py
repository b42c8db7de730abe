"""Where turns wait for an engine: the shell around ``dispatch``, ``placement`` and ``admission``.

Turns of several jobs go by ``fairness``, those of one job by ``admission``'s rank.

Those who wait are tried whenever an engine changes or a turn ends, and with them, each at its rank,
turns that stand on an engine whose gate has been closed for long (``watch``). With the joint rule
``dispatch`` says who goes next: a home that is full for a moment is waited for, engines whose KV
pool is full of sessions that come back are left alone. The other rules serve in rank order.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from rose_core.rollouts.capacity.admission import QueueLimits, has_room, rank, retry_after
from rose_core.rollouts.capacity.fairness import FairShares, work
from rose_core.rollouts.errors import UnknownVersion, UnsafeTurn, VersionGone
from rose_core.rollouts.placement.dispatch import DispatchState, at_once, next_turn
from rose_core.rollouts.placement.guards import NOTHING_KNOWN, RolloutOutlook
from rose_core.rollouts.placement.selection import (
    Obstacle,
    Placement,
    Policy,
    PolicyName,
    TurnView,
    Wait,
    obstacle,
    place,
)
from rose_core.rollouts.placement.watch import MoveReason
from rose_core.wire.routing import EngineKind
from rose_router import metrics
from rose_router.engines.fleet import Clock, Engine, Fleet, LiveLeg
from rose_router.errors import Busy, Overloaded, Unprocessable

_OTHERS_SECONDS = 60.0
"""A turn that no engine attached may run is refused once that has been so for as long, whether
engines were there when it came or not: they come one after the other, each within a minute, and
after a 422 no client asks again."""


_JOINT = PolicyName.JOINT  # named once: an enum's member is slow to find


@dataclass(eq=False)
class Waiter:
    """A turn that waits.

    Attributes:
        session: whose keys it leaves on its engine.
        job: whose turn it is.
        because: why it could not move; it then runs on dedicated engines only.
        refused: since when no engine attached may run it; ``None`` = one may, or none is. Without
            the time for which turns are held.
    """

    key: tuple[bool, int, int]
    view: TurnView
    session: str
    since: float
    future: asyncio.Future[Engine] = field(repr=False)
    job: str = ""
    because: tuple[str, ...] = ()
    obstacle: Obstacle = Obstacle.NO_ENGINE
    refused: float | None = None

    def take(self, engine: Engine) -> None:
        """Go there: a place is reserved."""
        self.future.set_result(engine)


@dataclass(eq=False)
class PausedTurn:
    """A turn that waits while it stands on an engine whose gate is closed.

    Attributes:
        since: when that gate closed.
        leg, engine: where it stands.
        tokens: that the leg had written when the turn began to wait, as the view says.
        moves_to: told the engine that is reserved for it and by which view, before its leg ends.
    """

    key: tuple[bool, int, int]
    view: TurnView
    session: str
    since: float
    job: str
    leg: LiveLeg
    tokens: int
    engine: Engine
    moves_to: Callable[[Engine, TurnView], None]

    @property
    def stands(self) -> bool:
        """Its gate has not opened since, and its leg is there and has written nothing more."""
        closed = not self.engine.gate_open and self.engine.gate_since == self.since
        silent = self.leg.verdict is None and self.leg.tokens == self.tokens
        return closed and silent and self.leg.rid in self.engine.legs

    def take(self, engine: Engine) -> None:
        """Go there: a place is reserved."""
        self.moves_to(engine, self.view)
        self.leg.end(MoveReason.PAUSED)


class TurnQueue:
    """Gives turns engines.

    Args:
        fleet: the engines.
        policy, queue: knobs.
        clock: monotonic seconds.
        outlook: what is known of all trajectories together, asked at every choice.
        finish_rate: turns that have ended in a second lately, for who is told to come back.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        queue: QueueLimits,
        clock: Clock,
        *,
        outlook: Callable[[], RolloutOutlook] = lambda: NOTHING_KNOWN,
        finish_rate: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._queue = queue
        self._clock = clock
        self._outlook = outlook
        self._finish_rate = finish_rate
        self._arrivals = itertools.count()
        self._waiting: list[Waiter] = []
        self._paused: dict[str, PausedTurn] = {}  # by their legs' ids
        self._again: asyncio.TimerHandle | None = None
        self._shares = FairShares()
        self._keeps = False  # an engine free
        self._held_at: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the waiting turns bring with them."""
        return sum(waiter.view.context for waiter in self._waiting)

    @property
    def held(self) -> bool:
        """No turn begins."""
        return self._held_at is not None

    def hold(self) -> None:
        """Begin no turn until ``release``; the time does not count as waiting."""
        if self._held_at is None:
            self._held_at = self._clock()

    def release(self) -> None:
        """Begin turns again."""
        if self._held_at is None:
            return
        held = self._clock() - self._held_at
        self._held_at = None
        for waiter in self._waiting:
            if waiter.refused is not None:
                waiter.refused += held
        self.pump()

    def is_possible(self, view: TurnView, without: frozenset[str]) -> bool:
        """Whether some engine, ``without`` those, could take the turn now."""
        return isinstance(self._choose(replace(view, avoid=without)), Placement)

    def check_room(self, job: str = "", more: int = 1) -> None:
        """Refuse new turns of the job while the queue is full, or would be with them.

        Args:
            job: whose they are.
            more: how many; those that an engine could take at once do not wait.

        Raises:
            Busy: it is.
            Unprocessable: they are more than could ever run and wait here.
        """
        if more == 1 and not self._waiting and self._queue.most:
            return  # the usual case
        places = sum(e.places for e in self._fleet if e.gate_open) if more > 1 else 0
        beside = max(0, more - 1 - places)
        if has_room(len(self._waiting) + beside, self._queue):
            return
        mine = sum(one.job == job for one in self._waiting)
        jobs = len({job, *(one.job for one in self._waiting)})
        waiting = len(self._waiting) + beside
        if has_room(waiting, self._queue, mine=mine + beside, jobs=jobs):
            return
        whose = f", {mine} of them of job {job}" if job else ""
        if more == 1:
            message = f"{len(self._waiting)} turns are waiting for an engine already{whose}"
        else:
            message = (
                f"the request asks for {more} answers at once; engines have {places} places free, "
                f"and of the {self._queue.most} turns that may wait {len(self._waiting)} do{whose}"
            )
        most = self._queue.most + sum(engine.cap for engine in self._fleet)
        if len(self._fleet) and more > max(most, 1):  # else engines bring places
            message += f"; ask for {most} answers at most (n, or prompts) at a time"
            raise Unprocessable("TooManyAnswers", message)
        raise Busy("QueueFull", f"{message}; try again later", retry_after=self._retry_after())

    async def place(
        self,
        view: TurnView,
        *,
        holds_tokens: bool,
        priority: int,
        session: str = "",
        born: int | None = None,
        job: str = "",
        because: tuple[str, ...] = (),
    ) -> Engine:
        """Wait for an engine where ``place_at_once`` found none; ``leave`` gives it back.

        Args:
            view: the turn.
            holds_tokens: it has been cut and goes on.
            priority: higher goes first.
            session: whose keys it leaves behind.
            born: number of its trajectory; older ones go first, without one they come as they come.
            job: whose turn it is; jobs that wait get engines in equal parts.
            because: why the turn could not move.

        Raises:
            Busy: the queue is full.
            Overloaded: the turn has waited too long.
            VersionGone: the exact version asked for runs nowhere any more.
            UnknownVersion: no engine attached has the turn's run any more.
            UnsafeTurn: for a minute no engine attached has taken it.
            Unprocessable: it could not move, and for a minute no engine attached is dedicated.
        """
        began = self._clock()
        self._shares.join(job)
        future: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        key = self.rank_of(holds_tokens=holds_tokens, priority=priority, born=born)
        waiter = Waiter(key, view, session, began, future, job, because)
        insort(self._waiting, waiter, key=lambda one: one.key)
        self.pump()
        try:
            if future.done():
                return future.result()
            if not holds_tokens:
                self._check_room_without(waiter)
            return await self._until_placed(waiter)
        except BaseException:  # also when cancelled, and raised again
            self._shares.leave(job)
            raise
        finally:
            metrics.QUEUE_SECONDS.observe(self._clock() - began)
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def has_queued(self, leg: str) -> bool:
        """Whether the leg's turn waits while it stands at a closed gate."""
        return leg in self._paused

    def queue_paused(self, one: PausedTurn) -> None:
        """Have a turn wait for another engine while it stands where it is, until its gate opens."""
        self._paused[one.leg.rid] = one

    def rank_of(
        self, *, holds_tokens: bool, priority: int, born: int | None
    ) -> tuple[bool, int, int]:
        """Where a turn that comes now stands in the queue; for the arguments see ``place``."""
        arrived = next(self._arrivals)
        return rank(holds_tokens, priority, arrived if born is None else born)

    def place_at_once(self, view: TurnView, session: str, job: str, now: float) -> Engine | None:
        """The usual case: nobody waits, and some engine has room.

        Args:
            view: the turn.
            session: whose keys it leaves behind.
            job: whose turn it is.
            now: seconds.

        Returns:
            The engine, reserved as by ``place``; ``None`` = see there.
        """
        if self._waiting or self._paused or self._held_at is not None:
            return None
        if view.alone or self._keeps:
            return None
        if self._policy.name is not _JOINT:
            return None
        chosen = at_once(view, self._scene(now, NOTHING_KNOWN), self._outlook)
        if chosen is None:
            return None
        self._shares.join(job)
        metrics.QUEUE_SECONDS.observe_none()
        return self._reserve(view, session, job, chosen)

    def _check_room_without(self, waiter: Waiter) -> None:
        self._waiting.remove(waiter)
        self.check_room(waiter.job)
        insort(self._waiting, waiter, key=lambda one: one.key)

    async def _until_placed(self, waiter: Waiter) -> Engine:
        try:
            # 1. Wait for an engine, at most for as long as a turn may wait; ``asyncio.wait`` leaves
            #    the future alone when it times out.
            while not waiter.future.done():
                await asyncio.wait({waiter.future}, timeout=self._queue.seconds)
                self._raise_if_late(waiter)
        except BaseException:  # also when cancelled, and raised again
            # 2. The turn gives up: too late, cancelled or failed. An engine may have been reserved
            #    in that very moment (the future is done, so it cannot be cancelled): give it back.
            if not waiter.future.cancel() and waiter.future.exception() is None:
                engine = waiter.future.result()
                self._unreserve(engine, waiter.view, waiter.session, waiter.job)
            raise
        # 3. Reserved: the caller owns the place until ``leave``.
        return waiter.future.result()

    def leave(
        self, engine: Engine, session: str = "", tokens: int = 0, job: str = "", more: float = 0
    ) -> None:
        """Give back the place of a turn that has ended, and note the keys it leaves there.

        Args:
            engine: where.
            session: whose keys.
            tokens: how many.
            job: whose turn it was.
            more: tokens that it wrote beyond what was expected.
        """
        self._shares.charge(job, more)
        self._shares.leave(job)
        self._requeue(engine, session, tokens)

    def give_back(self, engine: Engine, view: TurnView, session: str, job: str) -> None:
        """Give back a place that was reserved for a turn and has not been used.

        Args:
            engine: where.
            view: the turn, as it was when the place was reserved.
            session: whose keys it would have left there.
            job: whose turn it was.
        """
        self._shares.leave(job)
        self._unreserve(engine, view, session, job)

    def _unreserve(self, engine: Engine, view: TurnView, session: str, job: str) -> None:
        self._shares.charge(job, -_work(engine, view))
        self._fleet.residents.drop_session(session)
        self._requeue(engine)

    def _requeue(self, engine: Engine, session: str = "", tokens: int = 0) -> None:
        engine.reserved -= 1
        engine.solo = False  # who must be alone was the only one
        self._fleet.residents.end_turn(engine.name, session, tokens, self._clock())
        self.pump()

    def close(self) -> None:
        """Try nobody any more: a timer of many seconds would keep all of the router till then."""
        if self._again is not None:
            self._again.cancel()

    def pump(self) -> None:
        """Try those who wait; returns at once while every engine is full."""
        if self._held_at is not None or not (self._waiting or self._paused):
            return
        if not self._fleet.has_room():
            return
        self._forget_moved()
        self._keep_one_free()
        if self._policy.name is _JOINT:
            self._dispatch()
        else:
            self.look()

    def look(self) -> None:
        """Try those who wait in rank order, and note what stands in their way."""
        if self.held:
            return
        self._forget_moved()
        self._keep_one_free()
        if self._policy.name is _JOINT:
            self._dispatch()
        blocked: dict[tuple[object, ...], Obstacle] = {}
        for one in list(self._shares.order(self._everybody())):
            known = blocked.get(one.view.placement_key)
            chosen = self._choose(one.view) if known is None else Wait(known)
            if isinstance(chosen, Wait):
                blocked[one.view.placement_key] = chosen.obstacle
                if isinstance(one, Waiter):
                    one.obstacle = chosen.obstacle
                    self._fail_if_gone(one)
            elif self._policy.name is not _JOINT:
                self._give(one, chosen)
            elif isinstance(one, Waiter):
                one.obstacle = Obstacle.FULL  # its home, or a KV pool, and it is waited for
                one.refused = None
        self._waiting = [waiter for waiter in self._waiting if not waiter.future.done()]
        metrics.QUEUED.set(len(self._waiting))

    def _keep_one_free(self) -> None:
        """Keep one engine free for a turn that must be alone, as long as one waits for it.

        Never more than one: the others serve everybody else meanwhile.
        """
        first = None
        for one in self._waiting:
            if one.view.alone:
                first = one.view
                break
        for paused in self._paused.values():
            first = paused.view if first is None and paused.view.alone else first
        if first is None and not self._keeps:
            return  # the usual case
        able = [] if first is None else [e for e in self._fleet if self._could(first, e)]
        kept = min(
            able,
            key=lambda e: (not e.solo, not e.kept, e.kind is EngineKind.BORROWED, e.reserved),
            default=None,
        )
        self._keeps = kept is not None
        for engine in self._fleet:
            engine.kept = engine is kept

    def _could(self, view: TurnView, engine: Engine) -> bool:
        """Whether nothing but other turns stands in the way."""
        seen = engine.view(self._fleet.usual)
        met = obstacle(view, seen, self._fleet.head, self._policy, self._clock())
        return met is None or met is Obstacle.FULL

    def _dispatch(self) -> None:
        again: float | None = None
        everybody = self._everybody()
        while everybody:
            order = self._shares.order(everybody)
            chosen, again = next_turn(order, self._scene(self._clock(), self._outlook()))
            if chosen is None:
                break
            one = order[chosen[0]]
            self._give(one, chosen[1])
            everybody.remove(one)  # and not all made anew: thousands may wait
        if again is not None:
            self._pump_at(again)

    def _forget_moved(self) -> None:
        """Only turns that still stand at closed gates wait there."""
        if self._paused:
            self._paused = {rid: one for rid, one in self._paused.items() if one.stands}

    def _everybody(self) -> list[Waiter | PausedTurn]:
        """All who wait, by rank."""
        everybody: list[Waiter | PausedTurn] = [*self._waiting]
        if self._paused:
            everybody += self._paused.values()
            everybody.sort(key=lambda one: one.key)
        return everybody

    def _scene(self, now: float, outlook: RolloutOutlook) -> DispatchState:
        fleet = self._fleet
        return DispatchState(fleet.views(), fleet.head, self._policy, now, outlook, fleet.residents)

    def _pump_at(self, moment: float) -> None:
        if self._again is not None:
            self._again.cancel()
        delay = max(0.0, moment - self._clock()) + 0.001
        self._again = asyncio.get_running_loop().call_later(delay, self.pump)

    def _choose(self, view: TurnView) -> Placement | Wait:
        return place(
            view,
            self._fleet.views(),
            self._fleet.head,
            self._policy,
            self._clock(),
            outlook=self._outlook(),
        )

    def _give(self, one: Waiter | PausedTurn, placement: Placement) -> None:
        if isinstance(one, Waiter):
            self._waiting.remove(one)
        else:
            del self._paused[one.leg.rid]
            self._shares.join(one.job)
            metrics.QUEUE_SECONDS.observe(self._clock() - one.since)
        one.take(self._reserve(one.view, one.session, one.job, placement))

    def _reserve(self, view: TurnView, session: str, job: str, placement: Placement) -> Engine:
        engine = self._fleet.get(placement.engine)
        if engine is None:
            message = f"placement chose {placement.engine}, which is not in the fleet"
            raise RuntimeError(message)
        engine.reserved += 1
        engine.solo = view.alone
        self._shares.charge(job, _work(engine, view))
        needed = view.context + view.expected
        self._fleet.residents.begin_turn(engine.name, session, needed)
        return engine

    def _fail_if_gone(self, waiter: Waiter) -> None:
        """End a turn that no waiting helps.

        One that holds no tokens ends by its pin as if it came now: engines may have come, and gone,
        since it came. That none attached may run it is said when others had time to come. One that
        holds some waits for an engine that goes on.
        """
        view, fresh = waiter.view, waiter.key[0]
        if waiter.future.done() or (view.pin.exact is None and not fresh):
            return
        try:
            self._fleet.check_pin(view.pin)
            if fresh:
                self._check_taken(waiter)
            waiter.refused = None
        except (UnsafeTurn, Unprocessable) as error:
            now = self._clock()
            waiter.refused = now if waiter.refused is None else waiter.refused
            if now - waiter.refused >= _OTHERS_SECONDS:
                waiter.future.set_exception(error)
        except UnknownVersion as error:
            gone = view.pin.exact is not None
            waiter.future.set_exception(VersionGone(str(error)) if gone else error)

    def _check_taken(self, waiter: Waiter) -> None:
        """Whether an engine attached may run the turn, or nobody knows, since none is.

        Raises:
            UnsafeTurn: each refuses something that it asks for.
            Unprocessable: it could not move, and none is dedicated.
        """
        view = waiter.view
        if waiter.because and self._fleet.lacks_dedicated():
            why = "; ".join(waiter.because)
            message = f"no dedicated engine is attached, and the turn could not move: {why}"
            raise Unprocessable("NotSpliceable", message)
        if view.asked:
            self._fleet.check_taken(view.asked, dedicated_only=view.dedicated_only)

    def _raise_if_late(self, waiter: Waiter) -> None:
        if waiter.future.done() or self.held:
            return
        message = (
            f"no engine took the turn within {self._queue.seconds:.0f} s; "
            f"nearest obstacle: {waiter.obstacle.reason}"
        )
        raise Overloaded("QueueTimeout", message, retry_after=self._retry_after())

    def _retry_after(self) -> int:
        return retry_after(len(self._waiting), self._finish_rate())


def _work(engine: Engine, view: TurnView) -> float:
    """What the turn is expected to cost the engine, in tokens written."""
    at_home = view.cached if view.home == engine.name else 0
    return work(view.context - at_home, view.expected)
