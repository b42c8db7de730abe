"""What a node can do beside plain time-slicing, axis by axis, and what a pool needs of it.

The engine host says for each capability an empty text (it works), or a reason of the closed list
with the reason after a colon. A text may be given for the node (``DriverMemoryLimit``) or for one
of its GPUs (``MPS/GPU-...``), which comes first. What is opted into and not spoken of is not there:
an engine host that is too old to say so cannot do it.

| capability | asked for by | word when it is missing |
|---|---|---|
| ``DeviceAccess`` | every pool; missing only when the host says so | it, or ``DriverTooOld`` |
| ``MPS`` | ``compute: MPS`` | one of ``rose_core.devices.mps.MpsRefusal`` |
| ``DriverMemoryLimit`` | ``memoryLimit: Driver`` | ``DriverLimitUnavailable`` |
| ``GpuOwnership`` | nobody: a weaker proof lends too, and is said | - |
| ``ElasticMemory`` | ``memorySource: Elastic`` | ``ElasticUnavailable`` |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Capability(StrEnum):
    """An axis that a node may lack."""

    DEVICE_ACCESS = "DeviceAccess"
    MPS = "MPS"
    DRIVER_LIMIT = "DriverMemoryLimit"
    ELASTIC = "ElasticMemory"
    OWNERSHIP = "GpuOwnership"


SEEN = "GpuAccess"
"""Beside the capabilities, from the guard, for people: how many GPUs it sees, through what."""
_UNSPOKEN = {
    Capability.MPS: "MpsUnavailable",
    Capability.DRIVER_LIMIT: "DriverLimitUnavailable",
    Capability.ELASTIC: "ElasticUnavailable",
}
_SILENT = "the node's engine host does not speak of it; it is older than this operator"


@dataclass(frozen=True)
class MissingCapability:
    """A capability that a node lacks.

    Attributes:
        reason: one of a closed list.
        text: why, and what to do.
    """

    capability: Capability
    reason: str
    text: str


def compute_needs(compute: str) -> tuple[Capability, ...]:
    """What a pool's ``compute`` needs."""
    return (Capability.MPS,) if compute == "MPS" else ()


def memory_needs(source: str, limit: str) -> tuple[Capability, ...]:
    """What a pool's ``memorySource`` and ``memoryLimit`` need."""
    wanted = {Capability.ELASTIC: source == "Elastic", Capability.DRIVER_LIMIT: limit == "Driver"}
    return tuple(one for one, asked in wanted.items() if asked)


def gpu_key(capability: Capability, uuid: str) -> str:
    """Name of a capability of one GPU."""
    return f"{capability}/{uuid}"


def first_missing(
    reported: Mapping[str, str], wanted: Iterable[Capability], gpu_uuids: Iterable[str]
) -> MissingCapability | None:
    """The first capability that a replica's node or one of its GPUs lacks."""
    gpus = tuple(gpu_uuids)
    for capability in (Capability.DEVICE_ACCESS, *wanted):
        own = [
            reported[key] for key in (gpu_key(capability, uuid) for uuid in gpus) if key in reported
        ]
        lack = next(filter(None, own), "") if own else reported.get(capability.value)
        if lack is None and capability in _UNSPOKEN:
            return MissingCapability(capability, _UNSPOKEN[capability], _SILENT)
        if lack:
            reason, _, text = lack.partition(": ")
            return MissingCapability(capability, reason, text)
    return None
