"""Replicas over several pods: which reports belong together, and whether all are there (pure).

| the pods that nodes report of a group are | lent |
|---|---|
| all, each once, on nodes whose guards others may ask | as one replica, a slot for each pod |
| else | nothing of it: ``MultiNodeReplica``, with what is missing |

The planner and the guards of its nodes go by the same answer, so no guard follows in a group that
is not whole. Next step: ``rose_core.guard.following`` is what the guards do with it.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from rose_core.wire.sync import FollowerPod, ReplicaGroup, ReplicaReport, SyncRequest

# What others may be told to dial. ``local:/PATH``, which is no gRPC, would end who dials it.
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z.-]+):[0-9]{1,5}")
_NAMED = 4  # of the places that are missing


@dataclass(frozen=True)
class ReportedGroup:
    """What is reported of one.

    Attributes:
        pods: (node, report) by place, its leader first.
        refusal: why nothing of it is lent; empty = it may be.
        formed: what the guards of its nodes are sent; None with a refusal: nobody follows anybody.
    """

    pods: tuple[tuple[str, ReplicaReport], ...]
    refusal: str = ""
    formed: ReplicaGroup | None = None


def unit(report: ReplicaReport) -> str:
    """The replica that a report is about: its group, or the pod by itself."""
    return report.pod_uid if report.place is None else f"{report.pool}/{report.place.group}"


def form(requests: Iterable[SyncRequest]) -> dict[str, ReportedGroup]:
    """Groups by name, of what nodes have reported last."""
    found: dict[str, list[tuple[SyncRequest, ReplicaReport]]] = defaultdict(list)
    for request in requests:
        for report in request.replicas:
            if report.place is not None:
                found[unit(report)].append((request, report))
    return {name: _group(sorted(pods, key=_order)) for name, pods in found.items()}


def _order(pod: tuple[SyncRequest, ReplicaReport]) -> tuple[int, str]:
    place = pod[1].place
    return (-1 if place is None else place.index, pod[1].pod_uid)


def _group(found: list[tuple[SyncRequest, ReplicaReport]]) -> ReportedGroup:
    pods = tuple((request.node, report) for request, report in found)
    refusal = _refusal(found)
    if refusal:
        return ReportedGroup(pods, refusal)
    (request, leader), *rest = found
    followers = tuple(FollowerPod(report.pod_uid, other.node) for other, report in rest)
    formed = ReplicaGroup(leader.pod_uid, request.node, request.guard, followers)
    return ReportedGroup(pods, formed=formed)


def _refusal(found: list[tuple[SyncRequest, ReplicaReport]]) -> str:
    places = [report.place for _, report in found if report.place is not None]
    size = places[0].size
    indices = {place.index for place in places}
    if len({place.size for place in places}) > 1:
        return "its pods name different sizes of their group"
    # Never all places: the size is what an annotation says, which any pod may carry.
    missing = (index for index in range(size) if index not in indices)
    if some := ", ".join(map(str, itertools.islice(missing, _NAMED))):
        return (
            f"{len(found)} of {size} pods of its group are reported; worker-index {some} is not: "
            "does the pool's selector match every pod of the group, on nodes with an agent?"
        )
    if len(found) > size:
        return f"{len(found)} pods say that they are of its group of {size}"
    deaf = sorted({one.node for one, _ in found if not _ADDRESS.fullmatch(one.guard)})
    if deaf:
        return (
            f"the guard of node {deaf[0]} is not asked by others: it needs a certificate "
            "(tls.nodes of the chart)"
        )
    return ""
