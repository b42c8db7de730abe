"""Health of every replica's GPUs, what may be lent of them, the budget of what is."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rose_agent.devices.watch import DeviceWatch, Lent, Terms
from rose_agent.guard import report
from rose_agent.guard.replica import Replica
from rose_agent.guard.slot import Slot


def look_at(
    devices: DeviceWatch, replicas: Mapping[str, Replica], slots: Mapping[str, Slot]
) -> None:
    """Give every replica the view of its GPUs, and its slots their budget."""
    for uid, replica in replicas.items():
        beside = [s for s in slots.values() if s.grant and s.grant.pod_uid == uid]
        engines = [slot.status for slot in beside if slot.status is not None]
        lent = Lent(
            frozenset(slots),
            tuple(engine.residue_bytes or 0 for engine in engines),
            sum(engine.released_bytes for engine in engines),
            " ".join(sorted(engine.version for engine in engines)),
        )
        terms = Terms.of(replica.policy)
        kv_permille = report.kv_permille(replica, time.monotonic_ns())
        replica.view = devices.look(uid, replica.pod.gpu_uuids, terms, lent, kv_permille)
        for slot in beside:
            slot.budget = replica.view.budget
