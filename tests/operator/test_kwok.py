"""Hundreds of nodes and pods on a real API server: KWOK plays their kubelets, drains end pods."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest

from rose_core.wire.sync import ReplicaReport
from rose_dev.cluster.kwok import Kwok, nodes
from tests.operator.harness import Cluster, OperatorProcess, serving_pod, until
from tests.operator.stub_agent import StubAgent, replica
from tests.operator.test_process import Scene

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

NODES, SLOTS, DRAINED = 200, 40, 5
SECONDS = 240.0


class Agents:
    """An agent per node, all in one thread."""

    def __init__(self, agents: list[StubAgent]) -> None:
        self.all = agents
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        await asyncio.gather(*(agent.run(self._stop) for agent in self.all))

    def __enter__(self) -> "Agents":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def lent(self) -> set[str]:
        """Nodes that hold a grant."""
        return {agent.node for agent in self.all if agent.grants}


class County:
    """A pool with one replica on each of many nodes."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.kubectl = scene, scene.cluster.plane.kubectl
        self.names = [f"{scene.namespace}-{number}" for number in range(NODES)]
        self.place = f"--namespace={scene.namespace}"

    def build(self) -> Agents:
        """Nodes, pods that run there, and agents that report them."""
        self.kubectl("create", "--filename=-", stdin=nodes(self.names), seconds=SECONDS)
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        items = [
            account,
            *(serving_pod(f"chat-{name}", name, grace_seconds=1) for name in self.names),
        ]
        manifests = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        self.kubectl("create", self.place, "--filename=-", stdin=manifests, seconds=SECONDS)
        until(lambda: len(self.running()) == NODES, "every pod runs", SECONDS)
        reports = [self._agent(pod) for pod in self.pods()]
        return Agents(reports)

    def _agent(self, pod: dict[str, Any]) -> StubAgent:
        meta, node = pod["metadata"], pod["spec"]["nodeName"]
        report: ReplicaReport = replica(self.scene.pool_key, meta["name"], pod_uid=meta["uid"])
        return StubAgent(self.scene.operator.sync_port, node, (report,), pause=3.0)

    def pods(self) -> list[dict[str, Any]]:
        answer = self.kubectl("get", "pods", self.place, "--output=json")
        items: list[dict[str, Any]] = json.loads(answer)["items"]
        return items

    def running(self) -> set[str]:
        """Nodes whose pod runs."""
        return {pod["spec"]["nodeName"] for pod in self.pods() if _runs(pod)}


def _runs(pod: dict[str, Any]) -> bool:
    return bool(pod["status"]["phase"] == "Running")


@pytest.fixture
def county(cluster: Cluster) -> Iterator[tuple[County, Agents]]:
    system = cluster.namespace(f"rose-system-{uuid4().hex[:6]}")
    operator = OperatorProcess(cluster.plane.kubeconfig, cluster.folder, system)
    with ExitStack() as stack:
        stack.enter_context(Kwok(cluster.plane))
        operator.start()
        stack.callback(operator.kill)
        county = County(Scene(cluster, operator))
        away = ("delete", "node", "--wait=false", *county.names)
        stack.callback(cluster.plane.kubectl, *away, seconds=SECONDS)
        agents = stack.enter_context(county.build())
        yield county, agents


def test_a_drain_of_several_nodes_moves_just_their_slots(county: tuple[County, Agents]) -> None:
    town, agents = county
    limits = {"maxReplicasPercent": 50, "minUnlentReplicas": 1, "maxLoansPerMinute": 100}
    town.scene.pool(spec__lending=limits)
    town.scene.lease(changes={"spec.slots": {"min": 1, "max": SLOTS}})
    until(lambda: len(agents.lent()) == SLOTS, "every slot is granted", SECONDS)
    before = agents.lent()

    drained = sorted(before)[:DRAINED]
    town.kubectl("drain", *drained, "--force", "--timeout=200s", seconds=220)
    assert town.running() == set(town.names) - set(drained)
    for agent in agents.all:
        if agent.node in drained:
            agent.replicas = ()
    until(
        lambda: len(agents.lent() - set(drained)) == SLOTS and not agents.lent() & set(drained),
        "the slots go on elsewhere",
        SECONDS,
    )
    assert before - set(drained) <= agents.lent(), "nobody else was disturbed"
    touched = town.kubectl(
        "get", "nodes,pods", town.place, "--output=yaml", "--show-managed-fields"
    )
    assert "rose-operator" not in touched
