"""Closed words: why a gate is open or closed, why a slot is being taken back.

The same word stands in the slot's condition, in Events, in metrics and in the flight recorder;
``docs/guard.md`` explains each. Next step: ``gate`` and ``slot`` give them.
"""

from __future__ import annotations

from enum import StrEnum

from rose_core.host_reasons import HostReason


class GateReason(StrEnum):
    """Why a gate is open (the first three) or closed."""

    IDLE = "Idle"
    SLACK = "Slack"
    SERVING_ASLEEP = "ServingAsleep"

    STOP_REQUESTED = "StopRequested"
    NOT_GRANTED = "NotGranted"
    POOL_NOT_LENDING = "PoolNotLending"
    SERVING_GONE = "ServingGone"
    SERVING_NOT_READY = "ServingNotReady"
    SERVING_SETTLING = "ServingSettling"
    SERVING_AWAKE = "ServingAwake"
    MEMORY_PRESSURE = "MemoryPressure"
    DEVICE_UNFIT = "DeviceUnfit"
    HOST_STALE = "HostStale"
    SIGNAL_MISSING = "SignalMissing"
    SIGNAL_STALE = "SignalStale"
    SIGNAL_LOST = "SignalLost"
    SIGNAL_OPAQUE = "SignalOpaque"
    SIGNAL_UNVERIFIED = "SignalUnverified"
    SIGNAL_CONTRADICTED = "SignalContradicted"
    BREAKER_OPEN = "BreakerOpen"
    WITHHELD = "CrossoverWithheld"
    SERVING_BUSY = "ServingBusy"
    NO_PREFILL_SLACK = "NoPrefillSlack"
    NO_DECODE_SLACK = "NoDecodeSlack"
    COOL_DOWN = "CoolDown"
    NOT_CERTIFIED = "NotCertified"
    COMPUTE_LIMIT = "ComputeLimit"
    LEADER_SILENT = "LeaderSilent"


def slot_reason(reason: str) -> str:
    """A slot's reason as a condition may repeat it: the guard's or the host's.

    Returns:
        ``Other`` for what another version's node calls it.
    """
    return reason if reason in _GATE_REASONS else HostReason(reason).value


_GATE_REASONS = frozenset(reason.value for reason in GateReason)

STANDING = frozenset(
    {
        GateReason.STOP_REQUESTED,
        GateReason.POOL_NOT_LENDING,
        GateReason.SERVING_GONE,
        GateReason.SERVING_NOT_READY,
        GateReason.SERVING_SETTLING,
        GateReason.DEVICE_UNFIT,
        GateReason.SIGNAL_UNVERIFIED,
    }
)
"""Closed with these, neither a request nor the end of one opens the gate or has to close it."""

PACED = frozenset({GateReason.SLACK, GateReason.COMPUTE_LIMIT})
"""Closed with these the gate only pauses for a moment: the permit alone stops the engine, routers
go on sending turns."""

VACATING = frozenset(
    {
        GateReason.STOP_REQUESTED,
        GateReason.NOT_GRANTED,
        GateReason.POOL_NOT_LENDING,
        GateReason.SERVING_GONE,
        GateReason.SERVING_NOT_READY,
        GateReason.SERVING_SETTLING,
        GateReason.SERVING_AWAKE,
    }
)
"""Reasons for which a gate does not merely close: the engine has to leave the GPU (rung 5)."""
