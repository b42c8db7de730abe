"""``python -m bench.router``: the router beside sglang-router (where installed) and no router.

Every process has one thread of Python; on two cores client, router and stub share them, so figures
with and without router are taken the same way and the differences count, not the sums.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import resource
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.record import Figure, figure, record
from bench.router.load import Result, quantile, turns
from bench.router.stub import VERSION
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_wire.errors import Unavailable
from rose_wire.rpc import connect, converse
from rose_wire.services import ATTACH

LEASE = "bench/router"
_WORD = "bench"  # the bearer token between our own children


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=__doc__)
    parser.add_argument("--turns", type=int, default=1500, help="turns that are answered at once")
    parser.add_argument("--streams", type=int, default=100, help="concurrent streams")
    parser.add_argument("--stream-tokens", type=int, default=40)
    parser.add_argument("--token-seconds", type=float, default=0.1)
    parser.add_argument("--long-streams", type=int, default=1000, help="0 leaves this part out")
    parser.add_argument("--long-tokens", type=int, default=20)
    parser.add_argument("--long-token-seconds", type=float, default=1.0)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument(
        "--sglang-router-python", default=sys.executable, help="Python that has sglang-router"
    )
    return parser


@dataclass(frozen=True)
class Route:
    """A way to the engine: its URL, and the process in between (0 = none)."""

    url: str
    pid: int = 0

    def cpu_seconds(self) -> float:
        """Processor time that the process has used."""
        return sum(psutil.Process(self.pid).cpu_times()[:2]) if self.pid else 0.0

    def resident_bytes(self) -> int:
        """Memory of the process."""
        return int(psutil.Process(self.pid).memory_info().rss)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


@contextmanager
def stub(token_seconds: float) -> Iterator[str]:
    """A stub engine; its URL."""
    command = (sys.executable, "-m", "bench.router.stub", f"--token-seconds={token_seconds}")
    with process(*command, speaks=True) as child:
        if child.stdout is None:
            raise RuntimeError("no pipe to the stub")
        yield child.stdout.readline().strip()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:  # noqa: S310  # our own children
            return bool(reply.status == 200)
    except OSError:
        return False


async def _ready(url: str, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(_answers, url):  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.1)


@asynccontextmanager
async def rose(engine: str, cap: int) -> AsyncIterator[Route]:
    """ROSE's router with the stub attached."""
    http, attach = free_port(), free_port()
    update = EngineUpdate(
        "stub", EngineKind.DEDICATED, LEASE, engine, gate_open=True, cap=cap, version=VERSION
    )

    async def updates() -> AsyncIterator[EngineUpdate]:
        yield update
        await asyncio.Event().wait()

    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.write_text(_WORD)
        command = [sys.executable, "-m", "rose_cli.main", "router", f"--lease={LEASE}"]
        command += [f"--http-address=127.0.0.1:{http}", f"--attach-address=127.0.0.1:{attach}"]
        command += [f"--token-file={token}", "--log-level=WARNING", "--drain-seconds=0"]
        with process(*command) as child:
            url = f"http://127.0.0.1:{http}"
            await _ready(f"{url}/health")
            channel = connect(f"127.0.0.1:{attach}")

            async def stay() -> None:
                with suppress(Unavailable):
                    async for _ in converse(channel, ATTACH, updates(), token=_WORD):
                        pass

            attached = asyncio.create_task(stay())
            try:
                await _ready(f"{url}/ready")
                yield Route(url, child.pid)
            finally:
                attached.cancel()
                await asyncio.gather(attached, return_exceptions=True)
                await channel.close()


@asynccontextmanager
async def sglang_router(python: str, engine: str) -> AsyncIterator[Route]:
    """sglang-router in front of the stub."""
    port, metrics = free_port(), free_port()
    command = [python, "-m", "sglang_router.launch_router", f"--worker-urls={engine}"]
    command += ["--policy=cache_aware", "--host=127.0.0.1", f"--port={port}"]
    command += [f"--prometheus-port={metrics}", "--log-level=warn"]
    with process(*command) as child:
        await _ready(f"http://127.0.0.1:{port}/readiness")
        yield Route(f"http://127.0.0.1:{port}", child.pid)


def has_sglang_router(python: str) -> bool:
    """Whether that Python has sglang-router."""
    if python == sys.executable:
        return importlib.util.find_spec("sglang_router") is not None
    check = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang_router') is None)"
    return subprocess.run([python, "-c", check], check=False).returncode == 0


async def _routes(
    stack: AsyncExitStack, engine: str, given: argparse.Namespace
) -> dict[str, Route]:
    routes = {"direct": Route(engine)}
    routes["rose"] = await stack.enter_async_context(rose(engine, cap=4096))
    if has_sglang_router(given.sglang_router_python):
        other = sglang_router(given.sglang_router_python, engine)
        routes["sglang-router"] = await stack.enter_async_context(other)
    return routes


async def throughput(given: argparse.Namespace) -> list[Figure]:
    """Turns of one token, answered at once, 32 at a time."""
    figures: list[Figure] = []
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(stub(0))
        for name, route in (await _routes(stack, engine, given)).items():
            result, burnt = Result([], [], 1.0), 0.0
            for count in (64, given.turns):  # the first run warms connections up
                burnt = route.cpu_seconds()
                result = await turns(
                    route.url, count=count, at_once=32, tokens=8, prompt=given.prompt, stream=False
                )
            figures.append(figure(f"turns per second, {name}", result.per_second, "1/s"))
            if route.pid:
                each = given.turns / max(route.cpu_seconds() - burnt, 0.01)
                figures.append(figure(f"turns per second of CPU, {name}", each, "1/s"))
    return figures


async def memory(given: argparse.Namespace) -> list[Figure]:
    """Many slow streams at once: all must end whole; what each holds of the router's memory."""
    count = given.long_streams
    if not count:
        return []
    _allow_files(count * 2 + 256)
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(stub(given.long_token_seconds))
        router = await stack.enter_async_context(rose(engine, cap=count))
        before = router.resident_bytes()
        asked = asyncio.create_task(
            turns(
                router.url,
                count=count,
                at_once=count,
                tokens=given.long_tokens,
                prompt=given.prompt,
                stream=True,
                spread=given.long_token_seconds * given.long_tokens / 4,
            )
        )
        highest = before
        while not asked.done():
            await asyncio.wait({asked}, timeout=0.25)
            highest = max(highest, router.resident_bytes())
        whole = len(asked.result().seconds)
    return [
        figure("long streams held, all whole", whole, ""),
        figure("memory per long stream", (highest - before) / count / 1024, "KiB"),
    ]


def _allow_files(wanted: int) -> None:
    """Sockets of callers and children; children inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, wanted), hard), hard))


async def latency(given: argparse.Namespace) -> list[Figure]:
    """Streams at a set pace: how much later first events and ends come than without a router."""
    figures: list[Figure] = []
    base: Result | None = None
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(stub(given.token_seconds))
        for name, route in (await _routes(stack, engine, given)).items():
            result = await turns(
                route.url,
                count=given.streams * 2,
                at_once=given.streams,
                tokens=given.stream_tokens,
                prompt=given.prompt,
                stream=True,
                spread=given.token_seconds * given.stream_tokens,
            )
            base = base or result
            figures += _against(name, result, base)
    return figures


def _against(name: str, result: Result, base: Result) -> list[Figure]:
    figures = []
    for percent in (50, 99):
        first = quantile(result.first, percent) - quantile(base.first, percent)
        whole = quantile(result.seconds, percent) - quantile(base.seconds, percent)
        if result is base:
            first, whole = quantile(base.first, percent), quantile(base.seconds, percent)
        word = "" if result is base else "added "
        figures.append(figure(f"{word}first event p{percent}, {name}", first * 1000, "ms"))
        figures.append(figure(f"{word}turn p{percent}, {name}", whole * 1000, "ms"))
    return figures


async def run(given: argparse.Namespace) -> list[Figure]:
    """All parts."""
    return [*await throughput(given), *await latency(given), *await memory(given)]


def main() -> int:
    """Measure and report."""
    given = flags().parse_args()
    figures = asyncio.run(run(given))
    notes = [
        f"{given.streams} streams, starts spread evenly, {given.stream_tokens} tokens each, "
        f"one per {given.token_seconds * 1000:.0f} ms, prompts of {given.prompt} tokens"
    ]
    if not has_sglang_router(given.sglang_router_python):
        notes.append("sglang-router is not installed; --sglang-router-python names a Python")
    record("router", figures, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
