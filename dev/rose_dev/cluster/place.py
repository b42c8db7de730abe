"""Where the development cluster lives: names, addresses and folders, in one table.

The node has a network of its own, tied to the machine by one veth pair, and no default route, so
nothing inside can leave the machine. The ranges are unusual ones, so that a real cluster's routes
on a developer's machine are not hidden. A second node hangs on the first one's network, not on the
machine's, which need not forward packets for it. A second cluster beside the first is for tests
that run at once; it shares no address and no folder with it.

| what | first node | second node |
| --- | --- | --- |
| link's other end | 10.215.0.1, ``rose-dev0`` of the machine | 10.215.0.5, in the first node |
| node's end (kubelet; first: API server, DNS) | 10.215.0.2 | 10.215.0.6 |
| pods | 10.213.0.0/17 | 10.213.128.0/17 |
| services (ClusterIP) | 10.214.0.0/16; API server .0.1, DNS .0.10 | the same |
| cgroups | ``rose-dev`` in every hierarchy | ``rose-dev-2`` |
| in the second cluster | link ``rose-dev2``, 10.215.0.9 and .10 | ``rose-dev3``, .13 and .14 |
| its pods | 10.211.0.0/17 | 10.211.128.0/17 |
| its services, cgroups | 10.212.0.0/16; ``rose-dev-b`` | the same; ``rose-dev-b-2`` |
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rose_dev.cluster.parts import cache_root

NODE_NAME = "rose-dev"
"""Of the first node of each cluster, in its API server."""
MARK = "ROSE_DEV_NODE"
"""Environment variable that marks every process of the node, so that ``down`` finds them all."""


@dataclass(frozen=True)
class ClusterRanges:
    """What the nodes of one cluster share.

    Attributes:
        links: range of both links.
        pods, services: ranges of all its pods and ClusterIPs.
        api_service, dns_service: ClusterIPs of the API server and of DNS.
    """

    links: str
    pods: str
    services: str
    api_service: str
    dns_service: str


@dataclass(frozen=True)
class NodeAddress:
    """Name and addresses of one node.

    Attributes:
        ranges: of its cluster.
        link: the other end's interface.
        gateway, address: the two ends of the link, a /30.
        pods: range of its pods.
        cgroup: name of its cgroup trees.
    """

    ranges: ClusterRanges
    name: str
    link: str
    gateway: str
    address: str
    pods: str
    cgroup: str


def _nodes(number: int, suffix: str) -> tuple[NodeAddress, NodeAddress]:
    """Both nodes of the cluster with this number."""
    pods, services, link = f"10.{213 - 2 * number}", f"10.{214 - 2 * number}", 8 * number
    ranges = ClusterRanges(
        f"10.215.0.{link}/29",
        f"{pods}.0.0/16",
        f"{services}.0.0/16",
        f"{services}.0.1",
        f"{services}.0.10",
    )

    def node(place: int, name: str, seat: str) -> NodeAddress:
        first = link + 4 * place
        return NodeAddress(
            ranges,
            name,
            f"rose-dev{2 * number + place}",
            f"10.215.0.{first + 1}",
            f"10.215.0.{first + 2}",
            f"{pods}.{128 * place}.0/17",
            f"rose-dev{suffix}{seat}",
        )

    return node(0, NODE_NAME, ""), node(1, "rose-dev-2", "-2")


_SUFFIXES = ("", "-b")
CLUSTERS = tuple(_nodes(number, suffix) for number, suffix in enumerate(_SUFFIXES))
"""First and second node of each cluster that a machine can have."""
FIRST, SECOND = CLUSTERS[0]


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
        (second,) = (two for one, two in CLUSTERS if one == self.seat)
        return NodeFolders(Path(f"{self.run}-2"), Path(f"{self.data}-2"), second)

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


def place(number: int = 0) -> NodeFolders:
    """The machine's node: ``ROSE_DEV_DIR`` (default /run/rose-dev) and the user's cache.

    Args:
        number: of the cluster; people's is the first.
    """
    run, suffix = Path(os.environ.get("ROSE_DEV_DIR") or "/run/rose-dev"), _SUFFIXES[number]
    data = cache_root() / f"node{suffix}"
    return NodeFolders(Path(f"{run.absolute()}{suffix}"), data.absolute(), CLUSTERS[number][0])
