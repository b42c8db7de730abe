"""One slot of the guard: its permit, its calls to the engine host, its stream to the router.

``rose_core.guard.slot`` decides; this carries out. Closing the permit is one store to shared
memory, made before the call that reports an arrival returns. Whatever waits for an answer runs as a
task. Next step: ``loop`` steps slots, ``hold`` follows what the host holds, ``hostlink`` makes the
calls, ``routerlink`` tells the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rose_agent.guard import metrics
from rose_agent.guard.flight.recorder import Recorder
from rose_agent.guard.links.hostlink import HostLink
from rose_agent.guard.links.routerlink import RouterLink, update_of
from rose_agent.guard.slots import freezer
from rose_agent.guard.slots.hold import Calls, ConfirmedHold, Hold
from rose_core.devices.memory import Budget, Lendable, MemorySum
from rose_core.guard import lanes
from rose_core.guard.gate import GateVerdict
from rose_core.guard.ladder import LadderLimits, Rung, SlotAction, SlotOrder
from rose_core.guard.reasons import PACED, GateReason
from rose_core.guard.slot import EngineSeen, SlotMachine, SlotPhase, SlotSeen, decide, is_settled
from rose_core.identity import PodUid, SlotKey, SlotUid
from rose_core.rollouts.engines.kv_store import pool_secret
from rose_core.wire.host import Accepted, EngineState, EngineStatus, EnsureEngine, Holder
from rose_core.wire.sync import Grant
from rose_engines.node.permit import BadPermit, Permit
from rose_engines.node.rundir import SlotDir, read_json

_log = logging.getLogger(__name__)

_LOOK_NS = 100_000_000


class SlotPermit:
    """The guard's end of a slot's permit; holds at most one mapped permit.

    The engine host creates the permit file. The guard maps it, and maps it anew when the host has
    created another. After a change that the host's enforcer cannot foresee, the guard rings its
    bell.

    Args:
        path: where the host puts it.
        ring: tells the host's enforcer of a change at once.
        ring_soon: tells it when all slots have been stepped.
    """

    def __init__(self, path: Path, ring: Callable[[], None], ring_soon: Callable[[], None]) -> None:
        self._path, self._ring, self._ring_soon = path, ring, ring_soon
        self._inode = 0
        self._looked_ns = 0
        self.mapped: Permit | None = None
        self.complaint = ""

    def remap(self, now_ns: int) -> bool:
        """Map the permit that exists now; True when it is another one than before."""
        if self.mapped is not None and now_ns - self._looked_ns < _LOOK_NS:
            return False
        self._looked_ns, self.complaint = now_ns, ""
        try:
            inode = os.stat(self._path).st_ino  # noqa: PTH116  # hot path
        except OSError:
            self.drop()
            return False
        if self.mapped is not None and inode == self._inode:
            return False
        self.drop()
        try:
            self.mapped = Permit.attach(self._path)
        except (OSError, BadPermit) as error:
            self.complaint = str(error)
            return False
        self._inode = inode
        self.mapped.close_now()
        return True

    def drop(self) -> None:
        """Close it and let go of it."""
        if self.mapped is not None:
            self.mapped.close_now()
            self.mapped.detach()
            self.mapped = None

    def extend(self, until_ns: int, lane: int, chunk_divisor: int = 1) -> None:
        """Extend the permit for one of the slot's engines, for prefill chunks so much shorter.

        When the right to compute moves to the other engine, the permit stays closed until the next
        step, so that the two never compute at once.
        """
        if self.mapped is None:
            return
        before = self.mapped.until_ns
        # The enforcer knows when to look next from the deadline that it has seen. Periods begin
        # for all slots together, so what opens is told once; what ends sooner is told at once.
        opens, must_ring = before <= time.monotonic_ns(), until_ns < before
        self.mapped.divide_chunks(chunk_divisor)  # first: nobody computes long ones meanwhile
        if self.mapped.lane == lane:
            self.mapped.extend(until_ns)
        else:
            # The engine under way ends its iteration until the next step.
            self.mapped.close_now()
            self.mapped.choose(lane)
            must_ring = True
        if must_ring:
            self._ring()
        elif opens:
            self._ring_soon()

    def close(self) -> bool:
        """Close it and ring the bell; False when it had been closed or had lapsed already."""
        if self.mapped is None or not self.mapped.until_ns:
            return False
        lapsed = self.mapped.until_ns <= time.monotonic_ns()
        self.mapped.close_now()
        if not lapsed:  # else the enforcer has looked when it ended
            self._ring()
        return not lapsed


class History:
    """Writes what happens to one slot into metrics and flight recorder; decides nothing.

    Args:
        recorder: the flight recorder.
        name: the slot's name for people; it becomes known with the first grant.
    """

    def __init__(self, recorder: Recorder, name: Callable[[], str]) -> None:
        self._recorder, self._name = recorder, name
        self._state: EngineState | None = None

    def note_gate(self, before: GateVerdict, verdict: GateVerdict, now_ns: int) -> None:
        """Note the gate's verdict where its position or reason has changed."""
        if before.reason is verdict.reason and before.open == verdict.open:
            return
        paced = before.reason is verdict.reason and verdict.reason in PACED
        if not paced:
            metrics.GATE_CHANGES.labels(verdict.reason.value).inc()
        metrics.GATE_OPEN.labels(self._name()).set(verdict.open)
        # A paced permit ends by itself, before anybody looks.
        ended_ns = before.until_ns if before.open and not verdict.open else 0
        slack = verdict.slack
        measured = {"prefill": slack.prefill_s, "decode": slack.decode_s} if slack else {}
        self._recorder.note(
            min(now_ns, ended_ns or now_ns),
            self._name(),
            "gate",
            open=verdict.open,
            reason=verdict.reason,
            duty=verdict.duty,
            **measured,
        )

    def note_closing(self, arrival_ns: int, reason: GateReason, now_ns: int) -> None:
        """Note that a request has just closed the permit."""
        after_ns = time.monotonic_ns() - arrival_ns
        metrics.CLOSE_SECONDS.observe(after_ns / 1e9)
        self._recorder.note(
            now_ns, self._name(), "closed", arrival=arrival_ns, after_ns=after_ns, reason=reason
        )

    def note_stop(self, stopped: ConfirmedHold) -> None:
        """Note a hold that a request caused, confirmed by the host or given up."""
        metrics.STOP_SECONDS.observe(stopped.after_ns / 1e9)
        self._recorder.note(
            stopped.confirmed_ns,
            self._name(),
            "stopped",
            arrival=stopped.arrival_ns,
            after_ns=stopped.after_ns,
            paused_us=stopped.paused_us,
            answered=stopped.answered,
        )

    def note_order(self, action: SlotAction, now_ns: int) -> None:
        """Note an order other than extending or closing the permit."""
        order = action.order.name
        metrics.ORDERS.labels(order.title()).inc()
        self._recorder.note(now_ns, self._name(), "order", order=order, reason=action.reason)

    def note_rung(self, rung: Rung, reason: GateReason, now_ns: int) -> None:
        """Note how far the engine has been taken back."""
        self._recorder.note(now_ns, self._name(), "rung", rung=rung.name, reason=reason)

    def note_engine(self, status: EngineStatus | None, now_ns: int) -> None:
        """Note the engine's state as the host tells it: a failure is found there, not ordered."""
        if status is not None and status.state is not self._state:
            self._state = status.state
            self._recorder.note(
                now_ns, self._name(), "engine", state=status.state, reason=status.reason
            )

    def forget(self) -> None:
        """The slot is gone: its gauge with it."""
        with contextlib.suppress(KeyError):
            metrics.GATE_OPEN.remove(self._name())


@dataclass
class Totals:
    """What a slot has had and made since this guard began; integers, so that parts add up.

    Attributes:
        lent_ns, open_ns: GPU time granted, and with an open permit: two seconds in each second of
            a slot of two GPUs.
        reserved_ns: GPU time granted, by the share of the GPU's memory that serving was denied.
        last_ns: until when that has been counted.
        tokens: output tokens, over restarts of the engine.
        reclaims: rungs entered, by name.
        weight_bytes: size of the weights that were pulled for its engines.
        requests: live requests that ended beside it; ``violations`` are those that missed the SLO
            and had met an open gate.
        input_tokens, output_tokens: of live requests, by their engine's own count.
        with_tokens: those of ``requests`` that ended while these were counted; fewer where the
            engine does not say them, or did not at first.
    """

    last_ns: int
    lent_ns: int = 0
    open_ns: int = 0
    reserved_ns: int = 0
    tokens: int = 0
    tokens_seen: int = 0
    reclaims: dict[str, int] = field(default_factory=dict)
    weight_bytes: int = 0
    weights_seen: int = 0
    requests: int = 0
    violations: int = 0
    beside_seen: tuple[int, int] | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    with_tokens: int = 0
    served_seen: tuple[int, int, int] | None = None

    def account(
        self,
        now_ns: int,
        *,
        granted: bool,
        until_ns: int,
        status: EngineStatus | None,
        gpus: int = 1,
        reserve: MemorySum | None = None,
    ) -> None:
        """Add the time since the last call and the tokens the engine made meanwhile.

        Args:
            now_ns: until when.
            granted: the slot is.
            until_ns: end of the permit as it stood all that time; 0 = it was closed.
            status: the host's last word about the engine.
            gpus: of the slot.
            reserve: the memory of each; None = none is kept back, or nobody knows.
        """
        elapsed = max(0, now_ns - self.last_ns) * gpus
        opened = max(0, min(now_ns, until_ns) - self.last_ns) * gpus
        self.last_ns = now_ns
        if granted:
            self.lent_ns += elapsed
            metrics.LENT_SECONDS.inc(elapsed / 1e9)
            if reserve is not None and reserve.total:
                self.reserved_ns += elapsed * reserve.kept_back // reserve.total
        if opened:
            self.open_ns += opened
            metrics.OPEN_SECONDS.inc(opened / 1e9)
        if status is not None:
            self.tokens += _gain(self.tokens_seen, status.generated_tokens)
            self.weight_bytes += _gain(self.weights_seen, status.weight_bytes)
            self.tokens_seen, self.weights_seen = status.generated_tokens, status.weight_bytes

    def note_replica(self, finished: int, violations: int) -> None:
        """Note the replica's counters; requests from before the slot do not count for it."""
        seen = self.beside_seen or (finished, violations)
        self.requests += _gain(seen[0], finished)
        self.violations += _gain(seen[1], violations)
        self.beside_seen = finished, violations

    def note_served(self, input_tokens: int, output_tokens: int, finished: int) -> None:
        """Note the serving engine's counts of tokens; those from before the slot do not count.

        Args:
            input_tokens: of prompts, as the engine's last page has them; it may be an old one.
            output_tokens: of answers, likewise.
            finished: the replica's requests by now; they count once the tokens move, so that an
                engine that has stopped to say them adds no request without tokens.
        """
        seen = self.served_seen or (input_tokens, output_tokens, finished)
        if self.served_seen and seen[:2] == (input_tokens, output_tokens):
            return
        self.input_tokens += _gain(seen[0], input_tokens)
        self.output_tokens += _gain(seen[1], output_tokens)
        self.with_tokens += _gain(seen[2], finished)
        self.served_seen = input_tokens, output_tokens, finished

    def count_reclaim(self, rung: Rung) -> None:
        """Count a rung."""
        name = rung.name.title()
        self.reclaims[name] = self.reclaims.get(name, 0) + 1
        metrics.RUNGS.labels(name).inc()


def _gain(seen: int, now: int) -> int:
    """Growth of a counter; one that fell began anew, with a new engine or replica."""
    return now - seen if now >= seen else now


class GuardedSlot:
    """One slot on this node.

    Args:
        folder: its folder in the run directory.
        host: link to the engine host.
        recorder: flight recorder.
        token: the installation's token, for the router.
        on_change: called when something the loop should look at has changed.
    """

    def __init__(
        self,
        folder: SlotDir,
        host: HostLink,
        recorder: Recorder,
        token: str,
        on_change: Callable[[], None],
    ) -> None:
        self.folder = folder
        self.uid = SlotUid(folder.uid)
        self.machine = SlotMachine()
        self.grant: Grant | None = None
        self.verdict = GateVerdict(open=False, reason=GateReason.NOT_GRANTED)
        self.totals = Totals(last_ns=time.monotonic_ns())
        self.message = ""
        self.budget = Budget()
        self.device_class = ""
        self.slowdown = 0.0
        self.room = self._ordered_room = Lendable(None, "")
        self.reserve: MemorySum | None = None
        self._host = host
        self._history = History(recorder, lambda: self.name)
        self._stops: list[tuple[int, int, bool | None]] = []
        self._chunk_divisor = 1
        self._stood_on: tuple[object, ...] = ()  # empty: the last step left something to be ordered
        self._on_change = on_change
        self._limits = LadderLimits()
        self._lane = lanes.LaneChoice()
        self._permit = SlotPermit(folder.permit, host.ring, host.ring_soon)
        self._calls = Calls(self._call_ended)
        self._hold = Hold(self._calls, self._ask_hold, self._note_stop)
        order = read_json(folder.slot, EnsureEngine)
        self._ordered_weights = order.weights if order is not None else None
        self._data_token = order.token if order and order.token else secrets.token_urlsafe(24)
        self._router = RouterLink(token)

    @property
    def name(self) -> str:
        """For people: the slot's name, or its uid."""
        return self.grant.slot_name if self.grant else self.uid

    def take_stops(self) -> list[tuple[int, int, bool | None]]:
        """Each stop by an arrival since the last call.

        Returns:
            Nanoseconds, divisor of its chunks, whether the engine had turns; None = not known.
        """
        taken, self._stops = self._stops, []
        return taken

    def _note_stop(self, stopped: ConfirmedHold) -> None:
        self._history.note_stop(stopped)
        had_turns = stopped.turns > 0 if stopped.turns is not None else None
        self._stops.append((stopped.after_ns, self._chunk_divisor, had_turns))

    @property
    def status(self) -> EngineStatus | None:
        """The host's last word about the engine."""
        return self._host.engines.get(self.uid)

    @property
    def vanished(self) -> bool:
        """Nothing is left to look after."""
        gone = self.status is None or self.status.state is EngineState.GONE
        return self.grant is None and self.machine.phase is SlotPhase.ABSENT and gone

    @property
    def is_at_rest(self) -> bool:
        """Whether no permit is to be extended and no deadline runs: engine held or absent."""
        machine, permit = self.machine, self._permit.mapped
        if permit is not None and permit.until_ns:
            return False
        if self.status is None or self.status.state is EngineState.GONE:
            return machine.phase is SlotPhase.ABSENT  # no engine is there that needs weights
        if not self._weights_sent:
            return False
        held = self._hold.confirmed is True and not machine.self_frozen
        return held and machine.phase is SlotPhase.PRESENT

    def serves(self, pod_uid: PodUid) -> bool:
        """Its engine is up beside this pod."""
        here = self.grant is not None and self.grant.pod_uid == pod_uid
        return here and self.status is not None and self.status.state is EngineState.SERVING

    # --- one step

    def step(
        self, verdict: GateVerdict, now_ns: int, *, granted: bool | None, arrival_ns: int = 0
    ) -> None:
        """Decide and carry out: closing is done on return, calls to the host go on as tasks.

        Args:
            verdict: of the slot's gate.
            now_ns: CLOCK_MONOTONIC.
            granted: the slot has a living grant; None = this guard does not know yet.
            arrival_ns: first segment of the request that made the guard look; 0 = none.
        """
        if self._permit.remap(now_ns):
            # A new permit means a new host process: what the old one confirmed is void.
            self._hold.forget()
        if self._stands(verdict, now_ns, granted):
            self.verdict = verdict
            return
        self.message = self._permit.complaint or self.message
        until_ns = self._permit.mapped.until_ns if self._permit.mapped is not None else 0
        granted_now = self.grant is not None
        self.totals.account(
            now_ns,
            granted=granted_now,
            until_ns=until_ns,
            status=self.status,
            gpus=self.grant.engine.ranks if self.grant is not None else 1,
            reserve=self.reserve,
        )
        seen = self._see(verdict, now_ns, granted)
        before = self.machine
        if self._has_two_engines:
            self._lane = lanes.choose(self._lane, verdict, lanes.LaneLimits(), now_ns)
        self.machine, actions = decide(before, seen, self._limits, now_ns)
        self._note(seen, now_ns)
        for action in actions:
            self._carry_out(action, now_ns, arrival_ns)
        if self.machine.rung is not before.rung:
            self._note_rung(now_ns)
        self._update_router()
        settled = is_settled(self.machine, seen) and not self._has_two_engines
        self._stood_on = self._basis(granted) if settled else ()

    def _stands(self, verdict: GateVerdict, now_ns: int, granted: bool | None) -> bool:
        """Whether a step would only write the permit that stands there: most steps would."""
        before, permit = self.verdict, self._permit.mapped
        if not self._stood_on or permit is None:
            return False
        same = (
            permit.until_ns == (verdict.until_ns if verdict.open else 0)
            and verdict.reason is before.reason
            and verdict.open is before.open
            and (not verdict.open or verdict.chunk_divisor == self._chunk_divisor)
        )
        if not same or self._stood_on != self._basis(granted) or not self._host.is_alive(now_ns):
            return False
        age_ns = permit.host_age_ns(now_ns)
        return age_ns is not None and age_ns <= self._limits.host_stale_ns

    def _basis(self, granted: bool | None) -> tuple[object, ...]:
        """What a step goes by besides gate, permit and time."""
        return (
            *(granted, self.grant, self.status, self._host.asked_ns),
            *(self._hold.confirmed, self._hold.is_pending),
            *(self.budget, self.device_class, self.slowdown),
        )

    def _see(self, verdict: GateVerdict, now_ns: int, granted: bool | None) -> SlotSeen:
        status, permit = self.status, self._permit.mapped
        alive = self._host.is_alive(now_ns)
        return SlotSeen(
            granted=granted,
            generation=self.grant.key.slot.generation if self.grant else 0,
            verdict=verdict,
            engine=self._see_engine(status) if status is not None else None,
            host_alive=alive,
            heartbeat_ns=permit.host_age_ns(now_ns) if permit else None,
            processes=not alive and status is None and freezer.exists(self.folder),
            can_dormant=status is not None and status.can_dormant,
            weights_sent=self._weights_sent,
        )

    @property
    def _weights_sent(self) -> bool:
        """The host has taken over what the grant says about weights; true without a grant."""
        return self.grant is None or self.grant.weights == self._ordered_weights

    def _see_engine(self, status: EngineStatus) -> EngineSeen:
        hold = self._hold
        hold.believe(held=Holder.GUARD in status.holders, asked_ns=self._host.asked_ns)
        # Reading the kernel's files costs time: only what the guard froze itself is looked at.
        look = hold.confirmed is not True and self.machine.self_frozen
        return EngineSeen(
            status.state,
            status.slot.generation,
            held=hold.confirmed is True,
            asked=hold.is_pending,
            frozen=look and freezer.is_frozen(self.folder),
            cpu_ns=freezer.cpu_ns(self.folder) if look else None,
        )

    def _carry_out(self, action: SlotAction, now_ns: int, arrival_ns: int) -> None:
        order = action.order
        if order is SlotOrder.EXTEND:
            self._chunk_divisor = action.chunk_divisor
            self._permit.extend(action.until_ns, self._permitted_lane(), action.chunk_divisor)
            return
        if order is SlotOrder.CLOSE:
            self._close(now_ns, arrival_ns)
            return
        self._history.note_order(action, now_ns)
        match order:
            case SlotOrder.HOLD | SlotOrder.LET_GO:
                self._hold.order(hold=order is SlotOrder.HOLD, arrival_ns=arrival_ns)
            case SlotOrder.FREEZE:
                self._freeze(now_ns)
            case SlotOrder.KILL:
                self.message = freezer.kill(self.folder)
            case SlotOrder.STOP:
                self._calls.start("stop", lambda: self._stop(action.reason))
            case SlotOrder.ENSURE:
                self._calls.start("ensure", self._ensure)
            case SlotOrder.DORMANT | SlotOrder.ACTIVATE:
                dormant = order is SlotOrder.DORMANT
                work = partial(self._host.set_dormant, self._key(), dormant=dormant)
                self._calls.start("dormant", work)

    def _freeze(self, now_ns: int) -> None:
        """Freeze the engine's processes, without their host."""
        mapped = self._permit.mapped
        age_ns = mapped.host_age_ns(now_ns) if mapped is not None else None
        hurried = age_ns is None or age_ns > self._limits.host_stale_ns
        stopped_ns = now_ns - self.machine.since_ns
        self.message = freezer.freeze(self.folder, stopped_ns, hurried=hurried)

    @property
    def _has_two_engines(self) -> bool:
        """The slot has a second engine, at a share for busy serving (experimental)."""
        return self.grant is not None and self.grant.engine.sharing.busy_percent > 0

    def _permitted_lane(self) -> int:
        if not self._has_two_engines:
            return lanes.WIDE
        return lanes.permitted(self._lane.chosen, self.status.lanes if self.status else None)

    def _close(self, now_ns: int, arrival_ns: int) -> None:
        if self._permit.close() and arrival_ns:
            self._history.note_closing(arrival_ns, self.verdict.reason, now_ns)

    # --- calls to the engine host

    def _call_ended(self, problem: str) -> None:
        if problem:
            self.message = problem
            _log.warning("slot %s: %s", self.name, problem)
        self._on_change()

    async def _ensure(self) -> None:
        grant = self.grant
        if grant is None:
            return
        if self.status is None or self.status.slot != grant.key.slot:
            self._hold.forget()  # another engine
        await self._send_order(grant)

    async def _send_order(self, grant: Grant) -> None:
        await self._host.ensure(self._order(grant))
        self._ordered_weights = grant.weights

    def _order(self, grant: Grant) -> EnsureEngine:
        self._ordered_room = self.room
        kept = bool(grant.engine.kv_store_bytes)
        return EnsureEngine(
            slot=grant.key.slot,
            slot_name=grant.slot_name,
            engine=grant.engine,
            weights=grant.weights,
            gpu_uuids=grant.gpu_uuids,
            token=self._data_token,
            pod_uid=grant.pod_uid,
            lendable_bytes=self.room.bytes,
            lendable_text=self.room.message,
            lease=grant.lease,
            lease_uid=grant.lease_uid,
            kv_secret=pool_secret(grant.proof.token, grant.lease_uid) if kept else "",
        )

    def renew_room(self) -> None:
        """The engine was refused for its size: tell when there is another room."""
        grant = self.grant
        if grant is not None and self.room.bytes != self._ordered_room.bytes:
            self._calls.start("room", lambda: self._send_order(grant))

    def limit_memory(self, permille: int, held: int | None) -> None:
        """Send the host the engine's budget, and the bytes that it holds by the driver's count."""
        self._calls.start("memory", lambda: self._host.limit_memory(self._key(), permille, held))

    async def _stop(self, reason: GateReason) -> None:
        await self._host.stop(self._key(), reason.value)

    def _key(self) -> SlotKey:
        status = self.status
        if status is not None:
            return status.slot
        order = read_json(self.folder.slot, EnsureEngine)
        if order is not None:
            return order.slot
        return self.grant.key.slot if self.grant else SlotKey(self.uid, 0)

    async def _ask_hold(self, hold: bool) -> Accepted:
        return await self._host.hold(self._key(), hold=hold)

    # --- bookkeeping

    def is_computing(self, now_ns: int) -> bool:
        """The permit is open now."""
        permit = self._permit.mapped
        return permit is not None and permit.is_open_for_any(now_ns)

    @property
    def permitted_until_ns(self) -> int:
        """The end of its permit; 0 = closed."""
        permit = self._permit.mapped
        return 0 if permit is None else permit.until_ns

    def _note(self, seen: SlotSeen, now_ns: int) -> None:
        verdict = seen.verdict if seen.granted else GateVerdict(False, GateReason.NOT_GRANTED)
        self._history.note_gate(self.verdict, verdict, now_ns)
        self._history.note_engine(self.status, now_ns)
        self.verdict = verdict

    def _note_rung(self, now_ns: int) -> None:
        rung = self.machine.rung
        if rung is not Rung.NONE:
            self.totals.count_reclaim(rung)
        self._history.note_rung(rung, self.verdict.reason, now_ns)

    # --- router

    @property
    def gate_open(self) -> bool:
        """Turns may be sent: open, or paced inside a control period."""
        reason = self.verdict.reason
        position = self.verdict.open or reason in PACED
        return position and self.machine.rung is Rung.NONE

    def _update_router(self) -> None:
        grant = self.grant
        if grant is None:
            self._router.leave()
        elif grant.router:
            update = update_of(
                *(grant, self.status, self._data_token),
                gate_open=self.gate_open,
                leaving=self.machine.phase is SlotPhase.RELEASING,
                cap=self.budget.cap(grant.max_concurrent_turns),
                device_class=self.device_class,
                slowdown=self.slowdown,
                certificates=self._host.certificates,
            )
            self._router.publish(grant, update)

    async def detach(self) -> None:
        """Leave the router and the permit (closed); the engine is the machine's business."""
        self._permit.drop()
        tasks = [t for t in (self._router.close(), *self._calls.tasks) if t is not None]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        self._history.forget()
