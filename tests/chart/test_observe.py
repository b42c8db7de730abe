"""The default values on a real node: they see a pool without one capability and lend nothing; one
value and one pool later they lend.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_core.telemetry.dialects import samples
from rose_dev.cluster.node import Node
from rose_dev.waiting import wait_until
from tests.chart.installation import (
    CHART,
    RESEARCH,
    SECONDS,
    SERVING,
    SYSTEM,
    field,
    installation,
    logs,
    make_models,
    said,
)
from tests.chart.test_end_to_end import condition, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

OWN_STATUS = ("python", "-c", "print(open('/proc/self/status').read())")


@pytest.fixture
def observing(node: Node, tmp_path: Path) -> Iterator[Node]:
    """ROSE with lending as by default, which is off, and a pool that only observes."""
    with installation(node, make_models(tmp_path), "--set=lending.enabled=false", smoke=True):
        mode(node, "Observe")
        yield node


def mode(node: Node, wanted: str) -> None:
    change = json.dumps({"spec": {"mode": wanted}})
    pool = ("servingpool", "chat", f"--namespace={SERVING}")
    node.kubectl("patch", *pool, "--type=merge", f"--patch={change}")


def of_pool(node: Node, condition_type: str, what: str) -> str:
    path = f'{{.status.conditions[?(@.type=="{condition_type}")].{what}}}'
    return field(node, "servingpool", "chat", SERVING, path)


def rights_of_the_guard(node: Node) -> set[str]:
    """Every set of capabilities that a process in the guard's container has."""
    where = (f"--namespace={SYSTEM}", "--container=guard")
    status = node.kubectl("exec", "daemonset/rose-agent", *where, "--", *OWN_STATUS)
    return {line.split()[1] for line in status.splitlines() if line.startswith("Cap")}


def known_seconds(node: Node) -> float:
    """Time of which the agent knows whether a serving replica was busy."""
    chosen = ("--selector=app.kubernetes.io/name=rose-agent", f"--namespace={SYSTEM}")
    address = node.kubectl("get", "pods", *chosen, "--output=jsonpath={.items[0].status.podIP}")
    with urllib.request.urlopen(f"http://{address}:9101/metrics", timeout=10) as page:
        text = page.read().decode()
    name = "rose_guard_replica_known_seconds_total"
    return sum(value for found, _, value in samples(text) if found == name)


def test_the_default_sees_and_lends_nothing_until_it_is_told_to(observing: Node) -> None:
    node = observing
    assert rights_of_the_guard(node) == {"0" * 16}
    wait_until(
        lambda: (
            "without the wire tap" in said(node, "servingpool", "chat", SERVING, "SignalVerified")
        ),
        "the pool says what cannot be seen",
        seconds=SECONDS,
        pause=1.0,
    )
    assert of_pool(node, "Ready", "reason") == "ObserveMode"
    assert field(node, "servingpool", "chat", SERVING, "{.status.replicas}") == "2"
    wait_until(lambda: known_seconds(node) > 0, "the load is known", seconds=SECONDS)
    assert condition(node, "Granted") == "False"
    assert node.kubectl("get", "rslot", f"--namespace={SYSTEM}", "--output=name") == ""
    assert "forbidden" not in logs(node, "daemonset/rose-agent")

    where = (f"--namespace={SYSTEM}", "--wait", "--timeout=300s")
    node.helm("upgrade", "rose", str(CHART), *where, "--reuse-values", "--set=lending.enabled=true")
    mode(node, "Lend")
    wait_for(node, "Granted")
    assert field(node, "rolloutlease", "grpo", RESEARCH, "{.status.slotsGranted}") == "1"
