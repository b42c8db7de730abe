"""The example of a lease under a queue's quota, on a real node: its Job sizes the lease."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rose_dev.cluster.node import Node
from rose_dev.waiting import wait_until, wait_until_established
from tests.api import objects
from tests.api.objects import changed

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
SECONDS = 400.0
TOKENS = "rose-gpu.dev/slots"


@pytest.fixture
def team(node: Node) -> Iterator[Node]:
    """A namespace with a lease of no size, and a node that has tokens."""
    kinds = [f"--filename={path}" for path in (ROOT / "crds").glob("*.yaml")]
    had_kinds = node.kubectl("get", "crd", "rolloutleases.rose-gpu.dev", "--ignore-not-found")
    node.kubectl("apply", *kinds)
    wait_until_established(node.kubectl, "crd/rolloutleases.rose-gpu.dev")
    wait_until(
        lambda: not has_namespace(node), "an earlier run's namespace is gone", seconds=SECONDS
    )
    node.kubectl("create", "namespace", "research")
    changes = {"metadata.namespace": "research", "spec.slots": {"min": 0, "max": 0}}
    node.kubectl("apply", "--filename=-", stdin=json.dumps(changed(objects.LEASE, changes)))
    give_tokens(node, 8)
    yield node
    node.kubectl("delete", "namespace", "research", "--wait=false")
    if not had_kinds:  # Helm installs no chart over kinds that are not its own.
        node.kubectl("delete", *kinds, "--ignore-not-found", seconds=SECONDS)


def has_namespace(node: Node) -> bool:
    return bool(node.kubectl("get", "namespace", "research", "--ignore-not-found"))


def give_tokens(node: Node, count: int) -> None:
    """As docs/ecosystem.md says: an extended resource of a node, which the kubelet keeps."""
    name = node.kubectl("get", "nodes", "--output=jsonpath={.items[0].metadata.name}")
    path = f"/status/capacity/{TOKENS.replace('/', '~1')}"
    change = json.dumps([{"op": "add", "path": path, "value": str(count)}])
    node.kubectl("patch", "node", name, "--subresource=status", "--type=json", f"--patch={change}")


def example() -> str:
    """The example, with the image that this node has."""
    documents = list(yaml.safe_load_all((ROOT / "examples" / "kueue.yaml").read_text()))
    (container,) = documents[-1]["spec"]["template"]["spec"]["containers"]
    container |= {"image": "localhost/rose:dev", "imagePullPolicy": "Never"}
    return yaml.safe_dump_all(documents)


def size(node: Node) -> str:
    where = ("rolloutlease", "grpo", "--namespace=research")
    return node.kubectl("get", *where, "--output=jsonpath={.spec.slots.max}")


def test_the_lease_has_its_size_while_the_job_runs(team: Node) -> None:
    team.kubectl("apply", "--filename=-", stdin=example())
    wait_until(lambda: size(team) == "4", "the Job gives the lease its size", seconds=SECONDS)
    # As Kueue preempts: the Job is suspended, its pod gets SIGTERM.
    stop = ("patch", "job", "grpo-slots", "--namespace=research", "--type=merge")
    team.kubectl(*stop, '--patch={"spec": {"suspend": true}}')
    wait_until(lambda: size(team) == "0", "a preempted Job takes it back", seconds=SECONDS)
    team.kubectl(*stop, '--patch={"spec": {"suspend": false}}')
    wait_until(lambda: size(team) == "4", "admitted again", seconds=SECONDS)
