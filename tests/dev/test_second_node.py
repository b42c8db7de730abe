"""Two real nodes: pods reach each other across, a drain moves them, nothing is left behind."""

import json
from collections.abc import Iterator

import pytest

from rose_dev.cluster import cgroups, namespaces
from rose_dev.cluster.node import Node
from rose_dev.cluster.place import NODE_NAME
from rose_dev.cluster.second_node import SecondNode
from rose_dev.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ASK = "import urllib.request; print(urllib.request.urlopen('http://web.two.svc/').status)"


@pytest.fixture
def second(node: Node, second_node: SecondNode) -> Iterator[SecondNode]:
    yield second_node
    second_node.down()
    node.kubectl("delete", "namespace", "two", "--ignore-not-found", "--wait=false")


def web() -> str:
    """A server behind a Service, one pod per node, that moves when its node is drained."""
    image = {"image": "localhost/rose:dev", "imagePullPolicy": "Never"}
    probe = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1, "timeoutSeconds": 5}
    command = ["python", "-m", "http.server", "8000"]
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"app": "web"}},
    }
    pod = {
        "terminationGracePeriodSeconds": 1,
        "topologySpreadConstraints": [spread],
        "containers": [{"name": "web", "command": command, "readinessProbe": probe, **image}],
    }
    items = [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web"},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": {"app": "web"}},
                "template": {"metadata": {"labels": {"app": "web"}}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8000}]},
        },
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def pods(node: Node) -> dict[str, str]:
    """Ready pod -> its node."""
    listed = node.kubectl("get", "pods", "--namespace=two", "--output=json")
    return {
        pod["metadata"]["name"]: pod["spec"]["nodeName"]
        for pod in json.loads(listed)["items"]
        if "deletionTimestamp" not in pod["metadata"]
        and any(
            c["type"] == "Ready" and c["status"] == "True"
            for c in pod["status"].get("conditions", [])
        )
    }


def test_pods_of_two_nodes_are_one_cluster_and_a_drain_moves_them(
    node: Node, second: SecondNode
) -> None:
    node.kubectl("create", "namespace", "two")
    node.kubectl("apply", "--namespace=two", "--filename=-", stdin=web())
    both = {NODE_NAME, second.name}
    wait_until(lambda: set(pods(node).values()) == both, "a pod on each node", seconds=120)
    for pod in pods(node):
        asked = ("exec", "--namespace=two", pod, "--", "python", "-c")
        for _ in range(4):  # the Service picks either
            assert node.kubectl(*asked, ASK).strip() == "200"
    drain = ("drain", second.name, "--ignore-daemonsets", "--delete-emptydir-data")
    node.kubectl(*drain, "--timeout=100s", seconds=120)
    wait_until(
        lambda: list(pods(node).values()) == [NODE_NAME] * 2, "both pods on the first", seconds=120
    )

    second.down()
    assert namespaces.marked(second.place) == set()
    assert cgroups.trees(second.place.seat.cgroup) == []
    assert not second.place.run.exists()
    assert node.healthy(), "the first node goes on"
