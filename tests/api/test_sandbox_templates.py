"""A sandbox host reads SandboxTemplates of a real API server that has agent-sandbox's own kinds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rose_core.sandboxes.networks import PUBLIC
from rose_core.sandboxes.templates import read_template
from rose_dev.cluster.build import build
from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.cluster.parts import AGENT_SANDBOX_KINDS, AGENT_SANDBOX_PART
from rose_dev.waiting import wait_for_answer, wait_until_established
from rose_sandbox.cluster_templates import GROUP, ClusterTemplates
from rose_sandbox.errors import NoTemplates, Unavailable, UnknownTemplate
from rose_sandbox.templates import Templates
from rose_wire.api_server import access_to, find_access
from rose_wire.ports import free_port
from tests.sandbox.test_host import World

pytestmark = pytest.mark.cluster
Json = dict[str, Any]
KINDS = (
    f"sandboxtemplates.{GROUP}",
    f"sandboxclaims.{GROUP}",
    f"sandboxwarmpools.{GROUP}",
    "sandboxes.agents.x-k8s.io",
)
TEMPLATE: Json = {
    "apiVersion": f"{GROUP}/v1beta1",
    "kind": "SandboxTemplate",
    "metadata": {"name": "agent"},
    "spec": {
        "podTemplate": {
            "metadata": {"labels": {"app": "agent"}},
            "spec": {
                "containers": [
                    {
                        "name": "agent",
                        "image": "base",
                        "command": ["sleep", "infinity"],
                        "env": [{"name": "A", "value": "1"}],
                        "resources": {"limits": {"cpu": "500m", "memory": "256Mi"}},
                    }
                ],
            },
        },
    },
}


def applied(plane: ControlPlane, namespace: str, *objects: Json) -> None:
    text = "".join(f"---\n{json.dumps(one)}\n" for one in objects)
    how = ("--server-side", "--validate=strict", f"--namespace={namespace}", "--filename=-")
    plane.kubectl("apply", *how, stdin=text)


def found(plane: ControlPlane, kind: str, namespace: str) -> list[Json]:
    output = plane.kubectl("get", kind, f"--namespace={namespace}", "--output=json")
    items: list[Json] = json.loads(output)["items"]
    return items


@pytest.fixture
def namespace(control_plane: ControlPlane) -> str:
    name = f"agents-{uuid4().hex[:8]}"
    control_plane.kubectl("create", "namespace", name)
    return name


@pytest.fixture
def kinds(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The API server with agent-sandbox's own definitions; its webhook is not there."""
    if not AGENT_SANDBOX_KINDS.place.is_dir():
        pytest.skip("agent-sandbox's kinds are not there: rose dev build")
    files = [f"--filename={path}" for path in sorted(AGENT_SANDBOX_KINDS.place.glob("*.yaml"))]
    control_plane.kubectl("apply", "--server-side", *files)
    names = [f"crd/{kind}" for kind in KINDS]
    wait_until_established(control_plane.kubectl, *names)
    yield control_plane
    control_plane.kubectl("delete", "--ignore-not-found", "--timeout=60s", *names)


async def templates(plane: ControlPlane, namespace: str) -> ClusterTemplates:
    return ClusterTemplates(namespace, await find_access(plane.kubeconfig))


async def test_a_cluster_without_agent_sandbox_is_said_to_be_one(
    control_plane: ControlPlane, namespace: str
) -> None:
    source = await templates(control_plane, namespace)
    with pytest.raises(NoTemplates, match=rf"no sandboxtemplates\.{GROUP} of v1beta1"):
        await source.read("agent")
    await source.close()


async def test_an_api_server_that_is_away_is_one_to_ask_again(tmp_path: Path) -> None:
    source = ClusterTemplates("agents", access_to(f"http://127.0.0.1:{free_port()}", "word"))
    with pytest.raises(Unavailable, match="does not answer"):
        await source.read("agent")
    await source.close()
    nowhere = ClusterTemplates("agents")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KUBECONFIG", str(tmp_path / "none"))
        with pytest.raises(NoTemplates, match="finds no API server"):
            await nowhere.read("agent")


async def test_a_sandbox_is_made_of_a_template_of_the_cluster(
    kinds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    applied(kinds, namespace, TEMPLATE)
    source, world = await templates(kinds, namespace), World(tmp_path)
    result, made = await Templates(source, "fake").create(world.host, "s", "agent", {})
    assert (result.session, result.phase) == ("s", "acting")
    assert made.networks == PUBLIC
    assert made.passed_over == ("podTemplate.metadata.labels",), "the kind's defaults are none"
    assert world.host._box("s").spec.limits.memory_bytes == 256 << 20
    assert await world.output_of("s", "echo $A") == "1"
    with pytest.raises(UnknownTemplate, match=f"no SandboxTemplate other in namespace {namespace}"):
        await source.read("other")
    await source.close()
    await world.host.close()


@pytest.mark.long
async def test_beside_its_controller_a_host_takes_nothing_of_what_is_its(
    kinds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """Its own program, against the same API server: claims and pools are served by it alone."""
    program = build([AGENT_SANDBOX_PART])[AGENT_SANDBOX_PART.name]
    flags = ["--extensions", "--leader-elect=false", "--enable-webhook=false"]
    flags += ["--metrics-bind-address=0", "--health-probe-bind-address=0"]
    pool = {
        "apiVersion": f"{GROUP}/v1beta1",
        "kind": "SandboxWarmPool",
        "metadata": {"name": "warm"},
        "spec": {"replicas": 1, "sandboxTemplateRef": {"name": "agent"}},
    }
    claim = {
        "apiVersion": f"{GROUP}/v1beta1",
        "kind": "SandboxClaim",
        "metadata": {"name": "mine"},
        "spec": {"warmPoolRef": {"name": "warm"}},
    }
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - it does not wait
            [str(program), f"--kubeconfig={kinds.kubeconfig}", *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        applied(kinds, namespace, TEMPLATE, pool, claim)
        wait_for_answer(
            lambda: (
                found(kinds, f"sandboxclaims.{GROUP}", namespace)[0]
                .get("status", {})
                .get("sandbox", {})
                .get("name")
            ),
            "the claim has a sandbox",
            90.0,
        )
        (policy,) = wait_for_answer(
            lambda: found(kinds, "networkpolicies", namespace), "the template has a policy", 60.0
        )
        theirs = {"networkPolicy": {"egress": policy["spec"]["egress"]}}
        same = read_template({**TEMPLATE["spec"], **theirs})
        assert same.networks == PUBLIC, "what it means by no policy is what we mean"
        before = {kind: spoken(kinds, kind, namespace) for kind in (*KINDS, "pods")}
        source, world = await templates(kinds, namespace), World(tmp_path / "host")
        await Templates(source, "fake").create(world.host, "s", "agent", {})
        await world.host.end("s", forget=True)
        await source.close()
        assert {kind: spoken(kinds, kind, namespace) for kind in (*KINDS, "pods")} == before
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.terminate()
        process.wait(30)


def spoken(plane: ControlPlane, kind: str, namespace: str) -> dict[str, Any]:
    """Names of objects, and who has written them."""
    return {
        one["metadata"]["name"]: {
            entry["manager"] for entry in one["metadata"].get("managedFields", [])
        }
        for one in found(plane, kind, namespace)
    }
