"""One slot of the guard: its permit, its calls to the engine host, its stream to the router.

``rose_core.guard.slot`` decides; this carries out. Closing the permit is a store to shared memory
and happens inside the call that heard of the arrival; everything else runs behind it. Next step:
``loop`` steps slots, ``hostlink`` makes the calls, ``routerlink`` tells the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from rose_agent.guard import freezer, metrics
from rose_agent.guard.hostlink import HostLink
from rose_agent.guard.permit import SlotPermit
from rose_agent.guard.recorder import Recorder
from rose_agent.guard.routerlink import RouterLink, update_of
from rose_agent.guard.totals import Totals
from rose_core.devices.memory import Budget, Lendable
from rose_core.guard import lanes
from rose_core.guard.gate import Verdict
from rose_core.guard.ladder import Action, LadderLimits, Order, Rung
from rose_core.guard.reasons import GateReason
from rose_core.guard.slot import EngineSeen, Phase, SlotMachine, SlotSeen, decide
from rose_core.identity import SlotKey
from rose_core.wire.host import EngineState, EngineStatus, EnsureEngine, Holder
from rose_core.wire.sync import Grant
from rose_engines.rundir import SlotDir, read_json
from rose_wire.errors import WireError

_log = logging.getLogger(__name__)


class Slot:
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
        self.uid = folder.uid
        self.machine = SlotMachine()
        self.grant: Grant | None = None
        self.verdict = Verdict(open=False, reason=GateReason.NOT_GRANTED)
        self.totals = Totals(last_ns=time.monotonic_ns())
        self.message = ""
        self.budget = Budget()
        self.room = self._told_room = Lendable(None, "")
        self._host = host
        self._recorder = recorder
        self._on_change = on_change
        self._limits = LadderLimits()
        self._lane = lanes.Lane()
        self._permit = SlotPermit(folder.permit, host.ring)
        self._held: bool | None = None
        self._want_hold: bool | None = None
        self._hold_arrival_ns = 0
        self._held_ns = 0
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._frozen = (0, False)
        self._told_state: EngineState | None = None
        order = read_json(folder.slot, EnsureEngine)
        self._data_token = order.token if order and order.token else secrets.token_urlsafe(24)
        self._router = RouterLink(token)

    @property
    def name(self) -> str:
        """For people: the slot's name, or its uid."""
        return self.grant.slot_name if self.grant else self.uid

    @property
    def status(self) -> EngineStatus | None:
        """The host's last word about the engine."""
        return self._host.engines.get(self.uid)

    @property
    def vanished(self) -> bool:
        """Nothing is left to look after."""
        gone = self.status is None or self.status.state is EngineState.GONE
        return self.grant is None and self.machine.phase is Phase.ABSENT and gone

    @property
    def at_rest(self) -> bool:
        """No permit to extend and no deadline: closed, and its engine is held or not there."""
        machine, permit = self.machine, self._permit.mapped
        if permit is not None and permit.until_ns:
            return False
        if self.status is None or self.status.state is EngineState.GONE:
            return machine.phase is Phase.ABSENT
        held = self._held is True and not machine.self_frozen
        return held and machine.phase is Phase.PRESENT

    def serves(self, pod_uid: str) -> bool:
        """Its engine is up beside this pod."""
        here = self.grant is not None and self.grant.pod_uid == pod_uid
        return here and self.status is not None and self.status.state is EngineState.SERVING

    # --- one step

    def step(
        self, verdict: Verdict, now_ns: int, *, granted: bool | None, arrival_ns: int = 0
    ) -> None:
        """Decide and carry out; ``arrival_ns`` is the request that made us look."""
        if self._permit.look(now_ns):
            # A new permit means a new host process: what was agreed with the old one is void.
            self.forget_hold()
        self.message = self._permit.complaint or self.message
        until_ns = self._permit.mapped.until_ns if self._permit.mapped is not None else 0
        granted_now = self.grant is not None
        self.totals.account(now_ns, granted=granted_now, until_ns=until_ns, status=self.status)
        seen = self._see(verdict, now_ns, granted)
        before = self.machine
        self._lane = lanes.choose(self._lane, verdict, lanes.LaneLimits(), now_ns)
        self.machine, actions = decide(before, seen, self._limits, now_ns)
        self._note_gate(seen, now_ns)
        self._note_engine(now_ns)
        for action in actions:
            self._carry_out(action, now_ns, arrival_ns)
        if self.machine.rung is not before.rung:
            self._note_rung(now_ns)
        if self._permit.mapped is not None:
            self._permit.mapped.beat_guard(now_ns)
        self._tell_router()

    def _see(self, verdict: Verdict, now_ns: int, granted: bool | None) -> SlotSeen:
        status = self.status
        alive = self._host.alive(now_ns)
        permit = self._permit.mapped
        heartbeat = permit.host_age_ns(now_ns) if permit else None
        engine = None
        if status is not None:
            self._believe(status)
            needs_look = self._held is not True and self.machine.self_frozen
            engine = EngineSeen(
                status.state,
                status.slot.generation,
                held=self._held is True,
                asked=self._held is None and self._want_hold is True,
                frozen=needs_look and freezer.frozen(self.folder),
                cpu_ns=freezer.cpu_ns(self.folder) if needs_look else None,
            )
        processes = not alive and engine is None and freezer.exists(self.folder)
        return SlotSeen(
            granted=granted,
            generation=self.grant.key.slot.generation if self.grant else 0,
            verdict=verdict,
            engine=engine,
            host_alive=alive,
            heartbeat_ns=heartbeat,
            processes=processes,
            can_dormant=status is not None and status.can_dormant,
        )

    def _believe(self, status: EngineStatus) -> None:
        """The host's list corrects what was agreed by call, when it was asked for later."""
        calling = self._calls.get("hold")
        if (calling is None or calling.done()) and self._host.asked_ns > self._held_ns:
            self._held = self._want_hold = Holder.GUARD in status.holders

    def _carry_out(self, action: Action, now_ns: int, arrival_ns: int) -> None:
        order = action.order
        if order is Order.EXTEND:
            lane = lanes.permitted(self._lane.chosen, self.status.lanes if self.status else None)
            self._permit.extend(action.until_ns, lane)
            return
        if order is Order.CLOSE:
            self._close(now_ns, arrival_ns)
            return
        metrics.ORDERS.labels(order.name.title()).inc()
        self._recorder.note(now_ns, self.name, "order", order=order.name, reason=action.reason)
        if order in {Order.HOLD, Order.LET_GO}:
            self._hold(hold=order is Order.HOLD, arrival_ns=arrival_ns)
        elif order is Order.FREEZE:
            self.message = freezer.freeze(self.folder)
        elif order is Order.KILL:
            self.message = freezer.kill(self.folder)
        elif order is Order.STOP:
            self._call("stop", lambda: self._stop(action.reason))
        elif order is Order.ENSURE:
            self._call("ensure", self._ensure)
        elif order in {Order.DORMANT, Order.ACTIVATE}:
            dormant = order is Order.DORMANT
            self._call("dormant", lambda: self._host.set_dormant(self._key(), dormant=dormant))

    def _close(self, now_ns: int, arrival_ns: int) -> None:
        if self._permit.close() and arrival_ns:
            closed_ns = time.monotonic_ns()
            metrics.CLOSE_SECONDS.observe((closed_ns - arrival_ns) / 1e9)
            self._recorder.note(
                now_ns,
                self.name,
                "closed",
                arrival=arrival_ns,
                after_ns=closed_ns - arrival_ns,
                reason=self.verdict.reason,
            )

    # --- calls to the engine host, one of a kind at a time

    def _call(self, kind: str, work: Callable[[], Awaitable[None]]) -> None:
        running = self._calls.get(kind)
        if running is None or running.done():
            self._calls[kind] = asyncio.create_task(self._guarded(kind, work))

    async def _guarded(self, kind: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except WireError as error:
            self.message = f"{kind}: {error}"
            _log.warning("slot %s: %s", self.name, self.message)
        self._on_change()

    async def _ensure(self) -> None:
        grant = self.grant
        if grant is None:
            return
        self._held = None
        await self._host.ensure(self._order(grant))

    def _order(self, grant: Grant) -> EnsureEngine:
        self._told_room = self.room
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
        )

    def renew_room(self) -> None:
        """The engine was refused for its size: tell when there is another room."""
        grant = self.grant
        if grant is not None and self.room.bytes != self._told_room.bytes:
            self._call("room", lambda: self._host.ensure(self._order(grant)))

    def limit_memory(self, permille: int, held: int | None) -> None:
        """Tell the engine's budget, and what the driver says that it holds."""
        self._call("memory", lambda: self._host.limit_memory(self._key(), permille, held))

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

    def _hold(self, *, hold: bool, arrival_ns: int) -> None:
        if self._want_hold is not hold:
            self._want_hold = hold
            self._held = None
            self._hold_arrival_ns = arrival_ns
            # The host answers a hold only once every thread stands still; a change of mind does
            # not wait for that. Should the two cross, the host's list puts it right.
            waiting = self._calls.pop("hold", None)
            if waiting is not None:
                waiting.cancel()
        self._call("hold", self._hold_until_agreed)

    async def _hold_until_agreed(self) -> None:
        """Bring the host to the wanted side; a change of mind meanwhile is followed in order."""
        while self._want_hold is not None and self._held is not self._want_hold:
            wanted, arrival_ns = self._want_hold, self._hold_arrival_ns
            paused_us = await self._host.hold(self._key(), hold=wanted)
            now_ns = time.monotonic_ns()
            if wanted is self._want_hold:
                self._held, self._held_ns = wanted, now_ns
            if wanted and arrival_ns:
                metrics.STOP_SECONDS.observe((now_ns - arrival_ns) / 1e9)
                self._recorder.note(
                    now_ns,
                    self.name,
                    "stopped",
                    arrival=arrival_ns,
                    after_ns=now_ns - arrival_ns,
                    paused_us=paused_us,
                )

    def forget_hold(self) -> None:
        """The host may have been restarted: ask again before believing."""
        self._held = None

    # --- bookkeeping

    def computing(self, now_ns: int) -> bool:
        """The permit is open now."""
        permit = self._permit.mapped
        return permit is not None and permit.is_open_for_any(now_ns)

    def _note_gate(self, seen: SlotSeen, now_ns: int) -> None:
        verdict = seen.verdict if seen.granted else Verdict(False, GateReason.NOT_GRANTED)
        before, self.verdict = self.verdict, verdict
        if before.reason is verdict.reason and before.open == verdict.open:
            return
        paced = before.reason is GateReason.SLACK and verdict.reason is GateReason.SLACK
        if not paced:
            metrics.GATE_CHANGES.labels(verdict.reason.value).inc()
        metrics.GATE_OPEN.labels(self.name).set(verdict.open)
        # A paced permit ends by itself, before anybody looks.
        ended_ns = before.until_ns if before.open and not verdict.open else 0
        slack = verdict.slack
        measured = {"prefill": slack.prefill_s, "decode": slack.decode_s} if slack else {}
        self._recorder.note(
            min(now_ns, ended_ns or now_ns),
            self.name,
            "gate",
            open=verdict.open,
            reason=verdict.reason,
            duty=verdict.duty,
            **measured,
        )

    def _note_engine(self, now_ns: int) -> None:
        """What became of the engine: a failure is the host's finding, and nobody's decision."""
        status = self.status
        if status is not None and status.state is not self._told_state:
            self._told_state = status.state
            self._recorder.note(
                now_ns, self.name, "engine", state=status.state, reason=status.reason
            )

    def _note_rung(self, now_ns: int) -> None:
        rung = self.machine.rung
        if rung is not Rung.NONE:
            self.totals.reclaimed(rung)
        self._recorder.note(now_ns, self.name, "rung", rung=rung.name, reason=self.verdict.reason)

    # --- router

    @property
    def gate_open(self) -> bool:
        """Turns may be sent: open, or paced inside a control period."""
        reason = self.verdict.reason
        position = self.verdict.open or reason is GateReason.SLACK
        return position and self.machine.rung is Rung.NONE

    def _tell_router(self) -> None:
        grant = self.grant
        if grant is None:
            self._router.leave()
        elif grant.router:
            update = update_of(
                *(grant, self.status, self._data_token),
                gate_open=self.gate_open,
                leaving=self.machine.phase is Phase.RELEASING,
                cap=self.budget.cap(grant.max_concurrent_turns),
            )
            self._router.tell(grant.router, update)

    async def detach(self) -> None:
        """Leave the router and the permit (closed); the engine is the machine's business."""
        self._permit.drop()
        tasks = [t for t in (self._router.close(), *self._calls.values()) if t is not None]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(KeyError):
            metrics.GATE_OPEN.remove(self.name)
