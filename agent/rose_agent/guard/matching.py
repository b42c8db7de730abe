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
from typing import Protocol

from rose_agent.guard import metrics
from rose_agent.guard.gpus import look_at
from rose_agent.guard.neighbours import Neighbours
from rose_agent.guard.outcomes import Outcomes
from rose_agent.guard.replica import Replica
from rose_agent.guard.slot import Slot
from rose_agent.pods.kubernetes import KubernetesPods
from rose_agent.pods.model import PodSource, ServingPod
from rose_agent.pods.processes import Watcher
from rose_agent.signals.reader import Readers
from rose_core.guard.grants import GrantBook
from rose_core.wire.host import EngineState
from rose_core.wire.sync import PoolPolicy, SignalSource

_log = logging.getLogger(__name__)
_MISMATCH_NS = 2_000_000_000


class Owner(Protocol):
    """Who steps the replicas and slots that are made here, and knows what should be.

    Attributes:
        pods: where pods are found; None before that is known.
        policies: the operator's pools.
        grants: the operator's grants.
    """

    pods: PodSource | None
    policies: tuple[PoolPolicy, ...]
    grants: GrantBook

    def gone(self, replica: Replica, what: str) -> None:
        """Serving has ended there, or was started again."""

    def forget(self, uid: str) -> None:
        """The replica is gone."""

    def changed(self, slot: str) -> None:
        """A call of this slot has ended."""


class Matching:
    """Makes and forgets the guard's replicas and slots.

    Args:
        owner: whose they are.
        around: what they are made of and reported to.
        readers: of what serving pods say about themselves.
        exited: called with the pid of a serving process that has ended.

    Attributes:
        replicas: by uid of the pod.
        slots: by uid.
    """

    def __init__(
        self,
        owner: Owner,
        around: Neighbours,
        readers: Readers,
        exited: Callable[[int], None],
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.slots: dict[str, Slot] = {}
        self.pollers: dict[str, asyncio.Task[None]] = {}
        self.done = False
        self._owner, self._around, self._readers = owner, around, readers
        self._watcher = Watcher(exited)
        self._history: set[str] = set()
        self._wall_offset_s = time.time() - time.monotonic()

    def close(self) -> None:
        """End the pollers."""
        for task in self.pollers.values():
            task.cancel()
        for replica in self.replicas.values():
            replica.reader.close()
        self._watcher.close()

    def match(self, *, stop_pressed: bool) -> None:
        """Bring both in line with what exists, once the pods are known."""
        owner, around = self._owner, self._around
        if owner.pods is None:
            return
        pods = owner.pods.pods(owner.policies)
        if not owner.pods.synced:
            return
        by_pool = {policy.pool: policy for policy in owner.policies}
        for uid in set(self.replicas) - set(pods):
            self._forget_replica(uid)
        for uid, pod in pods.items():
            self._match_pod(owner.pods, uid, pod, by_pool[pod.pool])
        self._watch(owner.pods, pods)
        self.done = True
        self._watcher.watch(pid for pod in pods.values() for pid in pod.pids)
        around.pools.match(owner.policies)
        self._match_slots()
        look_at(around.devices, self.replicas, self.slots, owner.pods.residents)
        around.whole.match(self.replicas, owner.grants, stop=stop_pressed)

    def _watch(self, source: PodSource, pods: Mapping[str, ServingPod]) -> None:
        """Tell the tap what to follow, and forget the requests of replicas it no longer follows."""
        watched = {
            uid: self.replicas[uid].watch()
            for uid, pod in pods.items()
            if SignalSource.WIRE_TAP in self.replicas[uid].policy.allowed_signals
            and (pod.pid or not isinstance(source, KubernetesPods))
        }
        self._around.tap.watch(watched)
        for uid, replica in self.replicas.items():
            if uid not in watched and (replica.book.health is not None or replica.book.live):
                replica.forget(time.monotonic_ns())

    def _match_pod(self, pods: PodSource, uid: str, pod: ServingPod, policy: PoolPolicy) -> None:
        replica = self.replicas.get(uid) or self._found(uid, pod, policy)
        if replica.pod.instance and replica.pod.instance != pod.instance:
            self._owner.gone(replica, "serving-restart")
        replica.update(pod, policy)
        replica.lent = any(s.serves(uid) for s in self.slots.values())
        replica.maybe_back(self._around.settings.settle_seconds)
        replica.settled = self.settled(pod) and replica.reader.machines is not None
        if isinstance(pods, KubernetesPods):
            replica.reader.follow(pods.scheduler(uid))
        differs = replica.book.mismatched_since_ns
        if differs and time.monotonic_ns() - differs > _MISMATCH_NS:
            self._around.tap.resync()

    def _found(self, uid: str, pod: ServingPod, policy: PoolPolicy) -> Replica:
        around = self._around
        pool, breach = around.pools.state(pod.pool), around.blackbox.breach
        replica = Replica.create(
            pod,
            policy,
            outcomes=Outcomes(pod.name, pool, around.recorder, breach, time.monotonic_ns()),
            schedule=around.schedule,
            gate=around.settings.gate,
            readers=self._readers,
        )
        self.replicas[uid] = replica
        self.pollers[uid] = asyncio.create_task(replica.run())
        _log.info("guarding %s/%s of pool %s", pod.namespace, pod.name, pod.pool)
        return replica

    def settled(self, pod: ServingPod) -> bool:
        """A container that was started again has been Ready for long enough."""
        if not pod.restarted or not pod.ready_since_s:
            return True
        # The wall clock as it was at our start: its jumps neither settle a pod nor unsettle it.
        wall_s = time.monotonic() + self._wall_offset_s
        return wall_s - pod.ready_since_s >= self._around.settings.settle_seconds

    def _forget_replica(self, uid: str) -> None:
        replica = self.replicas.pop(uid)
        self._around.devices.forget(uid)
        self._around.whole.forget(uid)
        self._owner.forget(uid)
        poller = self.pollers.pop(uid, None)
        if poller is not None:
            poller.cancel()
        replica.reader.close()
        for gauge in (metrics.SIGNAL_KNOWN, metrics.VERIFIED, metrics.COMPUTE_SHARE):
            with contextlib.suppress(KeyError):
                gauge.remove(replica.pod.name)

    def _match_slots(self) -> None:
        owner, around = self._owner, self._around
        alive = owner.grants.alive(time.monotonic())
        self._history -= set(alive)
        listed = {uid for uid, e in around.host.engines.items() if e.state is not EngineState.GONE}
        self._history -= listed
        known = {folder.uid for folder in around.rundir.lent_slots()} | listed
        # A folder without an engine is only history: looked at once, then passed over.
        for uid in (known | set(alive)) - set(self.slots) - self._history:
            self.slots[uid] = Slot(
                around.rundir.slot(uid),
                around.host,
                around.recorder,
                around.settings.token,
                partial(owner.changed, uid),
            )
        for uid, slot in list(self.slots.items()):
            slot.grant = alive.get(uid)
            if slot.vanished and uid not in alive:
                del self.slots[uid]
                self._history.add(uid)
                task = asyncio.create_task(slot.detach())
                task.add_done_callback(_nothing)


def _nothing(_task: object) -> None:
    return
