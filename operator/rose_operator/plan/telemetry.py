"""What agents reported last, node by node, and when; nothing here outlives the process.

Times are seconds of the operator's own monotonic clock, taken when a report arrived.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from rose_core.devices.capabilities import Capability, MissingCapability, first_missing
from rose_core.lending.groups import ReportedGroup, form
from rose_core.wire.sync import ReplicaGroup, ReplicaReport, SlotReport, SlotState, SyncRequest

# Recent KV use: the weight of a new report; at a 2 s period half of the past is gone after 14 s.
_WEIGHT = 0.1

# What may be lent is counted in steps of this many bytes, so that not every page of it is news.
_MEMORY_STEP = 64 << 20

# Slow requests are judged over this window, in steps.
_TALLY_WINDOW = 300.0
_TALLY_STEP = 10.0


@dataclass
class NodeReport:
    """One agent's last word.

    Attributes:
        essence: what matters at once; the same object for as long as nothing of it changes, so
            that what was derived from it can be kept.
        kv: recent mean of KV use by pod uid.
    """

    request: SyncRequest
    received_at: float
    kv: dict[str, float] = field(default_factory=dict)
    essence: object = None
    _lacks: dict[tuple[tuple[Capability, ...], tuple[str, ...]], MissingCapability | None] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        """``slots``: slot uid -> report, without slots that are gone; ``used``: KV per replica."""
        self.used = tuple(
            None if r.kv_used_permille is None else round(self.kv[r.pod_uid])
            for r in self.request.replicas
        )
        self.slots: dict[str, SlotReport] = {
            report.slot.uid: report
            for report in self.request.slots
            if report.state is not SlotState.GONE
        }

    def inherit(self, old: NodeReport) -> None:
        """Keep what was derived from the report before, which was the same in all that matters."""
        self.essence, self._lacks = old.essence, old._lacks

    def missing(
        self, wanted: tuple[Capability, ...], gpus: tuple[str, ...]
    ) -> MissingCapability | None:
        """The first capability that the node or one of these GPUs lacks."""
        key = wanted, gpus
        if key not in self._lacks:
            self._lacks[key] = first_missing(self.request.capabilities, wanted, gpus)
        return self._lacks[key]


@dataclass(frozen=True)
class RequestTally:
    """Finished requests of a replica at one time, and those slower than the objective."""

    at: float
    requests: int
    slow: int


class NodeTelemetry:
    """All nodes.

    Args:
        started: when the operator started; a node that never reported is silent since then.
    """

    def __init__(self, started: float) -> None:
        self.started = started
        self.nodes: dict[str, NodeReport] = {}
        self._tallies: dict[str, deque[RequestTally]] = {}
        self._stopped_since: dict[str, float] = {}
        self._placed: dict[str, SyncRequest] = {}  # nodes with pods of groups, which few have
        self._groups: dict[str, ReportedGroup] | None = {}
        self._formed: dict[str, tuple[ReplicaGroup, ...]] = {}

    @property
    def groups(self) -> dict[str, ReportedGroup]:
        """Replicas over several pods, by name."""
        if self._groups is None:
            self._groups = form(self._placed.values())
            by_leader: dict[str, list[ReplicaGroup]] = defaultdict(list)
            for group in self._groups.values():
                if group.formed is not None:
                    for node in {node for node, _ in group.pods}:
                        by_leader[node].append(group.formed)
            self._formed = {node: tuple(found) for node, found in by_leader.items()}
        return self._groups

    def groups_on(self, node: str) -> tuple[ReplicaGroup, ...]:
        """The groups with a pod on a node, as its guard is sent them."""
        return self._formed.get(node, ()) if self.groups else ()

    def record(self, request: SyncRequest, now: float) -> bool:
        """Take a report in.

        Returns:
            Whether something changed that a plan or a status may depend on.
        """
        old = self.nodes.get(request.node)
        kv = _means(old.kv if old else {}, request.replicas)
        node = self.nodes[request.node] = NodeReport(request, now, kv, _essence(request))
        same = old is not None and old.essence == node.essence
        if not same:
            self._place(request)
        if old is not None and same:
            node.inherit(old)
        for replica in request.replicas:
            self._tally(replica, now)
        for slot in request.slots:
            if slot.state is SlotState.STOPPED:
                self._stopped_since.setdefault(slot.slot.uid, now)
            else:
                self._stopped_since.pop(slot.slot.uid, None)
        return not same

    def _place(self, request: SyncRequest) -> None:
        placed = any(report.place is not None for report in request.replicas)
        if placed:
            self._placed[request.node] = request
        if placed or self._placed.pop(request.node, None) is not None:
            self._groups = None

    def silence(self, node: str, now: float) -> float:
        """Seconds since the node was heard."""
        known = self.nodes.get(node)
        return now - (known.received_at if known else self.started)

    def forget(self, now: float, after_seconds: float) -> list[str]:
        """Drop nodes that have been silent for too long; their names."""
        gone = [name for name in self.nodes if self.silence(name, now) > after_seconds]
        for name in gone:
            del self.nodes[name]
            if self._placed.pop(name, None) is not None:
                self._groups = None
        pods = {report.pod_uid for node in self.nodes.values() for report in node.request.replicas}
        self._tallies = {uid: kept for uid, kept in self._tallies.items() if uid in pods}
        slots = {uid for node in self.nodes.values() for uid in node.slots}
        stopped = self._stopped_since
        self._stopped_since = {uid: since for uid, since in stopped.items() if uid in slots}
        return gone

    def stopped_seconds(self, uid: str, now: float) -> float:
        """How long the slot has been reported as stopped without a break."""
        return now - self._stopped_since.get(uid, now)

    def recent(self, pod_uid: str) -> tuple[int, int]:
        """Finished and slow requests of a replica over the last minutes."""
        kept = self._tallies.get(pod_uid)
        if not kept:
            return 0, 0
        return kept[-1].requests - kept[0].requests, kept[-1].slow - kept[0].slow

    def _tally(self, report: ReplicaReport, now: float) -> None:
        kept = self._tallies.setdefault(report.pod_uid, deque())
        new = RequestTally(now, report.requests_total, report.slow_requests_total)
        if kept and (new.requests < kept[-1].requests or new.slow < kept[-1].slow):
            kept.clear()  # the agent started anew and counts from zero
        if len(kept) > 1 and now - kept[-2].at < _TALLY_STEP:
            kept.pop()
        kept.append(new)
        while now - kept[0].at > _TALLY_WINDOW:
            kept.popleft()

    def slot(self, uid: str, node: str) -> SlotReport | None:
        """The last report about a slot by its node's agent."""
        known = self.nodes.get(node)
        return known.slots.get(uid) if known else None


def _means(old: dict[str, float], replicas: tuple[ReplicaReport, ...]) -> dict[str, float]:
    means: dict[str, float] = {}
    for report in replicas:
        if report.kv_used_permille is not None:
            before = old.get(report.pod_uid, float(report.kv_used_permille))
            means[report.pod_uid] = before + _WEIGHT * (report.kv_used_permille - before)
    return means


def _essence(request: SyncRequest) -> object:
    """What matters at once; figures that move all the time wait for the next regular pass."""
    replicas = tuple(
        (
            r.pod_uid,
            r.pod_namespace,
            r.pod_name,
            r.pool,
            r.ready,
            r.stopped,
            r.signal,
            r.verified,
            r.refusal,
            r.refusal_text,
            r.gpu_uuids,
            r.gpu_proof,
            r.device_class,
            r.place,
            lendable(r),
        )
        for r in request.replicas
    )
    slots = tuple(
        (s.slot, calm(s.state), s.version, s.digest, s.needs_bytes) for s in request.slots
    )
    return replicas, slots, request.capabilities, request.models, request.guard


def lendable(report: ReplicaReport) -> int | None:
    """Bytes that may be lent of each of a replica's GPUs, in whole steps; None = unknown."""
    lendable_bytes = report.lendable_bytes
    return None if lendable_bytes is None else lendable_bytes - lendable_bytes % _MEMORY_STEP


def calm(state: SlotState) -> SlotState:
    """The guard stops and continues engines many times a second; only a long stop is news."""
    return SlotState.RUNNING if state is SlotState.STOPPED else state
