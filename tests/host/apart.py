"""An engine host as it is on a node: a user of its own, and a root helper beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil

from rose_core.wire.host import EngineState, EngineStatus, HostStatusRequest
from rose_engines.node.rundir import RunDir
from rose_wire.errors import WireError
from rose_wire.rpc import call, connect
from rose_wire.services import STATUS
from tests.host.helpers import until
from tests.host.left import sweep

HOST, FIRST = 42_050, 42_100
# The test environment's own Python may lie where no other user can go.
_PYTHON = Path("/usr/bin/python3")


@contextlib.contextmanager
def everybodys_python() -> Iterator[Path]:
    """A Python that every user may run, with what this one has."""
    folder = Path(tempfile.mkdtemp(prefix="python", dir="/tmp"))
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    here = Path(sysconfig.get_paths()["purelib"])
    paths = [str(here)]
    for file in here.glob("*rose*.pth"):
        paths += file.read_text().split()
    (packages / "all.pth").write_text("\n".join(paths))
    (folder / "pyvenv.cfg").write_text(f"home = {_PYTHON.parent}\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(_PYTHON)
    folder.chmod(0o755)
    try:
        yield folder / "bin" / "python"
    finally:
        shutil.rmtree(folder)


def refusal(python: Path) -> str:
    """Why no other user can run a host here; empty when one can."""
    if os.geteuid() != 0:
        return "changing users needs root"
    if not _PYTHON.exists():
        return f"there is no {_PYTHON}"
    tried = subprocess.run(
        [python, "-B", "-c", "import rose_agent.host.main, rose_engines.fake"],
        user=HOST,
        group=HOST,
        extra_groups=[],
        env={"HOME": "/"},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"no other user can run it: {tried.stderr[-300:]}"


class ApartHost:
    """The host's process, and what is beside it."""

    def __init__(self, rundir: Path, process: asyncio.subprocess.Process) -> None:
        self.rundir = RunDir(rundir)
        self.process = process
        self.channel = connect(f"local:{rundir}/host.sock")

    @property
    def helper(self) -> psutil.Process:
        return next(
            child
            for child in psutil.Process(self.process.pid).children()
            if "rose_agent.host.helper.serve" in child.cmdline()
        )

    async def status(self) -> EngineStatus | None:
        with contextlib.suppress(WireError):
            status = await call(self.channel, STATUS, HostStatusRequest(), timeout=5)
            return status.engines[0] if status.engines else None
        return None

    async def serving(self) -> EngineStatus:
        found: list[EngineStatus] = []

        async def serves() -> bool:
            assert self.process.returncode is None
            status = await self.status()
            found[:] = [status] if status is not None else []
            return status is not None and status.state is EngineState.SERVING

        await until(serves, f"the engine serves: {found}")
        return found[0]


@contextlib.asynccontextmanager
async def apart(
    rundir: Path, models: Path, python: Path, driver: str, *more: str
) -> AsyncIterator[ApartHost]:
    """A host that answers, with its helper; both are gone afterwards, and what they made."""
    command: list[str | Path] = [
        python,
        "-B",
        "-m",
        "rose_cli.main",
        "engine-host",
        "--cgroup",
        driver,
    ]
    command += ["--rundir", rundir, "--models", models, "--engine-python", python]
    command += ["--data-port", "0", "--http-port", "0", "--drain-seconds", "0"]
    command += ["--host-uid", str(HOST), "--engine-uid", str(FIRST), *more]
    process = await asyncio.create_subprocess_exec(*command)
    host = ApartHost(rundir, process)
    try:

        async def up() -> bool:
            assert process.returncode is None, "the host has ended"
            with contextlib.suppress(WireError):
                await call(host.channel, STATUS, HostStatusRequest(), timeout=5)
                return True
            return False

        await until(up, "the host answers")
        yield host
    finally:
        await host.channel.close()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await asyncio.to_thread(sweep, rundir, driver)  # type: ignore[arg-type]
