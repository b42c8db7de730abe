"""Whose a GPU is, on whose word, and who else computes on it.

A loan takes a GPU from the pod that owns it, so it rests on a proof of ownership:

| proof | the pod has the GPU by what is listed by | counts |
|---|---|---|
| ``Allocated`` | the kubelet: a device plugin or DRA driver gave it | always |
| ``Processes`` | the driver: the pod's processes are there | where the kubelet cannot be asked |
| ``Written`` | its annotation, or the file of static replicas | with the static driver alone |

``Processes`` proves less: a pod that can reach a GPU which is not its own looks like its owner.

The kubelet names a device as its plugin does; GPUs that are given out in parts have no single owner
and are not lent:

| name | of | is |
|---|---|---|
| ``GPU-uuid``, or a CDI device with it in its name | anybody | that GPU |
| ``3`` | a resource ``nvidia.com/...`` | the GPU of that index |
| ``nvidia3``, ``gpu-3`` | such a resource, NVIDIA's DRA driver | the GPU of that minor number |
| each with ``::0`` or ``/vgpu0`` behind it | | a share in time (time-slicing, MPS) |
| ``MIG-...``, ``nvidia3/gi2``, ``gpu-3-mig-...`` | | a slice (MIG) |

Whoever is on the GPU besides its owner refuses the loan (``stranger``), because a rollout would
take time and memory from somebody who has not agreed. Next step: ``rose_agent.pods.claims``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from rose_core.uids import GpuUuid, PodUid, SlotUid

_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_MINOR = re.compile(r"(?:nvidia|gpu-)(\d{1,4})")
_MOST_NAMED = 4  # more pods than this help nobody who reads the reason
DRA_DRIVER = "gpu.nvidia.com"
# NVIDIA's MPS server computes for its clients; the driver lists it beside them.
MPS_SERVER = "nvidia-cuda-mps"


class Proof(StrEnum):
    """On whose word a GPU is a pod's; empty = nobody's yet."""

    NONE = ""
    ALLOCATED = "Allocated"
    PROCESSES = "Processes"
    WRITTEN = "Written"


class AllocatedShare(StrEnum):
    """How much of a GPU is allocated."""

    WHOLE = "whole"
    SHARE = "share"
    SLICE = "slice"


@dataclass(frozen=True)
class AllocatedDevice:
    """Something that the kubelet has allocated.

    Attributes:
        kind: resource name of a device plugin, or driver of a DRA claim.
        name: as plugin or driver call it.
        cdi: names of its CDI devices.
    """

    kind: str
    name: str
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True)
class Allocation:
    """What the kubelet has allocated to a pod that is admitted to the node."""

    namespace: str
    pod: str
    devices: tuple[AllocatedDevice, ...]

    @property
    def owner(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.pod}"


@dataclass(frozen=True)
class DriverGpu:
    """A GPU that the driver lists; ``minor`` is the number of its device file."""

    uuid: GpuUuid
    index: int
    minor: int | None = None


@dataclass(frozen=True)
class AllocatedGpu:
    """A GPU that an allocation names; ``uuid`` empty = the driver lists none of that name."""

    uuid: GpuUuid
    part: AllocatedShare
    name: str


@dataclass(frozen=True)
class Claim:
    """A pod's GPUs, and why they are not lent.

    Attributes:
        refusal: closed word (``rose_core.api.reasons``), empty when nothing speaks against it.
        message: the reason for people, with names.
    """

    gpus: tuple[GpuUuid, ...] = ()
    proof: Proof = Proof.NONE
    refusal: str = ""
    message: str = ""


SHARED, SLICED, NO_GPU, UNKNOWN_GPU = "SharedGpu", "MigEnabled", "NoGPU", "DeviceUnknown"


def find(device: AllocatedDevice, known: Iterable[DriverGpu]) -> AllocatedGpu | None:
    """The GPU that a device is or is a part of; None = it is no GPU."""
    name = device.name
    if "MIG-" in name or "/gi" in name or "-mig-" in name:
        return (
            AllocatedGpu(GpuUuid(""), AllocatedShare.SLICE, name)
            if _is_nvidia(device) or "MIG-" in name
            else None
        )
    base, _, shared = name.partition("::")
    base, _, virtual = base.partition("/vgpu")
    part = AllocatedShare.SHARE if shared or virtual else AllocatedShare.WHOLE
    uuid = _UUID.search(base) or next(filter(None, map(_UUID.search, device.cdi)), None)
    if uuid is not None:
        return AllocatedGpu(GpuUuid(uuid.group()), part, name)
    if base.startswith("GPU-"):  # of a driver that names its GPUs otherwise than NVIDIA's
        return AllocatedGpu(GpuUuid(base), part, name)
    if not _is_nvidia(device):
        return None
    numbered = _numbered(base, known)
    return None if numbered is None else AllocatedGpu(numbered, part, name)


def _numbered(base: str, known: Iterable[DriverGpu]) -> GpuUuid | None:
    """The GPU that a number names, empty where the driver has none of it; None: no number."""
    minor = _MINOR.fullmatch(base)
    if minor is not None:
        wanted = int(minor[1])
        uuids = (gpu.uuid for gpu in known if gpu.minor == wanted)
    elif base.isdecimal():
        wanted = int(base)
        uuids = (gpu.uuid for gpu in known if gpu.index == wanted)
    else:
        return None
    return next(uuids, GpuUuid(""))


def claim(
    namespace: str,
    pod: str,
    allocations: Sequence[Allocation],
    known: Sequence[DriverGpu],
    platform: frozenset[str] = frozenset(),
) -> Claim:
    """What the kubelet says of a pod's GPUs.

    Args:
        namespace: of the pod.
        pod: its name.
        allocations: of every pod on the node.
        known: the node's GPUs.
        platform: namespaces whose pods see GPUs without owning them (DRA's admin access).
    """
    owner = f"{namespace}/{pod}"
    own = [one for one in allocations if one.owner == owner]
    mine = _found(own, known)
    gpus = tuple(dict.fromkeys(one.uuid for one in mine if one.uuid))
    if not mine:
        text = f"the kubelet has allocated no GPU to pod {owner}"
        return Claim((), Proof.ALLOCATED, NO_GPU, text)
    others = [
        (one.owner, found)
        for one in allocations
        if one.owner != owner and one.namespace not in platform
        for found in _found([one], known)
    ]
    refusal = _why_not_lent(mine, others, len(known))
    return Claim(gpus, Proof.ALLOCATED, refusal.word, refusal.message)


class _Refusal(NamedTuple):
    """Why GPUs are not lent; nothing where they are.

    Attributes:
        word, message: ``refusal`` and ``message`` of ``Claim``.
    """

    word: str = ""
    message: str = ""


def _why_not_lent(
    mine: list[AllocatedGpu], others: list[tuple[str, AllocatedGpu]], known: int
) -> _Refusal:
    for one in mine:
        if one.part is AllocatedShare.SLICE:
            text = (
                f"the kubelet has allocated {one.name}, a slice of a GPU; only whole GPUs are lent"
            )
            return _Refusal(SLICED, text)
        if not one.uuid:
            text = (
                f"the kubelet has allocated {one.name}; the driver lists {known} GPUs, none of it"
            )
            return _Refusal(UNKNOWN_GPU, text)
    uuids = {one.uuid for one in mine}
    sharing = sorted({owner for owner, found in others if found.uuid in uuids})
    shares = [one.name for one in mine if one.part is AllocatedShare.SHARE]
    if not sharing and not shares:
        return _Refusal()
    named = ", ".join(sharing[:_MOST_NAMED])
    if shares:
        text = f"the device plugin gives out shares of the GPU ({shares[0]})"
        return _Refusal(SHARED, f"{text}, also to {named}" if sharing else text)
    return _Refusal(SHARED, f"the GPU is allocated to {len(sharing)} more pods: {named}")


def _found(allocations: Iterable[Allocation], known: Sequence[DriverGpu]) -> list[AllocatedGpu]:
    each = (find(device, known) for one in allocations for device in one.devices)
    return [found for found in each if found is not None]


def _is_nvidia(device: AllocatedDevice) -> bool:
    return device.kind.startswith("nvidia.com/") or device.kind == DRA_DRIVER


@dataclass(frozen=True)
class OnGpu:
    """A process on a GPU.

    Attributes:
        slot: uid of the slot whose engine it is.
        pod: uid of its pod.
        seen: its owner could be looked up; False = it is of another pid namespace, or is gone.
        command: its name, as the kernel has it.
    """

    pid: int
    slot: SlotUid = SlotUid("")
    pod: PodUid = PodUid("")
    seen: bool = True
    command: str = ""


@dataclass(frozen=True)
class GpuParty:
    """Who may be on a replica's GPU.

    Attributes:
        pod: uid of the replica's pod.
        pids: processes that are known to be its own.
        names: uid -> ``namespace/name`` of every pod on the node.
        platform: uids of pods that belong to the platform: ROSE's own, monitors.
        proof: on whose word the GPU is the replica's.
        mps: clients of one MPS server, which computes for them.
    """

    pod: PodUid = PodUid("")
    pids: frozenset[int] = frozenset()
    names: Mapping[PodUid, str] = field(default_factory=dict)
    platform: frozenset[PodUid] = frozenset()
    proof: Proof = Proof.NONE
    mps: bool = False


def stranger(process: OnGpu, party: GpuParty) -> str:
    """Who a process is that has no business on the GPU; empty = it has.

    | the process | is |
    |---|---|
    | of the replica's pod, or of the platform's | no stranger |
    | of an engine, unless a pod that is not the platform's bears the engine's mark | no stranger |
    | of any other pod | a stranger, by the pod's name |
    | of no pod: MPS's server where serving shares by MPS | no stranger |
    | of no pod, beside a replica from a file (``Written``) | no stranger |
    | of no pod, else | a stranger, by its command |
    | not to be seen from here | a stranger |
    """
    own = process.pid in party.pids or (process.pod and process.pod == party.pod)
    engine = process.slot and process.pod not in party.names
    if own or engine or process.pod in party.platform:
        return ""
    if process.pod:
        name = party.names.get(process.pod, process.pod)
        return f"pod {name} (process {process.pid})"
    if not process.seen:
        return f"process {process.pid}, which cannot be seen from the guard's pid namespace"
    if party.proof is Proof.WRITTEN or (party.mps and process.command.startswith(MPS_SERVER)):
        return ""
    return f"process {process.pid} ({process.command or 'unknown'}), which belongs to no pod"
