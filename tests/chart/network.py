"""Pods that stand beside an installation, and which ports of it they reach."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rose_dev.cluster.node import Node

Object = dict[str, Any]
OPEN = 8080
"""Where every pod of ``standing`` listens: somebody whom no policy names."""
# Waits: a packet filter that drops instead of refusing is told from one that answers late.
_KNOCK = """
import concurrent.futures, json, socket, sys
def knock(place):
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        return False
    return True
places = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(32) as pool:
    print(json.dumps([place for place, heard in zip(places, pool.map(knock, places)) if heard]))
"""
_GET = """
import json, sys, urllib.error, urllib.request
def get(url):
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return str(error)
print(json.dumps({url: get(url) for url in json.loads(sys.argv[1])}))
"""
_POST = """
import json, sys, urllib.request
url, token, body = sys.argv[1:]
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + token}
request = urllib.request.Request(url, body.encode(), headers)
with urllib.request.urlopen(request, timeout=90) as answer:
    print(answer.read().decode())
"""
# State 0A listens. The addresses of the loopback are 127.0.0.0/8 and ::1, in the kernel's order.
_LISTENS = """
import json
found = set()
for name in ("tcp", "tcp6"):
    for line in open("/proc/net/" + name).read().splitlines()[1:]:
        address, _, port = line.split()[1].partition(":")
        own = address.endswith("7F") or address == "0" * 24 + "01000000"
        if line.split()[3] == "0A" and not own:
            found.add(int(port, 16))
print(json.dumps(sorted(found)))
"""


@dataclass(frozen=True)
class Pod:
    """One that runs.

    Attributes:
        containers: their names; any one sees the pod's network.
    """

    namespace: str
    name: str
    address: str
    labels: dict[str, str]
    containers: tuple[str, ...]

    def python(self, node: Node, script: str, *arguments: str) -> Any:  # noqa: ANN401  # JSON
        """What a script prints that runs in it."""
        where = (self.name, f"--namespace={self.namespace}", f"--container={self.containers[0]}")
        reported = node.kubectl(
            "exec", *where, "--", "python", "-c", script, *arguments, seconds=120
        )
        return json.loads(reported)

    def listens(self, node: Node) -> list[int]:
        """Ports on which it listens to others, whether it declares them or not."""
        found: list[int] = self.python(node, _LISTENS)
        return found

    def reaches(self, node: Node, places: Iterable[str]) -> set[str]:
        """Those of ``ADDRESS:PORT`` with which it can connect."""
        return set(self.python(node, _KNOCK, json.dumps(sorted(places))))

    def gets(self, node: Node, urls: Iterable[str]) -> dict[str, int | str]:
        """Status of each page; what went wrong, where nobody answers."""
        found: dict[str, int | str] = self.python(node, _GET, json.dumps(sorted(urls)))
        return found

    def posts(self, node: Node, url: str, token: str, body: Object) -> Object:
        """What a service answers it."""
        found: Object = self.python(node, _POST, url, token, json.dumps(body))
        return found


def pods(node: Node, *chosen: str) -> list[Pod]:
    """Those that run; ``chosen`` as kubectl takes it."""
    listed = json.loads(node.kubectl("get", "pods", *chosen, "--output=json"))["items"]
    return [
        Pod(
            item["metadata"]["namespace"],
            item["metadata"]["name"],
            item["status"]["podIP"],
            item["metadata"].get("labels", {}),
            tuple(one["name"] for one in item["spec"]["containers"]),
        )
        for item in listed
        if item["status"].get("phase") == "Running" and "deletionTimestamp" not in item["metadata"]
    ]


def standing(
    namespace: str, name: str, port: int = OPEN, labels: dict[str, str] | None = None
) -> Object:
    """A pod without rights that listens on a port and does nothing."""
    container = {
        "name": "stands",
        "image": "localhost/rose:dev",
        "imagePullPolicy": "Never",
        "command": ["python", "-m", "http.server", str(port), "--directory=/tmp"],
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1},
        # The routers' namespace takes no other pod.
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    spec = {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 0}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {**spec, "containers": [container]},
    }


def namespace(name: str, **labels: str) -> Object:
    """A namespace with these labels."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector of the chart's kind (matchLabels alone) takes these labels."""
    assert set(selector) <= {"matchLabels"}, selector
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def named_ports(policies: Iterable[Object], namespace: str, labels: dict[str, str]) -> set[int]:
    """Ports for which a policy names callers of this pod."""
    return {
        port["port"]
        for policy in policies
        if policy["metadata"]["namespace"] == namespace
        and selects(policy["spec"]["podSelector"], labels)
        for rule in policy["spec"].get("ingress", [])
        for port in rule["ports"]
    }
