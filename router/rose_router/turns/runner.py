"""Moves a turn along its edges: place, run a leg, fold it, finish or go on elsewhere.

The only place where a turn's tokens are sampled, kept, dropped or continued. Placement, patience
and splice rules are ``rose_core.rollouts``'; this is the shell that obeys them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import methodcaller
from typing import Any

from msgspec.structs import replace

from rose_core.rollouts.engines.estimates import SAME_STEP, weight_of
from rose_core.rollouts.engines.suspects import GATE_SECONDS
from rose_core.rollouts.errors import BrokenStream, RolloutError
from rose_core.rollouts.placement.selection import TurnView
from rose_core.rollouts.placement.watch import MoveReason
from rose_core.rollouts.requests.stops import CutStops
from rose_core.rollouts.transcripts.transcript import Leg, StreamEvent
from rose_router import metrics
from rose_router.engines.engine_client import LegBody, Target
from rose_router.engines.fleet import Clock, Engine, Fleet, LiveLeg
from rose_router.errors import EngineRefused, LegLost, RouterError, TurnLost, Unprocessable
from rose_router.turns.sessions import Home
from rose_router.turns.state import RouterParts
from rose_router.turns.turn import Turn, TurnMove, TurnState, abort_of
from rose_router.turns.turn_queue import PausedTurn

LOG = logging.getLogger(__name__)

# Moves that say nothing against the engine or the turn: they do not count as losses.
_ORDERLY = frozenset({MoveReason.REVOKED, MoveReason.PAUSED, MoveReason.CAP_CUT})
_FINAL_EVENT_SECONDS = 2.0  # for an engine to say what it knows of a turn that is over
_MOST_MOVES = 64
CANARY_SECONDS = 2.0
"""An engine that computes answers one token sooner, and whoever waits for it waits for this."""
# Looked up once: finding a metric by its labels costs more than counting, and an enum's member
# more than comparing it.
_WAITING, _RUNNING, _DONE, _FAILED = TurnState
_COMPUTED, _CACHED, _FETCHED = map(metrics.PROMPT_TOKENS.tally, ("computed", "cached", "fetched"))
_PROMPT_META = ("prompt_tokens", "cached_tokens", "input_token_logprobs", "input_top_logprobs")


class TurnRunner:
    """Runs turns.

    Args:
        state: of the router.
    """

    def __init__(self, state: RouterParts) -> None:
        self._settings, self._fleet, self._queue = state.settings, state.fleet, state.queue
        self._fences, self._ledger, self._prospects = state.fences, state.ledger, state.prospects
        self._prefixes, self._sessions = state.prefixes, state.sessions
        self._clock = state.clock
        self._client, self._new_rid = state.outside.client, state.outside.new_rid

    def next_view(self, turn: Turn) -> TurnView:
        """What would come after a turn that has ended, were it to come now with no new prompt."""
        expected = max(1, round(self._ledger.totals.usual_tokens))
        view = self.view(turn, self._clock())
        return replace(view, expected=expected, losses=0, begins=False)

    async def run(self, turn: Turn) -> None:
        """Bring the turn to its end, whatever that is; never raises."""
        try:
            while turn.state is _WAITING or turn.state is _RUNNING:
                await self._advance(turn)
        except asyncio.CancelledError:
            self._abort_cancelled(turn)
        except (RouterError, RolloutError, EngineRefused) as error:
            self._fail(turn, error)
        except Exception as error:  # a bug must end this turn only, and be heard of
            LOG.exception("turn %s", turn.request.rid)
            self._fail(turn, TurnLost("Internal", f"{type(error).__name__}: {error}"))
        finally:
            if not turn.ended:
                self._note_ended(turn)
            request, tokens = turn.request, turn.transcript.tokens
            name, prompt, held = request.trajectory, request.prompt, len(tokens)
            if not request.keyed:
                self._prefixes.note(name, prompt, tokens)
            context = len(prompt) + held
            self._prospects.end_turn(name, held, context, turn.ended, moves=len(turn.moves))
            if turn.reserved is not None:  # it ended in the moment it was to move
                self._queue.give_back(*turn.reserved, request.session, request.job)
            self._ledger.close(turn)
            if turn.trace is not None:
                turn.trace.end(turn)
            turn.ended_event.set()

    def _note_ended(self, turn: Turn) -> None:
        """Nothing more will come: whoever streams it writes its end, before anything is noted."""
        turn.ended = self._clock()
        turn.changed.fire()

    async def _advance(self, turn: Turn) -> None:
        began, request, transcript = self._clock(), turn.request, turn.transcript
        held, turn.state = len(transcript.tokens), _WAITING
        engine: Engine | None
        if turn.reserved is not None:
            (engine, view), turn.reserved = turn.reserved, None
        else:
            view = self.view(turn, began)
            engine = self._queue.place_at_once(view, request.session, request.job, began)
        if engine is None:
            try:
                engine = await self._queue.place(
                    view,
                    holds_tokens=held > 0,
                    priority=request.priority,
                    session=request.session,
                    born=turn.born,
                    job=request.job,
                    because=request.dedicated_because,
                )
            finally:
                turn.queue_seconds += self._clock() - began
        self._note_placed(turn, view, engine)
        try:
            if not engine.gate_open or engine.version is None:
                return  # it closed while this turn woke up
            turn.check_bounds(engine.bounds)
            move = await self._leg(turn, engine, held)
        finally:
            holds = len(transcript.tokens)
            context, more = len(transcript.prompt) + holds, holds - held - view.expected
            self._queue.leave(engine, request.session, context, request.job, more)
        self._conclude_leg(turn, engine, move)

    def view(self, turn: Turn, now: float) -> TurnView:
        """A turn as placement sees it at that time."""
        name = turn.request.trajectory
        home = self._sessions.home(name)
        usual = self._ledger.totals.usual_tokens
        if home is None:
            view = turn.view("", 0, usual)
        else:
            engine = self._fleet.get(home.engine)
            same = engine is not None and str(engine.version) == home.version
            view = turn.view(home.engine, home.tokens if same else 0, usual)
        view = self._prospects.with_expectation(name, view, now)
        if view.begins and turn.transcript.tokens:
            return replace(view, begins=False)
        return view

    def _note_placed(self, turn: Turn, view: TurnView, engine: Engine) -> None:
        had_room = False
        if view.home and view.home != engine.name:
            home = self._fleet.get(view.home)
            had_room = home is not None and home.gate_open and home.occupied < home.cap
        self._prospects.note_placement(
            turn.request.trajectory, engine.update.kind, left_home=had_room, stratum=view.stratum
        )

    async def _leg(self, turn: Turn, engine: Engine, held: int) -> MoveReason | None:
        """Run one leg and fold it; why the turn must go on elsewhere, ``None`` when it ended."""
        now, update, rid = self._clock(), engine.update, self._new_rid()
        version = str(engine.version)
        leg = Leg(engine.name, update.kind, rid, version, held, reused=update.reuses_kv)
        can_move = partial(self._can_move, turn, engine)
        queue = partial(self._queue_paused, turn, engine)
        handle = LiveLeg(rid, now, now, task=turn.task, can_move=can_move, queue=queue)
        engine.legs[rid] = handle
        engine.turns += 1
        if update.device_class:
            metrics.CLASS_TURNS.labels(update.device_class).inc()
        turn.state, turn.leg = _RUNNING, leg
        if turn.trace is not None:
            turn.trace.begin_leg(leg)
        try:
            move = await self._outcome(turn, engine, leg, handle)
            # The last event may have come just before whatever ended the reading.
            return None if leg.complete else move
        finally:
            del engine.legs[rid]
            if turn.trace is not None:
                turn.trace.end_leg(leg)
            if turn.leg is leg:
                self._fold(turn, engine, leg)

    def _end_with_leg(self, turn: Turn, engine: Engine) -> None:
        """End a turn in the moment in which its leg's last event has come, all of it known.

        Its task is woken after whatever else has come in that moment, and does the rest.
        """
        leg = turn.leg
        if leg is None or turn.request.pin.exact is not None:
            return  # of an exact version something may be dropped, and sampled again
        self._fold(turn, engine, leg)
        self._finish(turn, leg.finish)
        self._note_ended(turn)

    async def _outcome(self, turn: Turn, engine: Engine, leg: Leg, handle: LiveLeg) -> MoveReason:
        """Read the leg; why that ended, if it was not by its last event."""
        trace = turn.trace.traceparent if turn.trace is not None else ""
        target = Target.of(engine.update, trace)
        request = turn.request
        body: LegBody
        if request.written and not leg.offset:
            body = request.leg_json(leg.rid, leg.version, turn.interval)
        else:
            context = turn.transcript.context
            body = request.leg_body(context, leg.offset, leg.rid, leg.version, turn.interval)
        end = partial(self._end_with_leg, turn, engine)
        reader = LegReader(turn, engine, leg, handle, end, fleet=self._fleet, clock=self._clock)
        try:
            try:
                if not reader.wants_final_event:
                    await self._client.stream(target, body, reader.take)
                else:
                    await self._read_to_the_end(target, body, reader, engine, leg)
                if leg.aborted:
                    _raise_refusal(leg)
                    return MoveReason.ABORTED
            except (BrokenStream, LegLost) as error:
                return await self._judge_loss(turn, engine, leg, error)
            else:
                return MoveReason.UNPLACED
        except asyncio.CancelledError:
            # One of its cancellations is the verdict's; any other ends the turn.
            if handle.verdict is None or (handle.task is not None and handle.task.uncancel()):
                raise
            if handle.verdict is MoveReason.STALLED:
                engine.back_off(self._clock())
            return handle.verdict

    async def _judge_loss(
        self, turn: Turn, engine: Engine, leg: Leg, error: BrokenStream | LegLost
    ) -> MoveReason:
        """Whose fault it is that reading the leg ended early."""
        if turn.is_over:
            return MoveReason.LOST  # behind its end, which its caller has: nobody's fault
        LOG.info("leg %s on %s: %s", leg.rid, engine.name, error)
        if isinstance(error, LegLost):
            if error.refused:
                return await self._refused(engine, leg, error)
            if not error.unsent:
                await self._lost(turn, engine, leg)
        engine.back_off(self._clock())
        return MoveReason.LOST

    async def _refused(self, engine: Engine, leg: Leg, error: LegLost) -> MoveReason:
        """The engine answered, and not with tokens.

        Raises:
            EngineRefused: it answers others: the request is at fault, not the engine.
        """
        if error.doubtful and not leg.placed and await self._answers(engine):
            raise EngineRefused(str(error)) from error
        engine.back_off(self._clock())
        return MoveReason.REFUSED

    async def _lost(self, turn: Turn, engine: Engine, leg: Leg) -> None:
        """The connection is gone: if the process is too, this turn may be why.

        Raises:
            Unprocessable: it was so the time before, when it ran alone.
        """
        blamed = engine.suspects(leg.rid)  # before anything is awaited: the others leave, too
        shut = not engine.gate_open and self._clock() - engine.gate_since > GATE_SECONDS
        if shut or engine.update.leaving or await self._answers(engine):
            return
        held = turn.held + leg.placed
        if turn.record.saw_death(engine.name, suspected=leg.rid in blamed, held=held):
            metrics.SUSPECTS.labels("refused").inc()
            message = (
                f"engines {', '.join(turn.record.engines)} ended while this turn ran on them, at "
                "the last one alone; it is not tried on another. Look at what it asks for"
            )
            raise Unprocessable("EndsEngines", message)
        if turn.record.must_be_alone():
            metrics.SUSPECTS.labels("isolated").inc()
            LOG.warning("turn %s may have ended %s; it goes on alone", leg.rid, engine.name)

    async def _answers(self, engine: Engine) -> bool:
        """Whether the engine computes another request: one token, asked for the least there is."""
        canary = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "stream": True,
            "rid": self._new_rid(),
        }
        target = Target.of(engine.update)
        try:
            async with asyncio.timeout(CANARY_SECONDS):
                await self._client.stream(target, canary, lambda events: bool(list(events)))
        except (LegLost, EngineRefused, BrokenStream, TimeoutError):
            return False
        return True

    async def _read_to_the_end(
        self, target: Target, body: LegBody, reader: LegReader, engine: Engine, leg: Leg
    ) -> None:
        """Also where the turn ends before the engine does: it is told to, and says its last.

        Without a last word in time the turn is as whole, and lacks what came with it.
        """
        try:
            async with asyncio.timeout(None) as limit:

                def halt() -> None:
                    limit.reschedule(asyncio.get_running_loop().time() + _FINAL_EVENT_SECONDS)
                    self._fences.raise_for(engine, leg.rid)

                await self._client.stream(target, body, partial(reader.take, halt=halt))
        except (LegLost, TimeoutError):
            if not leg.complete:
                raise

    def _fold(self, turn: Turn, engine: Engine, leg: Leg) -> None:
        if not leg.ended:
            self._fences.raise_for(engine, leg.rid)
        request, transcript, update = turn.request, turn.transcript, engine.update
        exact = request.pin.exact
        folded = transcript.fold(leg, str(exact) if exact else "")
        turn.leg = None
        turn.last_meta = leg.meta or turn.last_meta
        kept, dropped = folded.kept, folded.dropped
        engine.tokens += kept
        self._ledger.count_tokens(update.kind, kept, update.run)
        if dropped:
            turn.redone_tokens += dropped
            metrics.REDONE.inc(dropped)
        context = len(transcript.prompt) + len(transcript.tokens)
        self._sessions.settle(request.trajectory, Home(engine.name, context, leg.version))

    def _conclude_leg(self, turn: Turn, engine: Engine, move: MoveReason | None) -> None:
        if turn.state is not _RUNNING:
            return  # its end came with the leg's
        leg, held = turn.transcript.legs[-1], len(turn.transcript.tokens)
        dropped = leg.offset + len(leg.ids) > held
        if move is None and not dropped:
            self._finish(turn, leg.finish)
        elif held >= turn.request.most_tokens:
            self._finish(turn, {"type": "length", "length": turn.request.most_tokens})
        else:
            self._note_move(turn, engine, move or MoveReason.UNPLACED)

    def _note_move(self, turn: Turn, engine: Engine, move: MoveReason) -> None:
        turn.moves.append(TurnMove(move, engine.name, turn.held))
        if turn.trace is not None:
            turn.trace.move(turn.moves[-1])
        turn.losses += move not in _ORDERLY
        metrics.MOVES.labels(move.value).inc()
        metrics.REPREFILLED.inc(len(turn.transcript.prompt) + turn.held)
        if turn.held and turn.request.dedicated_because:
            why = "; ".join(turn.request.dedicated_because)
            message = f"engine {engine.name} was lost ({move}) and the turn cannot move: {why}"
            raise TurnLost("NotSpliceable", message, retry_after=1)
        if turn.losses > self._settings.max_losses or len(turn.moves) > _MOST_MOVES:
            count = len(turn.moves)
            message = f"the turn lost {count} engines, the last {engine.name} ({move})"
            raise TurnLost("EnginesLost", message, retry_after=5)

    def _can_move(self, turn: Turn, engine: Engine) -> bool:
        view = self.view(turn, self._clock())
        others = frozenset({engine.name})
        return not turn.request.dedicated_because and self._queue.is_possible(view, others)

    def _queue_paused(self, turn: Turn, engine: Engine, handle: LiveLeg) -> None:
        """Have the turn wait for another engine too, as if it were cut now."""
        request, leg = turn.request, turn.leg
        if leg is None or request.dedicated_because or self._queue.has_queued(handle.rid):
            return
        view, written = self.view(turn, self._clock()), leg.placed
        context = view.context + written
        view = replace(
            view,
            context=context,
            expected=max(1, view.expected - written),
            home=engine.name,
            cached=context,
            begins=view.begins and not written,
        )
        key = self._queue.rank_of(
            holds_tokens=turn.held + written > 0, priority=request.priority, born=turn.born
        )
        self._queue.queue_paused(
            PausedTurn(
                key,
                view,
                request.session,
                engine.gate_since,
                request.job,
                handle,
                handle.tokens,
                engine,
                partial(_keep_place, turn),
            )
        )

    @staticmethod
    def _finish(turn: Turn, finish: Any) -> None:  # noqa: ANN401  # SGLang's JSON
        turn.check()
        turn.state, turn.finish = _DONE, finish
        if finish["type"] == "length":  # the engine counted its own leg only
            turn.finish = {**finish, "length": len(turn.transcript.tokens)}

    def _abort_cancelled(self, turn: Turn) -> None:
        if not turn.is_over:  # else its end came just before
            turn.state = _DONE
            turn.finish = {
                "type": "abort",
                "message": turn.abort_message or "the caller hung up",
                "status_code": turn.abort_status,
                "err_type": "Aborted",
            }

    def _fail(self, turn: Turn, error: Exception) -> None:
        """An error before the first token, a typed abort with what is held after it."""
        if turn.is_over:
            LOG.info("turn %s had ended before: %s", turn.request.rid, error)
        elif turn.held:
            turn.state, turn.finish = _DONE, abort_of(error)
        else:
            turn.state, turn.error = _FAILED, error


def _keep_place(turn: Turn, engine: Engine, view: TurnView) -> None:
    turn.reserved = engine, view


def _raise_refusal(leg: Leg) -> None:
    """SGLang reports some wrong requests as an abort with a status; for a leg that was aborted.

    Raises:
        EngineRefused: it did.
        LegLost: it failed at it, which may be the request's fault.
    """
    status = leg.finish.get("status_code") if leg.finish is not None else None
    if leg.finish is None or not isinstance(status, int) or leg.placed:
        return
    text = str(leg.finish.get("message", "the engine refused the request"))
    if 400 <= status < 500:
        raise EngineRefused(text)
    if status == 500:
        raise LegLost(text, refused=True, doubtful=True)
    if status == 503:  # it says something of the engine now: it waits, or has lost the run
        raise LegLost(text, refused=True)


class LegReader:
    """Reads an engine's events of one leg: holds them, learns from them, notifies who listens.

    The client calls ``take`` in the moment in which a piece of the engine's stream arrives, without
    a task in between, and ``streaming`` writes what follows from it to the caller in that moment.

    Args:
        turn: whose leg it is.
        engine: who answers.
        leg: what was sampled so far.
        handle: the leg as the supervisor watches it.
        end: ends the turn with the leg.
        fleet: learns how fast the engine works.
        clock: monotonic seconds.

    Attributes:
        wants_final_event: of the engine, also where a stop string ends the turn before it: experts
            of all tokens come with it.
    """

    def __init__(
        self,
        turn: Turn,
        engine: Engine,
        leg: Leg,
        handle: LiveLeg,
        end: Callable[[], None],
        *,
        fleet: Fleet,
        clock: Clock,
    ) -> None:
        self._turn, self._engine, self._leg, self._handle = turn, engine, leg, handle
        self._end = end
        self._fleet, self._clock = fleet, clock
        self._crossing = None if turn.request.stops is None else _crossing(turn)
        self._over = False
        wanted = turn.request.passed.get("return_routed_experts")
        self.wants_final_event = bool(wanted) and self._crossing is not None

    def take(self, events: Iterable[StreamEvent], halt: Callable[[], None] | None = None) -> bool:
        """Take events that came together; listeners are notified once, at the end by it.

        Args:
            events: in their order.
            halt: has the engine say its last word, called where the turn ends before it; ``None`` =
                no more is wanted then.

        Returns:
            False when no more is wanted.

        Raises:
            BrokenStream: tokens are missing, or the engine counts backwards.
        """
        turn, leg = self._turn, self._leg
        now, before, began = self._clock(), leg.placed, turn.first_token_at
        taken: list[tuple[StreamEvent, int]] = []
        try:
            try:
                for event in events:
                    if not self._take_event(event, taken, halt):
                        return False
            finally:
                complete = leg.ended and leg.complete
                if leg.placed > before:
                    if turn.record.must_be_alone():
                        self._clear()
                    turn.first_token_at = began or now
                    # The end of the turn follows, and says its last tokens with it.
                    if not complete:
                        turn.changed.fire()
            if complete and not self._over:
                self._end()
        finally:
            # Once it is written: whoever waits for an event does not wait for what it teaches.
            self._learn(taken, now)
            if not began and turn.first_token_at:
                metrics.FIRST_TOKEN_SECONDS.observe(now - turn.began)
        return True

    def _take_event(
        self,
        event: StreamEvent,
        taken: list[tuple[StreamEvent, int]],
        halt: Callable[[], None] | None,
    ) -> bool:
        leg = self._leg
        if self._over:
            if event.finish is not None:
                leg.meta, leg.ended = event.meta, True
            return True
        new, turn = leg.take(event), self._turn
        if turn.trace is not None and leg.spans:
            turn.trace.see_version(leg.spans[-1].version)
        taken.append((event, new))
        if leg.offset == 0:
            meta, kept = event.meta, turn.prompt_meta
            # An engine says it with its first token; what it still learns, with its last.
            begins = len(leg.ids) == new
            if begins or event.finish is not None or "input_token_logprobs" in meta:
                # Another object each time: what was made of it is told by that.
                turn.prompt_meta = kept | {
                    name: meta[name] for name in _PROMPT_META if name in meta
                }
        if self._crossing is None or not _stopped(leg, self._crossing):
            return True
        if halt is None or leg.ended:
            return False
        self._over = True
        halt()
        return True

    def _clear(self) -> None:
        """Tokens came where an engine had died before: others may run beside the turn again."""
        record = self._turn.record
        record.note_tokens(self._turn.held + self._leg.placed)
        if not record.must_be_alone():
            self._engine.solo = False
            self._fleet.changed.fire()

    def _learn(self, taken: Iterable[tuple[StreamEvent, int]], now: float) -> None:
        """Learn from events that came together, and from how many new tokens each had."""
        engine, handle = self._engine, self._handle
        kind = engine.update.device_class
        for event, new in taken:
            if new and kind:
                metrics.CLASS_TOKENS.labels(kind, "written").inc(new)
            # Else the gap holds a pause of the gate.
            unpaused = engine.gate_since <= handle.last_event
            if new and not handle.tokens:
                self._learn_prompt(event.meta, now, unpaused=unpaused)
            elif new and unpaused:
                engine.gaps += 1
                since = now - engine.learned_at
                if engine.speed is None or engine.speed.teaches(since):
                    # A turn that stood still among others has missed steps that they have shown.
                    step = min((now - handle.last_event) / new, since / SAME_STEP)
                    weight = weight_of(engine.gaps)
                    engine.gaps, engine.learned_at = 0, now
                    learn = methodcaller("saw_step", step, weight, engine.occupied)
                    self._fleet.learn_speed(engine, learn)
            if engine.failures:
                engine.note_success()
            handle.last_event, handle.tokens = now, handle.tokens + new

    def _learn_prompt(self, meta: Mapping[str, Any], now: float, *, unpaused: bool) -> None:
        engine = self._engine
        uncached = meta.get("prompt_tokens", 0) - meta.get("cached_tokens", 0)
        _count_prompt(meta, uncached)
        if engine.update.device_class:
            read = metrics.CLASS_TOKENS.labels(engine.update.device_class, "read")
            read.inc(max(0, uncached))
        if unpaused:
            learn = methodcaller("saw_first_token", now - self._handle.began, uncached)
            self._fleet.learn_speed(engine, learn)


def _count_prompt(meta: Mapping[str, Any], uncached: int) -> None:
    """Where what an engine began with came from; it says so with its first token."""
    found = meta.get("cached_tokens", 0)
    fetched = (meta.get("cached_tokens_details") or {}).get("storage") or 0
    if uncached > 0:
        _COMPUTED.add(uncached)
    if found > fetched:
        _CACHED.add(found - fetched)
    if fetched:
        _FETCHED.add(fetched)


def _crossing(turn: Turn) -> CutStops | None:
    """Who looks for stop strings that the next leg's engine cannot see whole."""
    stops = turn.request.stops
    return CutStops(stops, turn.transcript.tokens) if stops is not None and turn.held else None


def _stopped(leg: Leg, crossing: CutStops) -> bool:
    """Whether a stop string has ended the turn; the leg then ends with it."""
    found = crossing.match(leg.ids)
    if found is None or leg.placed < found.count:
        return False
    leg.end(found.count, found.finish)
    return True
