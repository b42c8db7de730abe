"""Tells which GPUs a pod has, by the best proof that this node offers.

| driver | kubelet | a pod's GPUs are |
|---|---|---|
| static | not asked | those of its annotation; else paired with the node's GPUs by age |
| nvml | answers, or has answered | what it has allocated to the pod; nothing else counts |
| nvml | has not been asked yet | not known yet |
| nvml | has never answered | those that the pod's processes are on: weaker, and reported so |

The annotation never counts beside a real driver: who may write a pod could name the GPU of
another tenant by it. Next step: ``rose_core.devices.ownership`` decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rose_agent.devices.driver import Gpu
from rose_agent.pods.podresources import PodResources
from rose_core.devices.ownership import NO_GPU, UNKNOWN_GPU, Claim, DriverGpu, Proof, claim
from rose_core.identity import GpuUuid

GPU_ANNOTATION = "rose-gpu.dev/gpus"
# A node has 16 GPUs, and NVIDIA's names have 40 characters.
_MOST_WRITTEN, _LONGEST_NAME = 64, 128
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def own_namespace(file: Path = _NAMESPACE) -> frozenset[str]:
    """The namespace of this pod; none outside of a cluster."""
    try:
        return frozenset({file.read_text().strip()})
    except OSError:
        return frozenset()


@dataclass(frozen=True)
class ClaimingPod:
    """A pod whose GPUs are asked for.

    Attributes:
        annotation: what ``GPU_ANNOTATION`` says.
        older: how many pods of pools are older.
        pids: of its processes.
        ended: ``namespace/name`` of pods that have ended; kubelets before 1.34 still list them.
    """

    namespace: str
    name: str
    annotation: str = ""
    older: int = 0
    pids: tuple[int, ...] = ()
    ended: frozenset[str] = frozenset()


def driver_gpus(gpus: Sequence[Gpu]) -> tuple[DriverGpu, ...]:
    """The driver's GPUs by the names that a kubelet may use."""
    return tuple(DriverGpu(gpu.uuid, gpu.index, gpu.minor) for gpu in gpus)


class Claims(Protocol):
    """Which GPUs a pod has."""

    def of(self, asked: ClaimingPod) -> Claim:
        """A pod's GPUs."""

    @property
    def weakness(self) -> str:
        """Why ownership is less than proven on this node; empty when it is."""

    async def run(self) -> None:
        """Keep what is known fresh until cancelled."""


class WrittenClaims:
    """With the static driver: as written, else one GPU each in the order of age.

    Args:
        gpus: every GPU of the node, in order.
    """

    def __init__(self, gpus: Callable[[], Sequence[GpuUuid]]) -> None:
        self._gpus = gpus

    def of(self, asked: ClaimingPod) -> Claim:
        """Take the GPUs that the pod's annotation names, else the one that its age gives it."""
        names = asked.annotation.split(",", _MOST_WRITTEN)
        if len(names) > _MOST_WRITTEN or max(map(len, names)) > _LONGEST_NAME:
            text = f"annotation {GPU_ANNOTATION} names more than GPUs of one node"
            return Claim((), Proof.WRITTEN, UNKNOWN_GPU, text)
        written = tuple(GpuUuid(name) for name in names if name)
        aged = tuple(self._gpus()[asked.older : asked.older + 1])
        return Claim(written or aged, Proof.WRITTEN)

    @property
    def weakness(self) -> str:
        """Anybody may write an annotation."""
        return "the static device driver takes the pod's own annotation for its GPUs"

    async def run(self) -> None:
        """Nothing to keep fresh."""
        await asyncio.Event().wait()


class KubeletClaims:
    """With a real driver.

    Args:
        kubelet: what is allocated.
        known: GPUs that the driver lists.
        used_by: GPUs on which one of these processes holds memory.
        platform: namespaces whose pods see GPUs without owning them.
    """

    def __init__(
        self,
        kubelet: PodResources,
        known: Callable[[], Sequence[DriverGpu]],
        used_by: Callable[[Sequence[int]], tuple[GpuUuid, ...]],
        platform: frozenset[str] = frozenset(),
    ) -> None:
        self._kubelet = kubelet
        self._known = known
        self._used_by = used_by
        self._platform = platform

    def of(self, asked: ClaimingPod) -> Claim:
        """As the kubelet says; the annotation is not read."""
        kubelet = self._kubelet
        if kubelet.allocations is not None:
            living = [
                allocation
                for allocation in kubelet.allocations
                if allocation.owner not in asked.ended
            ]
            return claim(asked.namespace, asked.name, living, self._known(), self._platform)
        if not kubelet.asked:
            return Claim((), Proof.NONE, UNKNOWN_GPU, kubelet.problem)
        used = self._used_by(asked.pids)
        if not used:
            text = f"no process of pod {asked.namespace}/{asked.name} is on a GPU"
            return Claim((), Proof.PROCESSES, NO_GPU, text)
        return Claim(used, Proof.PROCESSES)

    @property
    def weakness(self) -> str:
        """The kubelet has never answered."""
        if self._kubelet.allocations is not None or not self._kubelet.asked:
            return ""
        return f"{self._kubelet.problem}; GPUs are told by process lists, which proves less"

    async def run(self) -> None:
        """Ask the kubelet until cancelled."""
        await self._kubelet.run()
