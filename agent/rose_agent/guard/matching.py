"""Makes replicas and slots for what exists on the node: pods, grants, engines left behind.

| there is | then |
|---|---|
| a pod of a pool, no replica | a replica, its pollers, its tap |
| a replica, no pod | all of it is forgotten |
| a container that was started again | the replica is gone until it has settled |
| a grant, or an engine without one | a slot |
| a slot without grant and engine | history |

Called twice a second and when pods or grants change. Next step: ``loop`` steps what is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import aiohttp

from rose_agent.guard import metrics
from rose_agent.guard.gpus import look_at
from rose_agent.guard.outcomes import Outcomes
from rose_agent.guard.replica import Replica
from rose_agent.guard.slot import Slot
from rose_agent.pods.kubernetes import KubernetesPods
from rose_agent.pods.model import PodSource, ServingPod
from rose_agent.pods.processes import Watcher
from rose_agent.signals.feed import load_source
from rose_core.wire.host import EngineState
from rose_core.wire.sync import PoolPolicy, SignalSource

if TYPE_CHECKING:
    from rose_agent.guard.loop import Guard

_log = logging.getLogger(__name__)
_MISMATCH_NS = 2_000_000_000


class Matching:
    """Makes and forgets the guard's replicas and slots.

    Args:
        guard: whose they are.
        session: HTTP session for engine figures.
        exited: called with the pid of a serving process that has ended.
    """

    def __init__(
        self, guard: Guard, session: aiohttp.ClientSession, exited: Callable[[int], None]
    ) -> None:
        self.pollers: dict[str, asyncio.Task[None]] = {}
        self.done = False
        self._guard, self._session = guard, session
        self._watcher = Watcher(exited)
        self._history: set[str] = set()
        self._wall_offset_s = time.time() - time.monotonic()

    def close(self) -> None:
        """End the pollers."""
        for task in self.pollers.values():
            task.cancel()
        self._watcher.close()

    def match(self, *, stop_pressed: bool) -> None:
        """Bring both in line with what exists, once the pods are known."""
        guard = self._guard
        if guard.pods is None:
            return
        pods = guard.pods.pods(guard.policies)
        if not guard.pods.synced:
            return
        by_pool = {policy.pool: policy for policy in guard.policies}
        for uid in set(guard.replicas) - set(pods):
            self._forget_replica(uid)
        for uid, pod in pods.items():
            self._match_pod(guard.pods, uid, pod, by_pool[pod.pool])
        self._watch(guard.pods, pods)
        self.done = True
        self._watcher.watch(pid for pod in pods.values() for pid in pod.pids)
        guard.pools.match(guard.policies)
        self._match_slots()
        look_at(guard.devices, guard.replicas, guard.slots)
        guard.whole.match(guard.replicas, guard.grants, stop=stop_pressed)

    def _watch(self, source: PodSource, pods: Mapping[str, ServingPod]) -> None:
        """Tell the tap what to follow, and forget the requests of replicas it no longer follows."""
        guard = self._guard
        watched = {
            uid: guard.replicas[uid].watch()
            for uid, pod in pods.items()
            if SignalSource.WIRE_TAP in guard.replicas[uid].policy.allowed_signals
            and (pod.pid or not isinstance(source, KubernetesPods))
        }
        guard.tap.watch(watched)
        for uid, replica in guard.replicas.items():
            if uid not in watched and (replica.book.health is not None or replica.book.live):
                replica.forget(time.monotonic_ns())

    def _match_pod(self, pods: PodSource, uid: str, pod: ServingPod, policy: PoolPolicy) -> None:
        guard = self._guard
        replica = guard.replicas.get(uid) or self._found(uid, pod, policy)
        if replica.pod.instance and replica.pod.instance != pod.instance:
            guard.gone(replica, "serving-restart")
        replica.update(pod, policy)
        replica.lent = any(s.serves(uid) for s in guard.slots.values())
        replica.maybe_back(guard.settings.settle_seconds)
        replica.settled = self.settled(pod)
        if replica.snapshot is None:
            pid = pods.scheduler(uid) if isinstance(pods, KubernetesPods) else 0
            replica.snapshot = load_source(pod, pid)
        differs = replica.book.mismatched_since_ns
        if differs and time.monotonic_ns() - differs > _MISMATCH_NS:
            guard.tap.resync()

    def _found(self, uid: str, pod: ServingPod, policy: PoolPolicy) -> Replica:
        guard = self._guard
        pool, breach = guard.pools.state(pod.pool), guard.blackbox.breach
        replica = Replica.create(
            pod,
            policy,
            outcomes=Outcomes(pod.name, pool, guard.recorder, breach, time.monotonic_ns()),
            schedule=guard.schedule,
            gate=guard.settings.gate,
            session=self._session,
        )
        guard.replicas[uid] = replica
        self.pollers[uid] = asyncio.create_task(replica.run())
        _log.info("guarding %s/%s of pool %s", pod.namespace, pod.name, pod.pool)
        return replica

    def settled(self, pod: ServingPod) -> bool:
        """A container that was started again has been Ready for long enough."""
        if not pod.restarted or not pod.ready_since_s:
            return True
        # The wall clock as it was at our start: its jumps neither settle a pod nor unsettle it.
        wall_s = time.monotonic() + self._wall_offset_s
        return wall_s - pod.ready_since_s >= self._guard.settings.settle_seconds

    def _forget_replica(self, uid: str) -> None:
        guard = self._guard
        replica = guard.replicas.pop(uid)
        guard.devices.forget(uid)
        guard.whole.forget(uid)
        guard.forget(uid)
        poller = self.pollers.pop(uid, None)
        if poller is not None:
            poller.cancel()
        if replica.snapshot is not None:
            replica.snapshot.close()
        for gauge in (metrics.SIGNAL_KNOWN, metrics.VERIFIED):
            with contextlib.suppress(KeyError):
                gauge.remove(replica.pod.name)

    def _match_slots(self) -> None:
        guard = self._guard
        alive = guard.grants.alive(time.monotonic())
        self._history -= set(alive)
        listed = {uid for uid, e in guard.host.engines.items() if e.state is not EngineState.GONE}
        self._history -= listed
        known = {folder.uid for folder in guard.rundir.lent_slots()} | listed
        # A folder without an engine is only history: looked at once, then passed over.
        for uid in (known | set(alive)) - set(guard.slots) - self._history:
            guard.slots[uid] = Slot(
                guard.rundir.slot(uid),
                guard.host,
                guard.recorder,
                guard.settings.token,
                partial(guard.changed, uid),
            )
        for uid, slot in list(guard.slots.items()):
            slot.grant = alive.get(uid)
            if slot.vanished and uid not in alive:
                del guard.slots[uid]
                self._history.add(uid)
                task = asyncio.create_task(slot.detach())
                task.add_done_callback(_nothing)


def _nothing(_task: object) -> None:
    return
