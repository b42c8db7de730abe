"""The guard's loop: events and ticks in, orders out.

| trigger | then |
|---|---|
| a request arrives or ends (tap) | the replica's slots are stepped at once |
| its size, its first token (tap) | the same, where the verdict goes by slack |
| its other tokens (tap) | the same, where the verdict waits for them; a paced one has its edges |
| the tap's heartbeat, else every 65 ms | every slot is stepped: permits are extended, deadlines |
| the same, while every slot is at rest | every slot is stepped, every 130 ms |
| the same, a replica whose slots are at rest | every second time |
| a verdict's own time (a period begins, cool-down) | the replica's slots, or all, are stepped |
| engine host's status, serving process exit, pod change, Sync reply | every slot is stepped |
| an update of the guard whose gate a replica follows | the replica's slots are stepped at once |
| every 500 ms | pods, watches, pollers, slots are matched with what should be |
| the same | replicas that no slot is beside are judged, for the report alone |

| there is | then |
|---|---|
| a pod of a pool, no replica | a replica, its pollers, its tap |
| a replica, no pod | all of it is forgotten |
| a container that was started again | the replica is gone until it has settled |
| a grant, or an engine without one | a slot |
| a slot without grant and engine | history |

One task owns all of it: nothing here waits, calls to neighbours run as tasks and report back by the
next step. Next step: ``slot`` carries out, ``report`` tells the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import SystemRandom

import msgspec

from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.watch import DeviceWatch
from rose_agent.guard import metrics
from rose_agent.guard.devices.gpus import update_views
from rose_agent.guard.flight.recorder import BlackBox, Recorder
from rose_agent.guard.groups.groups import Groups
from rose_agent.guard.groups.leading import Leading
from rose_agent.guard.links.hostlink import HostLink
from rose_agent.guard.links.taplink import TapLink
from rose_agent.guard.replicas.outcomes import Outcomes
from rose_agent.guard.replicas.pools import Pools
from rose_agent.guard.replicas.replica import GuardedReplica
from rose_agent.guard.replicas.whole import WholeReplicas
from rose_agent.guard.slots.slot import GuardedSlot
from rose_agent.guard.sync import report
from rose_agent.pods.kubernetes import KubernetesPods
from rose_agent.pods.model import PodSource, ServingPod
from rose_agent.pods.processes import Watcher
from rose_agent.signals.reader import Readers
from rose_core.devices.memory import BudgetLimits
from rose_core.guard.crossover import Cycles, Schedule
from rose_core.guard.gate import GateLimits, GateVerdict, ReplicaFacts, closed, judge
from rose_core.guard.grants import GrantBook
from rose_core.guard.reasons import STANDING, GateReason
from rose_core.identity import PodUid, SlotUid
from rose_core.telemetry.events import (
    Arrived,
    Counted,
    Dismissed,
    Ended,
    Health,
    Progress,
    Sized,
    TapEvent,
)
from rose_core.wire.host import EngineState
from rose_core.wire.sync import PoolPolicy, SignalSource, SyncReply, SyncRequest
from rose_engines.node.rundir import RunDir, read_json, write_json

__all__ = ["Guard", "Settings"]

_log = logging.getLogger(__name__)
TICK_SECONDS = 0.065
_TICK_NS = 2 * 65_000_000  # how long an open gate is taken for open without being looked at again
_MATCH_SECONDS = 0.5
_ORPHAN_SECONDS = 15.0
_EDGES = (Arrived, Dismissed, Ended)
_TOKENS = (Progress, Counted)

_MISMATCH_NS = 2_000_000_000
_SOON_NS = 10_000_000


class GuardFile(msgspec.Struct, frozen=True):
    """``guard.json``: what the guard must know at once after a restart.

    Attributes:
        highest_term: of a leader that it has obeyed, so that a deposed planner stays deposed.
        pools: policies last received, so that it protects serving before the operator answers.
    """

    highest_term: int = 0
    pools: tuple[PoolPolicy, ...] = ()


def load_guard_file(path: Path) -> GuardFile:
    """Read it; a missing or damaged file is an empty one."""
    return read_json(path, GuardFile) or GuardFile()


def save_guard_file(path: Path, state: GuardFile) -> str:
    """Write it; a full folder must not stop the guard.

    Returns:
        Why it could not be written; empty when it was.
    """
    try:
        write_json(path, state)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""


class Ticker:
    """Calls ``step`` until ``run`` is cancelled, at least once per period; single-threaded.

    Waking up is what costs, so the heartbeat of a living tap, which wakes the guard anyway,
    replaces the timer. Without a tap the timer ticks. While everything is at rest (no permit to
    extend, no deadline runs) every second tick is enough.

    Args:
        step: the work; returns whether everything is at rest now.
        seconds: longest time between two steps.
    """

    def __init__(self, step: Callable[[], bool], seconds: float) -> None:
        self._step, self._seconds = step, seconds
        self._resting = False
        self._timer: asyncio.TimerHandle | None = None
        self._failed: asyncio.Future[None] | None = None
        self._stepped_s = 0.0

    async def run(self) -> None:
        """Step now, and again at every tick.

        Raises:
            Exception: whatever a step raised.
        """
        self._failed = asyncio.get_running_loop().create_future()
        try:
            self._work()
            await self._failed
        finally:
            self._failed = None
            if self._timer is not None:
                self._timer.cancel()

    def beat(self) -> bool:
        """The loop is awake anyway: step, unless one was made a moment ago; whether it did."""
        if self._failed is None or self._failed.done():
            return False
        pause = 2 * self._seconds if self._resting else self._seconds
        due = asyncio.get_running_loop().time() - self._stepped_s >= pause / 2
        if due:
            self._work()
        return due

    def stir(self) -> None:
        """Something is not at rest any more: the next step is due after one period, not two."""
        if self._resting and self._failed is not None and not self._failed.done():
            self._resting = False
            self._arm()

    def _work(self) -> None:
        self._stepped_s = asyncio.get_running_loop().time()
        try:
            self._resting = self._step()
        except Exception as error:  # noqa: BLE001  # raised again by ``run``
            if self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)
            return
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        pause = 2 * self._seconds if self._resting else self._seconds
        self._timer = asyncio.get_running_loop().call_later(pause, self._work)


@dataclass(frozen=True)
class Settings:
    """What the guard is given at its start; ``rose_agent.guard.main`` makes it from the flags.

    Attributes:
        settle_seconds: Ready and stable for this long after a restart before lending resumes.
        crossover_seconds: length of alternating lent and withheld windows; 0 = pools withhold gaps.
        identity: folder with the node's certificate; None = it has none.
    """

    node: str
    token: str
    settle_seconds: float = 60.0
    crossover_seconds: float = 0.0
    gate: GateLimits = field(default_factory=GateLimits)
    budget: BudgetLimits = field(default_factory=BudgetLimits)
    identity: Path | None = None


class ReplicaTimers:
    """Steps a replica at the moment at which its verdict changes by itself; at most one timer each.

    A verdict says when that is (``GateVerdict.again_ns``): a period begins, a cool-down ends.
    Waiting for the next tick would cost up to 65 ms.

    Args:
        step: called with the replica's uid.
    """

    def __init__(self, step: Callable[[PodUid], None]) -> None:
        self._step = step
        self._timers: dict[PodUid, asyncio.TimerHandle] = {}
        self._at_ns: dict[PodUid, int] = {}

    def set(self, uid: PodUid, at_ns: int, now_ns: int) -> None:
        """Step the replica at ``at_ns``, instead of any earlier plan; in the past = never."""
        if self._at_ns.get(uid) == at_ns > now_ns:
            return  # a timer costs as much as the judgement before it
        self.cancel(uid)
        if at_ns > now_ns:
            loop = asyncio.get_running_loop()
            self._timers[uid] = loop.call_later((at_ns - now_ns) / 1e9, self._fire, uid)
            self._at_ns[uid] = at_ns

    def cancel(self, uid: PodUid) -> None:
        """Cancel the replica's timer, if it has one."""
        self._at_ns.pop(uid, None)
        if timer := self._timers.pop(uid, None):
            timer.cancel()

    def _fire(self, uid: PodUid) -> None:
        del self._timers[uid], self._at_ns[uid]
        self._step(uid)

    def is_set(self, uid: PodUid) -> bool:
        """Whether a timer runs for this replica."""
        return uid in self._timers

    def fires_soon(self, uid: PodUid, now_ns: int) -> bool:
        """Whether its timer fires within 10 ms."""
        return 0 <= self._at_ns.get(uid, 0) - now_ns < _SOON_NS

    def close(self) -> None:
        """End every timer."""
        for uid in list(self._timers):
            self.cancel(uid)


class Guard:
    """The guard of one node.

    Args:
        rundir: the node's run directory.
        settings: see ``Settings``.
        devices: GPUs of the node.
        readers: of what serving pods say about themselves.
    """

    def __init__(
        self,
        rundir: RunDir,
        settings: Settings,
        devices: DeviceDriver,
        readers: Readers,
    ) -> None:
        self.rundir = rundir
        self.settings = settings
        self.recorder = Recorder()
        self.blackbox = BlackBox(rundir.root / "flight", self.recorder)
        self.pools = Pools()
        self.host = HostLink(rundir.host_socket, self.step_all)
        self.tap = TapLink(rundir.tap_socket, self)
        self.pods: PodSource | None = None
        self.on_transition: Callable[[], None] = _ignore
        self.devices = DeviceWatch(devices, limits=settings.budget)
        self.device_absence = ""  # why NVML does not answer here
        self.device_summary = ""  # what it shows, and through what
        self.whole = WholeReplicas(rundir.root, self.recorder)
        self._started_s = time.monotonic()
        saved = load_guard_file(rundir.guard)
        self._saved = saved
        self.policies: tuple[PoolPolicy, ...] = saved.pools
        self.grants = GrantBook(highest_term=saved.highest_term)
        self.replicas: dict[PodUid, GuardedReplica] = {}
        self.slots: dict[SlotUid, GuardedSlot] = {}
        self.pollers: dict[PodUid, asyncio.Task[None]] = {}
        self._readers = readers
        self._watcher = Watcher(self._note_exit)
        self._history: set[SlotUid] = set()  # slots without grant and engine: looked at once
        self._wall_offset_s = time.time() - time.monotonic()
        self._verdicts: dict[PodUid, GateVerdict] = {}
        self._timers = ReplicaTimers(self._step_again)
        self._stop_pressed, self._stop_button = False, str(rundir.stop)
        self._ticked_ns = time.monotonic_ns()
        self._rested_ns = 0
        self._stepped: set[PodUid] = set()
        self._matched, self._matched_s = False, 0.0
        self._pulse = Ticker(self._tick, TICK_SECONDS)
        self.address = ""  # where guards of other nodes may ask
        self.leading = Leading(
            settings.node,
            self._verdict_of,
            lambda: self.grants.highest_term,
            self._group_stopped,
            time.monotonic_ns,
        )
        self.groups = Groups(
            self.leading, self.slots, settings.token, settings.identity, self._on_update
        )

    # --- events

    def on_tap(self, events: list[TapEvent], now_ns: int) -> None:
        """Apply events, then step the replicas they touch; those with an arrival first."""
        touched = {event.replica for event in events if self._take(event, now_ns)}
        others = [one for one in events if not isinstance(one, _TOKENS)]  # they are the most
        arrived = [event for event in others if isinstance(event, Arrived)]
        arrivals = {event.replica: event.time_ns for event in reversed(arrived)}
        # Tokens and ends wait for a look within 10 ms; who needs compute does not.
        pressing = arrivals.keys() | {event.replica for event in others if isinstance(event, Sized)}
        for uid in sorted(touched, key=lambda name: name not in arrivals):
            if uid in pressing or not self._timers.fires_soon(uid, now_ns):
                self._step_replica(uid, now_ns, arrivals.get(uid, 0))
        for event in arrived:
            self.recorder.note(event.time_ns, event.replica, "arrived", request=event.request)
        healths = (event for event in others if isinstance(event, Health))
        if any(not self._timers.fires_soon(one.replica, now_ns) for one in healths):
            self._stepped = touched  # just now, on all that is known
            self._pulse.beat()  # else whoever looks then steps all
            self._stepped = set()

    def _take(self, event: TapEvent, now_ns: int) -> bool:
        """Apply an event; whether its replica has to be stepped for it."""
        uid = event.replica
        replica = self.replicas.get(uid)
        if replica is None:
            return False
        replica.take(event, now_ns)
        may_change = isinstance(event, _EDGES) or self._may_change(event)
        return may_change and self._is_followed(uid)

    def _may_change(self, event: TapEvent) -> bool:
        """Whether this event can change a verdict that rests on slack before its next look."""
        verdict = self._verdicts.get(event.replica)
        if verdict is None or verdict.slack is None or isinstance(event, Health):
            return False  # a heartbeat is a tick
        return not (isinstance(event, _TOKENS) and verdict.again_ns)

    def on_tap_lost(self, now_ns: int) -> None:
        """The tap is gone: nothing is known about any replica."""
        for replica in self.replicas.values():
            replica.forget(now_ns)
        self.step_all()

    def on_reply(self, reply: SyncReply, sent_s: float) -> None:
        """Take grants and policies."""
        before = self.grants
        self.grants = before.take(reply, sent_s)
        if self.grants.refused_terms > before.refused_terms:
            self.recorder.note(
                time.monotonic_ns(), "sync", "refused", term=reply.term, highest=before.highest_term
            )
            return
        metrics.HIGHEST_TERM.set(self.grants.highest_term)
        if reply.pools or reply.complete:
            self.policies = reply.pools
        if reply.complete:
            self.groups.take(reply.groups)
        self._save()
        self.match()

    def _save(self) -> None:
        now = GuardFile(self.grants.highest_term, self.policies)
        if now == self._saved:
            return
        problem = save_guard_file(self.rundir.guard, now)
        if problem:  # the next answer of the operator tries again
            _log.error("%s; a restarted guard would not know its term and pools", problem)
            self.recorder.note(time.monotonic_ns(), "sync", "unsaved", problem=problem)
        else:
            self._saved = now

    def _note_exit(self, pid: int) -> None:
        for uid, replica in self.replicas.items():
            if pid in replica.pod.pids:
                self.mark_gone(replica, "serving-exit", pid)
                self._step_replica(uid, time.monotonic_ns(), 0)
        self.on_transition()

    # --- steps

    def is_burning(self) -> bool:
        """Whether a pool burns its error budget on this node now."""
        return self.pools.is_burning(self.policies, time.monotonic_ns())

    def step_all(self, *, resting: bool = True, but: Collection[PodUid] = ()) -> None:
        """Step every slot; those ``resting`` only where that is asked for.

        Args:
            resting: those as well.
            but: replicas that were stepped for the same events a moment ago.
        """
        now_ns = time.monotonic_ns()
        if resting:
            self._rested_ns = now_ns
        for uid in self.replicas:
            if uid in but or not self._is_followed(uid):
                continue
            if resting or not self._rests(uid):
                self._step_replica(uid, now_ns, 0)
        for slot in self.slots.values():
            if slot.grant is None or slot.grant.pod_uid not in self.replicas:
                self._step_alone(slot, now_ns)

    def _step_slot(self, uid: SlotUid) -> None:
        """Step one slot; with eight replicas on a node the others cost seven times as much."""
        slot = self.slots.get(uid)
        if slot is None:
            return  # it was forgotten meanwhile
        now_ns = time.monotonic_ns()
        if slot.grant is not None and slot.grant.pod_uid in self.replicas:
            self._step_replica(slot.grant.pod_uid, now_ns, 0)
        else:
            self._step_alone(slot, now_ns)

    def _step_alone(self, slot: GuardedSlot, now_ns: int) -> None:
        """A slot whose replica is not there: gone, or not looked for yet."""
        synced = self.pods is not None and self.pods.synced and bool(self.policies)
        reason = GateReason.SERVING_GONE if synced else GateReason.SIGNAL_MISSING
        slot.step(closed(reason), now_ns, granted=self._granted(slot))

    def _is_followed(self, uid: PodUid) -> bool:
        """Whether somebody goes by this replica's gate: a slot, or guards of other nodes."""
        return self.replicas[uid].granted or self.leading.leads(uid)

    def _may_close(self, uid: PodUid) -> bool:
        """Whether a request may have to close this gate before the tap's next heartbeat.

        Not one that is shut for a reason that no request changes. Once that reason is over, it
        stays shut until the tap has answered that it tells arrivals at once.
        """
        if not self._is_followed(uid):
            return False
        verdict = self._verdicts.get(uid)
        shut = verdict is not None and not verdict.open and verdict.reason in STANDING
        # A replica that is lent whole is drained and asleep while it is not Ready.
        return not shut or self.whole.knows(uid)

    def _rests(self, uid: PodUid) -> bool:
        """Whether nothing changes here by itself: shut, no time to look again, engines held."""
        verdict = self._verdicts.get(uid)
        if verdict is None or verdict.open or verdict.again_ns:
            return False
        return all(slot.is_at_rest for slot in self._beside(uid))

    def _beside(self, uid: PodUid) -> list[GuardedSlot]:
        """The slots that are granted on this replica's GPUs."""
        return [one for one in self.slots.values() if one.grant and one.grant.pod_uid == uid]

    def _judge(self, uid: PodUid, now_ns: int) -> tuple[ReplicaFacts, GateVerdict]:
        replica = self.replicas[uid]
        facts = self._facts_of(replica, now_ns)
        verdict = self._verdicts[uid] = judge(facts, self.settings.gate, now_ns)
        if verdict.reason is GateReason.NO_PREFILL_SLACK:
            replica.prefill_shut_ns = now_ns
        replica.note_known(known=facts.signal.doubt is None or facts.following is not None)
        return facts, verdict

    def _judge_unlent(self) -> None:
        """Judge the replicas beside which nothing is that could be stopped: for the report."""
        now_ns = time.monotonic_ns()
        for uid, replica in self.replicas.items():
            if not self._is_followed(uid):
                self._judge(uid, now_ns)
                replica.outcomes.open_time.note(0, now_ns)
                replica.note_compute(0, now_ns)
                self._timers.cancel(uid)

    def _step_replica(self, uid: PodUid, now_ns: int, arrival_ns: int) -> None:
        replica, slots = self.replicas[uid], self._beside(uid)
        facts, verdict = self._judge(uid, now_ns)
        # 1. Whether a rollout computes, before its slot is stepped: followers are told of that.
        leads = self.leading.leads(uid)
        computing = leads and any(s.serves(uid) and s.is_computing(now_ns) for s in slots)
        # 2. The slots: stopped first of all, where a request has arrived.
        until_ns, permitted_ns = 0, 0
        for slot in slots:
            whole = slot.grant is not None and slot.grant.whole
            own = self.whole.judge(uid, facts) if whole else verdict
            self._step_lent(replica, slot, own, now_ns, arrival_ns)
            if slot.is_computing(now_ns):
                until_ns = max(until_ns, own.until_ns or now_ns + _TICK_NS)
                permitted_ns = max(permitted_ns, 0 if whole else slot.permitted_until_ns)
        # 3. The followers' gates, which have no traffic of their own to go by.
        if leads:
            self.leading.note(uid, verdict, arrival_ns, own=computing)
            until_ns = max(until_ns, self.leading.computing_until_ns(uid))
        # 4. What is counted, and when to look again.
        replica.outcomes.open_time.note(until_ns, now_ns)
        replica.note_compute(permitted_ns, now_ns)
        if not self._resting():
            self._pulse.stir()
        self._timers.set(uid, self._due(verdict), now_ns)

    def _step_lent(
        self,
        replica: GuardedReplica,
        slot: GuardedSlot,
        verdict: GateVerdict,
        now_ns: int,
        arrival_ns: int,
    ) -> None:
        outcomes = replica.outcomes
        slot.slowdown = outcomes.experience.slowdown
        slot.step(verdict, now_ns, granted=self._granted(slot), arrival_ns=arrival_ns)
        slot.totals.note_replica(outcomes.counters.finished, outcomes.counters.exposed)
        served = replica.served_tokens
        if served is not None:
            slot.totals.note_served(*served, outcomes.counters.finished)
        for after_ns, chunk_divisor, had_turns in slot.take_stops():
            if not self.groups.takes_stop(replica.pod.uid, after_ns):
                outcomes.note_stop(after_ns, chunk_divisor, had_turns=had_turns)

    def _facts_of(self, replica: GuardedReplica, now_ns: int) -> ReplicaFacts:
        # Ranks would have to agree on a chunk before each iteration, and so would engines on
        # several nodes: theirs stay whole.
        uid = replica.pod.uid
        ranks = any(s.grant.engine.ranks > 1 for s in self._beside(uid) if s.grant)
        return replica.facts(
            now_ns,
            stop_pressed=self._stop_pressed,
            whole_chunks=ranks or self.leading.leads(uid),
            followed=self._is_followed(uid),
            following=self.groups.following(replica, now_ns),
        )

    def _verdict_of(self, uid: PodUid, now_ns: int) -> GateVerdict | None:
        """How a replica's gate stands at this moment, for guards of other nodes."""
        replica = self.replicas.get(uid)
        if replica is None:
            return None
        return judge(self._facts_of(replica, now_ns), self.settings.gate, now_ns)

    def _group_stopped(self, uid: PodUid, after_ns: int) -> None:
        if (replica := self.replicas.get(uid)) is not None:
            replica.outcomes.note_stop(after_ns, 1)

    def _on_update(self, uid: PodUid, arrived_ns: int) -> None:
        if uid in self.replicas:
            self._step_replica(uid, time.monotonic_ns(), arrived_ns)

    def _resting(self) -> bool:
        return all(slot.is_at_rest for slot in self.slots.values())

    def _due(self, verdict: GateVerdict) -> int:
        """When to look again: a paced permit lapses by itself, so not before the next period."""
        if not (verdict.open and verdict.again_ns):
            return verdict.again_ns
        period = self.settings.gate.period_ns
        return -(-verdict.again_ns // period) * period

    def _step_again(self, uid: PodUid) -> None:
        if not self._pulse.beat():
            self._on_update(uid, 0)

    def _granted(self, slot: GuardedSlot) -> bool | None:
        now_s = time.monotonic()
        if slot.grant is not None and self.grants.is_alive(slot.uid, now_s):
            return True
        young = now_s - self._started_s < _ORPHAN_SECONDS
        unconfirmed = not self.grants.complete_replies and slot.uid not in self.grants.held
        return None if young and unconfirmed else False

    def _tick(self) -> bool:
        began, but = time.monotonic(), self._stepped
        pressed = os.path.exists(self._stop_button)  # noqa: PTH110  # hot path
        if pressed is not self._stop_pressed:
            self._stop_pressed, but = pressed, set()
        if began - self._matched_s >= _MATCH_SECONDS:
            self._matched_s, but = began, set()
            self._match()
        # As the ticker has it: what rests is stepped half as often, whatever else is on the node.
        self.step_all(resting=time.monotonic_ns() - self._rested_ns >= _TICK_NS // 2, but=but)
        self._ticked_ns = time.monotonic_ns()
        metrics.TICK_SECONDS.observe(time.monotonic() - began)
        return self._resting()

    def health(self) -> str:
        """Why the guard is not healthy; for the liveness probe."""
        late_s = (time.monotonic_ns() - self._ticked_ns) / 1e9
        return f"the guard's loop has not run for {late_s:.1f} s" if late_s > 5 else ""

    async def run(self) -> None:
        """Tick until cancelled."""
        sources = (self.host.run(), self.tap.run(), self.devices.run())
        tasks = [asyncio.create_task(source) for source in sources]
        try:
            await self._pulse.run()
        finally:
            for task in tasks:
                task.cancel()
            self.close()
            self.groups.close()
            await self.blackbox.settle()
            for slot in self.slots.values():
                await slot.detach()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    # --- matching what is with what should be

    def close(self) -> None:
        """End pollers, readers and timers."""
        for task in self.pollers.values():
            task.cancel()
        for replica in self.replicas.values():
            replica.reader.close()
        self._watcher.close()
        self._timers.close()

    def match(self) -> None:
        """Bring replicas and slots in line with what exists, and step all of them."""
        self._match()
        self.step_all()

    def _match(self) -> None:
        if self.pods is None:
            return
        pods = self.pods.pods(self.policies)
        if not self.pods.synced:
            return
        by_pool = {policy.pool: policy for policy in self.policies}
        for uid in set(self.replicas) - set(pods):
            self._forget_replica(uid)
        for uid, pod in pods.items():
            self._match_pod(self.pods, uid, pod, by_pool[pod.pool])
        granted = {grant.pod_uid for grant in self.grants.alive(time.monotonic()).values()}
        for uid, replica in self.replicas.items():
            replica.granted = uid in granted
        self._watch(self.pods, pods)
        self._matched = True
        self._watcher.watch(pid for pod in pods.values() for pid in pod.pids)
        self.pools.match(self.policies)
        self._match_slots()
        self._judge_unlent()
        self.groups.match(self.replicas)
        update_views(self.devices, self.replicas, self.slots, self.pods.residents)
        self.whole.match(self.replicas, self.grants, stop=self._stop_pressed)

    def _watch(self, source: PodSource, pods: Mapping[PodUid, ServingPod]) -> None:
        """Tell the tap what to follow, and forget the requests of replicas it no longer follows."""
        watched = {
            uid: self.replicas[uid].watch(followed=self._may_close(uid))
            for uid, pod in pods.items()
            if SignalSource.WIRE_TAP in self.replicas[uid].policy.allowed_signals
            and (pod.pid or not isinstance(source, KubernetesPods))
            and not pod.follows  # nobody sends it requests
        }
        self.tap.watch(watched)
        for uid, replica in self.replicas.items():
            if uid not in watched and (replica.book.health is not None or replica.book.live):
                replica.forget(time.monotonic_ns())

    def _match_pod(self, pods: PodSource, uid: PodUid, pod: ServingPod, policy: PoolPolicy) -> None:
        replica = self.replicas.get(uid) or self._make_replica(uid, pod, policy)
        if replica.pod.instance and replica.pod.instance != pod.instance:
            self.mark_gone(replica, "serving-restart")
        replica.update(pod, policy)
        here = any(s.serves(uid) for s in self.slots.values())
        replica.lent = here or self.leading.has_lent_follower(uid)
        replica.check_return(self.settings.settle_seconds)
        replica.settled = self.is_settled(pod) and replica.reader.machines is not None
        if isinstance(pods, KubernetesPods):
            replica.reader.follow(pods.scheduler(uid))
        differs = replica.book.mismatched_since_ns
        if differs and time.monotonic_ns() - differs > _MISMATCH_NS:
            self.tap.resync()

    def _make_replica(self, uid: PodUid, pod: ServingPod, policy: PoolPolicy) -> GuardedReplica:
        pool, breach, now_ns = self.pools.state(pod.pool), self.blackbox.breach, time.monotonic_ns()
        cycles = Cycles(Schedule(self.settings.crossover_seconds), SystemRandom().random)
        replica = GuardedReplica.create(
            pod,
            policy,
            outcomes=Outcomes(pod.name, pool, self.recorder, breach, now_ns, cycles=cycles),
            gate=self.settings.gate,
            readers=self._readers,
        )
        self.replicas[uid] = replica
        if not pod.follows:  # nothing there says what its replica is doing
            self.pollers[uid] = asyncio.create_task(replica.run())
        _log.info("guarding %s/%s of pool %s", pod.namespace, pod.name, pod.pool)
        return replica

    def is_settled(self, pod: ServingPod) -> bool:
        """Whether a container that was started again has been Ready for long enough."""
        if not pod.restarted or not pod.ready_since_s:
            return True
        # The wall clock as it was at our start: its jumps neither settle a pod nor unsettle it.
        wall_s = time.monotonic() + self._wall_offset_s
        return wall_s - pod.ready_since_s >= self.settings.settle_seconds

    def _forget_replica(self, uid: PodUid) -> None:
        replica = self.replicas.pop(uid)
        self.devices.forget(uid)
        self.whole.forget(uid)
        self._verdicts.pop(uid, None)
        self._timers.cancel(uid)
        poller = self.pollers.pop(uid, None)
        if poller is not None:
            poller.cancel()
        replica.reader.close()
        for gauge in (metrics.SIGNAL_KNOWN, metrics.VERIFIED, metrics.COMPUTE_SHARE):
            with contextlib.suppress(KeyError):
                gauge.remove(replica.pod.name)

    def _match_slots(self) -> None:
        alive = self.grants.alive(time.monotonic())
        self._history -= set(alive)
        listed = {uid for uid, e in self.host.engines.items() if e.state is not EngineState.GONE}
        self._history -= listed
        known = {SlotUid(folder.uid) for folder in self.rundir.lent_slots()} | listed
        # A folder without an engine is only history: looked at once, then passed over.
        for uid in (known | set(alive)) - set(self.slots) - self._history:
            self.slots[uid] = GuardedSlot(
                self.rundir.slot(uid),
                self.host,
                self.recorder,
                self.settings.token,
                partial(self._report_change, uid),
            )
        for uid, slot in list(self.slots.items()):
            slot.grant = alive.get(uid)
            if slot.vanished and uid not in alive:
                del self.slots[uid]
                self._history.add(uid)
                task = asyncio.create_task(slot.detach())
                task.add_done_callback(lambda _task: None)  # kept until it ends

    def mark_gone(self, replica: GuardedReplica, what: str, pid: int = 0) -> None:
        """Serving has ended there, or was started again."""
        _log.warning("%s: %s", replica.pod.name, what)
        self.recorder.note(time.monotonic_ns(), replica.pod.name, what, pid=pid)
        replica.note_gone(pid)

    def _report_change(self, slot: SlotUid) -> None:
        """A call of this slot has ended: look at it, and let the operator hear of it."""
        self._step_slot(slot)
        self.on_transition()

    # --- for the operator

    @property
    def surveyed(self) -> bool:
        """Whether a report is whole: one that lacks a pod says that the pod is gone."""
        return self._matched or not self.policies

    def on_no_devices(self, text: str) -> None:
        """NVML does not answer here, and why."""
        self.device_absence = text

    def on_devices(self, text: str) -> None:
        """NVML answers, and what it shows."""
        self.device_summary = text

    def request(self) -> SyncRequest:
        """The next ``Sync`` request."""
        return report.sync_request(
            self.settings.node,
            self.grants.highest_term,
            [(r, self._verdicts.get(uid)) for uid, r in self.replicas.items()],
            self.slots.values(),
            host_alive=self.host.is_alive(time.monotonic_ns()),
            capabilities=report.capabilities(
                self.host.capabilities,
                self.device_absence,
                self.device_summary,
                self.pods.weakness if self.pods is not None else "",
            ),
            models=self.host.models,
            guard=self.address,
            sleepless=self.whole.refusal,
        )


def _ignore() -> None:
    return
