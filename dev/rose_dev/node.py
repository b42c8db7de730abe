"""A real one-node Kubernetes on this machine: kubelet, containerd, kube-proxy, DNS, RBAC.

States of the node, and what leads from one to the next:

    Absent --up--> Running --down--> Absent
       ^              | a component dies
       +---down/up-- Broken

``up`` on a running node only brings its image of ROSE up to date with the checkout; on a broken
one, or on leftovers of a run that was killed, it clears them away and starts anew. Next step:
``node_start`` has the order of a start, ``sandbox`` the namespaces and processes.
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
from typing import Any

from rose_dev import image, kwok, machinery
from rose_dev.build import build
from rose_dev.errors import DevelopmentError, NotSupported, StartFailed
from rose_dev.node_start import Say, Start
from rose_dev.packages import install_packages
from rose_dev.parts import CONTROL_PLANE, NODE, SCALE, cache_root
from rose_dev.place import HOST_ADDRESS, NODE_NAME, Place, place
from rose_dev.sandbox import Sandbox, sweep
from rose_dev.second import SecondNode
from rose_dev.shell import run, succeeds

COMPONENTS = (
    "containerd",
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "coredns",
    "kubelet",
)


class Node:
    """The machine's node. Everything that ``rose dev`` does, for tests and the demo.

    Attributes:
        place: its folders.
        host_address: address under which pods reach processes of this machine.
        sandbox: its namespaces and processes.
    """

    host_address = HOST_ADDRESS

    def __init__(self, at: Place | None = None) -> None:
        self.place = at or place()
        self.sandbox = Sandbox(self.place)
        self._binaries: dict[str, Path] = {}

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the administrator."""
        return self.place.kubeconfig

    def up(self, *, gpus: int = 8, say: Say = print) -> None:
        """Bring the node up; a node that runs stays as it is, with a fresh image of ROSE.

        Args:
            gpus: how many ``nvidia.com/gpu`` the node claims to have.
            say: receives one line per step.

        Raises:
            NotSupported: not Linux, or not root.
            DevelopmentError: a part could not be built or did not start.
        """
        require_root()
        with self._lock(say):
            self._binaries = build(CONTROL_PLANE + NODE, say)
            install_packages(say)
            if self.healthy():
                archive = image.archive(say)
                for sandbox in self._sandboxes():
                    machinery.load_once(sandbox, archive)
                say(f"[cluster] runs already; KUBECONFIG={self.kubeconfig}")
                return
            try:
                self._sweep()
                Start(self, say).run(gpus)
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

    def healthy(self) -> bool:
        """Whether every component runs and the API server says that the node is ready."""
        if not self.kubeconfig.exists() or not self.sandbox.alive():
            return False
        return all(map(self.sandbox.running, COMPONENTS)) and self.ready()

    def ready(self) -> bool:
        """Whether the API server says that the node is ready."""
        return self.agrees("wait", "--for=condition=Ready", f"node/{NODE_NAME}", "--timeout=1s")

    def components(self) -> dict[str, bool]:
        """Each component's name, and whether it runs."""
        return {name: self.sandbox.running(name) for name in COMPONENTS}

    def kill(self, component: str) -> None:
        """Kill a component as a crash would; ``restart`` brings it back."""
        self.sandbox.kill(component)

    def restart(self, component: str) -> None:
        """Start a component that was killed, with the arguments it had."""
        commands = json.loads((self.place.run / "commands.json").read_text())
        self.sandbox.start(component, commands[component])

    def root(self) -> Path:
        """The node's file system: hostPath volumes are found below it."""
        return self.sandbox.root()

    def kubectl(
        self, *arguments: str, stdin: str = "", check: bool = True, seconds: float = 60
    ) -> str:
        """Run kubectl as the administrator and return what it printed.

        Raises:
            CommandFailed: it failed (with ``check``) or took too long.
        """
        command = [str(self.binaries()["kubectl"]), f"--kubeconfig={self.kubeconfig}", *arguments]
        return run(command, seconds=seconds, stdin=stdin.encode(), check=check).stdout

    def agrees(self, *arguments: str) -> bool:
        """Whether kubectl, run as the administrator, ends with exit code 0."""
        return succeeds([self.binaries()["kubectl"], f"--kubeconfig={self.kubeconfig}", *arguments])

    def helm(self, *arguments: str, seconds: float = 180) -> str:
        """Run helm as the administrator and return what it printed.

        Raises:
            CommandFailed: it failed or took too long.
        """
        folder = self.place.run / "helm"
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(folder)}
        command = [str(self.binaries()["helm"]), f"--kubeconfig={self.kubeconfig}", *arguments]
        return run(command, seconds=seconds, env=environment).stdout

    def asked(self) -> list[dict[str, Any]]:
        """What service accounts have asked of the API server, as audit events, oldest first."""
        path = self.root() / self.place.audit.relative_to("/")
        return [json.loads(line) for line in path.read_text().splitlines()]

    def load(self, *archives: Path) -> None:
        """Import docker archives, so that pods can use them with ``imagePullPolicy: Never``.

        Raises:
            CommandFailed: the runtime refuses one.
        """
        for sandbox in self._sandboxes():
            for archive in archives:
                machinery.load(sandbox, archive)

    def claim_gpus(self, name: str, gpus: int) -> None:
        """Write ``nvidia.com/gpu`` into a node's status, as a device plugin would."""
        changes = [
            {"op": "add", "path": f"/status/{field}/nvidia.com~1gpu", "value": str(gpus)}
            for field in ("capacity", "allocatable")
        ]
        patch = ["patch", "node", name, "--subresource=status", "--type=json"]
        self.kubectl(*patch, f"--patch={json.dumps(changes)}")

    def second(self) -> SecondNode:
        """The node beside this one, whether it runs or not."""
        return SecondNode(self)

    def binaries(self) -> dict[str, Path]:
        """The parts by name; those that are missing are built."""
        if not self._binaries:
            self._binaries = build(CONTROL_PLANE + NODE)
        return self._binaries

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
