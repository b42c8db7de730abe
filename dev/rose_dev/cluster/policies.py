"""Network policies are enforced on a node that runs, for as long as a test asks for it.

kube-router's firewall does it and nothing else of kube-router: what a policy does not allow is
answered with a refusal (ICMP port unreachable), in the node's own packet filter. A node without it
lets every packet through, as a cluster does whose network enforces no policies. Other agents divert
packets with nftables' own ``queue``, which not every kernel has; this one needs iptables and ipset.

It runs beside the node's other processes and ends with them, also when a test is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rose_dev.cluster.build import build
from rose_dev.cluster.node import Node
from rose_dev.cluster.parts import POLICIES
from rose_dev.cluster.place import NODE_NAME
from rose_dev.waiting import wait_until

COMPONENT = "kube-router"
_OWN = ("KUBE-ROUTER-", "KUBE-POD-FW-", "KUBE-NWPLCY-")
"""How the names of its chains begin."""
_SECONDS = 90.0


@contextmanager
def enforced(node: Node) -> Iterator[None]:
    """Policies hold on the (first) node; afterwards nothing of it is left in the packet filter.

    Raises:
        DevelopmentError: it could not be built, or did not start.
    """
    if node.namespaces.running(COMPONENT):  # of a test that was killed, on a node that went on
        end(node)
    (binary,) = build(POLICIES).values()
    command = [
        str(binary),
        "--run-firewall=true",
        "--run-router=false",
        "--run-service-proxy=false",
        "--health-port=0",
        f"--kubeconfig={node.kubeconfig}",
        f"--hostname-override={NODE_NAME}",
        f"--service-cluster-ip-range={node.place.seat.ranges.services}",
    ]
    node.namespaces.start(COMPONENT, command)
    # The kernel sends each pod one refusal a second: many at once would wait in vain for theirs.
    node.namespaces.run(["sh", "-c", "echo 0 >/proc/sys/net/ipv4/icmp_ratelimit"])
    try:
        wait_until(lambda: _there(node), "the packet filter of kube-router", seconds=_SECONDS)
        yield
    finally:
        end(node)


def end(node: Node) -> None:
    """End it; its chains and sets go too, and those of the kubelet stay.

    Raises:
        DevelopmentError: it did not end, or the packet filter could not be written.
    """
    if node.namespaces.running(COMPONENT):
        node.namespaces.kill(COMPONENT)
    text = removal(node.namespaces.run(["iptables-save", "-t", "filter"]))
    node.namespaces.run(["iptables-restore", "--noflush", "--wait"], stdin=text.encode())
    node.namespaces.run(["ipset", "destroy"])


def removal(saved: str) -> str:
    """What ``iptables-restore --noflush`` is given to forget kube-router's chains and nothing else.

    To write back the whole table would undo what kube-proxy has written since it was read.

    Args:
        saved: the table ``filter``, as ``iptables-save`` prints it.
    """
    chains, jumps = [], []
    for line in saved.splitlines():
        fields = line.split()
        if line.startswith(":") and fields[0][1:].startswith(_OWN):
            chains.append(fields[0][1:])
        elif _jumps_in(fields):
            jumps.append("-D" + line.removeprefix("-A"))
    # A chain that is named is emptied; it goes when nothing jumps to it any more.
    emptied = [f":{chain} - [0:0]" for chain in chains]
    gone = [f"-X {chain}" for chain in chains]
    return "\n".join(["*filter", *emptied, *jumps, *gone, "COMMIT", ""])


def _jumps_in(fields: list[str]) -> bool:
    """Whether a rule of somebody else's chain leads into kube-router's."""
    if fields[:1] != ["-A"] or fields[1].startswith(_OWN):
        return False
    return any(field.startswith(_OWN) for field in fields[2:])


def _there(node: Node) -> bool:
    node.namespaces.pid(COMPONENT)  # one that has ended says why
    return "KUBE-NWPLCY-DEFAULT" in node.namespaces.run(["iptables-save", "-t", "filter"])
