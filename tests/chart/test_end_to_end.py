"""The chart on a real node: install, lend, publish weights, serve a turn, uninstall."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_dev.errors import StartFailed
from rose_dev.node import Node
from rose_dev.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
CHART = HERE.parents[1] / "helm" / "rose"
SYSTEM, RESEARCH, SERVING = "rose-system", "research", "serving"
SECONDS = 180.0


@pytest.fixture
def installed(node: Node, tmp_path: Path) -> Iterator[Node]:
    """ROSE from the chart with fake engines, and one model on the node."""
    from rose_dev.models import TINY, make_model  # noqa: PLC0415  # torch takes seconds to import

    make_model(TINY, tmp_path).rename(tmp_path / "tiny")
    tmp_path.chmod(0o755)
    remove(node)
    wait_until(
        lambda: not {RESEARCH, SERVING, SYSTEM} & set(namespaces(node)),
        "an earlier run's namespaces are gone",
        seconds=SECONDS,
        pause=0.5,
    )
    where = ("rose", str(CHART), f"--namespace={SYSTEM}", "--create-namespace")
    values = (f"--values={HERE / 'values.yaml'}", f"--set=engineHost.modelsPath={tmp_path}")
    try:
        node.helm("install", *where, *values, "--wait", "--timeout=120s", seconds=150)
        node.kubectl("apply", f"--filename={HERE / 'cluster.yaml'}")
        yield node
    finally:
        remove(node)


def remove(node: Node) -> None:
    """Take away what a run of this test makes; also of one that was killed."""
    if '"rose"' in node.helm("list", f"--namespace={SYSTEM}", "--output=json"):
        node.helm("uninstall", "rose", f"--namespace={SYSTEM}")
    names = [f"namespace/{name}" for name in (RESEARCH, SERVING, SYSTEM)]
    node.kubectl("delete", "--ignore-not-found", "--wait=false", *names)


def namespaces(node: Node) -> list[str]:
    listed = node.kubectl("get", "namespaces", "--output=jsonpath={.items[*].metadata.name}")
    return listed.split()


def field(node: Node, kind: str, name: str, namespace: str, path: str) -> str:
    where = (kind, name, f"--namespace={namespace}", f"--output=jsonpath={path}")
    return node.kubectl("get", *where, check=False).strip()


def condition(node: Node, name: str) -> str:
    path = f'{{.status.conditions[?(@.type=="{name}")].status}}'
    return field(node, "rolloutlease", "grpo", RESEARCH, path)


def wait_for(node: Node, name: str) -> None:
    """Wait for a condition of the lease; a failure shows what the cluster looks like."""
    try:
        wait_until(lambda: reached(node, name), name, seconds=SECONDS, pause=2.0)
    except StartFailed as error:
        kinds = "pods,servingpools,rolloutleases,rolloutslots"
        workloads = (
            "deployment/rose-operator",
            "daemonset/rose-agent",
            "daemonset/rose-engine-host",
        )
        seen = [
            node.kubectl("get", kinds, "--all-namespaces", check=False),
            node.kubectl("describe", "rolloutleases,rolloutslots", "-A", check=False),
            *(logs(node, workload) for workload in workloads),
        ]
        pytest.fail("\n\n".join([str(error), *seen]))


def reached(node: Node, name: str) -> bool:
    """Whether the lease has the condition; meanwhile serving is asked, as users would.

    Without requests nothing shows that the tap sees what the engines count.
    """
    where = ("pods", f"--namespace={SERVING}", "--output=jsonpath={.items[*].status.podIP}")
    for address in node.kubectl("get", *where).split():
        with contextlib.suppress(OSError):  # not ready yet
            post(f"http://{address}:30000/generate", max_new_tokens=4)
    return condition(node, name) == "True"


def post(url: str, *, max_new_tokens: int) -> list[int]:
    """One completion; the tokens."""
    body = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0},
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310  # to the cluster
        tokens: list[int] = json.load(answer)["output_ids"]
    return tokens


def logs(node: Node, workload: str) -> str:
    where = (f"--namespace={SYSTEM}", "--all-containers", "--tail=60")
    return node.kubectl("logs", workload, *where, check=False)


def publish(node: Node, models: Path) -> None:
    """Publish the model's own weights as the first version of the run."""
    from safetensors.torch import load_file  # noqa: PLC0415

    from rose_trainer import Publisher  # noqa: PLC0415

    address = field(node, "service", "weights", RESEARCH, "{.spec.clusterIP}")
    tensors = load_file(models / "tiny" / "model.safetensors")
    with Publisher(f"{address}:7446", "grpo") as publisher:
        publisher.wait(publisher.publish(0, tensors), 60)


def turn(node: Node) -> list[int]:
    """One turn through the lease's URL, by the Service's address."""
    name = field(node, "rolloutlease", "grpo", RESEARCH, "{.status.routerURL}")
    service = name.removeprefix("http://").split(".")[0]
    address = field(node, "service", service, SYSTEM, "{.spec.clusterIP}")
    return post(f"http://{address}:8000/generate", max_new_tokens=8)


def test_a_lease_becomes_turns(installed: Node, tmp_path: Path) -> None:
    node = installed
    wait_for(node, "Granted")
    publish(node, tmp_path)
    wait_for(node, "Ready")
    assert len(turn(node)) == 8
    assert field(node, "servingpool", "chat", SERVING, "{.status.lentReplicas}") == "1"
    slots = node.kubectl("get", "rslot", f"--namespace={SYSTEM}", "--no-headers")
    assert len(slots.splitlines()) == 1
    assert "forbidden" not in logs(node, "deployment/rose-operator")

    token = field(node, "secret", "rose-token", SYSTEM, "{.data.token}")
    node.helm("upgrade", "rose", str(CHART), f"--namespace={SYSTEM}", "--reuse-values")
    assert field(node, "secret", "rose-token", SYSTEM, "{.data.token}") == token
