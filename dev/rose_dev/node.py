"""A real one-node Kubernetes on this machine: kubelet, containerd, kube-proxy, DNS, RBAC.

States of the node, and what leads from one to the next:

    Absent --up--> Running --down--> Absent
       ^              | a component dies
       +---down/up-- Broken

``up`` on a running node only brings its image of ROSE up to date with the checkout; on one with
other GPUs, on a broken one, and on leftovers of a run that was killed, it clears them away and
starts anew. Next step: ``node_start`` has the order of a start, ``cluster`` what a running one can
be asked, ``sandbox`` the namespaces and processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rose_dev import image, kwok, machinery
from rose_dev.build import build
from rose_dev.cluster import COMPONENTS, Cluster
from rose_dev.errors import DevelopmentError, NotSupported, StartFailed
from rose_dev.gpu_node import starting as gpu_node
from rose_dev.gpu_node.starting import DRIVERS, profile_of
from rose_dev.node_start import Say, Start
from rose_dev.packages import install_packages
from rose_dev.parts import SCALE, cache_root
from rose_dev.place import NodeFolders, place
from rose_dev.sandbox import Sandbox, sweep
from rose_dev.second import SecondNode

_CLAIMED = 8


class Node(Cluster):
    """The machine's node. Everything that ``rose dev`` does, for tests and the demo."""

    def __init__(self, at: NodeFolders | None = None) -> None:
        super().__init__(at or place())

    def up(
        self, *, gpus: int | str | None = None, driver: int = DRIVERS[0], say: Say = print
    ) -> None:
        """Bring the node up; a node that runs stays as it is, with a fresh image of ROSE.

        Args:
            gpus: how many ``nvidia.com/gpu`` the node claims to have, or a machine of
                ``rose_dev.gpu.profiles``, whose GPUs NVIDIA's own programs can see; None = what
                runs will do, else a claim.
            driver: branch of NVIDIA's driver, of such a machine.
            say: receives one line per step.

        Raises:
            NotSupported: not Linux, or not root.
            DevelopmentError: a part could not be built or did not start.
        """
        require_root()
        with self._lock(say):
            self.build(say)
            install_packages(say)
            if self.healthy() and (gpus is None or _machine(gpus) == profile_of(self)):
                archive = image.archive(say)
                for sandbox in self._sandboxes():
                    machinery.load_once(sandbox, archive)
                say(f"[cluster] runs already; KUBECONFIG={self.kubeconfig}")
                return
            try:
                self._sweep()
                Start(self, say).run(_CLAIMED if gpus is None else gpus, driver)
            except DevelopmentError as error:
                logs = self._keep_logs()
                self._sweep()
                message = f"the node did not come up: {error}\nlogs are kept in {logs}"
                raise StartFailed(message) from error

    def down(self, *, say: Say = print) -> None:
        """End the node and remove every trace of it; also of one that was killed half-way.

        Raises:
            NotSupported: not Linux, or not root.
            DevelopmentError: something would not go.
        """
        require_root()
        with self._lock(say):
            self._sweep()
        say("[cluster] down")

    def components(self) -> dict[str, bool]:
        """Each component's name, and whether it runs."""
        plugins = gpu_node.COMPONENTS if profile_of(self) else ()
        return {name: self.sandbox.running(name) for name in (*COMPONENTS, *plugins)}

    def kill(self, component: str) -> None:
        """Kill a component as a crash would; ``restart`` brings it back."""
        self.sandbox.kill(component)

    def restart(self, component: str) -> None:
        """Start a component that was killed, with the arguments it had."""
        commands = json.loads((self.place.run / "commands.json").read_text())
        self.sandbox.start(component, commands[component])

    def load(self, *archives: Path) -> None:
        """Import docker archives, so that pods can use them with ``imagePullPolicy: Never``.

        Raises:
            CommandFailed: the runtime refuses one.
        """
        for sandbox in self._sandboxes():
            for archive in archives:
                machinery.load(sandbox, archive)

    def second(self) -> SecondNode:
        """The node beside this one, whether it runs or not."""
        return SecondNode(self)

    def add_kwok_nodes(self, count: int) -> None:
        """Stand nodes without machines beside the real one; they last as long as it does."""
        if not self.sandbox.running("kwok"):
            rules = self.place.run / "kwok.yaml"
            rules.write_text(kwok.stages())
            binary = build(SCALE)["kwok"]
            self.sandbox.start("kwok", kwok.command(binary, self.kubeconfig, rules))
        names = [f"kwok-{number}" for number in range(count)]
        self.kubectl("apply", "--filename=-", stdin=kwok.nodes(names))
        for name in names:
            self.kubectl("wait", "--for=condition=Ready", f"node/{name}", "--timeout=60s")

    def _sweep(self) -> None:
        """The second node hangs on the first, so it goes first."""
        sweep(self.place.second())
        sweep(self.place)

    def _keep_logs(self) -> Path:
        kept = cache_root() / "node-logs"
        shutil.rmtree(kept, ignore_errors=True)
        if self.place.logs.exists():
            shutil.copytree(self.place.logs, kept)
        return kept

    def _sandboxes(self) -> list[Sandbox]:
        """Of the nodes that run."""
        second = self.second()
        return [self.sandbox, *([second.sandbox] if second.sandbox.alive() else [])]

    @contextmanager
    def _lock(self, say: Say) -> Iterator[None]:
        path = self.place.run.with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("[cluster] somebody else brings the node up or down; waiting")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _machine(gpus: int | str) -> str:
    """Its name; empty for GPUs that are only claimed."""
    return gpus if isinstance(gpus, str) else ""


def can_run_node() -> bool:
    """Whether this is Linux and we are root."""
    return sys.platform == "linux" and os.geteuid() == 0


def require_root() -> None:
    """Check that a node can run here.

    Raises:
        NotSupported: it cannot; the message says what works instead.
    """
    if not can_run_node():
        message = (
            "a node needs root on Linux; elsewhere set KUBECONFIG to an existing cluster (kind, a "
            "real one), which then takes its place. The control plane alone, for tests of the API, "
            "works without root"
        )
        raise NotSupported(message)
