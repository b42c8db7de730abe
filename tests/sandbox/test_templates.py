"""Sandboxes of templates: what a host makes of one, and what it says where it can make none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose_core.sandboxes.networks import PUBLIC, Network
from rose_core.sandboxes.templates import TemplateLimits, TemplateRefused
from rose_dev.waiting import until
from rose_sandbox.client import RemoteHost, Sandbox
from rose_sandbox.cluster_templates import ClusterTemplates
from rose_sandbox.errors import (
    NoTemplates,
    RuntimeFailed,
    UnknownImage,
    UnknownSandbox,
    UnknownTemplate,
)
from rose_sandbox.host import Host
from rose_sandbox.http import ServingTraffic, application
from rose_sandbox.inspector.inspector import BlindInspector
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runsc import RunscRuntime
from rose_sandbox.runtimes.runtime import ExecResult, Limits
from rose_sandbox.templates import COMMAND_LOG, Templates, limits_of
from rose_weights.store.records import Records
from rose_weights.store.store import Store
from rose_wire.api_server import access_to
from tests.sandbox.test_host import World

Json = dict[str, Any]
SPEC: Json = {
    "podTemplate": {
        "spec": {
            "containers": [
                {
                    "name": "agent",
                    "ports": [{"containerPort": 8000}],
                    "image": "registry.example/agent:1",
                    "command": ["sleep", "4321"],
                    "workingDir": "/home",
                    "env": [{"name": "GREETING", "value": "hello"}],
                    "resources": {"limits": {"cpu": "500m"}, "requests": {"memory": "2Gi"}},
                    "volumeMounts": [{"name": "work", "mountPath": "/data/here"}],
                }
            ],
            "volumes": [{"name": "work", "emptyDir": {}}],
        }
    },
    "networkPolicy": {"egress": []},
    "envVarsInjectionPolicy": "Allowed",
}


@dataclass
class Written:
    """Templates of a test."""

    specs: dict[str, Json] = field(default_factory=lambda: {"agent": SPEC})

    async def read(self, name: str) -> Mapping[str, Any]:
        if name not in self.specs:
            raise UnknownTemplate(f"no SandboxTemplate {name}")
        return self.specs[name]


@dataclass
class Served:
    world: World
    written: Written
    url: str

    def box(self, template: str = "agent", session: str = "s", **more: Any) -> Sandbox:  # noqa: ANN401
        return Sandbox(session=session, url=self.url, token="word", template=template, **more)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    world, written = World(tmp_path), Written()
    templates = Templates(written, "fake", {"registry.example/agent:1": "base"})
    app = application(world.host, ServingTraffic(), lambda: "word", templates=templates)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Served(world, written, f"http://127.0.0.1:{runner.addresses[0][1]}")
    await world.host.close()
    await runner.cleanup()


def test_a_host_that_reads_no_templates_starts_without_the_client_of_kubernetes() -> None:
    code = "import sys, rose_sandbox.main; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_sandbox_is_made_of_a_template_and_comes_back_as_such(served: Served) -> None:
    host = served.world.host
    async with served.box(environment={"MORE": "1"}) as box:
        assert box.passed_over == ("podTemplate.spec.containers[0].ports",)
        assert (await box.run("echo $GREETING $MORE")).stdout == b"hello 1\n"
        assert (await box.run("pgrep setsid")).exit_code == 0, "its command runs"
        spec = host._box("s").spec
        assert (spec.image, spec.folder, spec.networks) == ("base", "/home", ())
        assert (spec.limits.cpus, spec.limits.memory_bytes) == (0.5, 2 << 30)
        await box.checkpoint([1, 2])
        await host.restore("s", 1)
        assert host._box("s").spec == spec
        (child,) = await box.fork(1)
        assert host._box(child.session).spec.networks == ()
        await host.end(child.session, forget=True)


async def test_what_a_host_cannot_make_of_a_template_it_says_by_name(served: Served) -> None:
    one = {"image": "base"}
    served.written.specs |= {
        "kata": {"podTemplate": {"spec": {"containers": [one], "runtimeClassName": "kata"}}},
        "gvisor": {"podTemplate": {"spec": {"containers": [one], "runtimeClassName": "gvisor"}}},
        "image": {"podTemplate": {"spec": {"containers": [{"image": "elsewhere"}]}}},
    }
    for name, error, word in (
        ("nobody", UnknownTemplate, "nobody"),
        ("kata", TemplateRefused, "template kata: podTemplate"),
        ("gvisor", TemplateRefused, "it is for runsc, and this host runs fake"),
        ("image", UnknownImage, "--template-image REFERENCE=NAME"),
    ):
        with pytest.raises(error, match=word):
            async with served.box(name):
                pass
    with pytest.raises(TemplateRefused, match="Allowed: GREETING may not be set"):
        async with served.box(environment={"GREETING": "2"}):
            pass
    far = RemoteHost(served.url, "word")
    mixed = {"session": "s", "template": "agent", "image": "a", "limits": {"pids": 1}}
    with pytest.raises(ValueError, match="image, limits: they are the template's"):
        await far._call("POST", "", mixed)
    await far.close()
    with pytest.raises(ValueError, match="image, limits and folder are the template's"):
        served.box(limits=Limits(cpus=1.0))
    assert served.world.host.sessions() == ()
    assert served.world.records.turns("s") == ()


async def test_a_template_whose_command_does_not_begin_leaves_no_sandbox(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: object, **__: object) -> ExecResult:
        return ExecResult(1, stderr=b"mkdir: no space left")

    monkeypatch.setattr(served.world.runtime, "exec", refuses)
    with pytest.raises(RuntimeFailed, match="template agent does not begin: mkdir: no space"):
        async with served.box():
            pass
    with pytest.raises(UnknownSandbox):
        await served.world.host.state("s")
    assert served.world.records.turns("s") == ()


@pytest.mark.parametrize(
    "name",
    ["../../b/sandboxtemplates/agent", "..", "a/../../../x", "a?watch=1", "%2e%2e", "A", "a" * 254],
)
async def test_a_name_leads_to_no_other_place_of_the_cluster(name: str) -> None:
    """The client takes one for a path: a caller named a template of another namespace."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.raw_path)
        return web.json_response({"metadata": {"name": "agent"}, "spec": SPEC})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        source = ClusterTemplates("mine", access_to(str(server.make_url("/")), "word"))
        assert (await source.read("agent-1.b"))["podTemplate"] == SPEC["podTemplate"]
        with pytest.raises(UnknownTemplate, match="is no name of a SandboxTemplate"):
            await source.read(name)
        await source.close()
    (path,) = asked
    assert path.endswith("/namespaces/mine/sandboxtemplates/agent-1.b")


async def test_a_host_that_reads_no_templates_says_how_it_would(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(NoTemplates, match="--templates NAMESPACE"):
        await Templates().create(world.host, "s", "agent", {})
    with pytest.raises(NoTemplates, match="name one by url="):
        async with Sandbox(session="s", template="agent", host=world.host):
            pass


def test_a_request_raises_a_limit_that_is_not_said_and_lowers_none() -> None:
    usual = Limits()
    nothing = TemplateLimits()
    assert limits_of(nothing, nothing) == usual
    assert limits_of(nothing, TemplateLimits(8.0, 1, 1)) == Limits(cpus=8.0)
    assert limits_of(TemplateLimits(0.5), TemplateLimits(0.1)) == Limits(cpus=0.5)
    assert limits_of(TemplateLimits(memory_bytes=7), nothing).memory_bytes == 7


@pytest.mark.parametrize("networks", [None, PUBLIC, (), (Network("::/0", (), ((1, 2),)),)])
async def test_networks_of_a_sandbox_are_in_its_record(
    tmp_path: Path, networks: tuple[Network, ...] | None
) -> None:
    world = World(tmp_path)
    await world.host.create("s", networks=networks)
    await world.host.checkpoint("s", [1])
    await world.host.restore("s")
    assert world.host._box("s").spec.networks == networks


@pytest.mark.sandbox
async def test_a_sandbox_of_runc_runs_its_templates_command_and_is_saved_with_it(
    runc: RuncRuntime, tmp_path: Path
) -> None:
    await lives_on(runc, tmp_path)


@pytest.mark.sandbox
async def test_a_sandbox_of_gvisor_runs_its_templates_command_and_is_saved_with_it(
    runsc: RunscRuntime, tmp_path: Path
) -> None:
    await lives_on(runsc, tmp_path)


async def lives_on(runtime: RuncRuntime | RunscRuntime, tmp_path: Path) -> None:
    """Its command is a process as any other: it is there after the sandbox was lost."""
    name = runtime.name
    records = Records(Store(tmp_path / "store"), "grpo")
    host = Host(
        runtime, BlindInspector(name), records, owner="one", scratch=tmp_path / "s", egress=["*"]
    )
    spec = {**SPEC, "podTemplate": {"spec": {**SPEC["podTemplate"]["spec"]}}}
    words = ["sh", "-c", "echo began with $GREETING in $PWD; exec sleep 4321"]
    (one,) = spec["podTemplate"]["spec"]["containers"]
    spec["podTemplate"]["spec"]["containers"] = [{**one, "command": words}]
    source = Written({"agent": spec})
    spec["podTemplate"]["spec"]["runtimeClassName"] = name
    templates = Templates(source, name, {"registry.example/agent:1": "base"})
    await templates.create(host, "s", "agent", {})

    async def output_of(command: str) -> str:
        result = await host.exec("s", command, 30)
        return result.stdout.decode().strip()

    until_said = f"until grep -qs hello {COMMAND_LOG}; do sleep 0.1; done; cat {COMMAND_LOG}"
    assert await output_of(until_said) == "began with hello in /home"
    assert await output_of("test -d /data/here && pgrep -fx 'sleep 4321' | wc -l") == "1"
    assert await output_of("echo > /dev/tcp/127.0.0.1/3128 && echo open") == "", "no way out"
    await host.checkpoint("s", [1])
    await runtime.end(host._box("s").handle)
    await host.restore("s")
    assert await output_of("pgrep -fx 'sleep 4321' | wc -l") == "1"
    await host.end("s", forget=True)
    await host.close()
    await until(lambda: host.sessions() == ())


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"command": ["nowhere"]}, "nowhere: not found"),
        ({"volumeMounts": [{"name": "work", "mountPath": "/etc/passwd/x"}]}, "Not a directory"),
        ({"workingDir": "/made/of/it"}, ""),
    ],
    ids=["a command that is not there", "a folder that cannot be", "a folder of commands"],
)
async def test_what_begins_in_the_background_hides_nothing_that_failed_before_it(
    runc: RuncRuntime, tmp_path: Path, change: Json, word: str
) -> None:
    """A sandbox was there without its command or its folder, and its command began in the root."""
    records = Records(Store(tmp_path / "store"), "grpo")
    host = Host(runc, BlindInspector("a test"), records, owner="one", scratch=tmp_path / "s")
    (one,) = SPEC["podTemplate"]["spec"]["containers"]
    pod = {**SPEC["podTemplate"]["spec"], "containers": [{**one, **change}]}
    source = Written({"agent": {**SPEC, "podTemplate": {"spec": pod}}})
    templates = Templates(source, "runc", {"registry.example/agent:1": "base"})
    if word:
        with pytest.raises(RuntimeFailed, match=word):
            await templates.create(host, "s", "agent", {})
        assert host.sessions() == ()
    else:
        await templates.create(host, "s", "agent", {})
        look = "pwd; readlink /proc/$(pgrep -fx 'sleep 4321')/cwd"
        found = await host.exec("s", look, 30)
        assert found.stdout.decode().split() == ["/made/of/it", "/made/of/it"]
    await host.end("s", forget=True)
    await host.close()
