"""The chart on two real nodes: the node that lends is drained, and the lease goes on on the other.

Kubelets end the evicted pods, the agent of the drained node stays (a DaemonSet), and operator,
router and serving replicas may be among the evicted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose_dev.cluster.node import Node
from rose_dev.cluster.place import NODE_NAME
from rose_dev.cluster.second_node import SecondNode
from rose_dev.errors import StartFailed
from rose_dev.waiting import wait_until
from tests.chart.installation import SECONDS, SERVING, SYSTEM, installation, logs, make_models, seen
from tests.chart.test_end_to_end import condition, reached

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

SPREAD = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": {"matchLabels": {"app": "chat"}},
}


@pytest.fixture
def second(node: Node, second_node: SecondNode, tmp_path: Path) -> Iterator[SecondNode]:
    """ROSE on two nodes, a serving replica on each."""
    with installation(node, make_models(tmp_path)):
        spread = {"spec": {"template": {"spec": {"topologySpreadConstraints": [SPREAD]}}}}
        node.kubectl(
            *("patch", "deployment", "chat", f"--namespace={SERVING}"),
            *("--type=merge", f"--patch={json.dumps(spread)}"),
        )
        yield second_node
        for name in (NODE_NAME, second_node.name):
            node.kubectl("uncordon", name)


def listed(node: Node, kind: str, namespace: str) -> list[dict[str, Any]]:
    """Objects of a kind that are not being deleted."""
    answer = node.kubectl("get", kind, f"--namespace={namespace}", "--output=json")
    items: list[dict[str, Any]] = json.loads(answer)["items"]
    return [one for one in items if "deletionTimestamp" not in one["metadata"]]


def lent_on(node: Node) -> list[str]:
    """Nodes whose replicas are lent."""
    slots = listed(node, "rolloutslots", SYSTEM)
    lent = [slot["spec"] for slot in slots if slot["spec"]["desired"] == "Lent"]
    return [spec["members"][0]["node"] for spec in lent]


def granted(node: Node, where: set[str]) -> bool:
    """Whether the lease has its slot on one of these nodes; meanwhile serving is asked."""
    reached(node, "Granted")
    return condition(node, "Granted") == "True" and bool(set(lent_on(node)) & where)


def wait_for_slot(node: Node, where: set[str]) -> str:
    """The node of the slot, once it is one of these; a failure shows the cluster."""
    try:
        wait_until(lambda: granted(node, where), f"a slot on {where}", seconds=SECONDS, pause=2.0)
    except StartFailed as error:
        pytest.fail("\n\n".join([str(error), *seen(node)]))
    (found,) = lent_on(node)
    return found


def serving_nodes(node: Node) -> set[str]:
    """Where serving replicas run."""
    return {pod["spec"].get("nodeName", "") for pod in listed(node, "pods", SERVING)}


def test_a_drained_node_gives_its_slot_to_the_other(node: Node, second: SecondNode) -> None:
    both = {NODE_NAME, second.name}
    agents = [
        pod for pod in listed(node, "pods", SYSTEM) if "rose-agent" in pod["metadata"]["name"]
    ]
    assert {pod["spec"]["nodeName"] for pod in agents} == both
    wait_until(lambda: serving_nodes(node) == both, "a replica on each node", seconds=SECONDS)
    drained = wait_for_slot(node, both)
    (other,) = both - {drained}

    # The operator's budget lets one of its two replicas go at a time.
    flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=300s")
    node.kubectl("drain", drained, *flags, seconds=320)
    assert wait_for_slot(node, {other}) == other
    here = [
        pod["metadata"]["name"]
        for namespace in (SERVING, SYSTEM)
        for pod in listed(node, "pods", namespace)
        if pod["spec"].get("nodeName") == drained
        and pod["metadata"]["ownerReferences"][0]["kind"] != "DaemonSet"
    ]
    assert here == [], "the drain has moved all but the daemons"
    assert "forbidden" not in logs(node, "deployment/rose-operator")
