"""NeMo Gym's own sandbox API on sandboxes: ``make sandbox-harbor`` fetches its modules."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from rose_sandbox.host import Host
from rose_sandbox.http import ServingTraffic, application
from rose_sandbox.inspector.inspector import BlindInspector
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_weights.store.records import Records
from rose_weights.store.store import Store

pytestmark = pytest.mark.sandbox

CACHE = Path(os.environ.get("ROSE_CACHE") or Path.home() / ".cache" / "rose")
PYTHON = CACHE / "harbor" / "bin" / "python"
CHECKOUT = Path(__file__).parents[2]
PACKAGES = [str(CHECKOUT / name) for name in ("sandbox", "weights", "wire", "")]
PROGRAM = """
import asyncio, pathlib, sys
from nemo_gym.sandbox import AsyncSandbox, SandboxCreateError, SandboxSpec, SandboxStatus
from nemo_gym.sandbox import list_providers

async def main(folder):
    assert "rose" in list_providers(), list_providers()
    spec = SandboxSpec(
        workdir="/home", env={"A": "1"}, files={"/data/x": "one"}, resources={"memory_mib": 256}
    )
    box = AsyncSandbox({"rose": {}}, spec)
    await box.start()
    assert await box.status() is SandboxStatus.RUNNING
    made = await box.exec("echo $A $B; pwd; cat /data/x; id -un; exit 3", cwd="/data",
                          env={"B": "2 3"}, user="nobody")
    assert (made.return_code, made.stdout) == (3, "1 2 3\\n/data\\nonenobody\\n"), made
    late = await box.exec("sleep 60", timeout_s=1)
    assert late.error_type == "timeout", late
    await box.exec("echo two > y")
    await box.download("/home/y", folder / "deep" / "y")
    assert (folder / "deep" / "y").read_text() == "two\\n"
    try:
        await box.download("/home/none", folder / "none")
    except FileNotFoundError:
        pass
    await box.stop()
    for asked, word in (
        (SandboxSpec(image="none"), "no image none"),
        (SandboxSpec(resources={"gpu": 1}), "a sandbox has none"),
        (SandboxSpec(entrypoint=["x"]), "first process"),
    ):
        try:
            await AsyncSandbox({"rose": {}}, asked).start()
        except SandboxCreateError as error:
            assert word in str(error), error
        else:
            raise AssertionError(asked)

asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


@pytest.fixture
async def served(runc: RuncRuntime, tmp_path: Path) -> AsyncIterator[tuple[Host, str]]:
    """A host of real sandboxes, and its address."""
    records = Records(Store(tmp_path / "store"), "grpo")
    host = Host(runc, BlindInspector("a test"), records, owner="one", scratch=tmp_path / "parts")
    runner = web.AppRunner(application(host, ServingTraffic(), lambda: "word"))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield host, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()
    for session in host.sessions():
        await host.end(session, forget=True)
    await host.close()


async def test_nemo_gyms_own_api_finds_and_drives_sandboxes(
    served: tuple[Host, str], tmp_path: Path
) -> None:
    if not PYTHON.exists():
        pytest.skip("NeMo Gym is not installed; make sandbox-harbor")
    host, url = served
    program = await asyncio.create_subprocess_exec(
        *(PYTHON, "-c", PROGRAM, tmp_path),
        env={
            **{name: os.environ[name] for name in ("PATH", "HOME")},
            "ROSE_SANDBOX_URL": url,
            "ROSE_SANDBOX_TOKEN": "word",
            "PYTHONPATH": os.pathsep.join(PACKAGES),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
    )
    output, _ = await asyncio.wait_for(program.communicate(), 200)
    assert program.returncode == 0, output.decode()
    assert host.sessions() == (), "closed sandboxes are gone"
