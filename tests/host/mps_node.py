"""A node with one GPU that is shared through MPS: stand-ins for the daemon, NVML and serving."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rose_agent.devices.mps.asking import PROGRAM, send
from rose_agent.devices.mps.control import MpsControl, Pipes
from rose_agent.devices.nvml import NvmlDriver
from rose_agent.devices.owners import Owner
from rose_agent.host.sharing.mps import MpsNode
from rose_agent.host.sharing.sharing import SharingMeans
from rose_agent.os.groups import wait_for
from rose_core.identity import GpuUuid, PodUid, SlotUid
from rose_core.wire.host import EnsureEngine
from rose_core.wire.sync import Sharing
from rose_dev.gpu import layout
from rose_dev.gpu.library import preloaded
from rose_dev.gpu.state import State, StateGpu
from rose_dev.gpu.testing import require
from rose_dev.process_testing import CLI, start_process
from rose_dev.shell import ending_with_us
from tests.host.helpers import order

GPU = GpuUuid("GPU-a")
POD = PodUid("pod-1")
GIB = 1 << 30
WHOLE = 132


@dataclass
class Node:
    """The stand-ins, and what the tests tell them."""

    pipes: Pipes
    gpu: StateGpu
    serving: int

    @property
    def ways(self) -> SharingMeans:
        """As the host's flags would make them."""
        return SharingMeans(MpsNode(self.pipes.root, NvmlDriver.open(), PROGRAM, self.owner))

    @property
    def control(self) -> MpsControl:
        """A control of the node's daemon."""
        return MpsControl(self.pipes, PROGRAM)

    def owner(self, pid: int) -> Owner:
        """Serving runs in the pod; whoever else there is, is an engine."""
        return Owner(pod=POD) if pid == self.serving else Owner(slot=SlotUid("some-slot"))

    def send_command(self, line: str) -> str:
        """What a client would tell the daemon."""
        return send(self.pipes.pipe / "control", line)

    def opt_in(self) -> None:
        """Serving uses its GPU through the daemon."""
        assert self.send_command(f"fake_connect {self.serving}") == ""

    def clients(self) -> frozenset[int]:
        """Of the server, without serving."""
        servers = self.control.servers()
        return servers[0].clients - {self.serving} if servers else frozenset()

    def terminated(self) -> set[int]:
        """Clients whose work was ended by command."""
        return set(map(int, self.send_command("fake_terminated").split()))


@contextlib.contextmanager
def node() -> Iterator[Node]:
    """The daemon as ``rose mps`` runs it, and a process that stands for serving."""
    require()
    folder = Path(tempfile.mkdtemp(prefix="mps", dir="/tmp"))
    folder.chmod(0o755)
    pipes = Pipes(folder).create()
    daemon = start_process(CLI, "mps", "--root", str(folder), "--program", " ".join(PROGRAM))
    serving = subprocess.Popen(ending_with_us(["/bin/sleep", "600"]))
    try:
        assert wait_for((pipes.pipe / "control").exists, 30.0)
        with State.create(folder / "nvml.state", "h100x2") as nvml, preloaded(nvml.path):
            nvml.raw.gpu_count = 1
            (gpu,) = nvml.gpus
            gpu.raw.uuid, gpu.raw.memory_total = GPU.encode(), 80 * GIB
            gpu.start(serving.pid, 40 * GIB, layout.MPS)
            yield Node(pipes, gpu, serving.pid)
    finally:
        serving.kill()
        serving.wait()
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(30) == 0
        shutil.rmtree(folder, ignore_errors=True)


def shared_order(percent: int = 30, **arguments: str) -> EnsureEngine:
    """An order for a fake engine on the GPU, under MPS."""
    plain = order(multiprocessors=str(WHOLE), **arguments)  # type: ignore[arg-type]
    engine = msgspec.structs.replace(plain.engine, sharing=Sharing("MPS", percent))
    return msgspec.structs.replace(plain, engine=engine, gpu_uuids=(GPU,), pod_uid=POD)
