"""Ways to a stub engine: direct, through the router, through sglang-router; each a process."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.router.stub import VERSION
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_wire.errors import Unavailable
from rose_wire.ports import free_ports
from rose_wire.rpc import connect, converse
from rose_wire.services import ATTACH

LEASE = "bench/router"
_SECRET = "bench"  # noqa: S105  # the bearer token between our own children


@dataclass(frozen=True)
class Route:
    """A way to the engine: its URL, and the process in between (0 = none).

    Attributes:
        pin: SHA-256 of its certificate in hex; empty = it is spoken to in plain text.
    """

    url: str
    pid: int = 0
    pin: str = ""

    def cpu_seconds(self) -> float:
        """Processor time that the process has used; to the nanosecond where the kernel says."""
        if not self.pid:
            return 0.0
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        fine = sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
        # Elsewhere in steps of 10 ms, and 600 turns of a lean router are over in six of them.
        return fine or sum(psutil.Process(self.pid).cpu_times()[:2])

    def resident_bytes(self) -> int:
        """Memory of the process."""
        return int(psutil.Process(self.pid).memory_info().rss)


@contextmanager
def process(*command: str, speaks: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A child that is gone afterwards; its output is thrown away unless it ``speaks`` to us."""
    output = subprocess.PIPE if speaks else subprocess.DEVNULL
    child = subprocess.Popen(command, stdout=output, text=True)
    try:
        yield child
    finally:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(10)
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


@dataclass(frozen=True)
class Stub:
    """A stub engine: its URL, and the SHA-256 of its certificate where it speaks TLS."""

    url: str
    pin: str = ""


@contextmanager
def stub(token_seconds: float, *, cumulative: bool = False, tls: bool = False) -> Iterator[Stub]:
    """A stub engine."""
    command = [sys.executable, "-m", "bench.router.stub", f"--token-seconds={token_seconds}"]
    command += ["--cumulative"] * cumulative + ["--tls"] * tls
    with process(*command, speaks=True) as child:
        yield Stub(*_first_line(child).split())


@contextmanager
def passer(engine: str) -> Iterator[Route]:
    """A proxy in Python that only passes bytes on."""
    command = [sys.executable, "-m", "bench.router.passer", engine]
    with process(*command, speaks=True) as child:
        yield Route(_first_line(child), child.pid)


@contextmanager
def reader(engine: str, server: str, *, python: str = sys.executable) -> Iterator[Route]:
    """A router that reads all and decides nothing, on that Python and behind that server."""
    command = [python, "-m", "bench.router.reader", engine, f"--server={server}"]
    with process(*command, speaks=True) as child:
        yield Route(_first_line(child), child.pid)


def _first_line(child: subprocess.Popen[str]) -> str:
    if child.stdout is None:
        raise RuntimeError("no pipe to the child")
    return child.stdout.readline().strip()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:  # noqa: S310  # our own children
            return bool(reply.status == 200)
    except OSError:
        return False


async def _ready(url: str, child: subprocess.Popen[str], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(_answers, url):
            if child.poll() is not None:
                sys.exit(f"{child.args!r} ended with {child.returncode}")
            await asyncio.sleep(0.1)


@asynccontextmanager
async def rose(
    engine: Stub, cap: int, *flags: str, python: str = sys.executable
) -> AsyncIterator[Route]:
    """ROSE's router with the stub attached, on that Python; ``flags`` are further ones of it."""
    http, attach = free_ports(2)
    update = EngineUpdate(
        *("stub", EngineKind.DEDICATED, LEASE, engine.url),
        gate_open=True,
        cap=cap,
        version=VERSION,
        certificates=(engine.pin,) if engine.pin else (),
    )

    async def updates() -> AsyncIterator[EngineUpdate]:
        yield update
        await asyncio.Event().wait()

    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.write_text(_SECRET)
        command = [python, "-m", "rose_cli.main", "router", f"--lease={LEASE}"]
        command += [f"--http-address=127.0.0.1:{http}", f"--attach-address=127.0.0.1:{attach}"]
        command += [f"--token-file={token}", "--log-level=WARNING", "--drain-seconds=0"]
        command += flags
        with process(*command) as child:
            url = f"http://127.0.0.1:{http}"
            await _ready(f"{url}/health", child)
            channel = connect(f"127.0.0.1:{attach}")

            async def stay() -> None:
                with suppress(Unavailable):
                    async for _ in converse(channel, ATTACH, updates(), token=_SECRET):
                        pass

            attached = asyncio.create_task(stay())
            try:
                await _ready(f"{url}/ready", child)
                yield Route(url, child.pid)
            finally:
                attached.cancel()
                await asyncio.gather(attached, return_exceptions=True)
                await channel.close()


@asynccontextmanager
async def sglang_router(python: str, engine: str) -> AsyncIterator[Route]:
    """sglang-router in front of the stub."""
    port, metrics = free_ports(2)
    command = [python, "-m", "sglang_router.launch_router", f"--worker-urls={engine}"]
    command += ["--policy=cache_aware", "--host=127.0.0.1", f"--port={port}"]
    command += [f"--prometheus-port={metrics}", "--log-level=warn"]
    with process(*command) as child:
        await _ready(f"http://127.0.0.1:{port}/readiness", child)
        yield Route(f"http://127.0.0.1:{port}", child.pid)


def has_sglang_router(python: str) -> bool:
    """Whether that Python has sglang-router.

    Raises:
        SystemExit: there is no such Python.
    """
    if python == sys.executable:
        return importlib.util.find_spec("sglang_router") is not None
    check = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang_router') is None)"
    try:
        return subprocess.run([python, "-c", check], check=False).returncode == 0
    except OSError as error:
        sys.exit(f"--sglang-router-python {python} cannot be run: {error.strerror}")
