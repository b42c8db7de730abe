"""Where turns wait for an engine: the shell around ``placement`` and ``admission``.

A turn that can be placed at once never waits. The others are tried again, in rank order, whenever
an engine changes or a turn ends; turns alike in what they can run on are tried once per round.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rose_core.rollouts import versions
from rose_core.rollouts.admission import Queue, has_room, rank, retry_after
from rose_core.rollouts.errors import UnknownVersion, VersionGone
from rose_core.rollouts.placement import Obstacle, Placement, Policy, TurnView, Wait, place
from rose_router import metrics
from rose_router.errors import Overloaded
from rose_router.fleet import Clock, Engine, Fleet


@dataclass(eq=False)
class Waiter:
    """A turn that waits."""

    key: tuple[bool, int, int]
    view: TurnView
    since: float
    future: asyncio.Future[Engine] = field(repr=False)
    obstacle: Obstacle = Obstacle.NO_ENGINE


class WaitingRoom:
    """Gives turns engines.

    Args:
        fleet: the engines.
        policy, queue: knobs.
        clock: monotonic seconds.
    """

    def __init__(self, fleet: Fleet, policy: Policy, queue: Queue, clock: Clock) -> None:
        self._fleet = fleet
        self._policy = policy
        self._queue = queue
        self._clock = clock
        self._arrivals = itertools.count()
        self._waiting: list[Waiter] = []
        self.finish_rate: Callable[[], float] = lambda: 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def possible(self, view: TurnView, without: frozenset[str]) -> bool:
        """Whether some engine, ``without`` those, could take the turn now."""
        return isinstance(self._choose(replace(view, avoid=without)), Placement)

    def check_room(self) -> None:
        """Refuse a new turn while the queue is full.

        Raises:
            Overloaded: it is.
        """
        if has_room(len(self._waiting), self._queue):
            return
        message = f"{len(self._waiting)} turns are waiting for an engine already; try again later"
        raise Overloaded("QueueFull", message, retry_after=self._retry_after())

    async def place(self, view: TurnView, *, holds_tokens: bool, priority: int) -> Engine:
        """Wait for an engine; it is reserved, ``leave`` gives it back.

        Raises:
            Overloaded: the queue is full, or the turn has waited too long.
            VersionGone: the exact version asked for runs nowhere any more.
        """
        began = self._clock()
        chosen = self._choose(view)
        if isinstance(chosen, Placement) and not self._waiting:
            metrics.QUEUE_SECONDS.observe(0)
            return self._reserve(chosen)
        if not holds_tokens:
            self.check_room()
        future: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        key = rank(holds_tokens, priority, next(self._arrivals))
        waiter = Waiter(key, view, began, future)
        self._waiting.append(waiter)
        self._waiting.sort(key=lambda w: w.key)
        self.pump()
        try:
            async with asyncio.timeout(self._queue.seconds):
                return await self._until_placed(waiter)
        except TimeoutError:
            raise self._waited_too_long(waiter) from None
        finally:
            metrics.QUEUE_SECONDS.observe(self._clock() - began)
            self._waiting = [w for w in self._waiting if w is not waiter]
            metrics.QUEUED.set(len(self._waiting))

    async def _until_placed(self, waiter: Waiter) -> Engine:
        try:
            return await waiter.future
        except asyncio.CancelledError:
            # The engine may have been reserved in the very moment the turn gave up.
            if not waiter.future.cancelled() and waiter.future.exception() is None:
                self.leave(waiter.future.result())
            raise

    def leave(self, engine: Engine) -> None:
        """A turn has ended on the engine."""
        engine.reserved -= 1
        self.pump()

    def pump(self) -> None:
        """Try those who wait, in order; returns at once while every engine is full."""
        if self._waiting and self._fleet.has_room():
            self.pump_all()

    def pump_all(self) -> None:
        """Try those who wait, in order, and note what stands in their way."""
        blocked: set[tuple[object, ...]] = set()
        for waiter in list(self._waiting):
            view = waiter.view
            alike = (view.dedicated_only, view.pin, view.avoid)
            if waiter.future.done() or alike in blocked:
                continue
            chosen = self._choose(view)
            if isinstance(chosen, Placement):
                waiter.future.set_result(self._reserve(chosen))
                continue
            blocked.add(alike)
            waiter.obstacle = chosen.obstacle
            self._fail_if_gone(waiter)
        self._waiting = [w for w in self._waiting if not w.future.done()]
        metrics.QUEUED.set(len(self._waiting))

    def _choose(self, view: TurnView) -> Placement | Wait:
        return place(view, self._fleet.views(), self._fleet.head, self._policy, self._clock())

    def _reserve(self, placement: Placement) -> Engine:
        engine = self._fleet.get(placement.engine)
        if engine is None:
            message = f"placement chose {placement.engine}, which is not in the fleet"
            raise RuntimeError(message)
        engine.reserved += 1
        return engine

    def _fail_if_gone(self, waiter: Waiter) -> None:
        if waiter.view.pin.exact is None:
            return
        try:
            versions.check_pin(waiter.view.pin, self._fleet.head, self._fleet.live_versions())
        except UnknownVersion as error:
            waiter.future.set_exception(VersionGone(str(error)))

    def _waited_too_long(self, waiter: Waiter) -> Overloaded:
        word = waiter.obstacle.reason
        message = (
            f"no engine took the turn within {self._queue.seconds:.0f} s; nearest obstacle: {word}"
        )
        return Overloaded("QueueTimeout", message, retry_after=self._retry_after())

    def _retry_after(self) -> int:
        return retry_after(len(self._waiting), self.finish_rate())
