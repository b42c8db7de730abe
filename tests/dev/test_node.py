"""One life of the node: up, pods with names and services, crashes, and nothing left behind."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from rose_dev.cluster import cgroups, namespaces
from rose_dev.cluster.node import Node
from rose_dev.cluster.node_init import SYSCTLS
from rose_dev.cluster.place import NodeFolders
from rose_dev.shell import run
from rose_dev.testing import NodeSession
from rose_dev.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

WEB = """
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: life, labels: {app: web}}
spec:
  containers:
  - name: web
    image: localhost/rose:dev
    imagePullPolicy: Never
    command: [python, -m, http.server, "8000"]
    readinessProbe: {httpGet: {path: /, port: 8000}, periodSeconds: 1, timeoutSeconds: 5}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: life}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8000}]}
"""
ASK = "import urllib.request; print(urllib.request.urlopen('http://web.life.svc/').status)"


def machine(own: NodeFolders) -> dict[str, object]:
    """What a node could leave on the machine, where other tests have mounts and links, too."""
    folders = (str(own.run), str(own.data), "/run/containerd", "/var/lib/kubelet")
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return {
        "sysctls": {name: Path("/proc/sys", name).read_text() for name in SYSCTLS},
        "forwarding": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "link": Path("/sys/class/net", own.seat.link).exists(),
        "tables": run(["nft", "list", "tables"], seconds=30).stdout,
        "routes": run(["ip", "route", "show", "via", own.seat.address], seconds=30).stdout,
        "mounts": sorted(mount for mount in mounts if mount.startswith(folders)),
        "cgroups": cgroups.trees(own.seat.cgroup),
        "folders": [path for path in ("/run/containerd", "/run/rose") if Path(path).exists()],
    }


def answers(node: Node, inside: str) -> bool:
    arguments = ["exec", "--namespace=life", inside, "--", "python", "-c", ASK]
    return node.kubectl(*arguments, check=False).strip() == "200"


def freeze(node: Node) -> None:
    """Freeze every pod, as a guard that dies in the middle would leave them."""
    for tree in cgroups.trees(node.place.seat.cgroup):
        for state in (tree / "kubepods").rglob("freezer.state"):
            state.write_text("FROZEN")


def test_a_life_leaves_nothing(ending_session: NodeSession) -> None:
    if not ending_session.ours:
        pytest.skip("a node that somebody brought up is running; this test would end it")
    ending_session.node.down()
    before = machine(ending_session.node.place)
    node = ending_session.ensure()
    node.kubectl("create", "namespace", "life")
    wait_until(
        lambda: "default" in node.kubectl("get", "serviceaccount", "--namespace=life"),
        "the namespace's service account",
        seconds=60,
    )
    node.kubectl("apply", "--filename=-", stdin=WEB)
    ready = ["wait", "--namespace=life", "--for=condition=Ready", "pod/web", "--timeout=60s"]
    node.kubectl(*ready, seconds=90)
    wait_until(lambda: answers(node, "web"), "the pod reaches a service by name", seconds=60)
    served = psutil.Process(node.namespaces.pid("etcd"))

    node.up()
    assert served.is_running(), "up on a running node must change nothing"

    node.kill("kube-apiserver")
    assert not node.healthy()
    node.restart("kube-apiserver")
    recovers = "the node recovers from the death of its API server"
    wait_until(node.healthy, recovers, seconds=240, why=node.faults)

    freeze(node)
    node.kill("kubelet")
    node.kill("containerd")
    assert not node.healthy()
    # Process 1 cannot end before its frozen children are thawed, which nobody but down does.
    os.kill(node.namespaces.pid("init"), signal.SIGKILL)
    node.down()
    assert machine(node.place) == before
    assert namespaces.marked(node.place) == set()
    assert not node.place.run.exists()
    assert not node.place.data.exists()
    node.down()  # once more is fine
