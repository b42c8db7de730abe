"""Serving replicas written down in a file, for tests and benchmarks without Kubernetes.

Read again whenever it was changed, so a test can do so under a running agent. Format (YAML)::

    replicas:
      - uid: serving-0
        pool: default/chat
        address: 127.0.0.1
        port: 30000
        pids: [4711]           # optional; their end vacates the GPU
        interfaces: [lo]       # optional; default all
        gpus: [GPU-static-0]   # optional
        ready: true            # optional
        stopped: false         # optional
        feed_port: 5558        # optional; SGLang's load feed
        group: llama/0         # optional; replica of several pods, with its place among them
        index: 0
        size: 2
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pydantic
import yaml

from rose_agent.errors import BadConfiguration
from rose_agent.pods.model import NodePods, ServingPod
from rose_core.devices.ownership import Claim, Proof
from rose_core.identity import GpuUuid, PodUid
from rose_core.wire.sync import GroupPlace, PoolPolicy
from rose_wire import problems

_log = logging.getLogger(__name__)


class StaticReplica(pydantic.BaseModel):
    """One entry of the file."""

    model_config = pydantic.ConfigDict(extra="forbid")

    uid: PodUid = pydantic.Field(min_length=1)
    pool: str = pydantic.Field(pattern="^[^/]+/[^/]+$")
    address: str = "127.0.0.1"
    port: int = pydantic.Field(gt=0, lt=65536)
    pid: int = 0
    pids: tuple[int, ...] = ()
    interfaces: tuple[str, ...] = ()
    gpus: tuple[GpuUuid, ...] = ()
    instance: str = ""
    ready: bool = True
    stopped: bool = False
    feed_port: int = pydantic.Field(default=0, ge=0, lt=65536)
    group: str = ""
    index: int = pydantic.Field(default=0, ge=0)
    size: int = pydantic.Field(default=1, ge=1)


class StaticReplicas(pydantic.BaseModel):
    """The file."""

    model_config = pydantic.ConfigDict(extra="forbid")

    replicas: tuple[StaticReplica, ...] = ()


class StaticPods:
    """Pods from such a file.

    Raises:
        BadConfiguration: the file is missing or malformed at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._look()
        self._file = self._read()

    @property
    def synced(self) -> bool:
        """A file is always complete."""
        return True

    @property
    def residents(self) -> NodePods:
        """A file knows no others."""
        return NodePods()

    @property
    def weakness(self) -> str:
        """Whoever wrote the file has the node."""
        return "replicas and their GPUs are taken from a file of the node (--static-replicas)"

    def pods(self, policies: Sequence[PoolPolicy]) -> dict[PodUid, ServingPod]:
        """Replicas of the known pools; a file that cannot be read now keeps its last content."""
        stamp = self._look()
        if stamp != self._stamp:
            try:
                self._file, self._stamp = self._read(), stamp
            except BadConfiguration as error:
                _log.warning("%s", error)
        pools = {policy.pool for policy in policies}
        return {r.uid: _pod(r) for r in self._file.replicas if r.pool in pools}

    async def run(self) -> None:
        """Nothing to keep fresh."""
        await asyncio.Event().wait()

    def _look(self) -> tuple[int, int, int]:
        """What changes with the file; zeros when it is not there."""
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def _read(self) -> StaticReplicas:
        try:
            return StaticReplicas.model_validate(yaml.safe_load(self._path.read_text()) or {})
        except problems.FILE_ERRORS as error:
            message = f"--static-replicas {self._path}: {problems.of_file(error)}"
            raise BadConfiguration(message) from error


def _pod(replica: StaticReplica) -> ServingPod:
    return ServingPod(
        uid=replica.uid,
        namespace=replica.pool.split("/")[0],
        name=replica.uid,
        pool=replica.pool,
        address=replica.address,
        port=replica.port,
        instance=replica.instance or ",".join(map(str, replica.pids)),
        ready=replica.ready,
        stopped=replica.stopped,
        pid=replica.pid,
        pids=replica.pids,
        interfaces=replica.interfaces,
        claim=Claim(replica.gpus, Proof.WRITTEN),
        feed_port=replica.feed_port,
        group_size=replica.size,
        place=GroupPlace(replica.group, replica.index, replica.size) if replica.group else None,
    )
