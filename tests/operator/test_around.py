"""Nodes and autoscalers of a real API server, as the operator sees them."""

import json
from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.operator import harness as env
from tests.operator.harness import Cluster, OperatorProcess, condition, until
from tests.operator.stub_agent import StubAgent, replica
from tests.operator.test_process import Scene

pytestmark = pytest.mark.cluster


def create(cluster: Cluster, manifest: dict[str, object]) -> None:
    cluster.plane.kubectl("create", "--filename=-", stdin=json.dumps(manifest))


@pytest.fixture
def scene(cluster: Cluster) -> Iterator[Scene]:
    """An operator that starts when nodes and autoscalers are there already."""
    system = cluster.namespace(f"rose-system-{uuid4().hex[:6]}")
    operator = OperatorProcess(cluster.plane.kubeconfig, cluster.folder, system)
    scene = Scene(cluster, operator)
    labels = {"topology.kubernetes.io/zone": "z1"}
    node = f"node-{scene.namespace}"
    create(
        cluster,
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}},
    )
    create(
        cluster,
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "scaler", "namespace": scene.namespace},
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat"},
                "maxReplicas": 9,
                "metrics": [
                    {
                        "type": "Pods",
                        "pods": {
                            "metric": {"name": "DCGM_FI_DEV_GPU_UTIL"},
                            "target": {"type": "AverageValue", "averageValue": "50"},
                        },
                    }
                ],
            },
        },
    )
    operator.start()
    report = replica(scene.pool_key, "chat-7d9f8b6c5d-x2x4z", pod_uid=f"uid-{scene.namespace}")
    agent = StubAgent(operator.sync_port, node, (report,))
    scene.agents.append(agent)
    with agent:
        yield scene
        scene.agents.clear()
    operator.kill()
    cluster.plane.kubectl("delete", "node", node)


def test_an_autoscaler_forbids_lending_and_a_cordon_takes_it_back(scene: Scene) -> None:
    cluster, node = scene.cluster, f"node-{scene.namespace}"
    all_of_it = {"maxReplicasPercent": 100, "minUnlentReplicas": 0}
    scene.pool(spec__lending=all_of_it)
    scene.lease()

    def accepted() -> tuple[str, str]:
        return condition(cluster.get(env.POOL, "chat", scene.namespace), "Accepted")

    until(lambda: accepted() == ("False", "AutoscalerConflict"), "the pool is refused")
    assert scene.slots() == []
    scene.pool(spec__lending=all_of_it | {"autoscalerCheck": "Ignore"})
    until(lambda: len(scene.slots()) == 1, "its owner may insist")
    cluster.plane.kubectl("cordon", node)
    until(lambda: not scene.slots(), "the slot of the cordoned node is given back")
    granted = condition(scene.get_lease(), "Granted")
    assert granted == ("False", "NoReplicaQualifies")
    cluster.plane.kubectl("uncordon", node)
    until(lambda: len(scene.slots()) == 1, "the node is lent from again")
