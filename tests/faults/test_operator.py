"""The operator through an API server that is overloaded, forgets, refuses, or is full of poison."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from rose_dev.api_client import ApiClient
from rose_dev.cluster.control_plane import ControlPlane
from rose_wire.api_server import Resource
from rose_wire.errors import StatusError, Unavailable
from tests.api.objects import LEASE, POOL, changed
from tests.faults.operator_proxy import FaultyProxy
from tests.operator import harness
from tests.operator.harness import Cluster, OperatorProcess, condition, until
from tests.operator.stub_agent import StubAgent, replica

pytestmark = pytest.mark.cluster
POISON = 1000
MALFORMED, MALFORMED_LEASES = 3, 24
MEDDLING = 20


class Scene:
    """An operator behind the proxy, a lending pool, one agent."""

    def __init__(self, cluster: Cluster, proxy: FaultyProxy, operator: OperatorProcess) -> None:
        self.cluster, self.proxy, self.operator = cluster, proxy, operator
        self.namespace = cluster.namespace(f"faults-{uuid4().hex[:8]}")
        key = f"{self.namespace}/chat"
        replicas = tuple(replica(key, f"{name}-{self.namespace}") for name in "abcd")
        self.agent = StubAgent(operator.sync_port, f"node-{self.namespace}", replicas)

    def pool(self) -> None:
        lends = {"maxReplicasPercent": 100, "minUnlentReplicas": 0}
        spec = {
            "metadata.namespace": self.namespace,
            "spec.mode": "Lend",
            "spec.slo": {"ttftMilliseconds": 500},
            "spec.lending": lends,
        }
        self.cluster.apply(changed(POOL, spec))

    def lease_manifest(self, name: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
        place = {
            "metadata.name": name,
            "metadata.namespace": self.namespace,
            "spec.poolRef.namespace": self.namespace,
        }
        return changed(LEASE, place | (changes or {}))

    def lease(self, name: str = "grpo") -> None:
        self.cluster.apply(self.lease_manifest(name))

    def status(self, name: str = "grpo", kind: str = "Granted") -> tuple[str, str]:
        return condition(self.cluster.get(harness.LEASE, name, self.namespace), kind)

    def granted(self, name: str = "grpo") -> None:
        try:
            until(lambda: self.status(name)[0] == "True", f"lease {name} is granted")
        except pytest.fail.Exception as error:
            lease = self.cluster.get(harness.LEASE, name, self.namespace) or {}
            answer = f"{lease.get('status')}\n{self.operator.log.read_text()[-3000:]}"
            pytest.fail(f"{error}\n{answer}")

    def slots(self) -> list[dict[str, Any]]:
        return [
            slot
            for slot in self.cluster.slots(self.operator.namespace)
            if slot["spec"]["leaseRef"]["namespace"] == self.namespace
        ]

    def writes(self, word: str) -> int:
        return sum(count for (_, path), count in self.proxy.writes.items() if word in path)


@pytest.fixture(scope="module")
def plane(
    control_plane: ControlPlane, api_client: ApiClient, tmp_path_factory: pytest.TempPathFactory
) -> Cluster:
    return Cluster(control_plane, api_client, tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def behind(plane: Cluster) -> Iterator[tuple[FaultyProxy, OperatorProcess]]:
    with FaultyProxy(plane.plane.kubeconfig, plane.folder) as proxy:
        namespace = plane.namespace(f"rose-system-{uuid4().hex[:6]}")
        operator = OperatorProcess(proxy.kubeconfig, plane.folder, namespace)
        operator.start()
        yield proxy, operator
        operator.kill()


@pytest.fixture
def scene(plane: Cluster, behind: tuple[FaultyProxy, OperatorProcess]) -> Iterator[Scene]:
    scene = Scene(plane, *behind)
    scene.pool()
    with scene.agent:
        yield scene
        scene.proxy.overload(0.0)
        scene.proxy.refuse("")
        for kind in (harness.LEASE, harness.POOL):
            until(partial(is_cleared, scene, kind), f"every {kind.kind} is gone", 120)
        until(lambda: not scene.slots(), "the slots are given back")


def is_cleared(scene: Scene, kind: Resource) -> bool:
    """Delete what is left of a kind; later tests' operators see every namespace.

    A thousand objects may take a busy API server longer than a client waits for one answer.
    """
    client = scene.cluster.client
    with suppress(Unavailable):
        client.delete_all(kind, scene.namespace)
    return not client.list(kind, scene.namespace)


def test_a_storm_of_429_delays_and_loses_nothing(scene: Scene) -> None:
    scene.proxy.overload(0.3)
    scene.lease()
    scene.granted()
    assert scene.proxy.refused > 0
    scene.proxy.overload(0.0)
    (slot,) = scene.slots()
    made = scene.writes(f"rolloutslots/{slot['metadata']['name']}")
    assert made <= 6  # a spec and a status, each perhaps a few times


def test_watches_that_drop_hide_no_deletion(scene: Scene) -> None:
    scene.lease()
    scene.granted()
    before = scene.proxy.dropped
    scene.proxy.drop_watches()
    scene.cluster.delete(harness.LEASE, "grpo", scene.namespace)
    until(lambda: not scene.slots(), "the slot of the deleted lease is given back")
    assert scene.proxy.dropped >= before + 5, "a watch of each kind was dropped"
    scene.lease("next")
    scene.granted("next")


def test_watches_that_are_told_410_hide_no_deletion(scene: Scene) -> None:
    scene.lease()
    scene.granted()
    before = scene.proxy.expired
    scene.proxy.expire_watches(5)
    scene.proxy.drop_watches()
    scene.cluster.delete(harness.LEASE, "grpo", scene.namespace)
    until(lambda: not scene.slots(), "the slot of the deleted lease is given back")
    scene.lease("next")
    scene.granted("next")
    until(lambda: scene.proxy.expired >= before + 5, "every 410 was told and survived")


def test_what_others_change_is_put_right_without_a_fight(scene: Scene) -> None:
    scene.lease()
    scene.granted()
    (slot,) = scene.slots()
    released = {"spec": {"desired": "Released", "releaseReason": "Preempted"}}
    client, system = scene.cluster.client, scene.operator.namespace
    name = slot["metadata"]["name"]
    client.merge(harness.SLOT, name, released, system)
    nonsense = {"status": {"slotsGranted": 77, "routerURL": "http://elsewhere"}}
    client.merge(harness.LEASE, "grpo", nonsense, scene.namespace, "status")
    router = f"router-{scene.namespace}-grpo"
    services = [one["metadata"]["name"] for one in client.list(harness.SERVICE, system)]
    mine = next(one for one in services if one.startswith(router[:40]))
    client.delete(harness.SERVICE, mine, system)

    def right() -> bool:
        status = (scene.cluster.get(harness.LEASE, "grpo", scene.namespace) or {})["status"]
        uids = [one["metadata"]["uid"] for one in scene.slots()]
        return (
            status["slotsGranted"] == 1
            and "elsewhere" not in status["routerURL"]
            and len(uids) == 1
            and slot["metadata"]["uid"] not in uids
            and scene.cluster.get(harness.SERVICE, mine, system) is not None
        )

    until(right, "slot, status and router are as they should be")


def test_somebody_who_writes_again_and_again_costs_a_write_each_and_wins_nothing(
    scene: Scene,
) -> None:
    scene.lease()
    scene.granted()
    (slot,) = scene.slots()
    before = scene.writes("rolloutleases/grpo/status")
    for number in range(MEDDLING):
        wrong = {"status": {"routerURL": f"http://elsewhere-{number}"}}
        scene.cluster.client.merge(harness.LEASE, "grpo", wrong, scene.namespace, "status")
        time.sleep(0.3)

    def right() -> bool:
        found = scene.cluster.get(harness.LEASE, "grpo", scene.namespace) or {}
        return "elsewhere" not in found["status"]["routerURL"]

    until(right, "the status is the operator's")
    ours = scene.writes("rolloutleases/grpo/status") - before
    assert 1 <= ours <= MEDDLING + 3  # and a few for its own counts
    assert [one["metadata"]["uid"] for one in scene.slots()] == [slot["metadata"]["uid"]]


def test_a_refused_write_is_tried_less_and_less_and_stops_nobody(scene: Scene) -> None:
    scene.proxy.refuse("rolloutleases/refused/status")
    scene.lease("refused")
    scene.lease("good")
    scene.granted("good")
    started, before = time.monotonic(), scene.writes("rolloutleases/refused/status")
    until(lambda: time.monotonic() - started > 6, "a few passes")
    assert before > 0
    assert scene.writes("rolloutleases/refused/status") - before <= 4
    scene.proxy.refuse("")
    scene.granted("refused")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "pool": ({"spec.poolRef.name": "nobody"}, "UnknownPool"),
    "class": ({"spec.engineClass": "other"}, "UnknownEngineClass"),
    "argument": ({"spec.engineArguments": {"dtype": "float8"}}, "ArgumentNotAllowed"),
    "store": ({"spec.weights.storeName": "elsewhere"}, "UnknownStore"),
    "gpus": ({"spec.gpusPerSlot": 9}, "InvalidSpec"),
    # What an API server lets in whose kinds are older, or were loosened for a while.
    "type": ({"spec.slots": "many"}, "InvalidSpec"),
    "range": ({"spec.slots": {"min": 3, "max": 1}}, "InvalidSpec"),
    "empty": ({"spec": {}}, "InvalidSpec"),
}


@contextmanager
def unvalidated(plane: ControlPlane) -> Iterator[None]:
    """Meanwhile the API server takes leases with any spec."""
    crd = "crd/rolloutleases.rose-gpu.dev"
    kept = json.loads(plane.kubectl("get", crd, "--output=json"))
    loose = deepcopy(kept)
    for version in loose["spec"]["versions"]:
        schema = version["schema"]["openAPIV3Schema"]
        schema.pop("x-kubernetes-validations", None)
        any_object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        schema["properties"]["spec"] = any_object
        for name in ("additionalPrinterColumns", "selectableFields"):
            version.pop(name, None)
        version["subresources"] = {"status": {}}
    for document in (loose, kept):
        document["metadata"].pop("resourceVersion", None)
    plane.kubectl("replace", "--filename=-", stdin=json.dumps(loose))
    try:
        yield
    finally:
        plane.kubectl("replace", "--filename=-", stdin=json.dumps(kept))


def create_poison(scene: Scene) -> dict[str, tuple[str, str]]:
    """Leases of every sort; name -> the condition that each must get."""
    kinds, expected = list(BAD), {}
    manifests = []
    for number in range(POISON):
        sorts = kinds[-MALFORMED:] if number < MALFORMED_LEASES else kinds[:-MALFORMED]
        changes, reason = BAD[sorts[number % len(sorts)]]
        name = f"poison-{number}"
        manifests.append(scene.lease_manifest(name, changes))
        expected[name] = ("False", reason)
    with unvalidated(scene.cluster.plane), ThreadPoolExecutor(4) as threads:
        until(lambda: loosened(scene), "the API server lets anything in")
        list(threads.map(partial(scene.cluster.client.create, harness.LEASE), manifests))
    return expected


def loosened(scene: Scene) -> bool:
    """Whether a lease with a spec of the wrong type is let in."""
    manifest = scene.lease_manifest("probe", {"spec": {"slots": "many"}})
    try:
        scene.cluster.client.create(harness.LEASE, manifest)
    except StatusError:
        return False
    scene.cluster.delete(harness.LEASE, "probe", scene.namespace)
    return True


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_poison_leases_get_their_reasons_and_harm_nobody(scene: Scene) -> None:
    scene.lease("before")
    scene.granted("before")
    (kept,) = scene.slots()
    expected = create_poison(scene)
    scene.lease("good")
    scene.granted("good")

    def missing() -> dict[str, tuple[str, str]]:
        listed = scene.cluster.client.list(harness.LEASE, scene.namespace)
        found = {one["metadata"]["name"]: condition(one, "Accepted") for one in listed}
        # Where the API server takes no status any more, an Event says why.
        for event in scene.cluster.client.list(harness.EVENT, scene.namespace):
            if event.get("reason") == "InvalidSpec":
                found[event["involvedObject"]["name"]] = ("False", "InvalidSpec")
        wrong = expected.items() - found.items()
        return {name: found.get(name, ("", "")) for name, _ in wrong}

    until(lambda: not missing(), "every poison lease has its reason", 400)
    slots = {slot["metadata"]["uid"] for slot in scene.slots()}
    assert len(slots) == 2
    assert kept["metadata"]["uid"] in slots
    # Two each at most, and further tries, less and less often, where a status is refused.
    assert scene.writes("rolloutleases/poison-") <= 2 * POISON + 20 * MALFORMED_LEASES
