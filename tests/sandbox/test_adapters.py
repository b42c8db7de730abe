"""Harnesses' own modules, unmodified, on sandboxes: ``make sandbox-adapters`` fetches them."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rose_sandbox.adapters.shells import command_of
from rose_sandbox.client import Sandbox
from rose_sandbox.host import Host
from rose_sandbox.inspector.inspector import BlindInspector
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_weights.store.records import Records
from rose_weights.store.store import Store

WHY = "harnesses are not installed; make sandbox-adapters"


def test_a_command_is_quoted_word_by_word_and_its_environment_is_its_own() -> None:
    assert command_of(["echo", "a b", "$X"]) == "echo 'a b' '$X'"
    made = command_of("echo $X", folder="/a b", environment={"X": "1 2"})
    assert made == "cd '/a b' && env 'X=1 2' sh -c 'echo $X'"
    assert shlex.split(made)[4] == "X=1 2"


@pytest.fixture
async def host(runc: RuncRuntime, tmp_path: Path) -> AsyncIterator[Host]:
    """A host of real sandboxes."""
    records = Records(Store(tmp_path / "store"), "grpo")
    made = Host(runc, BlindInspector("a test"), records, owner="one", scratch=tmp_path / "parts")
    yield made
    for session in made.sessions():
        await made.end(session, forget=True)
    await made.close()


@pytest.mark.sandbox
async def test_swe_rexs_runtime_is_a_sandbox_that_survives_its_host(host: Host) -> None:
    abstract = pytest.importorskip("swerex.runtime.abstract", reason=WHY)
    errors = pytest.importorskip("swerex.exceptions", reason=WHY)
    adapter = pytest.importorskip("rose_sandbox.adapters.swerex", reason=WHY)
    deployment = adapter.RoseDeployment(session="episode", host=host)
    with pytest.raises(errors.DeploymentNotStartedError):
        _ = deployment.runtime
    await deployment.start()
    runtime = deployment.runtime
    assert isinstance(runtime, abstract.AbstractRuntime)
    assert await deployment.is_alive()
    await runtime.create_session(abstract.CreateBashSessionRequest())
    with pytest.raises(errors.SessionExistsError):
        await runtime.create_session(abstract.CreateBashSessionRequest())

    async def reported(command: str, **more: Any) -> Any:  # noqa: ANN401  # SWE-ReX's
        return await runtime.run_in_session(abstract.BashAction(command=command, **more))

    await reported("export SECRET=7; cd /home; sleep 1000 &")
    assert (await reported("echo $SECRET $PWD")).output == "7 /home"
    with pytest.raises(errors.NonZeroExitCodeError, match="exit code 3"):
        await reported("(exit 3)")
    assert (await reported("(exit 3)", check="silent")).exit_code == 3
    with pytest.raises(errors.SessionDoesNotExistError):
        await reported("true", session="other")
    with pytest.raises(NotImplementedError):
        await reported("gdb", is_interactive_command=True)
    with pytest.raises(errors.CommandTimeoutError):
        await runtime.execute(abstract.Command(command=["sleep", "60"], timeout=0.5))
    await runtime.write_file(abstract.WriteFileRequest(path="/home/new/a", content="one\n"))
    made = await runtime.execute(
        abstract.Command(command=["cat", "a"], cwd="/home/new", env={"X": "1"}, check=True)
    )
    assert (made.stdout, made.exit_code) == ("one\n", 0)
    there = str(Path(__file__).parent)
    await runtime.upload(abstract.UploadRequest(source_path=there, target_path="/home/tests"))
    asked = abstract.ReadFileRequest(path="/home/tests/contract.py")
    own = Path(__file__).with_name("contract.py").read_text()
    assert (await runtime.read_file(asked)).content == own
    # The turn is saved, its world goes on elsewhere, and comes back as it was.
    await host.checkpoint("episode", [1, 2])
    await reported("rm -r /home/new; SECRET=8")
    await host.restore("episode")
    back = await reported("echo $SECRET; cat /home/new/a; pgrep -x sleep >/dev/null && echo on")
    assert back.output == "7\none\non"
    await runtime.close_session(abstract.CloseBashSessionRequest())
    await deployment.stop()
    assert host.sessions() == ()


@pytest.mark.sandbox
async def test_verifiers_runtime_is_a_sandbox_with_jobs_in_the_background(host: Host) -> None:
    base = pytest.importorskip("verifiers.v1.runtimes.base", reason=WHY)
    errors = pytest.importorskip("verifiers.v1.errors", reason=WHY)
    adapter = pytest.importorskip("rose_sandbox.adapters.verifiers", reason=WHY)
    async with Sandbox(session="episode", host=host) as box:
        runtime = adapter.RoseRuntime(adapter.RoseConfig(session="episode"), box=box)
        assert isinstance(runtime, base.Runtime)
        await runtime.start()
        assert runtime.info.id == "episode"
        runtime.env = {"TASK": "one two"}
        made = await runtime.run(["sh", "-c", 'echo "$TASK $X"; pwd; exit 4'], {"X": "3"})
        assert (made.exit_code, made.stdout) == (4, "one two 3\n/home\n")
        await runtime.write("deep/er/file", b"\0bytes")
        assert await runtime.read("deep/er/file") == b"\0bytes"
        assert await runtime.read("deep/er/file", max_bytes=6) == b"\0bytes"
        with pytest.raises(errors.SandboxError, match="over the 5 byte limit"):
            await runtime.read("deep/er/file", max_bytes=5)
        with pytest.raises(errors.SandboxError, match="none"):
            await runtime.read("none")
        await runtime.run_background(["sh", "-c", "echo up; sleep 1000"], {}, "service.log")
        await host.checkpoint("episode", [1])
        await runtime.run(["pkill", "-x", "sleep"], {})
        await host.restore("episode")
        assert (await runtime.run(["pgrep", "-x", "sleep"], {})).exit_code == 0
        assert await runtime.read("service.log") == b"up\n"
        assert await runtime.alive()
        with pytest.raises(errors.SandboxError, match="no address"):
            await runtime.expose(8000)
        await runtime.stop()
        assert host.sessions() == ("episode",)  # it was given, and is its owner's
