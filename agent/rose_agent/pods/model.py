"""One serving pod as the guard needs it, however it was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rose_core.devices.ownership import Claim
from rose_core.identity import GpuUuid, PodUid
from rose_core.wire.sync import GroupPlace, PoolPolicy


@dataclass(frozen=True)
class ServingPod:
    """A pod that belongs to a pool.

    Attributes:
        pool: ``namespace/name``.
        address, port: where its engine answers HTTP.
        instance: changes whenever the serving container restarts.
        ready: the pod is Ready.
        ready_since_s: wall-clock seconds since when, 0 unknown.
        stopped: the owner's stop annotation is set.
        pid: a process inside the pod, 0 = the agent's own network namespace.
        pids: serving processes whose end means that serving has gone.
        interfaces: to tap; empty = all.
        claim: its GPUs, and on whose word they are its own.
        feed_port: where its engine publishes its load (``signals.feed``), 0 = nowhere.
        group_size: pods that are one replica together, as their controller says.
        place: among them, where their controller says that too.
    """

    uid: PodUid
    namespace: str
    name: str
    pool: str
    address: str
    port: int
    instance: str = ""
    ready: bool = True
    ready_since_s: float = 0.0
    restarted: bool = False
    stopped: bool = False
    pid: int = 0
    pids: tuple[int, ...] = ()
    interfaces: tuple[str, ...] = ()
    claim: Claim = field(default_factory=Claim)
    feed_port: int = 0
    group_size: int = 1
    place: GroupPlace | None = None

    @property
    def follows(self) -> bool:
        """Another pod takes its replica's requests."""
        return self.place is not None and self.place.index > 0

    @property
    def gpu_uuids(self) -> tuple[GpuUuid, ...]:
        """GPUs it uses."""
        return self.claim.gpus

    @property
    def url(self) -> str:
        """Base URL of the engine that serves in the pod."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class NodePods:
    """Every pod of the node, by uid.

    Attributes:
        names: ``namespace/name``.
        platform: those of ROSE's own namespace, and of others that the platform has named.
    """

    names: Mapping[PodUid, str] = field(default_factory=dict)
    platform: frozenset[PodUid] = frozenset()


class PodSource(Protocol):
    """Where pods come from."""

    @property
    def synced(self) -> bool:
        """The source has seen every pod at least once; before that, absence says nothing."""

    @property
    def residents(self) -> NodePods:
        """All pods of the node, those of no pool included."""

    @property
    def weakness(self) -> str:
        """Why it is less than proven which GPUs are whose; empty when it is proven."""

    def pods(self, policies: Sequence[PoolPolicy]) -> dict[PodUid, ServingPod]:
        """Serving pods of these pools by uid."""

    async def run(self) -> None:
        """Keep the list fresh until cancelled."""
