"""The guard's loop: events and ticks in, orders out.

| trigger | then |
|---|---|
| a request arrives or ends (tap) | the replica's slots are stepped at once |
| its size, its tokens (tap) | the same, where the verdict goes by slack |
| the tap's heartbeat, else every 65 ms | every slot is stepped: permits are extended, deadlines |
| a verdict's own time (duty, cool-down) | the replica's slots are stepped |
| engine host's status, serving process exit, pod change, Sync reply | every slot is stepped |
| every 500 ms | pods, watches, pollers, slots are matched with what should be |

Nothing here waits: calls to neighbours run as tasks and report back by the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable

import aiohttp

from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.watch import DeviceWatch
from rose_agent.guard import metrics, report, state
from rose_agent.guard.again import Again
from rose_agent.guard.blackbox import BlackBox
from rose_agent.guard.gpus import look_at
from rose_agent.guard.hostlink import HostLink
from rose_agent.guard.outcomes import Outcomes
from rose_agent.guard.pools import Pools
from rose_agent.guard.pulse import Pulse
from rose_agent.guard.recorder import Recorder
from rose_agent.guard.replica import Replica
from rose_agent.guard.settings import Settings
from rose_agent.guard.slot import Slot
from rose_agent.guard.taplink import TapLink
from rose_agent.guard.whole import WholeReplicas
from rose_agent.pods.kubernetes import KubernetesPods
from rose_agent.pods.model import PodSource, ServingPod
from rose_agent.pods.processes import Watcher
from rose_agent.signals.feed import load_source
from rose_core.guard.crossover import Schedule
from rose_core.guard.gate import Verdict, closed, judge
from rose_core.guard.grants import GrantBook
from rose_core.guard.reasons import GateReason
from rose_core.telemetry.events import Arrived, Dismissed, Ended, Health, TapEvent
from rose_core.wire.host import EngineState
from rose_core.wire.sync import PoolPolicy, SignalSource, SyncReply, SyncRequest
from rose_engines.rundir import RunDir

__all__ = ["Guard", "Settings"]

_log = logging.getLogger(__name__)
TICK_SECONDS = 0.065
_TICK_NS = 2 * 65_000_000  # how long an open gate is taken for open without being looked at again
_MATCH_SECONDS = 0.5
_ORPHAN_SECONDS = 15.0
_EDGES = (Arrived, Dismissed, Ended)
_MISMATCH_NS = 2_000_000_000


class Guard:
    """Everything the guard keeps.

    Args:
        rundir: the node's run directory.
        settings: see ``Settings``.
        devices: GPUs of the node.
        session: HTTP session for engine figures.
    """

    def __init__(
        self,
        rundir: RunDir,
        settings: Settings,
        devices: DeviceDriver,
        session: aiohttp.ClientSession,
    ) -> None:
        self.rundir = rundir
        self.settings = settings
        self.recorder = Recorder()
        self.blackbox = BlackBox(rundir.root / "flight", self.recorder)
        self.pools = Pools()
        self.replicas: dict[str, Replica] = {}
        self.slots: dict[str, Slot] = {}
        self.host = HostLink(rundir.host_socket, self.step_all)
        self.tap = TapLink(rundir.tap_socket, self)
        self.schedule = Schedule(settings.crossover_seconds)
        self.pods: PodSource | None = None
        self.on_transition: Callable[[], None] = _nothing
        self.devices = DeviceWatch(devices, limits=settings.budget)
        self.whole = WholeReplicas(rundir.root, self.recorder)
        self._session = session
        self._started_s = time.monotonic()
        self._wall_offset_s = time.time() - self._started_s
        saved = state.load(rundir.guard)
        self._saved = saved
        self.policies: tuple[PoolPolicy, ...] = saved.pools
        self.grants = GrantBook(highest_term=saved.highest_term)
        self._pollers: dict[str, asyncio.Task[None]] = {}
        self._watcher = Watcher(self._exited)
        self._verdicts: dict[str, Verdict] = {}
        self._again = Again(self._step_again)
        self._history: set[str] = set()
        self._stop_pressed, self._stop_button = False, str(rundir.stop)
        self._matched = False
        self._ticked_ns = time.monotonic_ns()
        self._matched_s = 0.0
        self._pulse = Pulse(self._tick, TICK_SECONDS)

    # --- events

    def on_tap(self, events: list[TapEvent], now_ns: int) -> None:
        """Apply events; step the replicas they touch, an arrival's own first."""
        arrivals: dict[str, int] = {}
        touched: set[str] = set()
        for event in events:
            replica = self.replicas.get(event.replica)
            if replica is None:
                continue
            replica.take(event, now_ns)
            if isinstance(event, Arrived):
                arrivals.setdefault(event.replica, event.time_ns)
            if isinstance(event, _EDGES) or self._goes_by_slack(event.replica):
                touched.add(event.replica)
        for uid in sorted(touched, key=lambda name: name not in arrivals):
            self._step_replica(uid, now_ns, arrivals.get(uid, 0))
        for event in events:
            if isinstance(event, Arrived):
                self.recorder.note(event.time_ns, event.replica, "arrived", request=event.request)
            elif isinstance(event, Health):
                self._pulse.beat()

    def _goes_by_slack(self, uid: str) -> bool:
        verdict = self._verdicts.get(uid)
        return verdict is not None and verdict.slack is not None

    def on_tap_lost(self, now_ns: int) -> None:
        """Nothing is known any more."""
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
        self._save()
        self.match()

    def _save(self) -> None:
        now = state.GuardFile(self.grants.highest_term, self.policies)
        if now == self._saved:
            return
        problem = state.save(self.rundir.guard, now)
        if problem:  # the next answer of the operator tries again
            _log.error("%s; a restarted guard would not know its term and pools", problem)
            self.recorder.note(time.monotonic_ns(), "sync", "unsaved", problem=problem)
        else:
            self._saved = now

    def _exited(self, pid: int) -> None:
        for uid, replica in self.replicas.items():
            if pid in replica.pod.pids:
                self._gone(replica, "serving-exit", pid)
                self._step_replica(uid, time.monotonic_ns(), 0)
        self.on_transition()

    # --- steps

    def step_all(self) -> None:
        """Step every slot."""
        now_ns = time.monotonic_ns()
        for uid in self.replicas:
            self._step_replica(uid, now_ns, 0)
        for slot in self.slots.values():
            if slot.grant is None or slot.grant.pod_uid not in self.replicas:
                slot.step(closed(self._absent()), now_ns, granted=self._granted(slot))

    def _absent(self) -> GateReason:
        """The gate of a replica that is not there: gone, or not looked for yet."""
        synced = self.pods is not None and self.pods.synced and bool(self.policies)
        return GateReason.SERVING_GONE if synced else GateReason.SIGNAL_MISSING

    def _step_replica(self, uid: str, now_ns: int, arrival_ns: int) -> None:
        replica = self.replicas[uid]
        facts = replica.facts(now_ns, stop_pressed=self._stop_pressed)
        verdict = self._verdicts[uid] = judge(facts, self.settings.gate, now_ns)
        replica.note_known(known=facts.signal.doubt is None)
        until_ns = 0
        for slot in self.slots.values():
            if slot.grant is not None and slot.grant.pod_uid == uid:
                own = self.whole.judge(uid, facts) if slot.grant.whole else verdict
                slot.step(own, now_ns, granted=self._granted(slot), arrival_ns=arrival_ns)
                if slot.computing(now_ns):
                    until_ns = max(until_ns, own.until_ns or now_ns + _TICK_NS)
        replica.outcomes.open_time.note(until_ns, now_ns)
        self._again.look(uid, verdict.again_ns, now_ns)

    def _step_again(self, uid: str) -> None:
        if uid in self.replicas:
            self._step_replica(uid, time.monotonic_ns(), 0)

    def _granted(self, slot: Slot) -> bool | None:
        now_s = time.monotonic()
        if slot.grant is not None and slot.uid in self.grants.alive(now_s):
            return True
        young = now_s - self._started_s < _ORPHAN_SECONDS
        unheard = not self.grants.complete_replies and slot.uid not in self.grants.held
        return None if young and unheard else False

    def _tick(self) -> None:
        began = time.monotonic()
        self._stop_pressed = os.path.exists(self._stop_button)  # noqa: PTH110  # hot path
        if began - self._matched_s >= _MATCH_SECONDS:
            self._matched_s = began
            self._match()
        self.step_all()
        self._ticked_ns = time.monotonic_ns()
        metrics.TICK_SECONDS.observe(time.monotonic() - began)

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
            for task in (*tasks, *self._pollers.values()):
                task.cancel()
            self._again.close()
            self._watcher.close()
            await self.blackbox.settle()
            for slot in self.slots.values():
                await slot.detach()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    # --- matching what is with what should be

    def match(self) -> None:
        """Pods to replicas, grants and leftovers to slots; then a step of all of them."""
        self._match()
        self.step_all()

    def _match(self) -> None:
        if self.pods is None:
            return
        pods = self.pods.pods(self.policies)
        by_pool = {policy.pool: policy for policy in self.policies}
        if not self.pods.synced:
            return
        for uid in set(self.replicas) - set(pods):
            self._forget_replica(uid)
        for uid, pod in pods.items():
            self._match_pod(uid, pod, by_pool[pod.pool])
        self.tap.watch(
            {
                uid: self.replicas[uid].watch()
                for uid, pod in pods.items()
                if SignalSource.WIRE_TAP in self.replicas[uid].policy.allowed_signals
                and (pod.pid or not isinstance(self.pods, KubernetesPods))
            }
        )
        self._matched = True
        self._watcher.watch(pid for pod in pods.values() for pid in pod.pids)
        self.pools.match(self.policies)
        self._match_slots()
        look_at(self.devices, self.replicas, self.slots)
        self.whole.match(self.replicas, self.grants, stop=self._stop_pressed)

    def _match_pod(self, uid: str, pod: ServingPod, policy: PoolPolicy) -> None:
        replica = self.replicas.get(uid)
        if replica is None:
            pool, breach = self.pools.state(pod.pool), self.blackbox.breach
            replica = Replica.create(
                pod,
                policy,
                outcomes=Outcomes(pod.name, pool, self.recorder, breach, time.monotonic_ns()),
                schedule=self.schedule,
                gate=self.settings.gate,
                session=self._session,
            )
            self.replicas[uid] = replica
            self._pollers[uid] = asyncio.create_task(replica.run())
            _log.info("guarding %s/%s of pool %s", pod.namespace, pod.name, pod.pool)
        if replica.pod.instance and replica.pod.instance != pod.instance:
            self._gone(replica, "serving-restart")
        replica.update(pod, policy)
        replica.lent = any(s.serves(uid) for s in self.slots.values())
        replica.maybe_back(self.settings.settle_seconds)
        replica.settled = self._settled(pod)
        if replica.snapshot is None:
            pid = self.pods.scheduler(uid) if isinstance(self.pods, KubernetesPods) else 0
            replica.snapshot = load_source(pod, pid)
        differs = replica.book.mismatched_since_ns
        if differs and time.monotonic_ns() - differs > _MISMATCH_NS:
            self.tap.resync()

    def _gone(self, replica: Replica, what: str, pid: int = 0) -> None:
        _log.warning("%s: %s", replica.pod.name, what)
        self.recorder.note(time.monotonic_ns(), replica.pod.name, what, pid=pid)
        replica.note_gone(pid)

    def _settled(self, pod: ServingPod) -> bool:
        if not pod.restarted or not pod.ready_since_s:
            return True
        # The wall clock as it was at our start: its jumps neither settle a pod nor unsettle it.
        wall_s = time.monotonic() + self._wall_offset_s
        return wall_s - pod.ready_since_s >= self.settings.settle_seconds

    def _forget_replica(self, uid: str) -> None:
        replica = self.replicas.pop(uid)
        self.devices.forget(uid)
        self.whole.forget(uid)
        self._verdicts.pop(uid, None)
        self._again.forget(uid)
        poller = self._pollers.pop(uid, None)
        if poller is not None:
            poller.cancel()
        if replica.snapshot is not None:
            replica.snapshot.close()
        for gauge in (metrics.SIGNAL_KNOWN, metrics.VERIFIED):
            with contextlib.suppress(KeyError):
                gauge.remove(replica.pod.name)

    def _match_slots(self) -> None:
        alive = self.grants.alive(time.monotonic())
        self._history -= set(alive)
        listed = {uid for uid, e in self.host.engines.items() if e.state is not EngineState.GONE}
        self._history -= listed
        known = {folder.uid for folder in self.rundir.lent_slots()} | listed
        # A folder without an engine is only history: looked at once, then passed over.
        for uid in (known | set(alive)) - set(self.slots) - self._history:
            folder = self.rundir.slot(uid)
            self.slots[uid] = Slot(
                folder, self.host, self.recorder, self.settings.token, self._changed
            )
        for uid, slot in list(self.slots.items()):
            slot.grant = alive.get(uid)
            if slot.vanished and uid not in alive:
                del self.slots[uid]
                self._history.add(uid)
                task = asyncio.create_task(slot.detach())
                task.add_done_callback(_nothing)

    def _changed(self) -> None:
        self.step_all()
        self.on_transition()

    # --- for the operator

    @property
    def surveyed(self) -> bool:
        """Whether a report is whole: one that lacks a pod says that the pod is gone."""
        return self._matched or not self.policies

    def request(self) -> SyncRequest:
        """The next ``Sync`` request."""
        return report.sync_request(
            self.settings.node,
            self.grants.highest_term,
            [(r, self._verdicts.get(uid)) for uid, r in self.replicas.items()],
            self.slots.values(),
            host_alive=self.host.alive(time.monotonic_ns()),
            capabilities=self.host.capabilities,
            sleepless=self.whole.refusal,
        )


def _nothing(_task: object = None) -> None:
    return
