"""Sandbox hosts from the chart on a real node: a client in a pod, a host that is killed, a fork.

With ``ROSE_BUILT_IMAGES`` they are what the Dockerfile made, as in ``installation``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose_core.wire.enrolment import lease_digest
from rose_dev.cluster.node import Node
from rose_dev.cluster.parts import AGENT_SANDBOX_KINDS
from rose_dev.errors import CommandFailed
from rose_dev.waiting import wait_until, wait_until_established
from rose_sandbox.errors import Unavailable
from rose_sandbox.main import RUNTIMES
from rose_sandbox.runtimes.parts import Parts, find_parts
from rose_weights.serve import tenants
from tests.chart.installation import (
    CHART,
    HERE,
    RESEARCH,
    ROUTERS,
    SECONDS,
    SYSTEM,
    namespaces,
    remove,
    secret,
    seen,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

NAME = f"rose-sandboxes-research-grpo-{lease_digest('research', 'grpo')}"
TEMPLATES = "sandboxtemplates.extensions.agents.x-k8s.io"
URL = f"http://{NAME}.{SYSTEM}.svc:7600"


def parts() -> Parts:
    try:
        return find_parts()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=sorted(RUNTIMES))
def installed(node: Node, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    """The chart with sandbox hosts for one lease, a store of records and a pod of the team."""
    found, built = parts(), Path(os.environ.get("ROSE_BUILT_IMAGES", ""))
    remove(node)
    gone = {RESEARCH, SYSTEM, ROUTERS}
    wait_until(
        lambda: not gone & set(namespaces(node)), "namespaces are gone", seconds=SECONDS, pause=0.5
    )
    try:
        prepare(node, tmp_path)
        values: dict[str, dict[str, Any]] = {
            "image": {"repository": "localhost/rose", "tag": "dev", "pullPolicy": "Never"}
            | {"perComponent": False},
            "agent": {"enabled": False},
            "operator": {"replicas": 1},
            "sandboxes": {
                "enabled": True,
                "store": f"rose://weights.{RESEARCH}.svc:7446",
                "leases": [{"namespace": RESEARCH, "name": "grpo"}],
                "runtime": request.param,
                "partsPath": str(found.folder),
                "gibibytes": 4,
                "templates": {"enabled": True, "images": {"registry.example/agent:1": "base"}},
            },
        }
        if built.name:  # by the Dockerfile, as in ``installation``
            node.load(built / "sandbox.tar")
            values["sandboxes"]["image"] = {"repository": "localhost/rose-sandbox", "tag": "built"}
        file = tmp_path / "values.json"
        file.write_text(json.dumps(values))
        where = ("rose", str(CHART), f"--namespace={SYSTEM}", "--create-namespace")
        try:
            node.helm(
                "install", *where, f"--values={file}", "--wait", "--timeout=300s", seconds=330
            )
        except CommandFailed as error:
            host = logs_of_host(node)
            pytest.fail("\n\n".join([str(error), host, *seen(node)]))
        yield node
    finally:
        remove(node)
        node.kubectl("delete", f"crd/{TEMPLATES}", "--ignore-not-found", "--wait=false")


def logs_of_host(node: Node) -> str:
    try:
        return node.kubectl("logs", f"daemonset/{NAME}", f"--namespace={SYSTEM}", "--tail=40")
    except CommandFailed as error:
        return str(error)


def prepare(node: Node, folder: Path) -> None:
    file = folder / "tenants.json"
    record = tenants.grant(file, "sandboxes", record=("grpo",))
    beside = (HERE / "cluster.yaml").read_text()
    wanted = {("Deployment", "weights"), ("Service", "weights"), ("Namespace", RESEARCH)}
    documents = [
        one
        for one in yaml.safe_load_all(beside)
        if (one["kind"], one["metadata"]["name"]) in wanted
    ]
    made = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}},
        *documents,
        secret(RESEARCH, "store-credentials", tenants=file.read_text()),
        secret(SYSTEM, NAME, token="word", record=record),
        secret(RESEARCH, "sandboxes", token="word"),
        client(),
    ]
    node.kubectl("apply", "--filename=-", stdin="".join(f"---\n{json.dumps(o)}\n" for o in made))
    if not AGENT_SANDBOX_KINDS.place.is_dir():
        pytest.skip("agent-sandbox's kinds are not there: rose dev build")
    (kind,) = AGENT_SANDBOX_KINDS.place.glob("*_sandboxtemplates.yaml")
    node.kubectl("apply", "--server-side", f"--filename={kind}")
    wait_until_established(node.kubectl, f"crd/{TEMPLATES}")
    container = {
        "name": "agent",
        "image": "registry.example/agent:1",
        "command": ["sh", "-c", "echo $GREETING > /home/begun; exec sleep 4321"],
        "env": [{"name": "GREETING", "value": "from a template"}],
    }
    template = {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": {"name": "agent", "namespace": RESEARCH},
        "spec": {"podTemplate": {"spec": {"containers": [container]}}},
    }
    node.kubectl("apply", "--server-side", "--filename=-", stdin=json.dumps(template))


def client() -> dict[str, object]:
    container = {
        "name": "agent",
        "image": "localhost/rose:dev",
        "imagePullPolicy": "Never",
        "command": ["sleep", "3600"],
        "env": [
            {"name": "ROSE_SANDBOX_URL", "value": URL},
            {
                "name": "ROSE_SANDBOX_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "sandboxes", "key": "token"}},
            },
        ],
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    metadata = {"name": "agent", "namespace": RESEARCH}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def ask(node: Node, program: str) -> str:
    """What a program of the team's pod prints; it has a ``host`` and may ``await``."""
    lines = "\n".join(f"        {line}" for line in program.strip().split("\n"))
    whole = f"""
import asyncio, os
from rose_sandbox.client import RemoteHost, Sandbox
from rose_sandbox.runtimes.runtime import Limits

async def main():
    host = RemoteHost(os.environ["ROSE_SANDBOX_URL"], os.environ["ROSE_SANDBOX_TOKEN"])
    try:
{lines}
    finally:
        await host.close()

asyncio.run(main())
"""
    where = ("exec", "--stdin", "agent", f"--namespace={RESEARCH}", "--")
    return node.kubectl(*where, "python", "-", stdin=whole).strip()


def host_pod(node: Node) -> str:
    labels = f"--selector=rose-gpu.dev/sandboxes={NAME}"
    path = "--output=jsonpath={.items[*].metadata.name}"
    return node.kubectl("get", "pods", f"--namespace={SYSTEM}", labels, path).strip()


CREATE = """
from dataclasses import asdict
box = Sandbox(session="episode")
await box.__aenter__()
await box.run("export GREETING=hello; echo one > /home/a")
await box.run("(while :; do date +%s > /home/beat; sleep 1; done) &")
told = await box.checkpoint([1, 2, 3])
print(told.recoverable_to, told.action)
"""
RESTORE = """
from rose_sandbox.errors import HostAway
back = None
for _ in range(60):  # the name may lead to the killed host for a while
    try:
        back = await host.restore("episode")
        break
    except HostAway as error:
        away = error
        await asyncio.sleep(1)
if back is None:
    raise away
print(back["ids"])
box = Sandbox(session="episode", host=host, existing=True)
print((await box.run("echo $GREETING $(cat /home/a)")).stdout.decode())
wait = "for n in 1 2 3 4 5 6 7 8 9; do test -e /home/beat && break; sleep 1; done"
made = await box.run(f"rm -f /home/beat; {wait}; test -e /home/beat && echo beats")
print(made.stdout.decode())
"""
FORK = """
made = await host.fork("episode", 2, None)
for name in made.sessions:
    child = Sandbox(session=name, host=host, existing=True)
    print((await child.run(f"echo {name[-4:]} > /home/b; cat /home/a")).stdout.decode().strip())
    await host.end(name, forget=True)
await host.end("episode", forget=True)
"""
TEMPLATE = """
from rose_sandbox.errors import UnknownTemplate
url, token = os.environ["ROSE_SANDBOX_URL"], os.environ["ROSE_SANDBOX_TOKEN"]
async with Sandbox(session="templated", template="agent", url=url, token=token) as box:
    print((await box.run("until test -s /home/begun; do sleep 0.1; done; cat /home/begun")).stdout)
try:
    await Sandbox(session="other", template="nobody", url=url, token=token).__aenter__()
except UnknownTemplate as error:
    print(error)
"""
STRANGER = """
from rose_sandbox.errors import HostAway
stranger = RemoteHost(os.environ["ROSE_SANDBOX_URL"], "guess")
try:
    await stranger.checkpoint("episode", [])
except HostAway as refused:
    print("refused", "bearer token" in str(refused))
await stranger.close()
"""


def test_an_agents_world_survives_the_kill_of_its_hosts_pod(installed: Node) -> None:
    node = installed
    node.kubectl("wait", "pod/agent", f"--namespace={RESEARCH}", "--for=condition=Ready")
    try:
        assert ask(node, CREATE) == "1 full"
        assert ask(node, STRANGER) == "refused True"
        made, unknown = ask(node, TEMPLATE).split("\n")
        assert made == r"b'from a template\n'"
        assert unknown == f"no SandboxTemplate nobody in namespace {RESEARCH}"
        before = host_pod(node)
        where = (f"--namespace={SYSTEM}", "--grace-period=0", "--force")
        node.kubectl("delete", "pod", before, *where)
        wait_until(lambda: host_pod(node) not in {"", before}, "another host", seconds=SECONDS)
        node.kubectl(
            *("rollout", "status", f"daemonset/{NAME}", f"--namespace={SYSTEM}", "--timeout=300s"),
            seconds=310,
        )
        said = ask(node, RESTORE).split("\n")
        assert said[0] == "[1, 2, 3]"
        assert said[1].startswith("hello one")
        assert said[-1].strip() == "beats", "its job in the background goes on"
        assert ask(node, FORK).split() == ["one", "one"]
    except (CommandFailed, AssertionError) as error:
        pytest.fail("\n\n".join([str(error), logs_of_host(node), *seen(node)]))
    assert os.path.exists(parts().folder), "the node's folder is read, not taken"  # noqa: PTH110
