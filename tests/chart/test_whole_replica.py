"""A replica lent whole under a real kubelet: drained, asleep, lent, woken, Ready again; twice.

A request wakes the first one, which is then left alone for minutes; the end of the lease wakes the
other. Serving is the fake engine, whose memory really goes (``tests/chart/whole.yaml``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rose_dev.cluster.node import Node
from rose_dev.errors import StartFailed
from rose_dev.waiting import wait_until
from tests.chart.installation import (
    HERE,
    RESEARCH,
    SECONDS,
    SERVING,
    SYSTEM,
    installation,
    logs,
    make_models,
    seen,
)
from tests.chart.test_end_to_end import post

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

# Serving has all but the headroom, so nothing is left to lend beside it.
FULL = [
    {"uuid": f"GPU-static-{number}", "memoryBytes": 16 << 30, "usedBytes": 15 << 30}
    for number in range(2)
]
VALUES = (
    "--set=agent.wholeReplica.enabled=true",
    f"--set-json=agent.staticGpus={json.dumps(FULL)}",
)
DAY = {"status": {"load": {"busyPermille": [100] * 48}}}
WORD = {
    "spec": {
        "lending": {
            "maxReplicasPercent": 100,
            "minUnlentReplicas": 0,
            "forecast": {"leadMinutes": 5, "maxBusyPercent": 80},
        },
        "wholeReplica": {
            "minReleasedMebibytes": 32,
            "maxBusyPercent": 80,
            "minAwakeReplicas": 1,
            "drainSeconds": 120,
            "wakeSeconds": 120,
        },
    }
}


@dataclass(frozen=True)
class Replica:
    """A serving pod as the API server has it."""

    name: str
    address: str
    ready: bool
    restarts: int


@pytest.fixture
def lending(node: Node, tmp_path: Path) -> Iterator[Node]:
    """ROSE with its sleeper, full serving replicas, a pool whose day is known."""
    with installation(node, make_models(tmp_path), *VALUES):
        node.kubectl("apply", f"--filename={HERE / 'whole.yaml'}")
        change = ("patch", "servingpool", "chat", f"--namespace={SERVING}", "--type=merge")
        node.kubectl(*change, "--subresource=status", f"--patch={json.dumps(DAY)}")
        node.kubectl(*change, f"--patch={json.dumps(WORD)}")
        yield node


def replicas(node: Node) -> dict[str, Replica]:
    """Serving pods that are not being deleted and can sleep, by name."""
    answer = node.kubectl("get", "pods", f"--namespace={SERVING}", "--output=json")
    items = [one for one in json.loads(answer)["items"] if not gone(one)]
    return {one["metadata"]["name"]: replica(one) for one in items}


def gone(pod: dict[str, Any]) -> bool:
    """It is being deleted, or belongs to the Deployment as it was before."""
    return "deletionTimestamp" in pod["metadata"] or "volumes" not in pod["spec"]


def replica(pod: dict[str, Any]) -> Replica:
    status = pod["status"]
    conditions = {one["type"]: one["status"] for one in status.get("conditions", ())}
    started = status.get("containerStatuses", [{}])[0].get("restartCount", 0)
    ready = conditions.get("Ready") == "True"
    return Replica(pod["metadata"]["name"], status.get("podIP", ""), ready, started)


def slots(node: Node) -> list[dict[str, Any]]:
    answer = node.kubectl("get", "rolloutslots", f"--namespace={SYSTEM}", "--output=json")
    items: list[dict[str, Any]] = json.loads(answer)["items"]
    return items


def asleep(node: Node, but: str = "") -> str:
    """The pod whose whole slot runs an engine, as far as its replica is not Ready; empty = none."""
    found = replicas(node)
    for slot in slots(node):
        spec, (member, *_) = slot["spec"], slot["spec"]["members"]
        name = str(member["podName"])
        runs = slot.get("status", {}).get("state") in {"Running", "Syncing", "Loading"}
        if spec["tier"] == "Whole" and runs and name != but:
            return name if name in found and not found[name].ready else ""
    return ""


def ask(node: Node) -> None:
    """Requests as users would send them, to Ready replicas alone, so that the tap is verified."""
    for one in replicas(node).values():
        if one.ready and one.address:
            with contextlib.suppress(OSError):  # it is drained at this very moment
                post(f"http://{one.address}:30000/generate", max_new_tokens=2)


def until(node: Node, met: Callable[[], object], what: str) -> None:
    """Wait; a failure shows the cluster, and what sleeper and guard said."""
    try:
        wait_until(lambda: bool(met()), what, seconds=SECONDS, pause=1.0)
    except StartFailed as error:
        output = node.kubectl("get", "servingpools", "-A", "--output=yaml", check=False)
        pytest.fail("\n\n".join([str(error), output, *seen(node)]))


def falls_asleep(node: Node, but: str = "") -> str:
    """The pod that is lent whole: not Ready, its slot's engine running."""
    found: list[str] = []

    def lent() -> bool:
        ask(node)
        found.append(asleep(node, but))
        return bool(found[-1])

    until(node, lent, "a replica sleeps and its slot runs")
    return found[-1]


def test_a_sleeping_replica_wakes_for_a_request_and_at_the_end_of_its_lease(
    lending: Node,
) -> None:
    node = lending
    first = falls_asleep(node)
    pod = replicas(node)[first]
    # No Service sends it anything; who goes to its address all the same is answered.
    assert len(post(f"http://{pod.address}:30000/generate", max_new_tokens=4)) == 4
    until(node, lambda: replicas(node)[first].ready, "the woken replica is Ready")
    assert "RequestWhileAsleep" in logs(node, "daemonset/rose-agent")

    second = falls_asleep(node, but=first)
    assert second != first
    node.kubectl("delete", "rolloutlease", "grpo", f"--namespace={RESEARCH}")
    until(node, lambda: all(one.ready for one in replicas(node).values()), "both are Ready")
    until(node, lambda: not slots(node), "the slots are gone")
    after = replicas(node)
    assert set(after) >= {first, second}
    assert {one.restarts for one in after.values()} == {0}, "woken, not restarted"
    assert len(post(f"http://{after[second].address}:30000/generate", max_new_tokens=4)) == 4
