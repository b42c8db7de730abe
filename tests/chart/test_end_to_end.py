"""The chart on a real node: install, test, lend, serve a turn, upgrade, roll back, uninstall."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import start_http_server

from rose_dev import dashboards, prometheus
from rose_dev.cluster.node import Node
from rose_dev.errors import StartFailed
from rose_dev.waiting import wait_until
from tests.chart.auditing import granted, since, used
from tests.chart.installation import (
    CHART,
    HERE,
    RESEARCH,
    ROUTERS,
    SECONDS,
    SERVING,
    SYSTEM,
    field,
    installation,
    logs,
    make_models,
    seen,
)
from tests.chart.rendering import render
from tests.chart.routers import two_answer_as_one
from tests.chart.scraping import scraping, targets

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

# Panels about what does not happen in a quiet minute; their queries are run all the same.
QUIET = {
    "ROSE / Harvested capacity: Leases refused",
    "ROSE / Harvested capacity: Moves",
    "ROSE / Harvested capacity: Requests refused by routers",
    "ROSE / Operator and agents: Links to routers",
    "ROSE / Operator and agents: Pool of keys: bytes",
    "ROSE / Operator and agents: Pool of keys: speed of a pull",
    "ROSE / Serving guard: Made slow by lending, at most",
    "ROSE / Serving guard: Missed by the tap",
    "ROSE / Serving guard: Promised requests",
}


PLACES = (SYSTEM, ROUTERS)

# Rights that this test gives no occasion for: no lease ends, no node is cordoned.
SPARED = {
    "rose-operator": {
        ("delete", "rolloutslots"),
        ("delete", "deployments"),
    },
    "rose-agent": set(),
}


@pytest.fixture
def installed(node: Node, tmp_path: Path) -> Iterator[Node]:
    """ROSE from the chart with fake engines, and one model on the node."""
    with installation(node, make_models(tmp_path), smoke=True):
        yield node


def lent(node: Node) -> str:
    return field(node, "servingpool", "chat", SERVING, "{.status.lentReplicas}")


def condition(node: Node, name: str) -> str:
    path = f'{{.status.conditions[?(@.type=="{name}")].status}}'
    return field(node, "rolloutlease", "grpo", RESEARCH, path)


def wait_for(node: Node, name: str) -> None:
    """Wait for a condition of the lease; a failure shows what the cluster looks like."""
    try:
        wait_until(lambda: reached(node, name), name, seconds=SECONDS, pause=2.0)
    except StartFailed as error:
        pytest.fail("\n\n".join([str(error), *seen(node)]))


def reached(node: Node, name: str, *, stream: bool = False) -> bool:
    """Whether the lease has the condition; meanwhile serving is asked, as users would.

    Without requests nothing shows that the tap sees what the engines count.
    """
    where = ("pods", f"--namespace={SERVING}", "--output=jsonpath={.items[*].status.podIP}")
    for address in node.kubectl("get", *where).split():
        with contextlib.suppress(OSError):  # not ready yet
            post(f"http://{address}:30000/generate", max_new_tokens=4, stream=stream)
    return condition(node, name) == "True"


def post(
    url: str, *, max_new_tokens: int, stream: bool = False, token: str = "", session: str = ""
) -> list[int]:
    """One completion; the tokens, none of a streamed one."""
    body = {
        "stream": stream,
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0},
    }
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {"X-Rose-Session": session} if session else {}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310  # to the cluster
        if stream:
            answer.read()
            return []
        tokens: list[int] = json.load(answer)["output_ids"]
    return tokens


def rights_of_the_host(node: Node) -> tuple[str, str]:
    """User and capabilities of the engine host's first process."""
    where = (f"--namespace={SYSTEM}", "--container=engine-host")
    status = node.kubectl("exec", "daemonset/rose-engine-host", *where, "--", *READ_STATUS)
    lines = (line.partition(":") for line in status.splitlines())
    words = {name: rest.strip() for name, _, rest in lines}
    return words["Uid"].split()[0], words["CapEff"]


READ_STATUS = ("python", "-c", "print(open('/proc/1/status').read())")


def publish(node: Node, models: Path) -> None:
    """Publish the model's own weights as the first version of the run."""
    from safetensors.torch import load_file  # noqa: PLC0415

    from rose_trainer import Publisher  # noqa: PLC0415

    address = field(node, "service", "weights", RESEARCH, "{.spec.clusterIP}")
    tensors = load_file(models / "tiny" / "model.safetensors")
    credential = (models / "team").read_text()
    with Publisher(f"{address}:7446", "grpo", token=credential) as publisher:
        publisher.wait(publisher.publish(0, tensors), 60)


def service(node: Node) -> str:
    """Address of the router's Service, which the lease's URL names."""
    url = field(node, "rolloutlease", "grpo", RESEARCH, "{.status.routerURL}")
    name = url.removeprefix("http://").split(".")[0]
    return field(node, "service", name, ROUTERS, "{.spec.clusterIP}")


def callers_token(node: Node, audience: str = "rose-lease/research/grpo") -> str:
    """What a service account of the lease's namespace shows to its router."""
    account = ("default", f"--namespace={RESEARCH}")
    return node.kubectl("create", "token", *account, f"--audience={audience}").strip()


def turn(node: Node, session: str = "") -> list[int]:
    """One turn through the lease's URL, by the Service's address."""
    url, token = f"http://{service(node)}:8000/generate", callers_token(node)
    return post(url, max_new_tokens=8, token=token, session=session)


def train_on_a_right_answer(node: Node, name: str) -> None:
    """A trajectory of one turn, and the trainer's word that it was right."""
    turn(node, name)
    reported = json.dumps({"trained": [name], "rewards": {name: 1.0}}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {callers_token(node)}"}
    url = f"http://{service(node)}:8000/trajectories"
    request = urllib.request.Request(url, reported, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310  # to the cluster
        assert json.load(answer) == {"unknown": []}


def nobody_calls_without_a_token(node: Node) -> None:
    """The router takes no word of a pod that shows none, or one for another lease."""
    for path in ("/generate", "/pause_generation", "/abort_request", "/update_weights_from_disk"):
        for token in ("", callers_token(node, "rose-lease/research/other")):
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(f"http://{service(node)}:8000{path}", max_new_tokens=1, token=token)
            assert refused.value.code == 401
            reported = json.load(refused.value)["message"]
            assert "--namespace research --audience rose-lease/research/grpo" in reported


def test_a_lease_becomes_turns(installed: Node, tmp_path: Path) -> None:
    node = installed
    wait_for(node, "Granted")
    publish(node, tmp_path)
    wait_for(node, "Ready")
    assert len(turn(node)) == 8
    nobody_calls_without_a_token(node)
    # Counts may wait a few seconds for others to be written with them.
    wait_until(lambda: lent(node) == "1", "the pool counts what it lends", seconds=SECONDS)
    slots = node.kubectl("get", "rslot", f"--namespace={SYSTEM}", "--no-headers")
    assert len(slots.splitlines()) == 1
    assert rights_of_the_host(node) == ("63999", "0" * 16)
    assert "forbidden" not in logs(node, "deployment/rose-operator")
    every_panel_shows_something(node, tmp_path)
    mine = callers_token(node)
    two_answer_as_one(
        node,
        service(node),
        lambda at: len(post(f"http://{at}:8000/generate", max_new_tokens=8, token=mine)),
    )
    upgrade_and_roll_back(node)
    every_right_is_used(node)
    idle_slots_go_and_turns_bring_them_back(node)
    uninstall(node)


def test_a_prometheus_is_there_to_ask_every_panel() -> None:
    """Without one ``every_panel_shows_something`` checks nothing, inside a longer test."""
    found = prometheus.find("prometheus")
    if found is None:
        pytest.skip("no Prometheus (rose dev build): no panel of the dashboards was checked")
    assert found.is_file()


def every_right_is_used(node: Node) -> None:
    """Each process runs with the chart's own rights; what it did not need must be explained."""
    rendered = render(yaml.safe_load((HERE / "values.yaml").read_text()))
    installed = field(node, "namespace", SYSTEM, SYSTEM, "{.metadata.creationTimestamp}")
    asked = since(node.asked(), installed)
    for account, spared in SPARED.items():
        idle = granted(rendered, account) - used(asked, SYSTEM, account)
        assert idle == spared, account


def every_panel_shows_something(node: Node, folder: Path) -> None:
    """A real Prometheus scrapes the pods while turns run; then it answers every dashboard."""
    if prometheus.find("prometheus") is None:
        return  # ``test_a_prometheus_is_there_to_ask_every_panel`` says so
    from rose_trainer import metrics as trainer_metrics  # noqa: PLC0415  # torch

    pods = [
        node.kubectl("get", "pods", f"--namespace={place}", "--output=json") for place in PLACES
    ]
    store = field(node, "pods", "--selector=app=weights", RESEARCH, "{.items[0].status.podIP}")
    server, _ = start_http_server(0, "127.0.0.1", registry=trainer_metrics.REGISTRY)
    jobs = targets(*pods) | {
        "weights": [f"{store}:9105"],
        "trainer": [f"127.0.0.1:{server.server_port}"],
    }
    with scraping(folder, jobs) as running:
        for number in range(3):
            train_on_a_right_answer(node, f"answer-{number}")
            reached(node, "Ready", stream=True)
        found: set[str] = set()

        def full() -> bool:
            found.clear()
            found.update(running.empty_panels(dashboards.LENDING) - QUIET)
            return not found

        with contextlib.suppress(StartFailed):
            wait_until(full, "no panel is empty", seconds=120, pause=2.0)
        assert "; ".join(sorted(found)) == ""
    server.shutdown()
    server.server_close()


def upgrade_and_roll_back(node: Node) -> None:
    """Operators and agents are replaced twice; secrets, slot and lease stay as they were."""
    before = kept(node)
    where = (f"--namespace={SYSTEM}", "--wait", "--timeout=300s")
    changes = ("--reuse-values", "--set=operator.logLevel=DEBUG", "--set=agent.logLevel=DEBUG")
    node.helm("upgrade", "rose", str(CHART), *where, *changes)
    unchanged(node, before)
    node.helm("rollback", "rose", "1", *where)
    unchanged(node, before)
    wait_for(node, "Ready")
    unchanged(node, before)
    assert len(turn(node)) == 8


def unchanged(node: Node, before: dict[str, str]) -> None:
    """Nothing of it is different; a failure shows what happened meanwhile."""
    now = kept(node)
    if now != before:
        different = {name: (before[name], now[name]) for name in now if now[name] != before[name]}
        events = node.kubectl("get", "events", "-A", "--sort-by=.lastTimestamp").splitlines()
        found = [line for line in events if "rose-gpu" in line or "rollout" in line.lower()]
        pytest.fail(
            "\n".join([str(different), *found, logs(node, "deployment/rose-operator")]),
        )


def kept(node: Node) -> dict[str, str]:
    """What neither upgrade nor rollback may change."""
    slot = node.kubectl("get", "rslot", f"--namespace={SYSTEM}", "--output=name").strip()
    generation = "{.metadata.uid} {.metadata.generation}"
    return {
        "token": field(node, "secret", "rose-token", SYSTEM, "{.data.token}"),
        "authority": field(node, "secret", "rose-node-authority", SYSTEM, r"{.data.tls\.crt}"),
        "routers": field(node, "secret", "rose-router-authority", SYSTEM, r"{.data.tls\.crt}"),
        "certificate": field(node, "secret", "rose-tls", SYSTEM, r"{.data.tls\.crt}"),
        "slot": field(node, "rolloutslot", slot.partition("/")[2], SYSTEM, generation),
        "lease": field(node, "rolloutlease", "grpo", RESEARCH, generation),
    }


def idle_slots_go_and_turns_bring_them_back(node: Node) -> None:
    """To zero without turns, and from zero with the first one, which waits for its engine."""
    patch = json.dumps({"spec": {"slots": {"idleSeconds": 10}}})
    where = (f"--namespace={RESEARCH}", "--type=merge", f"--patch={patch}")
    node.kubectl("patch", "rolloutlease", "grpo", *where)
    wait_until(lambda: slots(node) == [], "the slot goes back", seconds=SECONDS, pause=1.0)
    wait_until(lambda: sizes(node) == "0 0 0", "nothing is wanted", seconds=SECONDS, pause=1.0)
    assert reason(node) == "Idle"
    assert condition(node, "Ready") == "True", "it takes turns"
    wait_until(lambda: answered(node), "a turn is answered", seconds=SECONDS, pause=1.0)
    wait_until(lambda: sizes(node) == "1 1 1", "it is there again", seconds=SECONDS, pause=1.0)


def answered(node: Node) -> bool:
    """Whether a turn got its tokens before its caller lost patience."""
    with contextlib.suppress(OSError):
        return len(turn(node)) == 8
    return False


def slots(node: Node) -> list[str]:
    return node.kubectl("get", "rslot", f"--namespace={SYSTEM}", "--output=name").split()


def sizes(node: Node) -> str:
    path = "{.status.slotsWanted} {.status.slotsGranted} {.status.slotsReady}"
    return field(node, "rolloutlease", "grpo", RESEARCH, path)


def reason(node: Node) -> str:
    path = '{.status.conditions[?(@.type=="Ready")].reason}'
    return field(node, "rolloutlease", "grpo", RESEARCH, path)


def uninstall(node: Node) -> None:
    """The GPU comes back first, routers go too, pools and leases stay."""
    node.helm("uninstall", "rose", f"--namespace={SYSTEM}", "--timeout=300s")
    kinds = "deployments,services,rslot"
    left = "".join(
        node.kubectl("get", kinds, f"--namespace={place}", "-o", "name") for place in PLACES
    )
    assert left.split() == []
    assert field(node, "rolloutlease", "grpo", RESEARCH, "{.metadata.name}") == "grpo"
    assert field(node, "servingpool", "chat", SERVING, "{.metadata.name}") == "chat"
    ready = "{.status.conditions[?(@.type=='Ready')].reason}"
    granted = "{.status.slotsGranted} {.status.slotsReady} {.status.routerURL}"
    assert field(node, "rolloutlease", "grpo", RESEARCH, ready) == "Uninstalled"
    assert field(node, "rolloutlease", "grpo", RESEARCH, granted).split() == ["0", "0"]
    assert field(node, "servingpool", "chat", SERVING, ready) == "Uninstalled"
    assert field(node, "servingpool", "chat", SERVING, "{.status.lentReplicas}") == "0"
