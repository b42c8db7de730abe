"""What leases' engines need of a GPU, as the engine hosts that were to start them have said.

Kept by lease, pool and node, beside the terms of which it was said: once a lease asks for another
model or cache, or a pool shares in another way, its size is unknown again. Lost with the process,
and learned anew from the next report of a slot, or at the cost of one slot that does not start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rose_core import lending
from rose_core.api import RolloutLease, RolloutSlot, ServingPool
from rose_core.api.rolloutslot import SlotEngine, SlotSharing
from rose_core.host_reasons import HostReason
from rose_core.wire.sync import SlotState
from rose_operator.plan.slot_terms import engine_of, sharing_of
from rose_operator.plan.telemetry import NodeTelemetry

_UNKNOWN = lending.EngineNeeds()


@dataclass
class _Sized:
    """Of one lease in one pool: the terms, and bytes by node."""

    engine: SlotEngine
    sharing: SlotSharing
    nodes: dict[str, int] = field(default_factory=dict)


class EngineSizes:
    """The sizes that are known."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, _Sized]] = {}
        self._lacking: set[str] = set()

    def observe(
        self,
        leases: Iterable[RolloutLease],
        slots: Iterable[RolloutSlot],
        telemetry: NodeTelemetry,
    ) -> None:
        """Look at every slot's report; of leases that are gone nothing is kept."""
        present = {lease.metadata.uid for lease in leases}
        self._known = {uid: known for uid, known in self._known.items() if uid in present}
        self._lacking = set()
        for slot in slots:
            report = telemetry.slot(slot.metadata.uid, slot.spec.member.node)
            if report is None or report.slot.generation != slot.metadata.generation:
                continue
            failed = report.state in {SlotState.FAILED, SlotState.STARTING}
            if failed and report.reason == HostReason.INSUFFICIENT_MEMORY:
                self._lacking.add(slot.metadata.uid)
            if report.needs_bytes is not None and slot.spec.lease_ref.uid in present:
                self._learn(slot, report.needs_bytes)

    def _learn(self, slot: RolloutSlot, needed: int) -> None:
        spec = slot.spec
        pools = self._known.setdefault(spec.lease_ref.uid, {})
        sized = pools.get(spec.pool_ref.key)
        if sized is None or (sized.engine, sized.sharing) != (spec.engine, spec.sharing):
            sized = pools[spec.pool_ref.key] = _Sized(spec.engine, spec.sharing)
        sized.nodes[spec.member.node] = needed

    def needs(self, lease: RolloutLease, pools: Mapping[str, ServingPool]) -> lending.EngineNeeds:
        """What is known of the lease's engine as it is asked for now.

        Args:
            lease: as the API server has it.
            pools: by key; of others nothing is known.
        """
        known = self._known.get(lease.metadata.uid)
        if known is None:
            return _UNKNOWN
        engine = engine_of(lease)
        return lending.EngineNeeds(
            {
                (key, node): needed
                for key, sized in known.items()
                if key in pools
                and (sized.engine, sized.sharing) == (engine, sharing_of(pools[key]))
                for node, needed in sized.nodes.items()
            }
        )

    def lacks_memory(self, slot_uid: str) -> bool:
        """Whether the slot's node has found too little memory to start its engine."""
        return slot_uid in self._lacking
