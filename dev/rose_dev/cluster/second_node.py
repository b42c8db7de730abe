"""A second real node beside the first: what drains, evictions and agents on several nodes need.

It has namespaces, a container runtime, a kubelet and a kube-proxy of its own, and the first one's
control plane. Its network hangs on the first node's (``place`` has the addresses). It ends with
``Node.down``, or by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rose_dev import image
from rose_dev.cluster import node_components, node_files
from rose_dev.cluster.kubectl import Cluster
from rose_dev.cluster.namespaces import NodeNamespaces, sweep
from rose_dev.cluster.node_components import START_SECONDS
from rose_dev.errors import StartFailed
from rose_dev.waiting import wait_until

COMPONENTS = ("containerd", "kubelet", "kube-proxy")


class SecondNode:
    """The node beside ``first``.

    Attributes:
        name: of its Node object.
        namespaces: its own, with its processes.
    """

    def __init__(self, first: Cluster) -> None:
        self._first = first
        self.place = first.place.second()
        self.name = self.place.seat.name
        self.namespaces = NodeNamespaces(self.place)

    def up(self, *, gpus: int = 8, log: Callable[[str], None] = print) -> None:
        """Start it beside the first, which must run; one that runs stays as it is.

        Raises:
            DevelopmentError: the first does not run, or a component did not start.
        """
        if not self._first.healthy():
            message = "the first node does not run: rose dev up"
            raise StartFailed(message)
        if self.namespaces.running("kubelet") and self._ready():
            return
        sweep(self.place)
        self.namespaces.open(beside=self._first.namespaces)
        self._start(gpus)
        log(f"[cluster] {self.name} is ready")

    def down(self) -> None:
        """End it, and take its Node object and its pods away."""
        sweep(self.place)
        self._first.kubectl("delete", "node", self.name, "--ignore-not-found", "--wait=false")
        # Kubernetes collects pods of a node that is gone after 40 s. Until then whoever asks for a
        # pod of a DaemonSet may be given one of them.
        where = ("--all-namespaces", f"--field-selector=spec.nodeName={self.name}")
        self._first.kubectl("delete", "pods", *where, "--force", "--grace-period=0", "--wait=false")

    def components(self) -> dict[str, bool]:
        """Each component's name, and whether it runs; empty while there is no second node."""
        if not self.namespaces.alive():
            return {}
        return {name: self.namespaces.running(name) for name in COMPONENTS}

    def root(self) -> Path:
        """Root of the second node's file system, seen from this machine."""
        return self.namespaces.root()

    def _start(self, gpus: int) -> None:
        pki = self._first.place.run / "control-plane" / "pki"
        node_components.write_files(self.place, pki)
        commands = node_components.commands(self.place, pki, self._first.binaries())
        node_components.start_runtime(self.namespaces, commands["containerd"])
        node_components.load(self.namespaces, image.pause_archive(node_files.PAUSE_IMAGE))
        node_components.load_once(self.namespaces, image.archive())
        for name in COMPONENTS[1:]:
            self.namespaces.start(name, commands[name])
        wait_until(self._ready, f"{self.name} is ready", seconds=START_SECONDS)
        self._first.claim_gpus(self.name, gpus)

    def _ready(self) -> bool:
        self.namespaces.pid("kubelet")
        return self._first.ready(self.name)
