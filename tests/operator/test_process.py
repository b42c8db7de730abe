"""The operator process on a real API server, with agents over real gRPC."""

import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from rose_cli.main import main as rose
from rose_core.wire.sync import GroupPlace, ReplicaReport
from rose_wire.api_server import Resource
from tests.api.objects import LEASE, POOL, changed
from tests.operator import harness as env
from tests.operator.harness import DEPLOYMENT, SERVICE, Cluster, OperatorProcess, condition, until
from tests.operator.stub_agent import StubAgent, replica

pytestmark = pytest.mark.cluster


class Scene:
    """A pool that lends, and names of this test's own."""

    def __init__(self, cluster: Cluster, operator: OperatorProcess) -> None:
        self.cluster = cluster
        self.operator = operator
        self.namespace = cluster.namespace(f"team-{uuid4().hex[:8]}")
        self.agents: list[StubAgent] = []

    @property
    def pool_key(self) -> str:
        return f"{self.namespace}/chat"

    def pool(self, name: str = "chat", **changes: object) -> None:
        self.cluster.apply(
            changed(
                POOL,
                {
                    "metadata.name": name,
                    "metadata.namespace": self.namespace,
                    "spec.mode": "Lend",
                    "spec.slo": {"ttftMilliseconds": 500},
                    "spec.lending": {"maxReplicasPercent": 100, "minUnlentReplicas": 1},
                }
                | {key.replace("__", "."): value for key, value in changes.items()},
            )
        )

    def lease(self, name: str = "grpo", changes: dict[str, Any] | None = None) -> None:
        self.cluster.apply(
            changed(
                LEASE,
                {
                    "metadata.name": name,
                    "metadata.namespace": self.namespace,
                    "spec.poolRef.namespace": self.namespace,
                }
                | (changes or {}),
            )
        )

    def get_lease(self, name: str = "grpo") -> dict[str, Any] | None:
        return self.cluster.get(env.LEASE, name, self.namespace)

    def slots(self) -> list[dict[str, Any]]:
        return [
            slot
            for slot in self.cluster.slots(self.operator.namespace)
            if slot["spec"]["leaseRef"]["namespace"] == self.namespace
        ]

    def replica(self, name: str, kv: int = 100) -> ReplicaReport:
        """A replica of this scene's pool; nodes of other scenes are remembered for a while."""
        return replica(self.pool_key, f"{name}-{self.namespace}", kv=kv)

    def agent(self, *names: str, **kv: int) -> StubAgent:
        """The agent of this scene's only node; it lives until the scene is cleaned."""
        node = f"node-{self.namespace}"
        replicas = tuple(self.replica(name, kv.get(name, 100)) for name in names)
        agent = StubAgent(self.operator.sync_port, node, replicas)
        agent.__enter__()
        self.agents.append(agent)
        return agent

    def router_is_ready(self, name: str) -> None:
        self.cluster.plane.kubectl(
            "patch",
            "deployment",
            name,
            f"--namespace={self.operator.namespace}",
            "--subresource=status",
            "--type=merge",
            '--patch={"status":{"replicas":1,"readyReplicas":1,"availableReplicas":1}}',
        )

    def running(self) -> None:
        """Pool and lease are there, one slot runs, the lease is Ready."""
        self.pool()
        self.lease()
        until(
            lambda: (self.get_lease() or {}).get("status", {}).get("routerURL"),
            "the lease has a URL",
        )
        self.router_is_ready(router_name(self))
        until(
            lambda: condition(self.get_lease(), "Ready") == ("True", "SlotsReady"),
            "the lease is Ready",
        )

    def clean(self) -> None:
        """Leave nothing that a later test's operator would have to wait for."""
        try:
            self._delete_all(env.LEASE)
            until(lambda: not self.slots(), "the slots are given back")
        finally:
            for agent in self.agents:
                agent.__exit__()
            self._delete_all(env.POOL)

    def _delete_all(self, resource: Resource) -> None:
        for thing in self.cluster.client.list(resource, self.namespace):
            self.cluster.delete(resource, thing["metadata"]["name"], self.namespace)


def router_name(scene: Scene) -> str:
    url = (scene.get_lease() or {})["status"]["routerURL"]
    return str(url.removeprefix("http://").split(".")[0])


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[OperatorProcess]:
    namespace = cluster.namespace(f"rose-system-{uuid4().hex[:6]}")
    process = OperatorProcess(cluster.plane.kubeconfig, cluster.folder, namespace)
    process.start()
    yield process
    process.kill()


@pytest.fixture
def scene(cluster: Cluster, operator: OperatorProcess) -> Iterator[Scene]:
    scene = Scene(cluster, operator)
    yield scene
    scene.clean()


def test_each_pod_of_a_leaderworkersets_group_lends_on_its_own_node(scene: Scene) -> None:
    agents = []
    for index in (0, 1):
        node = f"node-{index}-{scene.namespace}"
        seen: dict[str, Any] = {} if index == 0 else {"signal": None, "verified": None}
        place = GroupPlace("llama/0", index, 2)
        name = f"llama-0-{index}-{scene.namespace}"
        pods = (replica(scene.pool_key, name, place=place, **seen),)
        agent = StubAgent(scene.operator.sync_port, node, pods, guard=f"10.0.0.{index}:7448")
        agent.__enter__()
        agents.append(agent)
    scene.agents += agents
    scene.pool(spec__lending={"maxReplicasPercent": 100, "minUnlentReplicas": 0})
    scene.lease(changes={"spec.slots": {"min": 1, "max": 4}})
    until(lambda: all(agent.grants for agent in agents), "both nodes hold a grant")
    found = sorted(slot["spec"]["members"][0]["node"] for slot in scene.slots())
    assert found == [agent.node for agent in agents]
    leader, follower = (agent.replicas[0].pod_uid for agent in agents)
    for agent in agents:
        (group,) = agent.replies[-1][1].groups
        assert (group.leader, group.guard) == (leader, "10.0.0.0:7448")
        assert [one.pod for one in group.followers] == [follower]

    def lent() -> bool:
        pool = scene.cluster.get(env.POOL, "chat", scene.namespace) or {}
        return (pool["status"]["replicas"], pool["status"]["lentReplicas"]) == (1, 1)

    until(lent, "the pool has one replica, which is lent")


def test_a_lease_becomes_a_slot_a_grant_and_a_url_and_goes_back(scene: Scene) -> None:
    cluster, operator = scene.cluster, scene.operator
    agent = scene.agent("busy", "idle", busy=700, idle=50)
    scene.running()
    (slot,) = scene.slots()
    assert slot["spec"]["members"][0]["podName"].startswith("idle-")
    assert slot["status"]["weightVersion"] == "grpo@1.0"
    (grant,) = agent.grants.values()
    assert grant.router.endswith(":7444")
    assert grant.weights.endpoint == "store.example:7446"
    lease = scene.get_lease()
    assert lease is not None
    status = lease["status"]
    assert (status["slotsWanted"], status["slotsGranted"], status["slotsReady"]) == (1, 1, 1)
    assert status["observedGeneration"] == lease["metadata"]["generation"]
    assert {entry["type"] for entry in status["conditions"]} == {
        "Ready",
        "Accepted",
        "Granted",
        "RouterReady",
        "WeightsSynced",
        "Reclaiming",
    }
    name = router_name(scene)
    assert cluster.get(SERVICE, name, operator.namespace) is not None

    scene.pool(spec__mode="Paused")
    until(lambda: not scene.slots(), "the slot is given back")
    assert not agent.grants
    until(
        lambda: condition(scene.get_lease(), "Ready") == ("False", "PoolNotLending"),
        "the lease says why",
    )
    cluster.delete(env.LEASE, "grpo", scene.namespace)
    until(
        lambda: (
            cluster.get(DEPLOYMENT, name, operator.namespace) is None
            and cluster.get(SERVICE, name, operator.namespace) is None
        ),
        "the router is cleaned up",
    )


def test_a_person_gets_the_reason_for_every_replica(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.agent("busy", "idle", busy=700, idle=50)
    scene.running()
    config = f"--kubeconfig={scene.cluster.plane.kubeconfig}"
    place = [config, f"--namespace={scene.namespace}"]
    assert rose(["explain", "lease", "grpo", *place]) == 0
    text = capsys.readouterr().out
    assert "AllSlotsGranted: 1 of 1 slots" in text
    assert "2 replicas: 1 Lent, 1 PoolLimitReached" in text
    assert f"{scene.namespace}/idle-{scene.namespace}" in text
    assert rose(["explain", "pool", "chat", *place]) == 0
    assert "1 of 2 replicas lent" in capsys.readouterr().out


def test_a_restart_on_a_correct_world_writes_nothing(scene: Scene) -> None:
    agent = scene.agent("a", "b")
    scene.running()
    settled(scene)
    before = versions(scene)
    term = agent.highest_term
    scene.operator.kill()
    scene.operator.start()
    until(lambda: agent.highest_term > term, "the new process leads in a new term")
    until(lambda: passes(scene.operator) >= 4, "the new process has planned")
    reported = writes(scene.operator)
    assert reported == {}, scene.cluster.plane.kubectl("get", "rlease,servpool", "-A", "-o", "yaml")
    assert versions(scene) == before
    until(
        lambda: [grant.key.term for grant in agent.grants.values()] == [agent.highest_term],
        "the grant is renewed in the new term",
    )


def test_without_an_api_server_grants_are_renewed_and_nothing_is_doubled(scene: Scene) -> None:
    plane = scene.cluster.plane
    agent = scene.agent("a", "b")
    scene.running()
    settled(scene)
    (before,) = scene.slots()
    plane.stop_api_server()
    try:
        until(lambda: page(scene.operator, "/readyz") == "Offline\n", "the lock has lapsed")
        since = time.monotonic()
        until(lambda: renewals(agent, since) >= 5, "grants are renewed meanwhile")
    finally:
        plane.start_api_server()
    until(lambda: page(scene.operator, "/readyz") == "Leader\n", "it leads again")
    scene.pool(spec__lending={"maxReplicasPercent": 100, "minUnlentReplicas": 0})
    scene.lease("second")
    until(
        lambda: condition(scene.get_lease("second"), "Granted")[0] == "True",
        "a new lease is served",
    )
    slots = scene.slots()
    gpus = [slot["spec"]["members"][0]["gpuUUIDs"][0] for slot in slots]
    assert sorted(gpu.split("-")[1] for gpu in gpus) == ["a", "b"]
    assert before["metadata"]["uid"] in {slot["metadata"]["uid"] for slot in slots}


def test_a_signal_ends_it_and_gives_the_lead_back(
    cluster: Cluster, operator: OperatorProcess
) -> None:
    until(lambda: page(operator, "/readyz") == "Leader\n", "it leads")
    assert operator.terminate() == 0
    held = cluster.plane.kubectl(
        "get",
        "lease",
        "rose-operator",
        f"--namespace={operator.namespace}",
        "--output=jsonpath={.spec.holderIdentity}",
    )
    assert held == ""
    operator.start()


BAD_LEASES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown-pool": ({"spec.poolRef.name": "nobody"}, "UnknownPool"),
    "observe": ({"spec.poolRef.name": "observe"}, "PoolNotLending"),
    "paused": ({"spec.poolRef.name": "paused"}, "PoolNotLending"),
    "foreign": ({"spec.poolRef.name": "foreign"}, "NamespaceNotAllowed"),
    "mps": ({"spec.poolRef.name": "mps"}, "NoReplicaQualifies"),
    "argument": ({"spec.engineArguments": {"dtype": "float8"}}, "ArgumentNotAllowed"),
    "store": ({"spec.weights.storeName": "elsewhere"}, "UnknownStore"),
    "class": ({"spec.engineClass": "other"}, "UnknownEngineClass"),
    "hungry": ({"spec.poolRef.name": "empty"}, "NoReplicaQualifies"),
}


def test_every_bad_lease_gets_its_reason_and_a_good_one_is_served_beside_them(
    scene: Scene,
) -> None:
    scene.pool("observe", spec__mode="Observe")
    scene.pool("paused", spec__mode="Paused")
    scene.pool("foreign", spec__lending={"borrowerNamespaces": ["somebody-else"]})
    scene.pool("mps", spec__compute="MPS")
    scene.pool("empty")
    for name, (changes, _) in BAD_LEASES.items():
        scene.lease(name, changes)
    scene.agent("a", "b")
    scene.running()
    for name, (_, reason) in BAD_LEASES.items():
        until(
            lambda name=name, reason=reason: (  # type: ignore[misc]
                condition(scene.get_lease(name), "Ready") == ("False", reason)
            ),
            f"lease {name} says {reason}",
        )
    assert len(scene.slots()) == 1


def settled(scene: Scene) -> None:
    """Nothing has been written for a while."""
    seen: list[tuple[float, dict[str, str]]] = [(time.monotonic(), versions(scene))]

    def quiet() -> bool:
        now = versions(scene)
        if now != seen[-1][1]:
            seen.append((time.monotonic(), now))
        return time.monotonic() - seen[-1][0] > 3

    until(quiet, "the world is at rest")


def versions(scene: Scene) -> dict[str, str]:
    """Resource versions of everything that belongs to the scene."""
    cluster, namespace = scene.cluster, scene.operator.namespace
    name = router_name(scene)
    things = [
        *scene.slots(),
        scene.get_lease(),
        cluster.get(env.POOL, "chat", scene.namespace),
        cluster.get(DEPLOYMENT, name, namespace),
        cluster.get(SERVICE, name, namespace),
    ]
    return {
        f"{thing.get('kind', '')}/{thing['metadata']['uid']}": thing["metadata"]["resourceVersion"]
        for thing in things
        if thing is not None
    }


def page(operator: OperatorProcess, path: str) -> str:
    request = f"http://127.0.0.1:{operator.http_port}{path}"
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())
    except OSError as error:
        return f"{error}"


def metric_lines(operator: OperatorProcess, name: str) -> dict[str, float]:
    lines = page(operator, "/metrics").splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(name))
    return {key: float(value) for key, value in pairs}


def passes(operator: OperatorProcess) -> float:
    return sum(metric_lines(operator, "rose_operator_plan_seconds_count").values())


def writes(operator: OperatorProcess) -> dict[str, float]:
    """Write requests of this process, the leader Lease's apart."""
    counts = metric_lines(operator, "rose_operator_api_writes_total")
    return {key: count for key, count in counts.items() if 'kind="Lease"' not in key and count}


def renewals(agent: StubAgent, since: float) -> int:
    return sum(reply.complete and bool(reply.grants) for at, reply in agent.replies if at > since)
