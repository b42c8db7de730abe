"""Where the development cluster lives: names, addresses and folders, in one table.

The node has a network of its own, tied to the machine by one veth pair, and no default route, so
nothing inside can leave the machine. The ranges are unusual ones, so that a real cluster's routes
on a developer's machine are not hidden. A second node hangs on the first one's network, not on the
machine's, which need not forward packets for it.

| what | first node | second node |
| --- | --- | --- |
| link's other end | 10.215.0.1, ``rose-dev0`` of the machine | 10.215.0.5, in the first node |
| node's end (kubelet; first: API server, DNS) | 10.215.0.2 | 10.215.0.6 |
| pods | 10.213.0.0/17 | 10.213.128.0/17 |
| services (ClusterIP) | 10.214.0.0/16; API server .0.1, DNS .0.10 | the same |
| cgroups | ``rose-dev`` in every hierarchy | ``rose-dev-2`` |
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rose_dev.parts import cache_root

NODE_NAME = "rose-dev"
LINK = "rose-dev0"
CGROUP = "rose-dev"
HOST_ADDRESS = "10.215.0.1"
NODE_ADDRESS = "10.215.0.2"
LINK_RANGE = "10.215.0.0/29"  # both links
POD_RANGE = "10.213.0.0/16"
SERVICE_RANGE = "10.214.0.0/16"
API_SERVICE = "10.214.0.1"
DNS_SERVICE = "10.214.0.10"
MARK = "ROSE_DEV_NODE"
"""Environment variable that marks every process of the node, so that ``down`` finds them all."""


@dataclass(frozen=True)
class NodeAddress:
    """Name and addresses of one node.

    Attributes:
        link: the other end's interface.
        gateway, address: the two ends of the link, a /30.
        pods: range of its pods.
        cgroup: name of its cgroup trees.
    """

    name: str
    link: str
    gateway: str
    address: str
    pods: str
    cgroup: str


FIRST = NodeAddress(NODE_NAME, LINK, HOST_ADDRESS, NODE_ADDRESS, "10.213.0.0/17", CGROUP)
SECOND = NodeAddress(
    "rose-dev-2", "rose-dev1", "10.215.0.5", "10.215.0.6", "10.213.128.0/17", "rose-dev-2"
)


@dataclass(frozen=True)
class NodeFolders:
    """Folders of a node.

    Attributes:
        run: state, sockets, logs, certificates; one per machine, so that anybody finds leftovers.
        data: container images and file systems, on a real disk.
    """

    run: Path
    data: Path
    seat: NodeAddress = FIRST

    def second(self) -> NodeFolders:
        """The place of the second node beside this one."""
        return NodeFolders(Path(f"{self.run}-2"), Path(f"{self.data}-2"), SECOND)

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the administrator."""
        return self.run / "kubeconfig"

    @property
    def logs(self) -> Path:
        """One log file per component."""
        return self.run / "logs"

    @property
    def audit(self) -> Path:
        """What service accounts asked of the API server, one JSON object per line."""
        return self.logs / "audit.jsonl"

    @property
    def kubelet(self) -> Path:
        """The kubelet's root."""
        return self.data / "kubelet"

    @property
    def pod_resources(self) -> Path:
        """Folder of the kubelet's socket that says which pod has which GPU."""
        return self.kubelet / "pod-resources"

    @property
    def containerd(self) -> Path:
        """Socket of the container runtime."""
        return self.run / "containerd.sock"


def place() -> NodeFolders:
    """The machine's node: ``ROSE_DEV_DIR`` (default /run/rose-dev) and the user's cache."""
    run = Path(os.environ.get("ROSE_DEV_DIR") or "/run/rose-dev")
    return NodeFolders(run.absolute(), (cache_root() / "node").absolute())
