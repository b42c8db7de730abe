"""The node's cluster as its administrator sees it: kubectl, helm, the audit log.

Whether any of it runs is not known here. Next step: ``node`` brings it up and down,
``second_node`` a node beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose_dev.cluster.build import build
from rose_dev.cluster.namespaces import NodeNamespaces
from rose_dev.cluster.parts import CONTROL_PLANE, NODE
from rose_dev.cluster.place import NODE_NAME, NodeFolders
from rose_dev.errors import CommandFailed
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


class Cluster:
    """The machine's cluster.

    Attributes:
        place: folders of its first node.
        namespaces: those of its first node, with its processes.
    """

    def __init__(self, at: NodeFolders) -> None:
        self.place = at
        self.namespaces = NodeNamespaces(at)
        self._binaries: dict[str, Path] = {}

    @property
    def host_address(self) -> str:
        """Address under which pods reach processes of this machine."""
        return self.place.seat.gateway

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the administrator."""
        return self.place.kubeconfig

    def healthy(self) -> bool:
        """Whether every component runs and the API server says that the node is ready."""
        return not self.faults()

    def faults(self) -> list[str]:
        """What keeps the node from being healthy, for whoever waits in vain."""
        if not self.kubeconfig.exists() or not self.namespaces.alive():
            return ["nothing of it runs"]
        ended = [f"{name} does not run" for name in COMPONENTS if not self.namespaces.running(name)]
        return ended or ([] if self.ready() else ["the API server does not call it Ready"])

    def ready(self, name: str = NODE_NAME) -> bool:
        """Whether the API server says that a node is ready.

        Asked with a plain read: ``kubectl wait`` opens a watch within its time limit, which a
        machine whose cores are taken does not do in a second, however often it is asked.
        """
        path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        try:
            return self.kubectl("get", "node", name, "--output", path, seconds=20) == "True"
        except CommandFailed:
            return False

    def root(self) -> Path:
        """The node's file system: hostPath volumes are found below it."""
        return self.namespaces.root()

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

    def helm(self, *arguments: str, seconds: float = 360) -> str:
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

    def claim_gpus(self, name: str, gpus: int) -> None:
        """Write ``nvidia.com/gpu`` into a node's status, as a device plugin would."""
        changes = [
            {"op": "add", "path": f"/status/{field}/nvidia.com~1gpu", "value": str(gpus)}
            for field in ("capacity", "allocatable")
        ]
        patch = ["patch", "node", name, "--subresource=status", "--type=json"]
        self.kubectl(*patch, f"--patch={json.dumps(changes)}")

    def build(self, log: Callable[[str], None] = print) -> None:
        """Build the parts that are missing.

        Raises:
            DevelopmentError: one could not be built.
        """
        self._binaries = build(CONTROL_PLANE + NODE, log)

    def binaries(self) -> dict[str, Path]:
        """The parts by name; those that are missing are built."""
        if not self._binaries:
            self.build()
        return self._binaries
