"""MPS of this node as the engine host uses it: ask the daemon, check, end clients through it.

Decisions are ``rose_core.devices.mps``; this gathers what they are made of. A process is serving's
when its cgroup names the serving pod, so the host must see the node's processes (``hostPID``).
Every method blocks for as long as the control program takes: callers use a thread.
Next step: ``sharing`` says when each is asked.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.mps.control import PROGRAM, MpsControl, Pipes
from rose_agent.devices.owners import Owner, owner_of
from rose_agent.errors import DeviceError, MpsError
from rose_core.devices.mps import (
    EndStep,
    Finding,
    MpsClient,
    MpsRefusal,
    MpsSeen,
    MpsServer,
    client_environment,
    is_faulty,
    is_limited,
    may_share,
    next_end_step,
)
from rose_core.identity import GpuUuid, PodUid

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.05
_NO_ROOT = "this engine host was started without --mps-root (chart: mps.enabled)"


@dataclass(frozen=True)
class MpsNode:
    """The MPS daemon of the node.

    Attributes:
        root: folder of its directories; None = there is none.
        driver: knows who is on a GPU, and its multiprocessors.
        program: the control program and arguments that come before its own.
        owner: whose a process is.
    """

    root: Path | None = None
    driver: DeviceDriver | None = None
    program: Sequence[str] = (PROGRAM,)
    owner: Callable[[int], Owner | None] = owner_of

    def environment(self, percent: int) -> Mapping[str, str]:
        """What makes a process a limited client of the daemon's server."""
        pipes = self._pipes()
        return client_environment(str(pipes.pipe), str(pipes.log), percent)

    def may_share(
        self, gpus: Collection[GpuUuid], engine_uid: int, pod_uid: PodUid = PodUid("")
    ) -> Finding:
        """Whether an engine of this user may start beside serving.

        Args:
            gpus: uuids; serving must be on one of them where no pod is named.
            engine_uid: user that the engine will be.
            pod_uid: the serving pod; empty = any pod that is no engine's.
        """
        if self.root is None:
            return Finding(MpsRefusal.UNAVAILABLE, _NO_ROOT)
        try:
            servers = self._control().servers()
        except MpsError as error:
            return may_share(MpsSeen(None, frozenset(), str(error)), engine_uid)
        clients = frozenset[int]().union(*(server.clients for server in servers))
        serving = frozenset(pid for pid in clients if self._serves(pid, pod_uid))
        if not pod_uid:
            serving &= self._on(gpus, serving)
        return may_share(MpsSeen(servers, serving), engine_uid)

    def is_limited(self, gpu: GpuUuid, client: MpsClient, percent: int) -> Finding:
        """Whether an engine that started has got its share of its first GPU and no more.

        Args:
            gpu: its first one; its multiprocessors are the whole.
            client: its processes, and the multiprocessors that it sees.
            percent: of them that were ordered.
        """
        servers = self.servers() or ()
        ours = next((server for server in servers if server.clients & client.pids), None)
        server = ours or next(iter(servers), None)
        if server is None:
            return Finding(MpsRefusal.UNAVAILABLE, "the MPS server is gone")
        return is_limited(client, server, self._whole(gpu), percent)

    def is_faulty(self) -> bool:
        """A server is in FAULT; no answer is no fault."""
        return is_faulty(self.servers() or ())

    def detach(self, pids: Collection[int]) -> None:
        """End these processes' work on their GPUs, so that they are safe to kill.

        Waits until the server lists none of them, at most as long as the decision allows.
        """
        began, ordered = time.monotonic(), set[int]()
        while True:
            listed = [(server, pid) for server in self.servers() or () for pid in server.clients]
            ours = [(server, pid) for server, pid in listed if pid in pids]
            waited_s = time.monotonic() - began
            steps = [self._step(server, pid, ordered, waited_s) for server, pid in ours]
            if all(step is EndStep.KILL for step in steps):
                return
            time.sleep(_POLL_SECONDS)

    def _step(self, server: MpsServer, pid: int, ordered: set[int], waited_s: float) -> EndStep:
        step = next_end_step(listed=True, ordered=pid in ordered, waited_s=waited_s)
        if step is EndStep.TERMINATE:
            ordered.add(pid)
            try:
                self._control().terminate(server.pid, pid)
            except MpsError as error:  # it may have left between the two questions
                _log.info("%s", error)
        return step

    def servers(self) -> tuple[MpsServer, ...] | None:
        """The daemon's servers; None when no daemon answers."""
        if self.root is None:
            return None
        try:
            return self._control().servers()
        except MpsError as error:
            _log.info("%s", error)
            return None

    def _pipes(self) -> Pipes:
        return Pipes(self.root or Path("/nonexistent"))

    def _control(self) -> MpsControl:
        return MpsControl(self._pipes(), self.program)

    def _serves(self, pid: int, pod_uid: PodUid) -> bool:
        owner = self.owner(pid)
        if owner is None or owner.slot:
            return False
        return owner.pod == pod_uid if pod_uid else bool(owner.pod)

    def _on(self, gpus: Collection[GpuUuid], pids: frozenset[int]) -> frozenset[int]:
        """Those that use one of the GPUs; all where the driver cannot know."""
        found = set[int]()
        for gpu in gpus:
            listed = None
            with contextlib.suppress(DeviceError):
                listed = self.driver.processes(gpu) if self.driver is not None else None
            if listed is None:
                return pids
            found |= {process.pid for process in listed}
        return pids & found if gpus else pids

    def _whole(self, gpu: GpuUuid) -> int | None:
        with contextlib.suppress(DeviceError):
            return self.driver.multiprocessors(gpu) if self.driver is not None else None
        return None
