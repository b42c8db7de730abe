"""What a loan costs before it gives anything, learned per lease: from its making until it runs."""

from __future__ import annotations

from collections.abc import Iterable

from rose_core.api import RolloutSlot
from rose_core.lending.gate import usual_start
from rose_core.wire.sync import SlotState
from rose_operator.plan.admission import created
from rose_operator.plan.telemetry import NodeTelemetry


class ToggleCosts:
    """Starts that were observed from begin to end."""

    def __init__(self) -> None:
        self._starting: set[str] = set()
        self._ran: set[str] = set()
        self._seconds: dict[str, float] = {}

    def observe(self, slots: Iterable[RolloutSlot], telemetry: NodeTelemetry, now: float) -> None:
        """Look at every slot's report; ``now`` is seconds since the epoch."""
        present = {slot.metadata.uid: slot for slot in slots}
        self._starting &= present.keys()
        self._ran &= present.keys()
        leases = {slot.spec.lease_ref.uid for slot in present.values()}
        self._seconds = {uid: value for uid, value in self._seconds.items() if uid in leases}
        for uid, slot in present.items():
            if uid in self._ran:
                continue
            report = telemetry.slot(uid, slot.spec.member.node)
            if report is not None and report.state is SlotState.RUNNING:
                self._ran.add(uid)
                if uid in self._starting:  # else it ran before we looked
                    self._learn(slot.spec.lease_ref.uid, now - created(slot).timestamp())
            else:
                self._starting.add(uid)

    def _learn(self, lease: str, seconds: float) -> None:
        self._seconds[lease] = usual_start(self._seconds.get(lease), seconds)

    def seconds(self, lease_uid: str) -> float | None:
        """Usual cost of a loan to this lease, None before the first."""
        return self._seconds.get(lease_uid)

    def has_run(self, slot_uid: str) -> bool:
        """Whether the slot's engine has been seen running."""
        return slot_uid in self._ran
