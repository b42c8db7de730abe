"""What agents said last, node by node, and when; nothing here outlives the process.

Times are seconds of the operator's own monotonic clock, taken when a report arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rose_core.wire.sync import ReplicaReport, SlotReport, SlotState, SyncRequest

# Recent KV use: the weight of a new report; at a 2 s period half of the past is gone after 14 s.
_WEIGHT = 0.1


@dataclass
class Node:
    """One agent's last word."""

    request: SyncRequest
    heard_at: float
    kv: dict[str, float] = field(default_factory=dict)

    @property
    def slots(self) -> dict[str, SlotReport]:
        """Slot uid -> report, without slots that are gone."""
        return {
            report.slot.uid: report
            for report in self.request.slots
            if report.state is not SlotState.GONE
        }


class Telemetry:
    """All nodes.

    Args:
        started: when the operator started; a node that never reported is silent since then.
    """

    def __init__(self, started: float) -> None:
        self.started = started
        self.nodes: dict[str, Node] = {}

    def record(self, request: SyncRequest, now: float) -> bool:
        """Take a report in.

        Returns:
            Whether something changed that a plan or a status may depend on.
        """
        old = self.nodes.get(request.node)
        kv = _means(old.kv if old else {}, request.replicas)
        self.nodes[request.node] = Node(request, now, kv)
        return old is None or _essence(old.request) != _essence(request)

    def silence(self, node: str, now: float) -> float:
        """Seconds since the node was heard."""
        known = self.nodes.get(node)
        return now - (known.heard_at if known else self.started)

    def forget(self, now: float, after_seconds: float) -> None:
        """Drop nodes that have been silent for too long."""
        for name in [name for name in self.nodes if self.silence(name, now) > after_seconds]:
            del self.nodes[name]

    def slot(self, uid: str, node: str) -> SlotReport | None:
        """The last report about a slot by its node's agent."""
        known = self.nodes.get(node)
        return known.slots.get(uid) if known else None


def _means(old: dict[str, float], replicas: tuple[ReplicaReport, ...]) -> dict[str, float]:
    means = {}
    for report in replicas:
        if report.kv_used_permille is not None:
            before = old.get(report.pod_uid, float(report.kv_used_permille))
            means[report.pod_uid] = before + _WEIGHT * (report.kv_used_permille - before)
    return means


def _essence(request: SyncRequest) -> object:
    """What matters at once; figures that move all the time wait for the next regular pass."""
    replicas = tuple(
        (r.pod_uid, r.pool, r.ready, r.stopped, r.signal, r.verified, r.refusal, r.gpu_uuids)
        for r in request.replicas
    )
    slots = tuple((s.slot, s.state, s.reason, s.version, s.digest) for s in request.slots)
    return replicas, slots
