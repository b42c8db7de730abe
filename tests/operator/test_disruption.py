"""Serving pods that are drained, evicted and deleted on a real API server with two nodes.

Agents are stubs that report what the API server says of their node's pods; the kubelet's part (the
pod ends after its grace) is played by the test. ROSE must neither hold up a disruption nor wait for
its end: the GPU is vacated while the pod still terminates, and the lease goes on elsewhere.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest

from rose_core.wire.sync import ReplicaReport
from rose_wire.api_server import Resource
from tests.operator.harness import EVENT, Cluster, OperatorProcess, condition, serving_pod, until
from tests.operator.stub_agent import StubAgent, replica
from tests.operator.test_process import Scene

pytestmark = pytest.mark.cluster


class Town:
    """Two nodes with a serving pod each; the first one's is lent first."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.kubectl = scene, scene.cluster.plane.kubectl
        self.nodes = [f"{scene.namespace}-n{number}" for number in (1, 2)]
        self.pods = ["chat-1", "chat-2"]
        account = {"kind": "ServiceAccount", "metadata": {"name": "default"}}
        self._create({"apiVersion": "v1"} | account)
        for node, pod in zip(self.nodes, self.pods, strict=True):
            self._create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
            self._create(serving_pod(pod, node, grace_seconds=600))
        self.agents = [
            StubAgent(scene.operator.sync_port, node, (self._report(pod, kv),))
            for node, pod, kv in zip(self.nodes, self.pods, (10, 500), strict=True)
        ]

    def _create(self, manifest: dict[str, Any]) -> None:
        place = f"--namespace={self.scene.namespace}"
        self.kubectl("create", place, "--filename=-", stdin=json.dumps(manifest))

    def _report(self, pod: str, kv: int) -> ReplicaReport:
        uid = f"uid-{self.scene.namespace}-{pod}"
        gpus = (f"GPU-{uid}",)
        return replica(self.scene.pool_key, pod, kv=kv, pod_uid=uid, gpu_uuids=gpus)

    def pod(self, number: int) -> dict[str, Any] | None:
        """A serving pod as the API server has it."""
        found = self.kubectl(
            *("get", "pod", self.pods[number], f"--namespace={self.scene.namespace}"),
            *("--ignore-not-found", "--output=json"),
        )
        return json.loads(found) if found else None

    def ends(self, number: int) -> None:
        """The kubelet's part: the pod's grace is over, its agent no longer sees it."""
        self.kubectl(
            *("delete", "pod", self.pods[number], f"--namespace={self.scene.namespace}"),
            *("--grace-period=0", "--force", "--ignore-not-found", "--wait=false"),
        )
        self.agents[number].replicas = ()

    def lent_on(self, number: int) -> bool:
        """Whether the node holds a grant."""
        return bool(self.agents[number].grants)

    def events(self, reason: str) -> list[str]:
        """Messages of Events with this reason."""
        client, namespace = self.scene.cluster.client, self.scene.namespace
        found = client.list(EVENT, namespace)
        return [event.get("message", "") for event in found if event.get("reason") == reason]


@pytest.fixture
def town(cluster: Cluster) -> Iterator[Town]:
    system = cluster.namespace(f"rose-system-{uuid4().hex[:6]}")
    operator = OperatorProcess(cluster.plane.kubeconfig, cluster.folder, system)
    operator.start()
    town = Town(Scene(cluster, operator))
    with ExitStack() as stack:
        stack.callback(operator.kill)
        stack.callback(cluster.plane.kubectl, "delete", "node", *town.nodes)
        for agent in town.agents:
            stack.enter_context(agent)
        town.scene.pool(spec__lending={"maxReplicasPercent": 50, "minUnlentReplicas": 1})
        town.scene.lease()
        until(lambda: town.lent_on(0), "the least used replica is lent")
        yield town


def test_a_drain_is_not_held_up_and_the_gpu_is_free_before_the_pod_is_gone(town: Town) -> None:
    with ThreadPoolExecutor(1) as thread:
        drain = thread.submit(
            town.kubectl, "drain", town.nodes[0], "--force", "--timeout=120s", seconds=130
        )
        until(lambda: not town.lent_on(0), "the cordoned node gives its slot back")
        pod = town.pod(0)
        assert pod is not None, "the GPU is vacated while the pod still terminates"
        assert not pod["metadata"].get("finalizers")
        until(
            lambda: "deletionTimestamp" in (town.pod(0) or {"metadata": {}})["metadata"],
            "the drain evicts the pod: nothing of ROSE refuses it",
        )
        town.ends(0)
        assert "drained" in drain.result(120)
    until(lambda: town.events("NodeCordoned"), "an Event names the cause")
    # One replica is left, and the pool's owner keeps one: the lease waits and says so. While the
    # drained one still served, the other may have been lent: then it takes a moment to come back.
    until(
        lambda: condition(town.scene.get_lease(), "Granted")[0] == "False" and not town.lent_on(1),
        "the lease is without a slot",
    )


def test_an_evicted_pod_takes_its_slot_with_it_and_the_lease_goes_on_elsewhere(town: Town) -> None:
    town.scene.pool(spec__lending={"maxReplicasPercent": 100, "minUnlentReplicas": 0})
    namespace, name = town.scene.namespace, town.pods[0]
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
    town.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(eviction))
    assert town.lent_on(0), "an eviction is taken at once, whatever is lent"
    town.ends(0)
    until(lambda: town.lent_on(1), "the lease goes on on the other node")
    until(lambda: not town.lent_on(0), "the slot of the pod that is gone ends")
    until(lambda: town.events("ReplicaGone"), "an Event names the cause")
    budgets = Resource("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
    assert town.scene.cluster.client.list(budgets, namespace) == [], (
        "ROSE makes no budget for serving pods"
    )
