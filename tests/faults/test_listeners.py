"""Every port of every process, tried by a stranger: nothing but health and metrics answers.

The same processes know secrets of ours; whatever they say of themselves is searched for those.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from rose_dev.control_plane import ControlPlane
from rose_weights.serve import tenants
from tests.agent.node import SLOT, Node, node, tap_refusal
from tests.api.installed import install
from tests.faults import doors
from tests.operator.harness import OperatorProcess

pytestmark = pytest.mark.skipif(bool(tap_refusal()), reason=tap_refusal() or "-")

ROSE = ("-m", "rose_cli.main")
# Listeners of each: pages, and where there is one a data route or gRPC.
PORTS = {"tap": 1, "agent": 1, "host": 2, "sync": 1, "store": 2, "relay": 2, "router": 2}
PORTS["ingest"] = 1


@dataclass
class Fleet:
    """Every process of ROSE but the operator, on one machine, each with secrets of its own."""

    node: Node
    words: dict[str, str] = field(default_factory=dict)

    def secret(self, name: str) -> str:
        """A file with a word that occurs nowhere else."""
        path = self.node.root / f"{name}.secret"
        if name not in self.words:
            self.words[name] = secrets.token_hex(16)
            path.write_text(self.words[name] + "\n")
        return str(path)

    def tenants(self) -> Path:
        """A store's file of tenants; the credential of its one tenant is the secret ``store``."""
        path = self.node.root / "tenants.json"
        self.words["store"] = tenants.grant(path, "team", publish=("*",), read=("*",))
        (self.node.root / "store.secret").write_text(self.words["store"])
        return path

    def engines(self) -> set[int]:
        return {process.pid for process in self.node.engine_processes()}

    def listeners(self, name: str) -> list[tuple[str, int]]:
        process = psutil.Process(self.node.processes[name].pid)
        children = {child.pid for child in process.children(recursive=True)}
        return doors.listeners({process.pid} | children - self.engines())

    async def start(self, name: str, *words: str) -> None:
        await self.node.spawn(name, *ROSE, *words)
        await self.ready(name)

    async def ready(self, name: str) -> None:
        await self.node.until(
            lambda: len(self.listeners(name)) == PORTS[name], f"{name} listens on {PORTS[name]}"
        )

    def port(self, name: str, said: str) -> str:
        """An address that a process tells in its log."""
        log = (self.node.root / f"{name}.log").read_text()
        return f"127.0.0.1:{log.split(said)[1].split(',')[0].split()[0]}"


@contextlib.asynccontextmanager
async def fleet(root: Path) -> AsyncIterator[Fleet]:
    installation = root / "installation.secret"
    installation.write_text(word := secrets.token_hex(16))
    flags = (f"--token-file={installation}", "--log-level=DEBUG")
    async with node(root, *flags) as parts:
        made = Fleet(parts, {"installation": word})
        run = f"--rundir={parts.root / 'run'}"
        mine = f"--token-file={installation}"
        anywhere = ("--http-port=0", "--log-level=DEBUG")
        await made.start("sync", "weight-sync", run, mine, *anywhere)
        place = (f"--root={root / 'store'}", "--address=127.0.0.1:0", *anywhere)
        await made.start("store", "weights", "serve", *place, f"--tenants={made.tenants()}")
        store = made.port("store", "gRPC port ")
        place = (f"--root={root / 'relay'}", "--address=127.0.0.1:0", *anywhere)
        upstream = (f"--upstream={store}", f"--upstream-token-file={made.secret('store')}")
        await made.start("relay", "weights", "relay", *place, *upstream, mine)
        routing = ("--http-address=127.0.0.1:0", "--attach-address=127.0.0.1:0")
        turns = f"--turn-token-file={made.secret('turns')}"
        await made.start("router", "router", "--lease=team/run", *routing, mine, turns, anywhere[1])
        (root / "checkpoints").mkdir()
        publishing = (f"--store={store}", "--run=run", f"--token-file={made.secret('store')}")
        callers = f"--caller-token-file={made.secret('callers')}"
        at = (f"--root={root / 'checkpoints'}", "--address=127.0.0.1:0")
        await made.start("ingest", "ingest", *publishing, *at, callers)
        for name in ("tap", "host", "agent"):
            await made.ready(name)
        await parts.until(parts.engine_processes, "an engine runs")
        yield made


def private(path: Path, root: Path) -> bool:
    """Whether only its owner can connect to a Unix socket."""
    ways = [path, *(folder for folder in path.parents if folder.is_relative_to(root / "run"))]
    return any(stat.S_IMODE(way.stat().st_mode) & 0o077 == 0 for way in ways)


def sockets(found: Fleet) -> list[Path]:
    """Unix sockets in the folder of the test, by the processes that hold them."""
    pids = {process.pid for process in found.node.processes.values()} | found.engines()
    names = [
        str(one.laddr) for pid in pids for one in psutil.Process(pid).net_connections(kind="unix")
    ]
    return [path for name in names if (path := Path(name)).is_relative_to(found.node.root)]


async def test_strangers_get_health_and_counts_and_nothing_else(short_dir: Path) -> None:
    async with fleet(short_dir) as found:
        said: list[str] = []
        for name in PORTS:
            for token in ("", "guess"):
                for _, port in found.listeners(name):
                    answer = await doors.knock(port, token)
                    assert answer.pages or answer.calls, f"{name}: {port} answered nothing"
                    assert answer.heard <= doors.OPEN, f"{name} port {port} let a stranger in"
                    said += answer.bodies.values()
        # With its own word each door opens, so it was the word that was missing.
        for name, word in (("agent", "installation"), ("store", "store"), ("router", "turns")):
            answers = [
                await doors.knock(port, found.words[word]) for _, port in found.listeners(name)
            ]
            assert any(answer.heard - doors.OPEN for answer in answers), name
            said += [text for answer in answers for text in answer.bodies.values()]
        for pid in found.engines():
            for address, _ in doors.listeners([pid]):
                assert address in {"127.0.0.1", "::1"}, "an engine can be reached from elsewhere"
        held = sockets(found)
        assert held
        assert [path for path in held if path.exists() and not private(path, short_dir)] == []
        said.append(str(await found.node.report()))
        said += outputs(found)
        text = "\n".join(said)
        assert SLOT.uid in text, "the search looks where things are said"
        assert [name for name, word in found.words.items() if word in text] == []


def outputs(found: Fleet) -> list[str]:
    """Everything the processes logged, reported and show in lists of processes."""
    pids = {process.pid for process in found.node.processes.values()}
    said = [path.read_text(errors="replace") for path in found.node.root.rglob("*.log")]
    said += [repr(request) for request in found.node.operator.requests]
    said += [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids | found.engines()]
    said += [Path(f"/proc/{pid}/environ").read_text() for pid in found.engines()]
    return said


@pytest.mark.cluster
async def test_the_operator_hears_no_stranger(control_plane: ControlPlane, tmp_path: Path) -> None:
    install(control_plane)
    name = f"doors-{secrets.token_hex(4)}"
    control_plane.kubectl("create", "namespace", name)
    word = secrets.token_hex(16)
    (tmp_path / "word").write_text(word)
    own = (f"--token-file={tmp_path / 'word'}", "--log-level=DEBUG")
    operator = OperatorProcess(control_plane.kubeconfig, tmp_path, name, more=own)
    await asyncio.to_thread(operator.start)
    try:
        assert operator.process is not None
        ports = [port for _, port in doors.listeners([operator.process.pid])]
        assert sorted(ports) == sorted((operator.sync_port, operator.http_port))
        for port in ports:
            answer = await doors.knock(port, "guess")
            assert answer.pages or answer.calls
            assert answer.heard <= doors.OPEN
            assert word not in "".join(answer.bodies.values())
        opened = await doors.knock(operator.sync_port, word)
        assert opened.heard, "with the word the door opens, so it was the word that was missing"
        assert word not in operator.log.read_text()
    finally:
        operator.kill()
