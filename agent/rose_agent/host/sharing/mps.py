"""MPS of this node as the engine host uses it: ask the daemon, check, end clients through it.

Decisions are ``rose_core.devices.mps``; this gathers what they are made of. A process is serving's
when its cgroup names the serving pod, so the host must see the node's processes (``hostPID``).
Every method blocks for as long as the control program takes: callers use a thread.

Process trees of MPS clients stop by their own permit, and leave the server before they die. Nobody
has measured what a frozen client does to the other clients of its server, and killing one with work
under way can hang them all. So the host never freezes such a tree. The plugin inside waits at its
permit and reports that it rests (``Status.resting``). The host asks for that while the tree should
stand still. A tree that does not report it in time is killed like any other
(``enforcement.tree``), after the server was asked to end its work.

| asked | what is true |
|---|---|
| no control socket yet | standing still: it is loading, within its share, and has no turns |
| ``resting``, permit not open | standing still |
| anything else, or no answer | not standing still |

Next step: ``sharing`` says when each is asked.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.mps.control import PROGRAM, MpsControl, Pipes
from rose_agent.devices.owners import Owner, owner_of
from rose_agent.errors import DeviceError, GroupError, MpsError
from rose_agent.os.groups import ProcessGroup
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
from rose_engines.weights.calls import GetStatus, Status, ask

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.05
_NO_ROOT = "this engine host was started without --mps-root (chart: mps.enabled)"

_STATUS_SECONDS = 0.5
_REST_POLL_SECONDS = 0.005


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


class ClientGroup:
    """A tree whose processes leave their MPS server before they are killed.

    Args:
        tree: the tree itself.
        let_go: takes processes from the server; blocks until they have left.
    """

    def __init__(self, tree: ProcessGroup, let_go: Callable[[Collection[int]], None]) -> None:
        self._tree = tree
        self._let_go = let_go

    @property
    def driver(self) -> str:
        """Driver of the process tree, which the client shares."""
        return self._tree.driver

    @property
    def directory(self) -> Path | None:
        """Directory of the process tree, which the client shares."""
        return self._tree.directory

    def pids(self) -> tuple[int, ...]:
        """Processes of the tree, the client among them."""
        return self._tree.pids()

    def freeze(self) -> None:
        """Nothing: the permit stops it."""

    def thaw(self) -> None:
        """Whoever froze it from outside is undone."""
        self._tree.thaw()

    def is_frozen(self) -> bool:
        """Whether the kernel holds it, which here nobody of ours asks for."""
        return self._tree.is_frozen()

    def cpu_ns(self) -> int | None:
        """Not known: what runs on the GPU needs no processor."""
        return None

    def kill(self) -> None:
        """Take every process from the server, then kill the tree."""
        self._let_go(self.pids())
        self._tree.kill()

    def remove(self) -> None:
        """Remove the process tree."""
        self._tree.remove()


class SteeredGroup(ClientGroup):
    """The same tree for the enforcer, whose thread must wait for nobody.

    Args:
        tree: the tree.
        let_go: see ``ClientGroup``.
        control: control socket of the plugin inside.
    """

    def __init__(
        self, tree: ProcessGroup, let_go: Callable[[Collection[int]], None], control: Path
    ) -> None:
        super().__init__(tree, let_go)
        self._control = control
        self._stopping = threading.Event()
        self._resting = False
        self._asker: threading.Thread | None = None
        self._killer: threading.Thread | None = None

    def freeze(self) -> None:
        """Begin to ask whether it rests."""
        self._resting = False
        self._stopping.set()
        if self._asker is None or not self._asker.is_alive():
            self._asker = threading.Thread(target=self._ask, name="resting", daemon=True)
            self._asker.start()

    def thaw(self) -> None:
        """Ask no more; it goes on by its permit."""
        self._stopping.clear()
        self._resting = False
        super().thaw()

    def is_frozen(self) -> bool:
        """The plugin's last word, or nobody is left."""
        return self._resting or not self.pids()

    def kill(self) -> None:
        """Begin to end it, once."""
        if self._killer is None or not self._killer.is_alive():
            self._killer = threading.Thread(target=self._end, name="end client", daemon=True)
            self._killer.start()

    def _end(self) -> None:
        try:
            super().kill()
        except GroupError as error:
            _log.error("%s", error)

    def _ask(self) -> None:
        while self._stopping.is_set() and self.pids():
            resting = is_resting(self._control)
            self._resting = resting and self._stopping.is_set()
            threading.Event().wait(_REST_POLL_SECONDS * (10 if resting else 1))


def is_resting(control: Path) -> bool:
    """Ask the plugin behind a control socket; see the module's table."""
    if not control.exists():
        return True
    try:
        status = ask_status(control)
    except OSError:
        return False
    return status.resting and status.permit_open is not True


def ask_status(control: Path) -> Status:
    """What the plugin behind a control socket says; from any thread.

    Raises:
        OSError: no answer, or none that is understood.
    """
    answer = ask(control, GetStatus(), _STATUS_SECONDS)
    if isinstance(answer, Status):
        return answer
    raise ConnectionError(f"{control} answered {type(answer).__name__}")
