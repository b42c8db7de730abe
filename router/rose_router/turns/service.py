"""The router without its sockets: takes turn requests, gives turns.

``app`` puts HTTP in front of it, ``attach`` feeds its fleet, tests drive it under virtual time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from rose_core.rollouts.capacity.reply_time import Queue, reply_seconds
from rose_core.rollouts.errors import UnknownVersion, VersionGone
from rose_core.rollouts.requests.fields import (
    NO_BOUNDS,
    Bounds,
    check_within,
    least,
)
from rose_core.rollouts.transcripts.transcript import Transcript
from rose_core.rollouts.versions import NO_PIN
from rose_router import metrics
from rose_router.begun import BegunTask
from rose_router.config import Settings
from rose_router.engines.engine_client import EngineClient
from rose_router.engines.fleet import Clock
from rose_router.errors import BadRequest, Conflict, Overloaded, draining
from rose_router.turns.drafting import Drafter, Send
from rose_router.turns.request import TurnRequest
from rose_router.turns.runner import TurnRunner
from rose_router.turns.sessions import Home
from rose_router.turns.state import RouterParts, RouterPorts
from rose_router.turns.supervisor import Supervisor
from rose_router.turns.turn import Turn
from rose_router.turns.turn_clock import Listener, Nobody
from rose_router.turns.warming import Warmer

if TYPE_CHECKING:
    from rose_router.turns.tracing import Tracing

_LEAVE_SECONDS = 10.0
"""Longest that callers are waited for who have not heard of the end: a kubelet notices within six
seconds that a router of its own accord is not ready (three probes), and the proxies a second
later."""
_NUMBERS = itertools.count(secrets.randbits(32))
_PROCESS = secrets.token_hex(8)


def random_rid() -> str:
    """32 hexadecimal digits: of one length, so that no id is a prefix of another.

    Half of them are this process's own, the rest counts: no two are alike, here or elsewhere.
    """
    return f"{_PROCESS}{next(_NUMBERS):016x}"


def leaves_at(began: float, asked: float, quiet: float) -> float:
    """When a router that has begun to leave takes no more turns.

    Args:
        began: when it did.
        asked: when the last caller asked for something.
        quiet: seconds without a caller after which none is expected.
    """
    return min(max(began, asked) + quiet, began + _LEAVE_SECONDS)


def _nothing() -> None:
    return


class Service:
    """A lease's router.

    Args:
        settings: knobs.
        client: reaches engines.
        clock: monotonic seconds.
        new_rid: makes ids of legs, all of one length.
        dice: random numbers from 0 to 1, for exploration.
        tracing: makes spans of turns; ``None`` = nobody wants them.
        send: brings engines what they draft from; ``None`` = nobody does.

    Attributes:
        leaving: callers should go elsewhere; who comes all the same is served.
        draining: no new turn is taken.
        asked_at: when somebody last asked for something, while it is leaving.
        on_turn: called when a turn begins.
        sandboxes: hears when turns begin and end, and sessions are over.
        loops: what watches the turns, from ``start`` to ``close``.
    """

    def __init__(
        self,
        settings: Settings,
        client: EngineClient,
        *,
        clock: Clock = time.monotonic,
        new_rid: Callable[[], str] = random_rid,
        dice: Callable[[], float] = random.random,
        tracing: Tracing | None = None,
        send: Send | None = None,
    ) -> None:
        self.tracing = tracing
        self.settings, self.policies = settings, settings.policies
        self.clock = clock
        self._state = state = RouterParts(settings, RouterPorts(client, clock, new_rid, dice))
        self.fleet, self.queue, self.ledger = state.fleet, state.queue, state.ledger
        self.prospects, self.prefixes = state.prospects, state.prefixes
        self._runner = TurnRunner(state)
        self._supervisor = Supervisor(state)
        self._warmer = Warmer(state, self._runner.next_view)
        self.drafter = Drafter(state.fleet, lambda: state.ledger, send, clock) if send else None
        self.leaving = False
        self.draining = False
        self.asked_at = 0.0
        self._bounds: tuple[Bounds | None, Bounds] = None, NO_BOUNDS
        self.labels: dict[str, str] = {}
        self.on_turn: Callable[[], None] = _nothing
        self.sandboxes: Listener = Nobody()
        self.loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to watch."""
        loops = [self._supervisor.run(), self._warmer.run()]
        if self.drafter is not None:
            loops.append(self.drafter.run())
        self.loops = [asyncio.create_task(loop) for loop in loops]

    async def close(self) -> None:
        """End every turn with a typed abort and stop."""
        turns = list(self.ledger)
        for turn in turns:
            turn.abort_status = Overloaded.status  # its caller has not asked for it
            self._end(turn, "the router stops")
        await asyncio.gather(*(turn.ended_event.wait() for turn in turns))
        for loop in self.loops:
            loop.cancel()
        await asyncio.gather(*self.loops, return_exceptions=True)
        await self._warmer.close()
        await self._state.fences.close()
        self.queue.close()

    async def drain(self, passed_on: Callable[[], Awaitable[None]] | None = None) -> None:
        """Send callers elsewhere; return when every live turn has ended or the time is over.

        Load balancers hear late of an end, and send callers here meanwhile: those are served.

        Args:
            passed_on: waits for the turns that other replicas run for callers of this one.
        """
        self.leaving = True
        began, quiet = self.clock(), self.settings.lame_duck_seconds
        while (left := leaves_at(began, self.asked_at, quiet) - self.clock()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)
        self.draining = True
        waits: list[Awaitable[None]] = [turn.ended_event.wait() for turn in self.ledger]
        waits += [passed_on()] if passed_on else []
        if waits:
            tasks = [asyncio.ensure_future(one) for one in waits]
            try:
                await asyncio.wait(tasks, timeout=self.settings.drain_seconds)
            finally:
                for one in tasks:
                    one.cancel()

    def submit(
        self,
        request: TurnRequest,
        *,
        interval: int = 1,
        alone: bool = False,
        at_once: bool = False,
    ) -> Turn:
        """Begin a turn, or join the one that the request is a duplicate of.

        Args:
            request: what is asked.
            interval: tokens per event of the engine's stream; more than one where nobody watches.
            alone: the caller waits for nothing else, and does so by ``until_ended`` at once. Where
                nobody can join the turn, it then runs in the caller's task: one of its own, and
                being woken by it, are a thirtieth of what the router does for a turn.
            at_once: where it has a task of its own, this begins here: an engine with room for it
                has been asked when this returns.

        Returns:
            The turn; the caller counts as a listener and must ``leave``.

        Raises:
            Conflict: pinned version not announced yet.
            BadRequest: it never will be; duplicate id.
            UnsafeTurn: no engine attached could bear it.
            PromptTooLong: the prompt leaves no room for an answer.
            Overloaded: draining.
        """
        if self.draining:
            raise draining()
        now = self.clock()
        turn = self.ledger.find(request, now)
        if turn is None:
            if not request.session and (found := self._recognized(request)):
                request = request.but(session=found)
            if request.pin is not NO_PIN:
                self._check(request)
            transcript = Transcript(request.prompt)
            turn = Turn(request, now, transcript, interval, labels=self.labels)
            turn.check_bounds(self.bounds())
            self.ledger.open(turn)
            self.on_turn()
            prompt = request.prompt
            turn.born = self.prospects.begin_turn(
                request.trajectory,
                request.hint,
                len(prompt),
                turn.began,
                prompt=prompt,
                job=request.job,
                run=request.pin.run,
            )
            self._warmer.begin_turn(turn)
            if self.drafter is not None:
                self.drafter.begin_turn(turn)
            self.sandboxes.begin_turn(turn)
            if self.tracing is not None:
                self.tracing.begin_turn(turn)
            if not alone or request.own_rid:
                self._begin(turn, at_once=at_once)
        elif interval < turn.interval:
            turn.interval = interval  # somebody watches it now
        turn.listeners += 1
        return turn

    def _begin(self, turn: Turn, *, at_once: bool = False) -> None:
        loop = asyncio.get_running_loop()
        if at_once:
            begun = BegunTask(loop, self._run(turn))
            turn.task = begun.task
            begun.begin()
        else:
            turn.task = loop.create_task(self._run(turn))

    async def _run(self, turn: Turn) -> None:
        await self._runner.run(turn)
        self._note_end(turn)

    async def until_ended(self, turn: Turn) -> None:
        """Wait for the end of a turn, for its caller.

        Raises:
            CancelledError: the caller has hung up.
        """
        if turn.task is not None or turn.is_over:
            await turn.ended_event.wait()
            return
        task = turn.task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a turn is waited for in a task")
        await self._runner.run(turn)  # which takes whoever cancels the task for the turn's
        turn.task = None  # turns are kept: each would keep what its caller was answered
        if turn.cancelled:
            task.uncancel()
        gone = task.cancelling() > 0
        turn.abandoned = turn.abandoned or gone
        self._note_end(turn)
        if gone:
            raise asyncio.CancelledError

    def admit(self, requests: Sequence[TurnRequest]) -> None:
        """Refuse a request's turns before anything is made for them.

        One that is alone is asked by ``submit``, also before.

        Raises:
            Busy: they do not fit into the queue.
            UnsafeTurn: no engine attached could bear one of them.
            PromptTooLong: a prompt leaves no room for an answer.
        """
        self.queue.check_room(requests[0].job, len(requests))
        if len(requests) == 1:
            return
        bounds, seen = self.bounds(), None
        for request in requests:
            if request.prompt is not seen:  # answers to one prompt have all in common
                seen = request.prompt
                asked = request.prompt, request.sampling, request.passed
                check_within(*asked, bounds, request.highest)

    def bounds(self) -> Bounds:
        """What a turn must keep to run on the engines of this lease."""
        known = self.fleet.bounds()
        if known is not self._bounds[0]:
            lease = Bounds(context=self.settings.context_tokens)
            self._bounds = known, least((lease, known))
        return self._bounds[1]

    def leave(self, turn: Turn) -> None:
        """A caller no longer listens; nobody listening ends the turn."""
        turn.listeners -= 1
        if not turn.listeners and not turn.is_over:
            turn.abandoned = True
            self._end(turn, "the caller hung up")

    def abort(self, rid: str, job: str = "") -> bool:
        """End the turn with exactly this caller's id, of this job where one is given.

        Returns:
            False when no such turn is live.
        """
        turns = self.ledger.live(rid, job)
        for turn in turns:
            self._end(turn, "Aborted")
        return bool(turns)

    def end_trajectory(self, session: str) -> None:
        """End a trajectory: its keys are of no more use, and its length is known."""
        self.prospects.end_trajectory(session)
        if self.tracing is not None:
            self.tracing.end_trajectory(session)
        self._warmer.drop(session)
        self.end_sandbox(session)
        self.fleet.residents.drop_session(session)

    def reply_seconds(self, turn: Turn) -> float | None:
        """Seconds until the last token of a turn that has just come; None: nobody could say."""
        now = self.clock()
        able = [one for one in self.fleet if one.version is not None]
        shut = 0.0
        if able and not any(one.gate_open for one in able):
            shut = min(now - one.gate_since for one in able)
        queue = Queue(len(self.queue), self._state.finished.per_second(), shut)
        return reply_seconds(self._runner.view(turn, now), self.fleet.views(), queue)

    def home_of(self, trajectory: str) -> Home | None:
        """Where the keys of a trajectory are."""
        return self._state.sessions.home(trajectory)

    def settle(self, trajectory: str, home: Home) -> None:
        """Let a trajectory's next turn find keys there."""
        self._state.sessions.settle(trajectory, home)

    def end_sandbox(self, session: str) -> None:
        """Tell who has its sandbox that a trajectory will ask for no more turns."""
        self.sandboxes.end_session(session)

    def abort_all(self, job: str = "") -> int:
        """End every turn of this lease, or of one job of it; their number."""
        turns = [turn for turn in self.ledger if job in {"", turn.request.job}]
        for turn in turns:
            self._end(turn, "Aborted")
        return len(turns)

    async def until_idle(self) -> None:
        """Wait until the turns that run now have ended; those that only wait may go on waiting."""
        running = [turn for turn in self.ledger if turn.leg is not None]
        await asyncio.gather(*(turn.ended_event.wait() for turn in running))

    def unready(self) -> str:
        """Why no turn could run now, or an empty string."""
        if self.leaving:
            return "draining" if self.draining else "leaving"
        if not len(self.fleet):
            return "no engine is attached"
        if not self.fleet.live_versions():
            return "no engine has an attested weight version"
        return ""

    def _recognized(self, request: TurnRequest) -> str:
        """The trajectory of its job that the turn's prompt goes on from; empty = none."""
        found = self.prefixes.find(request.prompt)
        return found if not found or not request.job or found.startswith(f"{request.job}/") else ""

    def _check(self, request: TurnRequest) -> None:
        try:
            self.fleet.check_pin(request.pin)
        except VersionGone as error:
            raise BadRequest("VersionGone", str(error)) from error
        except UnknownVersion as error:
            raise Conflict("UnknownVersion", str(error), retry_after=1) from error

    def _end(self, turn: Turn, message: str) -> None:
        turn.abort_message = turn.abort_message or message
        if turn.task is None:
            self._begin(turn)  # whoever was to run it does not
        # A task that is cancelled before its first step never runs, and the turn would stay live
        # for ever; this comes after that step.
        asyncio.get_running_loop().call_soon(self._cancel, turn)

    @staticmethod
    def _cancel(turn: Turn) -> None:
        # Once: what cancels a caller's task a second time is the caller's own end. Nor after the
        # end, when the caller is being answered.
        if turn.task is not None and not turn.is_over and not turn.cancelled:
            turn.cancelled = True
            turn.task.cancel()

    def _note_end(self, turn: Turn) -> None:
        self._state.finished.note_end(turn.ended)
        self._warmer.end_turn(turn)
        if self.drafter is not None:
            self.drafter.end_turn(turn)
        self.sandboxes.end_turn(turn)
        if turn.abandoned:
            metrics.UNDELIVERED.inc(turn.held)
