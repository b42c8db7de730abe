"""The verbs for people on a real API server; the operator's part is played where it is asked."""

import asyncio
import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest

from rose_cli import main as cli
from rose_cli.ops.cluster import Cluster
from rose_cli.ops.errors import CommandError
from rose_core.api import EXPLAIN_ANNOTATION, RESUME_ANNOTATION, STOP_ANNOTATION, ServingPool
from rose_dev.api_client import ApiClient
from rose_dev.cluster.control_plane import ControlPlane
from rose_operator.kube.api import RESOURCES, ObjectKind
from rose_wire.api_server import ApiServer
from rose_wire.errors import StatusError
from tests.api.objects import LEASE, POOL, SLOT, changed

LEASES, POOLS = RESOURCES[ObjectKind.LEASE], RESOURCES[ObjectKind.POOL]
SLOTS = RESOURCES[ObjectKind.SLOT]
NOWHERE = """\
apiVersion: v1
kind: Config
current-context: x
contexts: [{name: x, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: u, user: {}}]
"""


class Town:
    """A namespace with a lending pool and a lease."""

    def __init__(self, plane: ControlPlane, client: ApiClient) -> None:
        self.plane, self.client = plane, client
        self.namespace = f"cli-{uuid4().hex[:8]}"
        plane.kubectl("create", "namespace", self.namespace)
        place = {"metadata.namespace": self.namespace}
        lends = {"spec.mode": "Lend", "spec.slo": {"ttftMilliseconds": 500}}
        client.create(POOLS, changed(POOL, place | lends))
        borrows = {"spec.poolRef.namespace": self.namespace}
        client.create(LEASES, changed(LEASE, place | borrows))

    def rose(self, *words: str) -> int:
        config = [f"--kubeconfig={self.plane.kubeconfig}"]
        place = [] if words[0] == "drain" else [f"--namespace={self.namespace}"]
        return cli.main([*words, *config, *place])

    def pool(self) -> dict[str, Any]:
        return self.client.get(POOLS, "chat", self.namespace)

    def lease(self) -> dict[str, Any]:
        return self.client.get(LEASES, "grpo", self.namespace)

    def slot(self, node: str) -> None:
        member = SLOT["spec"]["members"][0] | {"node": node}
        place = {"metadata.namespace": self.namespace, "spec.members": [member]}
        pool = {"spec.poolRef.namespace": self.namespace}
        self.client.create(SLOTS, changed(SLOT, place | pool))

    def give_back(self) -> None:
        self.client.delete(SLOTS, SLOT["metadata"]["name"], self.namespace)


@pytest.fixture
def town(control_plane: ControlPlane, api_client: ApiClient) -> Town:
    return Town(control_plane, api_client)


@pytest.mark.cluster
def test_status_top_and_report_tell_what_there_is(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    assert town.rose("status") == 1  # nothing is Ready without an operator
    text, error = capsys.readouterr()
    assert error == ""
    assert f"{town.namespace}/chat" in text
    assert "no slots" in text
    assert town.rose("status", "-o", "json") == 1
    assert json.loads(capsys.readouterr().out)["leases"][0]["wanted"] == 1
    assert town.rose("top") == 0
    assert f"{town.namespace}/grpo" in capsys.readouterr().out
    assert town.rose("top", "nodes", "-o", "csv") == 0
    capsys.readouterr()
    assert town.rose("report", "--by", "namespace", "-o", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["namespace"], row["leases"]) == (town.namespace, 1)
    town.namespace = "nowhere"
    assert town.rose("status") == 0
    output = capsys.readouterr().out
    assert "no pools in namespace nowhere (-A: in all)" in output
    assert "no leases in namespace nowhere" in output


@pytest.mark.cluster
def test_a_caller_from_outside_is_granted_listed_and_revoked(
    town: Town, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lease = ("--lease", "grpo")
    out = ("--out", str(tmp_path / "credential"))
    assert town.rose("caller", "grant", "laptop", *lease, *out, "--turns-only") == 0
    secret = (tmp_path / "credential").read_text().strip()
    assert secret not in "".join(capsys.readouterr())
    assert (tmp_path / "credential").stat().st_mode & 0o077 == 0
    (entry,) = town.lease()["spec"]["router"]["callers"]
    assert entry["sha256"] == hashlib.sha256(secret.encode()).hexdigest()
    assert (entry["name"], entry["turnsOnly"]) == ("laptop", True)
    assert town.rose("caller", "grant", "second", *lease, "--expires", "never") == 0
    assert capsys.readouterr().out.startswith("rose_second_")
    assert town.rose("caller", "grant", "laptop", *lease) == 1
    assert "has a caller 'laptop' already" in capsys.readouterr().err
    assert town.rose("caller", "list", *lease) == 0
    listed = capsys.readouterr().out
    assert "laptop  turns" in listed
    assert "second  everything  never" in listed
    assert town.rose("caller", "revoke", "laptop", *lease) == 0
    assert [one["name"] for one in town.lease()["spec"]["router"]["callers"]] == ["second"]
    assert town.rose("caller", "revoke", "laptop", *lease) == 1
    assert "it has: second" in capsys.readouterr().err
    # What the API server itself refuses: a credential in the place of its hash, a name twice.
    for wrong in ([{"name": "a", "sha256": secret}], [entry, entry]):
        changes = {"spec": {"router": {"callers": wrong}}}
        with pytest.raises(StatusError, match=r"sha256|[Dd]uplicate"):
            town.client.merge(LEASES, "grpo", changes, town.namespace)


@pytest.mark.cluster
def test_explain_asks_waits_for_the_answer_and_takes_the_question_back(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer() -> None:
        while True:
            asked = (town.lease()["metadata"].get("annotations") or {}).get(EXPLAIN_ANNOTATION)
            if asked:
                break
            time.sleep(0.05)
        explanation = {
            "request": asked,
            "time": "2027-01-15T08:00:00Z",
            "summary": "NoReplicaQualifies: 0 of 1 slots",
            "verdicts": [{"replica": "s/a", "reason": "Settling", "message": "needs 4 s"}],
            "omitted": 2,
        }
        url = "http://router.rose-system.svc:8000"
        status = {"status": {"explanation": explanation, "routerURL": url}}
        town.client.merge(LEASES, "grpo", status, town.namespace, "status")

    operator = threading.Thread(target=answer)
    operator.start()
    assert town.rose("explain", "lease", "grpo") == 0
    operator.join(30)
    text = capsys.readouterr().out
    assert "NoReplicaQualifies: 0 of 1 slots" in text
    assert "Settling  needs 4 s" in text
    assert "2 more replicas are not listed" in text
    token = f"--namespace {town.namespace} --audience rose-lease/{town.namespace}/grpo"
    assert "turns go to http://router.rose-system.svc:8000; a token for them" in text
    assert f"kubectl create token ACCOUNT {token}" in text
    assert EXPLAIN_ANNOTATION not in (town.lease()["metadata"].get("annotations") or {})


@pytest.mark.cluster
def test_models_tells_where_each_lies_and_that_a_node_lacks_it(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    assert town.rose("models") == 0
    assert "no engine host has reported one" in capsys.readouterr().out
    held = {"name": "qwen3-8b", "digest": "abc", "sizeBytes": 1 << 34, "nodes": ["n1", "n2"]}
    status = {"models": [held, held | {"name": "small", "missingNodes": 1}]}
    town.client.merge(POOLS, "chat", {"status": status}, town.namespace, "status")
    assert town.rose("models", "qwen*") == 0
    text = capsys.readouterr().out
    assert "16.0 GiB" in text
    assert "2 of 2" in text
    assert "small" not in text
    assert town.rose("models", "--nodes", "-o", "json") == 1, "one node lacks a model"
    rows = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["node"]) for row in rows[:2]] == [
        ("qwen3-8b", "n1"),
        ("qwen3-8b", "n2"),
    ]


@pytest.mark.cluster
def test_an_autoscaler_gets_size_and_selector_and_scales_a_lease(town: Town) -> None:
    selector = "app.kubernetes.io/name=rose-router,app.kubernetes.io/instance=router-x"
    status = {"status": {"slotsGranted": 1, "selector": selector}}
    town.client.merge(LEASES, "grpo", status, town.namespace, "status")
    path = f"/apis/rose-gpu.dev/v1alpha1/namespaces/{town.namespace}/rolloutleases/grpo/scale"
    found = json.loads(town.plane.kubectl("get", f"--raw={path}"))
    assert found["status"] == {"replicas": 1, "selector": selector}
    scale = ("scale", "rolloutlease", "grpo", f"--namespace={town.namespace}", "--replicas=3")
    town.plane.kubectl(*scale)
    assert town.lease()["spec"]["slots"]["max"] == 3


@pytest.mark.cluster
def test_explain_says_when_nobody_answers(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    assert town.rose("explain", "pool", "chat", "--timeout", "0.5") == 1
    assert "the operator has not answered within" in capsys.readouterr().err
    assert EXPLAIN_ANNOTATION not in (town.pool()["metadata"].get("annotations") or {})


@pytest.mark.cluster
def test_pause_waits_for_the_gpus_and_resume_goes_back_to_the_mode_before(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    town.slot("n0")
    assert town.rose("pause", "chat", "--timeout", "0.5") == 1
    assert "slots are left" in capsys.readouterr().err
    assert town.pool()["spec"]["mode"] == "Paused"
    town.give_back()
    assert town.rose("pause", "--all") == 0
    assert "nothing is lent any more" in capsys.readouterr().out
    assert town.rose("resume", "chat") == 0
    assert town.pool()["spec"]["mode"] == "Lend"
    assert RESUME_ANNOTATION not in (town.pool()["metadata"].get("annotations") or {})


@pytest.mark.cluster
def test_resume_does_not_guess_a_mode(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    paused = {"spec": {"mode": "Paused"}}
    town.client.merge(POOLS, "chat", paused, town.namespace)
    assert town.rose("resume", "chat") == 1
    assert "was not paused by `rose pause`" in capsys.readouterr().err


@pytest.mark.cluster
def test_drain_presses_the_stop_button_of_the_nodes_serving_pods_alone(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    node = f"node-{town.namespace}"
    for name, app in (("serves", "chat"), ("other", "db")):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": town.namespace, "labels": {"app": app}},
            "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]},
        }
        town.plane.kubectl("create", "--filename=-", stdin=json.dumps(pod))

    def annotations(name: str) -> dict[str, str]:
        place = f"--namespace={town.namespace}"
        raw = json.loads(town.plane.kubectl("get", "pod", name, place, "--output=json"))
        return dict(raw["metadata"].get("annotations") or {})

    assert town.rose("drain", node) == 0
    assert f"no slot is left on {node}" in capsys.readouterr().out
    assert annotations("serves")[STOP_ANNOTATION] == "true"
    assert STOP_ANNOTATION not in annotations("other")
    assert town.rose("drain", node, "--undo") == 0
    assert STOP_ANNOTATION not in annotations("serves")


@pytest.mark.cluster
def test_an_object_that_is_not_there_is_named(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    assert town.rose("explain", "lease", "nobody") == 1
    assert f'"nobody" not found in namespace {town.namespace}' in capsys.readouterr().err
    assert town.rose("drain", "nowhere") == 1
    assert "no pod runs on nowhere" in capsys.readouterr().err


@pytest.mark.cluster
def test_who_may_not_is_told_what_is_missing(
    town: Town, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anonymous = tmp_path / "config"
    text = NOWHERE.replace("http://127.0.0.1:9", town.plane.server)
    insecure = "insecure-skip-tls-verify: true, server:"
    anonymous.write_text(text.replace("server:", insecure))
    place = [f"--kubeconfig={anonymous}", f"--namespace={town.namespace}"]
    assert cli.main(["status", *place]) == 1
    error = capsys.readouterr().err
    assert "cannot list resource" in error
    assert "rose-KIND-viewer" in error


def test_an_absent_cluster_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config"
    config.write_text(NOWHERE)
    assert cli.main(["status", f"--kubeconfig={config}"]) == 1
    error = capsys.readouterr().err
    assert "the API server http://127.0.0.1:9 cannot be reached" in error
    assert cli.main(["status", f"--kubeconfig={tmp_path / 'none'}"]) == 1
    assert "set KUBECONFIG" in capsys.readouterr().err
    assert cli.main(["status", f"--kubeconfig={config}", "--context=y"]) == 1
    assert "has no context 'y'; it has: x" in capsys.readouterr().err


class _Shelf:
    """An API server whose only pool fits no schema of this version."""

    async def get(self, *_: object, **__: object) -> dict[str, Any]:
        return changed(POOL, {"spec.engine": {"kind": "Tomorrow"}})


def test_an_object_that_cannot_be_read_is_told_and_not_traced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster.__new__(Cluster)
    cluster.namespace, cluster._api = "serving", cast("ApiServer", _Shelf())
    with (
        asyncio.Runner() as cluster._runner,
        pytest.raises(CommandError, match="chat cannot be used as it is"),
    ):
        cluster.get(ServingPool, "chat")
    assert "spec.engine.kind" in capsys.readouterr().err
