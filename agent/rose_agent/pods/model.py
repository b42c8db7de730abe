"""One serving pod as the guard needs it, whoever found it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rose_core.wire.sync import PoolPolicy


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
        gpu_uuids: GPUs it uses.
        feed_port: where its engine publishes its load (``signals.feed``), 0 = nowhere.
        group_size: pods that are one replica together, as their controller says.
    """

    uid: str
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
    gpu_uuids: tuple[str, ...] = ()
    feed_port: int = 0
    group_size: int = 1

    @property
    def url(self) -> str:
        """Of its engine."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"


class PodSource(Protocol):
    """Where pods come from."""

    @property
    def synced(self) -> bool:
        """The source has seen every pod at least once; before that, absence says nothing."""

    def pods(self, policies: Sequence[PoolPolicy]) -> dict[str, ServingPod]:
        """Serving pods of these pools by uid."""

    async def run(self) -> None:
        """Keep the list fresh until cancelled."""
