"""The chart's network policies on a node that enforces them, with the values that install.md has.

Everything that must pass passes, with ROSE installed under them from its first second; a pod that
no policy names is refused at every port of every pod; what may dial only its peers dials nobody
else. Without the policies the same pods reach the same ports: where nothing enforces them the test
fails. Ports are those on which the pods listen, whoever declared them.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from rose_core.rights import Listener
from rose_dev.cluster.node import Node
from rose_dev.cluster.policies import enforced
from rose_dev.testing import NodeSession
from rose_dev.waiting import wait_until
from tests.chart.installation import (
    CHART,
    RESEARCH,
    ROUTERS,
    SECONDS,
    SERVING,
    SYSTEM,
    apply,
    field,
    installation,
    make_models,
    secret,
)
from tests.chart.network import OPEN, Object, Pod, named_ports, namespace, pods, standing
from tests.chart.rendering import REWARDS, SANDBOXES, render
from tests.chart.test_end_to_end import callers_token, publish, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

INSTALL = CHART.parents[1] / "docs" / "install.md"
MONITORING, ELSEWHERE = "monitoring", "elsewhere"
LISTENERS: dict[str, tuple[Listener, ...]] = {
    "operator": (Listener.OPERATOR,),
    "guard": (Listener.AGENT,),
    "tap": (Listener.TAP,),
    "engine-host": (Listener.HOST,),
    "weight-sync": (Listener.SYNC,),
    "relay": (Listener.RELAY,),
    "router": (Listener.ROUTER,),
    "rewards": (Listener.REWARDS, Listener.SCALER),
    "batches": (Listener.BATCHES,),
    "worker": (),
    # Hosts of sandboxes need parts of the node that take long to make: a pod stands for one.
    "stands": (Listener.SANDBOX,),
}
"""By the name of a container of the chart's pods."""
NOT_THE_CHARTS = {Listener.API, Listener.STORE, Listener.INGEST, Listener.FORWARD}
TOKEN = "0123456789abcdef0123456789abcdef"


def policy_of() -> Object:
    """The values of docs/install.md."""
    _, _, page = INSTALL.read_text().partition("### Network policies\n")
    found = re.search(r"```yaml\n(networkPolicy:\n.*?)```", page, re.DOTALL)
    assert found is not None, "install.md shows no values of networkPolicy"
    values: Object = yaml.safe_load(found.group(1))
    return values


def values() -> Object:
    """Those, the relay, and what else of the chart listens."""
    return {
        **policy_of(),
        "stores": [],
        "relay": {
            "enabled": True,
            "upstream": "weights.research.svc:7446",
            "upstreamTokenSecret": "rose-store-credential",
        },
        "rewards": {**REWARDS, "workers": [{"name": "shared"}], "callerNamespaces": [RESEARCH]},
        "batches": {"leases": [{"namespace": RESEARCH, "name": "grpo"}]},
    }


def sandbox_host() -> list[Object]:
    """A pod in the place of a sandbox host, and the policy of one."""
    (policy,) = [
        item
        for item in render({**values(), "sandboxes": SANDBOXES}).all("NetworkPolicy")
        if item["metadata"]["name"].startswith("rose-sandboxes-")
    ]
    labels = policy["spec"]["podSelector"]["matchLabels"] | {"app.kubernetes.io/part-of": "rose"}
    return [policy, standing(SYSTEM, "sandbox-host", 7600, labels)]


def strangers(node: Node) -> list[Pod]:
    """Pods that no policy names, but for what pods of other namespaces call themselves."""
    return pods(node, "--all-namespaces", "--selector=network=stranger")


@contextmanager
def beyond(node: Node) -> Iterator[str]:
    """A port of the machine, which is no pod's and outside of the cluster."""
    with socket.create_server((node.host_address, 0), backlog=16) as server:
        over = threading.Event()

        def take() -> None:
            while not over.is_set():
                server.accept()[0].close()

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        place = f"{node.host_address}:{server.getsockname()[1]}"
        yield place
        over.set()
        socket.create_connection(server.getsockname()).close()
        thread.join()


@pytest.fixture(scope="module")
def closed(node_session: NodeSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """ROSE, installed under policies that hold, with a lease that is served."""
    node = node_session.ensure()
    models = tmp_path_factory.mktemp("models")
    models.parent.chmod(0o755)
    file = models / "values.yaml"
    file.write_text(yaml.safe_dump(values()))
    names = (MONITORING, ELSEWHERE)
    before = (
        namespace(RESEARCH, team="research"),
        secret(RESEARCH, "rose-batches", grpo=TOKEN),
        secret(SYSTEM, "rose-rewards-teams", teams=f"research {TOKEN}\n"),
        secret(SYSTEM, "rose-rewards-workers", workers=f"shared {TOKEN}\n", shared=TOKEN),
    )

    def clean() -> None:
        for name in names:
            node.kubectl("delete", "namespace", name, "--ignore-not-found", seconds=330)

    clean()
    try:
        with (
            enforced(node),
            installation(node, make_models(models), f"--values={file}", before=before, smoke=True),
        ):
            stranger = {"network": "stranger"}
            apply(
                node,
                *map(namespace, names),
                standing(MONITORING, "reader"),
                standing(ELSEWHERE, "nobody", labels=stranger),
                # The name of a component opens nothing in a namespace that is not ROSE's.
                standing(
                    ELSEWHERE,
                    "pretends",
                    labels={
                        **stranger,
                        "app.kubernetes.io/name": "rose-agent",
                        "rose-gpu.dev/engine-host": "true",
                    },
                ),
                standing(
                    ELSEWHERE,
                    "pretends-too",
                    labels={**stranger, "app.kubernetes.io/name": "rose-batches"},
                ),
                standing(SYSTEM, "neighbour", labels=stranger),
                standing(ROUTERS, "neighbour", labels=stranger),
                *sandbox_host(),
            )
            wait_for(node, "Granted")
            publish(node, models)
            wait_for(node, "Ready")
            everywhere = ("--all-namespaces", "--selector=network=stranger")
            node.kubectl(
                "wait", "pods", *everywhere, "--for=condition=Ready", "--timeout=300s", seconds=310
            )
            yield node
    finally:
        clean()


def of_rose(node: Node) -> list[Pod]:
    """Every pod of the chart, and the routers."""
    chosen = pods(node, "--all-namespaces", "--selector=app.kubernetes.io/part-of=rose")
    routers = pods(node, f"--namespace={ROUTERS}", "--selector=app.kubernetes.io/name=rose-router")
    found = {(one.namespace, one.name): one for one in (*chosen, *routers)}
    return list(found.values())


def named(node: Node, name: str) -> Pod:
    """The pod of a component, of which there is one."""
    found = [one for one in of_rose(node) if one.labels.get("app.kubernetes.io/name") == name]
    assert found, f"no pod of {name} runs"
    return found[0]


def policies(node: Node) -> list[Object]:
    items: list[Object] = json.loads(
        node.kubectl("get", "networkpolicies", "--all-namespaces", "--output=json")
    )["items"]
    return items


def places(node: Node) -> dict[str, set[str]]:
    """``ADDRESS:PORT`` of everything that listens, by its pod's first container."""
    found: dict[str, set[str]] = {}
    for pod in of_rose(node):
        ports = {f"{pod.address}:{port}" for port in pod.listens(node)}
        found.setdefault(pod.containers[0], set()).update(ports)
    return found


def test_each_port_that_listens_has_callers_who_are_named(closed: Node) -> None:
    rules = policies(closed)
    found: set[Listener] = set()
    for pod in of_rose(closed):
        ports = set(pod.listens(closed))
        for container in pod.containers:
            found.update(LISTENERS[container])
        assert ports == named_ports(rules, pod.namespace, pod.labels) & ports, pod.name
    assert found == set(Listener) - NOT_THE_CHARTS


def test_who_is_named_gets_through(closed: Node) -> None:
    node = closed
    team = pods(node, f"--namespace={RESEARCH}", "--selector=app=weights")[0]
    token = callers_token(node)
    router = field(node, "rolloutlease", "grpo", RESEARCH, "{.status.routerURL}")
    asked = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    assert len(team.posts(node, f"{router}/generate", token, asked)["output_ids"]) == 8

    reward = {"trajectory": "one", "function": "exact", "answer": "4", "expected": "4"}
    reported = team.posts(node, f"http://rose-rewards.{SYSTEM}.svc:8100/v1/rewards", TOKEN, reward)
    assert reported["reward"] == 1.0, "the gateway was asked, and a worker has dialled it"

    (reader,) = pods(node, f"--namespace={MONITORING}")
    pages = {
        f"http://{pod.address}:{port}/metrics"
        for pod in of_rose(node)
        for port in readable(node, pod)
        if "stands" not in pod.containers
    }
    assert len(pages) >= 9
    statuses = reader.gets(node, pages)
    assert {url: status for url, status in statuses.items() if status != 200} == {}

    serving = pods(node, f"--namespace={SERVING}", "--selector=app=chat")[0]
    vacated = f"http://rose-engine-host.{SYSTEM}.svc:9103/vacated"
    assert serving.gets(node, [vacated]) == {vacated: 200}


def readable(node: Node, pod: Pod) -> set[int]:
    """Ports of a pod that the readers of metrics are named for."""
    reader: Any = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": MONITORING}}
    }
    rules = [
        {
            **policy,
            "spec": {
                **policy["spec"],
                "ingress": [
                    rule
                    for rule in policy["spec"].get("ingress", [])
                    if reader in rule.get("from", [])
                ],
            },
        }
        for policy in policies(node)
    ]
    return named_ports(rules, pod.namespace, pod.labels)


def dialled(node: Node, machine: str) -> dict[str, tuple[set[str], set[str]]]:
    """By component: what it must reach, and what it must not."""
    listen = places(node)
    (stranger,) = [one for one in strangers(node) if one.name == "nobody"]
    (serving, *_) = pods(node, f"--namespace={SERVING}", "--selector=app=chat")
    store = pods(node, f"--namespace={RESEARCH}", "--selector=app=weights")[0]
    api = field(node, "service", "kubernetes", "default", "{.spec.clusterIP}")
    anybody = {f"{stranger.address}:{OPEN}", f"{serving.address}:30000", f"{api}:443", machine}
    at_store = {f"{store.address}:7446"}

    def some(container: str, *ports: int) -> set[str]:
        found = {place for place in listen[container] if int(place.rpartition(":")[2]) in ports}
        assert found, f"{container} listens on none of {ports}"
        return found

    turns, data = some("router", 8000), some("engine-host", 30800)
    enrol, sync = some("operator", 7442), some("operator", 7443)
    relay, gateway, batches = some("relay", 7446), some("rewards", 8100), some("batches", 8200)
    pages = {place for container in ("guard", "engine-host") for place in listen[container]} - data
    return {
        "rose-router": (
            enrol | data | batches,
            anybody | at_store | relay | sync | gateway | pages,
        ),
        "rose-engine-host": (
            relay | at_store,
            anybody | turns | enrol | sync | gateway | batches,
        ),
        "rose-reward-worker-shared": (
            gateway,
            anybody | turns | at_store | relay | enrol | data | batches | pages,
        ),
        "rose-batches": (
            turns,
            anybody | at_store | relay | enrol | data | gateway | pages,
        ),
    }


ALWAYS = {"rose-reward-worker-shared"}
"""Whose policy is there without ``networkPolicy.enabled``."""


def test_who_is_not_named_gets_nowhere_and_without_policies_everywhere(closed: Node) -> None:
    node = closed
    listen = set().union(*places(node).values())
    assert len(listen) > 15
    with beyond(node) as machine:
        dial = dialled(node, machine)
        for stranger in strangers(node):
            assert stranger.reaches(node, listen) == set(), f"{stranger.namespace}/{stranger.name}"
        for name, (must, never) in dial.items():
            assert named(node, name).reaches(node, must | never) == must, name
        switch(node, "false")
        scaler = {place for place in listen if place.endswith(":8101")}
        for stranger in strangers(node):
            assert stranger.reaches(node, listen) == listen - scaler
        for name, (must, never) in dial.items():
            wanted = must if name in ALWAYS else must | never
            assert named(node, name).reaches(node, must | never) == wanted, name
        switch(node, "true")


def switch(node: Node, enabled: str) -> None:
    """Set ``networkPolicy.enabled`` and wait until it holds for a first port."""
    change = f"--set=networkPolicy.enabled={enabled}"
    node.helm("upgrade", "rose", str(CHART), f"--namespace={SYSTEM}", "--reuse-values", change)
    if enabled == "false":  # this one is the test's own
        own = sandbox_host()[0]["metadata"]["name"]
        node.kubectl("delete", "networkpolicy", own, f"--namespace={SYSTEM}")
    else:
        apply(node, sandbox_host()[0])
    one = {f"{named(node, 'rose-operator').address}:7443"}
    stranger = strangers(node)[0]
    wait_until(
        lambda: stranger.reaches(node, one) == (one if enabled == "false" else set()),
        f"networkPolicy.enabled={enabled} holds",
        seconds=SECONDS,
        pause=0.5,
    )


def test_an_uninstallation_gives_everything_back(closed: Node) -> None:
    """Last: its hook asks operator, guard and engine host, as a caller who is named."""
    closed.helm("uninstall", "rose", f"--namespace={SYSTEM}", "--timeout=300s")
    assert field(closed, "servingpool", "chat", SERVING, "{.status.lentReplicas}") == "0"
