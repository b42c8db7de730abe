"""The guard's loop: events and ticks in, orders out.

| trigger | then |
|---|---|
| tap event (arrival, end, heartbeat) | the replica's slots are stepped at once |
| every 20 ms | every slot is stepped: permits are extended, deadlines noticed |
| engine host's status, serving process exit, pod change, Sync reply | every slot is stepped |
| every 500 ms | pods, watches, pollers, slots are matched with what should be |

Nothing here waits: calls to neighbours run as tasks and report back by the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.errors import DeviceError
from rose_agent.guard import metrics, report, state
from rose_agent.guard.hostlink import HostLink
from rose_agent.guard.recorder import Recorder
from rose_agent.guard.replica import Replica
from rose_agent.guard.slot import Slot
from rose_agent.guard.taplink import TapLink
from rose_agent.pods.kubernetes import KubernetesPods
from rose_agent.pods.model import PodSource, ServingPod
from rose_agent.pods.processes import Watcher
from rose_agent.signals.snapshot import Snapshot
from rose_agent.tap.frames import Watch
from rose_core.guard.crossover import Schedule
from rose_core.guard.gate import GateLimits, Verdict, closed, judge
from rose_core.guard.grants import GrantBook
from rose_core.guard.reasons import GateReason
from rose_core.telemetry.events import Arrived, Health, TapEvent
from rose_core.wire.host import EngineState
from rose_core.wire.sync import PoolPolicy, SignalSource, SyncReply, SyncRequest
from rose_engines.rundir import RunDir

_log = logging.getLogger(__name__)
TICK_SECONDS = 0.02
_MATCH_SECONDS = 0.5
_ORPHAN_SECONDS = 15.0
_MISMATCH_NS = 2_000_000_000


@dataclass(frozen=True)
class Settings:
    """What the guard is told at its start.

    Attributes:
        settle_seconds: Ready and stable for this long after a restart before lending resumes.
        crossover_seconds: length of alternating lent and withheld windows; 0 = always lend.
    """

    node: str
    token: str
    settle_seconds: float = 60.0
    crossover_seconds: float = 0.0
    gate: GateLimits = field(default_factory=GateLimits)


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
        self.replicas: dict[str, Replica] = {}
        self.slots: dict[str, Slot] = {}
        self.host = HostLink(rundir.host_socket, self.step_all)
        self.tap = TapLink(rundir.tap_socket, self)
        self.schedule = Schedule(settings.crossover_seconds)
        self.pods: PodSource | None = None
        self.on_transition: Callable[[], None] = _nothing
        self._devices = devices
        self._session = session
        self._started_s = time.monotonic()
        saved = state.load(rundir.guard)
        self._saved = saved
        self.policies: tuple[PoolPolicy, ...] = saved.pools
        self.grants = GrantBook(highest_term=saved.highest_term)
        self._pollers: dict[str, asyncio.Task[None]] = {}
        self._watcher = Watcher(self._exited)
        self._verdicts: dict[str, Verdict] = {}
        self._history: set[str] = set()
        self._stop_pressed = False
        self._ticked_ns = time.monotonic_ns()

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
            if not isinstance(event, Health):
                touched.add(event.replica)
        for uid in sorted(touched, key=lambda name: name not in arrivals):
            self._step_replica(uid, now_ns, arrivals.get(uid, 0))
        for event in events:
            if isinstance(event, Arrived):
                self.recorder.note(event.time_ns, event.replica, "arrived", request=event.request)

    def on_tap_lost(self, now_ns: int) -> None:
        """Nothing is known any more."""
        for replica in self.replicas.values():
            replica.book.forget(now_ns)
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
        if now != self._saved:
            self._saved = now
            state.save(self.rundir.guard, now)

    def _exited(self, pid: int) -> None:
        now_ns = time.monotonic_ns()
        for uid, replica in self.replicas.items():
            if pid in replica.pod.pids:
                self._gone(replica, "serving-exit", pid)
                self._step_replica(uid, now_ns, 0)
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
        metrics.SIGNAL_KNOWN.labels(replica.pod.name).set(facts.signal.doubt is None)
        for slot in self.slots.values():
            if slot.grant is not None and slot.grant.pod_uid == uid:
                slot.step(verdict, now_ns, granted=self._granted(slot), arrival_ns=arrival_ns)
                if slot.computing(now_ns):
                    replica.last_open_ns = now_ns

    def _granted(self, slot: Slot) -> bool | None:
        now_s = time.monotonic()
        if slot.grant is not None and slot.uid in self.grants.alive(now_s):
            return True
        young = now_s - self._started_s < _ORPHAN_SECONDS
        unheard = not self.grants.complete_replies and slot.uid not in self.grants.held
        return None if young and unheard else False

    def health(self) -> str:
        """Why the guard is not healthy; for the liveness probe."""
        late_s = (time.monotonic_ns() - self._ticked_ns) / 1e9
        return f"the guard's loop has not run for {late_s:.1f} s" if late_s > 5 else ""

    async def run(self) -> None:
        """Tick until cancelled."""
        tasks = [asyncio.create_task(self.host.run()), asyncio.create_task(self.tap.run())]
        matched = 0.0
        try:
            while True:
                began = time.monotonic()
                self._stop_pressed = self.rundir.stop.exists()
                if began - matched >= _MATCH_SECONDS:
                    matched = began
                    self.match()
                self.step_all()
                self._ticked_ns = time.monotonic_ns()
                metrics.TICK_SECONDS.observe(time.monotonic() - began)
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for task in (*tasks, *self._pollers.values()):
                task.cancel()
            self._watcher.close()
            for slot in self.slots.values():
                await slot.detach()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    # --- matching what is with what should be

    def match(self) -> None:
        """Pods to replicas, grants and leftovers to slots."""
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
                uid: Watch(uid, pod.pid, pod.port, interfaces=pod.interfaces)
                for uid, pod in pods.items()
                if SignalSource.WIRE_TAP in self.replicas[uid].policy.allowed_signals
                and (pod.pid or not isinstance(self.pods, KubernetesPods))
            }
        )
        self._watcher.watch(pid for pod in pods.values() for pid in pod.pids)
        self._match_slots()
        self.step_all()

    def _match_pod(self, uid: str, pod: ServingPod, policy: PoolPolicy) -> None:
        replica = self.replicas.get(uid)
        if replica is None:
            replica = Replica.create(pod, policy, self.recorder, self.schedule, self._session)
            self.replicas[uid] = replica
            self._pollers[uid] = asyncio.create_task(replica.run())
            _log.info("guarding %s/%s of pool %s", pod.namespace, pod.name, pod.pool)
        if replica.pod.instance and replica.pod.instance != pod.instance:
            self._gone(replica, "serving-restart")
        replica.update(pod, policy)
        replica.lent = any(s.serves(uid) for s in self.slots.values())
        self._maybe_back(replica)
        replica.settled = self._settled(pod)
        if isinstance(self.pods, KubernetesPods) and replica.snapshot is None:
            pid = self.pods.scheduler(uid)
            replica.snapshot = Snapshot(pid) if pid else None
        differs = replica.book.mismatched_since_ns
        if differs and time.monotonic_ns() - differs > _MISMATCH_NS:
            self.tap.resync()

    def _gone(self, replica: Replica, what: str, pid: int = 0) -> None:
        _log.warning("%s: %s", replica.pod.name, what)
        self.recorder.note(time.monotonic_ns(), replica.pod.name, what, pid=pid)
        replica.gone, replica.gone_since_ns = True, time.monotonic_ns()
        replica.exited |= {pid} if pid else set()

    def _maybe_back(self, replica: Replica) -> None:
        """Serving is back once new processes stand Ready for the settling time."""
        if not replica.gone:
            return
        waited_s = (time.monotonic_ns() - replica.gone_since_ns) / 1e9
        fresh = not replica.exited & set(replica.pod.pids)
        if replica.pod.ready and fresh and waited_s >= self.settings.settle_seconds:
            replica.gone, replica.exited = False, set()

    def _settled(self, pod: ServingPod) -> bool:
        if not pod.restarted or not pod.ready_since_s:
            return True
        return time.time() - pod.ready_since_s >= self.settings.settle_seconds

    def _forget_replica(self, uid: str) -> None:
        replica = self.replicas.pop(uid)
        self._verdicts.pop(uid, None)
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
        known = {folder.uid for folder in self.rundir.all_slots()} | listed
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
                task.add_done_callback(_ignore)

    def _changed(self) -> None:
        self.step_all()
        self.on_transition()

    # --- for the operator

    def request(self) -> SyncRequest:
        """The next ``Sync`` request."""
        now_ns = time.monotonic_ns()
        host_alive = self.host.alive(now_ns)
        slots = [report.slot_report(slot) for slot in self.slots.values()]
        return SyncRequest(
            node=self.settings.node,
            agent_version=_version(),
            highest_term=self.grants.highest_term,
            replicas=tuple(
                report.replica_report(
                    replica,
                    self._verdicts.get(uid, closed(GateReason.SIGNAL_MISSING)),
                    now_ns,
                    host_alive=host_alive,
                    lendable=self._lendable(replica),
                )
                for uid, replica in self.replicas.items()
            ),
            slots=tuple(r for r in slots if r is not None),
            capabilities={"EngineHost": "" if host_alive else "the engine host does not answer"},
        )

    def _lendable(self, replica: Replica) -> int | None:
        """Free memory of the replica's GPUs less the pool's headroom; None when unknown."""
        free = 0
        try:
            for uuid in replica.pod.gpu_uuids:
                memory = self._devices.memory(uuid)
                if memory.used_bytes is None:
                    return None
                headroom = memory.total_bytes * replica.policy.memory_headroom_percent // 100
                free += max(0, memory.total_bytes - memory.used_bytes - headroom)
        except DeviceError:
            return None
        return free if replica.pod.gpu_uuids else None


def _version() -> str:
    try:
        return importlib.metadata.version("rose-gpu")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _nothing() -> None:
    return


def _ignore(_task: asyncio.Task[None]) -> None:
    return
