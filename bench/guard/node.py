"""The processes of the benchmark: real engines pinned to one core, everything else on the others.

On a GPU node guard, tap and engine host find a free core when a request arrives. Left to the
scheduler they wait here behind the prefill that they are to protect, and so does the client that
measures.

Sessions get a group of their own from the kernel (autogroup, sched(7)), and groups that share a
core are weighed against each other anew at every sleep and every wake. With a serving engine that
sleeps hundreds of times a second and a rollout engine that only wants to run, Linux 6.18 let the
latter wait for half a minute. Two processes that share a GPU meet no such rule, so here all
processes join one group (``one_group``), in which the kernel weighs threads only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from bench.guard.serving import SERVING, Serving
from rose_agent.guard.inspection.node_verbs import fetch
from rose_agent.os.groups import wait_for
from rose_agent.os.limits import v1_base
from rose_core.identity import GpuUuid, GrantKey, PodUid, SlotKey, SlotUid
from rose_core.wire.host import HoldEngine, Holder
from rose_core.wire.sync import (
    EngineSpec,
    Grant,
    PoolPolicy,
    SignalSource,
    SyncReply,
    SyncRequest,
    WeightSource,
)
from rose_dev.engine_environment import engine_python
from rose_dev.models import make_named
from rose_engines.node.permit import Permit
from rose_engines.node.rundir import EngineFile, RunDir, read_json
from rose_wire.ports import free_port
from rose_wire.rpc import Server, call, connect
from rose_wire.services import HOLD, SYNC

SLOT = SlotKey(SlotUid("bench-slot"), 1)
POOL = "bench/serving"
SYNC_SECONDS = 2.0  # as an operator says by itself
_PATIENCE_SECONDS = 3.0
_KNOWN_SECONDS = 25.0
_KNOCK_TOKENS = 100  # long enough for a poll to see it
_KNOCK_REST_SECONDS = 1.5  # long enough for a poll to see that it is over
ENGINE_CORE = 0
_GROUP_SECONDS = 10.0  # for those that the kernel still buries


def pin(pid: int) -> None:
    """Put a process tree with all its threads on the engines' core."""
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {ENGINE_CORE})


def stand_aside() -> None:
    """Keep this process, and what it starts, off the engines' core where there is another."""
    others = set(range(os.cpu_count() or 1)) - {ENGINE_CORE}
    if others:
        for thread in psutil.Process().threads():
            os.sched_setaffinity(thread.id, others)


@contextlib.contextmanager
def one_group() -> Iterator[bool]:
    """Put this process, and what it starts, into one group of the scheduler.

    A task outside the root of the ``cpu`` hierarchy has no group by its session. Without a v1
    hierarchy that can be written, nothing is changed.

    Yields:
        Whether it is so.
    """
    base = v1_base("cpu")
    group = base / f"rose-bench-{os.getpid()}" if base is not None else None
    try:
        if group is not None:
            group.mkdir()
            _join(group)
    except OSError:
        group = None
    try:
        yield group is not None
    finally:
        if group is not None and base is not None:
            wait_for(lambda: _left(group, base), _GROUP_SECONDS)


def _left(group: Path, base: Path) -> bool:
    """Move everybody out and remove the group; false while the kernel still buries somebody."""
    for pid in (group / "cgroup.procs").read_text().split():
        _join(base, int(pid))
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def _join(group: Path, pid: int = 0) -> None:
    with contextlib.suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid or os.getpid()))


@dataclass
class Bench:
    """The running node.

    Attributes:
        signals: sources the guard may use; the polled condition leaves out the tap.
        goal_ms: the pool's SLO, TTFT and TPOT; 0 = none.
        grant: of the one slot; None: of an engine without a router, whose weights nobody sends.
        window_s: length of a guard's lent and withheld windows; 0 = it lends always.
    """

    root: Path
    model: str
    serving: Serving = SERVING["sglang"]
    signals: tuple[SignalSource, ...] = tuple(SignalSource)
    goal_ms: tuple[int, int] = (0, 0)
    grant: Grant | None = None
    window_s: float = 0.0
    serving_url: str = ""
    operator_port: int = 0
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    @property
    def rundir(self) -> RunDir:
        """The node's run directory."""
        return RunDir(self.root / "run")

    async def sync(self, _request: SyncRequest) -> SyncReply:
        """An operator that lends the one slot for ever."""
        ttft, tpot = self.goal_ms
        policy = PoolPolicy(
            POOL,
            "Lend",
            {"x": "y"},
            1,
            engine=self.serving.engine,
            ttft_milliseconds=ttft,
            tpot_milliseconds=tpot,
            allowed_signals=self.signals,
        )
        grants = (self.grant or grant_of(make_named(self.model).name),)
        return SyncReply(1, True, grants, (policy,), sync_period_seconds=SYNC_SECONDS)

    async def spawn(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> None:
        """Start a process with its own log."""
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *argv, stdout=log, stderr=log, env=env
            )

    async def rose(self, name: str, verb: str, *flags: str) -> None:
        """Start a verb of ours on the run directory."""
        argv = [sys.executable, "-m", "rose_cli.main", verb, "--rundir", str(self.rundir.root)]
        await self.spawn(name, [*argv, "--http-port", "0", *flags])

    async def start_serving(self) -> None:
        """A stock engine without ROSE's plugin."""
        port = free_port()
        argv, environment = self.serving.start(make_named(self.model), port)
        await self.spawn("serving", argv, environment)
        self.serving_url = f"http://127.0.0.1:{port}"
        await self._answering("serving", f"{self.serving_url}{self.serving.ready}")
        pin(self.processes["serving"].pid)
        entry = {"uid": "serving", "pool": POOL, "port": port, "interfaces": ["lo"]}
        entry["gpus"] = ["core-0"]
        (self.root / "replicas.yaml").write_text(yaml.safe_dump({"replicas": [entry]}))

    async def _answering(self, name: str, url: str) -> None:
        """Wait for HTTP 200 of a process.

        Raises:
            RuntimeError: it ended, or never answered; with the end of its log.
        """
        waiting = asyncio.create_task(answers(url))
        ended = asyncio.create_task(self.processes[name].wait())
        await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if waiting.done() and waiting.exception() is None:
            return
        waiting.cancel()
        log = (self.root / f"{name}.log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{name} does not answer at {url}; its log ends:\n{log}")

    async def start_agent(self) -> None:
        """The guard."""
        await self.rose(
            "agent",
            "agent",
            *("--node", "bench", "--operator", f"127.0.0.1:{self.operator_port}"),
            *("--http-host", "127.0.0.1"),
            *("--devices", "static", "--static-replicas", str(self.root / "replicas.yaml")),
            *("--crossover-seconds", str(self.window_s)),
        )

    async def end(self, name: str) -> None:
        """Kill one process; of the serving engine all, because vLLM's do not see its end."""
        process = self.processes.pop(name)
        workers = _workers(process.pid) if name == "serving" else []
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()

    def engine(self) -> EngineFile | None:
        """The rollout engine as the host started it."""
        return read_json(self.rundir.slot(SLOT.uid).engine, EngineFile)

    async def rollouts_ready(self) -> str:
        """Wait for the rollout engine; returns its URL."""
        while True:
            file = self.engine()
            if file is not None and file.url:
                with contextlib.suppress(TimeoutError):
                    await answers(f"{file.url}/ready", 5.0)
                    pin(file.pids[0])
                    return file.url
            await asyncio.sleep(0.5)

    def last_output(self, characters: int = 4000) -> str:
        """Where each log of the node ends, and which processes have ended by themselves."""
        parts = []
        for log in sorted(self.root.glob("*.log")):
            process = self.processes.get(log.stem)
            ended = "" if process is None or process.returncode is None else " (ended)"
            parts.append(f"== {log.stem}{ended}\n{log.read_text(errors='replace')[-characters:]}")
        return "\n".join(parts)

    async def page(self, name: str) -> dict[str, Any]:
        """A page of the guard."""
        return await fetch(self.rundir.root, f"/{name}")

    async def settled(self) -> None:
        """Wait until the guard knows the replica and has opened the gate."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                slots = (await self.page("report"))["slots"]
                if slots and slots[0]["gateOpen"]:
                    return
            await asyncio.sleep(0.2)

    async def guarded(self, *, up: bool) -> None:
        """Start or end tap and guard, so that what is measured without them is without them."""
        if up == ("agent" in self.processes):
            return
        if up:
            await self.rose("tap", "tap", "--http-host", "127.0.0.1")
            await self.start_agent()
            return
        for name in ("agent", "tap"):
            await self.end(name)

    async def guarded_anew(
        self, signals: tuple[SignalSource, ...], goal_ms: tuple[int, int]
    ) -> None:
        """A tap and a guard that begin with this policy; returns when they know serving.

        A guard keeps what it has learned and how much of the error budget is left, so one that has
        lived through another condition would carry that into this one. A guard that does not come
        to know serving (it may have begun in the middle of a request) is replaced by another.

        Raises:
            TimeoutError: none did.
        """
        self.signals, self.goal_ms = signals, goal_ms
        for last in (False, False, True):
            await self.guarded(up=False)
            await self.guarded(up=True)
            try:
                async with asyncio.timeout(_KNOWN_SECONDS):
                    await self.verified()
            except TimeoutError:
                if last:
                    raise
            else:
                return

    async def verified(self) -> None:
        """Wait for an open gate, with small requests where the guard waits for some.

        A guard that began anew trusts the tap once requests agree, and vLLM's load page once that
        has shown work.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self.settled()
                return
        knocking = asyncio.create_task(self._knock())
        try:
            await self.settled()
        finally:
            knocking.cancel()
            await asyncio.gather(knocking, return_exceptions=True)

    async def _knock(self) -> None:
        dialect = self.serving.dialect
        async with aiohttp.ClientSession() as http:
            while True:
                body = dialect.body([1, 2, 3], _KNOCK_TOKENS)
                async with http.post(f"{self.serving_url}{dialect.path}", json=body) as answer:
                    await answer.read()
                await asyncio.sleep(_KNOCK_REST_SECONDS)

    @property
    def bell(self) -> Path:
        """Where a gate of the benchmark's own rings."""
        return self.rundir.enforcer_bell

    @contextlib.asynccontextmanager
    async def permit(self) -> AsyncIterator[Permit]:
        """The engine's permit, for a gate of the benchmark's own; no guard may be running."""
        channel = connect(f"local:{self.rundir.host_socket}")
        permit = Permit.attach(self.rundir.slot(SLOT.uid).permit)
        try:
            await call(channel, HOLD, HoldEngine(SLOT, Holder.GUARD, hold=False), timeout=5)
            yield permit
        finally:
            permit.close_now()
            permit.detach()
            await channel.close()

    def guard_processes(self) -> list[psutil.Process]:
        """Guard and tap with their children."""
        found: list[psutil.Process] = []
        for name in ("agent", "tap"):
            root = psutil.Process(self.processes[name].pid)
            found += [root, *root.children(recursive=True)]
        return found


def grant_of(model: str) -> Grant:
    """The one slot, with an engine that serves this model."""
    return Grant(
        key=GrantKey(1, SLOT),
        ttl_seconds=600.0,
        slot_name="bench",
        lease="bench/lease",
        pool=POOL,
        pod_uid=PodUid("serving"),
        pod_name="serving",
        gpu_uuids=(GpuUuid("core-0"),),
        engine=EngineSpec("sglang-cpu", model, kv_tokens=16384, max_running=8),
        weights=WeightSource("127.0.0.1:1", "bench"),
        router="",
    )


def _workers(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


async def answers(url: str, seconds: float = 600.0) -> None:
    """Wait for HTTP 200.

    Raises:
        TimeoutError: it never came.
    """
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as http:
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.3)
    raise TimeoutError(f"{url} did not answer within {seconds:g} s")


@contextlib.asynccontextmanager
async def running(
    root: Path,
    model: str,
    serving: Serving = SERVING["sglang"],
    grant: Grant | None = None,
) -> AsyncIterator[Bench]:
    """Start everything; end everything."""
    with one_group():
        stand_aside()
        async with _started(Bench(root, model, serving, grant=grant)) as bench:
            yield bench


@contextlib.asynccontextmanager
async def _started(bench: Bench) -> AsyncIterator[Bench]:
    server = Server()
    server.unary(SYNC, bench.sync)
    bench.operator_port = await server.start("127.0.0.1:0")
    bench.rundir.create()
    try:
        await bench.start_serving()
        await bench.rose(
            "host",
            "engine-host",
            *("--models", str(make_named(bench.model).parent)),
            *("--engine-python", str(engine_python()), "--data-port", "0"),
        )
        await bench.guarded(up=True)
        yield bench
    finally:
        host = bench.processes.get("host")
        if host is not None:
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                host.terminate()
                await asyncio.wait_for(host.wait(), 20)
        for name in list(bench.processes):
            await bench.end(name)
        await server.stop(0)
