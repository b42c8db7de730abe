"""Replicas lent whole on this node: the sleeper's orders and permits, the gate of their slots.

``rose_core.guard.whole`` decides; this carries out, twice a second. The sleeper keeps serving
asleep only while its permit is extended: once that has not happened for ``_GRANT_NS``, it wakes
serving, whatever has become of the guard. Next step: ``rose sleeper``
(``rose_agent.sleeper.sleepers``) follows what is written here.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rose_agent.guard import metrics
from rose_agent.guard.flight.recorder import Recorder
from rose_agent.guard.replicas.replica import GuardedReplica
from rose_agent.os.processes import start_ticks
from rose_agent.sleeper.sleeper import SleeperRecord
from rose_core.api.reasons import Reason
from rose_core.devices.sleeper import SleepStage
from rose_core.guard.gate import GateVerdict, ReplicaFacts
from rose_core.guard.grants import GrantBook
from rose_core.guard.whole import Whole, WholeLimits, WholePhase, WholeSeen, decide, judge
from rose_core.identity import PodUid
from rose_core.wire.sync import SleepTerms
from rose_engines.node.permit import BadPermit, Permit
from rose_engines.node.rundir import read_json, write_json
from rose_engines.node.servingdir import ServingDir, ServingDirs, SleepOrder

_log = logging.getLogger(__name__)
_GRANT_NS = 5_000_000_000
_ALIVE_NS = 5_000_000_000
_QUIET_NS = 2_000_000_000
_FIRST_SYNC_SECONDS = 15.0


@dataclass
class _SleepyReplica:
    """A replica of a pool that lets its replicas sleep."""

    folder: ServingDir
    name: str = ""
    whole: Whole = field(default_factory=Whole)
    permit: Permit | None = None
    order: SleepOrder | None = None


class WholeReplicas:
    """Every replica of the node that may be lent whole.

    Args:
        root: the run directory.
        recorder: flight recorder.
    """

    def __init__(self, root: Path, recorder: Recorder) -> None:
        self._dirs = ServingDirs(root)
        self._recorder = recorder
        self._known: dict[PodUid, _SleepyReplica] = {}
        self._started_s = time.monotonic()

    def match(
        self, replicas: Mapping[PodUid, GuardedReplica], grants: GrantBook, *, stop: bool
    ) -> None:
        """Take one step with every replica that may sleep."""
        now_s = time.monotonic()
        whole = {grant.pod_uid for grant in grants.alive(now_s).values() if grant.whole}
        unconfirmed = not grants.complete_replies and now_s - self._started_s < _FIRST_SYNC_SECONDS
        for folder in self._dirs.ordered():  # a guard before this one left it
            left = PodUid(folder.uid)
            if left not in replicas and left not in self._known:
                self._known[left] = _SleepyReplica(folder)
                self.forget(left)
        for uid, replica in replicas.items():
            if replica.policy.sleep is None and uid not in self._known:
                continue
            sleepy = self._known.setdefault(
                uid, _SleepyReplica(self._dirs.of(uid), replica.pod.name)
            )
            granted: bool | None = uid in whole and _allowed(replica, stop=stop)
            if not granted and unconfirmed:
                granted = None
            try:
                self._step(sleepy, replica, granted, now_s)
            except (OSError, BadPermit) as error:
                _log.error("pod %s is not lent whole: %s", replica.pod.name, error)

    def knows(self, uid: PodUid) -> bool:
        """Whether this replica is lent whole, or its owner lets it be."""
        return uid in self._known

    def judge(self, uid: PodUid, facts: ReplicaFacts) -> GateVerdict:
        """The gate of a whole slot on this replica."""
        sleepy = self._known.get(uid)
        return judge(facts, sleepy.whole.phase if sleepy else WholePhase.OFF)

    def refusal(self, replica: GuardedReplica) -> Reason | None:
        """Why this replica cannot be lent whole; None = nothing speaks against it."""
        sleepy = self._known.get(replica.pod.uid)
        if sleepy is None:
            return None
        refusal = sleepy.whole.refusal(_limits(replica.policy.sleep), time.monotonic())
        # What has memory to lend is lent beside serving, and needs no sleep.
        if sleepy.whole.phase is not WholePhase.OFF or not replica.full:
            return refusal if sleepy.whole.phase is WholePhase.RETURNING else None
        lives = refusal is not None or self._sleeper_lives()
        return refusal if lives else Reason.SLEEPER_UNAVAILABLE

    def forget(self, uid: PodUid) -> None:
        """The pod is gone: take its order back, because there is nothing to wake."""
        sleepy = self._known.pop(uid, None)
        if sleepy is None:
            return
        sleepy.folder.order.unlink(missing_ok=True)
        if sleepy.permit is not None:
            sleepy.permit.close_now()
            sleepy.permit.detach()
        for gauge in (metrics.SERVING_ASLEEP, metrics.SERVING_WAKING):
            with contextlib.suppress(KeyError):
                gauge.remove(sleepy.name)

    def _step(
        self, sleepy: _SleepyReplica, replica: GuardedReplica, granted: bool | None, now_s: float
    ) -> None:
        now_ns = time.monotonic_ns()
        signal = replica.signal(now_ns)
        since = None if replica.arrivals_wait else signal.empty_since_ns
        seen = WholeSeen(
            granted=granted,
            stage=self._reported_stage(sleepy),
            ready=replica.pod.ready,
            quiet=signal.running == 0 and since is not None and now_ns - since >= _QUIET_NS,
            busy=bool(signal.running),
        )
        limits = _limits(replica.policy.sleep)
        before, sleepy.whole = sleepy.whole, decide(sleepy.whole, seen, limits, now_s)
        if sleepy.whole.phase is not before.phase or sleepy.whole.failure is not before.failure:
            self._note(sleepy, replica, now_ns)
        self._order(sleepy, replica)
        self._extend(sleepy, now_ns)
        finished = sleepy.whole.phase is WholePhase.OFF and seen.stage is SleepStage.AWAKE
        if finished and granted is False:
            sleepy.folder.order.unlink(missing_ok=True)
            sleepy.order = None

    def _reported_stage(self, sleepy: _SleepyReplica) -> SleepStage | None:
        if not self._sleeper_lives():
            return None
        record = read_json(sleepy.folder.record, SleeperRecord)
        return SleepStage.AWAKE if record is None else record.sleeper.stage

    def _sleeper_lives(self) -> bool:
        try:
            permit = Permit.attach(self._dirs.alive, writable=False)
        except (OSError, BadPermit):
            return False
        try:
            age = permit.host_age_ns(time.monotonic_ns())
        finally:
            permit.detach()
        return age is not None and age < _ALIVE_NS

    def _order(self, sleepy: _SleepyReplica, replica: GuardedReplica) -> None:
        if sleepy.whole.phase is WholePhase.OFF:
            return
        pod, terms = replica.pod, replica.policy.sleep
        if terms is None:  # the owner has taken it back: the old order says how to wake serving
            terms = SleepTerms(sleepy.order.release_bytes if sleepy.order else 0)
        wanted = SleepOrder(
            replica.policy.engine,
            pod.url,
            tuple((pid, start_ticks(pid)) for pid in pod.pids),
            pod.gpu_uuids,
            terms.release_bytes,
            terms.wake_seconds,
            drained=sleepy.whole.drained,
        )
        if wanted != sleepy.order or not sleepy.folder.order.exists():
            sleepy.folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(sleepy.folder.order, wanted)
            sleepy.order = wanted

    def _extend(self, sleepy: _SleepyReplica, now_ns: int) -> None:
        if not sleepy.whole.asks:
            if sleepy.permit is not None:
                sleepy.permit.close_now()
                sleepy.permit.detach()
                sleepy.permit = None
            return
        if sleepy.permit is None or not sleepy.folder.permit.exists():
            sleepy.permit = Permit.create(sleepy.folder.permit)
        sleepy.permit.extend(now_ns + _GRANT_NS)

    def _note(self, sleepy: _SleepyReplica, replica: GuardedReplica, now_ns: int) -> None:
        whole, name = sleepy.whole, replica.pod.name
        _log.info("%s, lent whole: %s %s", name, whole.phase, whole.failure or "")
        self._recorder.note(now_ns, name, "whole", phase=whole.phase, word=whole.failure or "")
        metrics.SERVING_ASLEEP.labels(name).set(whole.phase is WholePhase.ASLEEP)
        metrics.SERVING_WAKING.labels(name).set(whole.phase is WholePhase.RETURNING)
        metrics.WHOLE_PHASES.labels(whole.phase.value, whole.failure or "").inc()


def _allowed(replica: GuardedReplica, *, stop: bool) -> bool:
    """Whether serving may sleep: whatever forbids lending wakes it."""
    policy, now_ns = replica.policy, time.monotonic_ns()
    if stop or replica.pod.stopped or replica.gone or policy.sleep is None:
        return False
    return policy.mode == "Lend" and not replica.outcomes.pool.breaker.open(now_ns)


def _limits(terms: SleepTerms | None) -> WholeLimits:
    return WholeLimits() if terms is None else WholeLimits(terms.drain_seconds)
