"""A node without Kubernetes: fake serving engine, tap, engine host, guard, operator in the test.

Everything but the operator is a process of its own, as in production, so that it can be killed and
stopped. The tap listens on the loopback of the test's own namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil
import yaml
from safetensors.numpy import save_file

from rose_agent.guard.inspection import node_verbs
from rose_core.identity import GpuUuid, GrantKey, PodUid, SlotKey, SlotUid
from rose_core.telemetry.dialects import samples
from rose_core.wire.sync import (
    EngineSpec,
    Grant,
    Notice,
    NoticeRequest,
    PoolPolicy,
    SlotReport,
    SyncReply,
    SyncRequest,
    WeightSource,
)
from rose_dev.process_testing import spawn_process
from rose_dev.shell import ending_with_us
from rose_engines.node.rundir import EngineFile, RunDir, read_json
from rose_wire import tls
from rose_wire.rpc import Server
from rose_wire.services import NOTICES, SYNC
from tests.host.helpers import FAKE
from tests.host.left import sweep

POOL = "default/chat"
SLOT = SlotKey(SlotUid("slot-1"), 1)
PATIENCE_SECONDS = 60.0
_GENERATED = "generation_tokens_total"


def tap_refusal() -> str:
    """Why no packet socket can be opened here; empty when one can."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0).close()
    except OSError as error:
        return f"the wire tap needs root or CAP_NET_RAW: {error}"
    return ""


class FakeOperator:
    """Answers ``Sync`` with what the test sets; keeps the last request."""

    def __init__(self) -> None:
        self.term = 1
        self.complete = True
        self.granted = True
        self.silent = False
        self.ttl_seconds = 30.0
        self.sync_seconds = 0.3
        self.mode = "Lend"
        self.ttft_ms = 0
        self.tpot_ms = 0
        self.generation = 1
        self.arguments = {"token-seconds": "0.002"}
        self.others: tuple[PoolPolicy, ...] = ()
        self.beside: dict[PodUid, GpuUuid] = {}  # replicas with a slot of their own, as well
        self.requests: list[SyncRequest] = []
        self.address = ""
        self._server = Server()
        self._server.unary(SYNC, self._sync)
        self._server.server_stream(NOTICES, self._notices)

    async def start(self) -> None:
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1:0')}"

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _notices(self, _request: NoticeRequest) -> AsyncIterator[Notice]:
        """Nothing to say, on a stream that stays open, as the real one."""
        await asyncio.sleep(3600)
        yield Notice()

    async def _sync(self, request: SyncRequest) -> SyncReply:
        self.requests.append(request)
        if self.silent:
            await asyncio.sleep(3600)
        policy = PoolPolicy(
            pool=POOL,
            mode=self.mode,
            labels={"app": "chat"},
            port=1,
            ttft_milliseconds=self.ttft_ms,
            tpot_milliseconds=self.tpot_ms,
        )
        more = (self._grant_beside(pod, gpu) for pod, gpu in self.beside.items())
        grants = (self._grant(), *more) if self.granted else ()
        return SyncReply(
            self.term,
            self.complete,
            grants,
            (policy, *self.others),
            sync_period_seconds=self.sync_seconds,
        )

    def _grant(self) -> Grant:
        return Grant(
            key=GrantKey(self.term, SlotKey(SLOT.uid, self.generation)),
            ttl_seconds=self.ttl_seconds,
            slot_name="slot-one",
            lease="team/run",
            pool=POOL,
            pod_uid=PodUid("serving-0"),
            pod_name="serving-0",
            gpu_uuids=(GpuUuid("GPU-0"),),
            engine=EngineSpec("fake", "small", arguments=FAKE | self.arguments),
            weights=WeightSource("127.0.0.1:1", "run"),
            router="",
        )

    def _grant_beside(self, pod: PodUid, gpu: GpuUuid) -> Grant:
        key = GrantKey(self.term, SlotKey(SlotUid(f"beside-{pod}"), 1))
        made, name = self._grant(), f"beside-{pod}"
        return msgspec.structs.replace(
            made, key=key, slot_name=name, pod_uid=pod, pod_name=pod, gpu_uuids=(gpu,)
        )

    @property
    def slot(self) -> SlotReport | None:
        """The slot as last reported."""
        if not self.requests:
            return None
        return next((s for s in self.requests[-1].slots if s.slot.uid == SLOT.uid), None)


@dataclass
class Node:
    """The running parts."""

    root: Path
    operator: FakeOperator
    http: aiohttp.ClientSession
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    serving_url: str = ""
    agent_flags: tuple[str, ...] = ()
    tap_flags: tuple[str, ...] = ()
    cgroup: str = "signals"
    module: str = ""
    neighbours: list[dict[str, object]] = field(default_factory=list)
    name: str = "node-1"
    inside: tuple[str, ...] = ()  # a command that starts the others in another namespace
    identity: Path | None = None

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.root / "run")

    # --- processes

    async def spawn(self, name: str, *arguments: str) -> asyncio.subprocess.Process:
        if self.module and "rose_cli.main" in arguments:
            _, _, *rest = arguments
            arguments = ("-m", self.module, str(self.root / f"{name}.served"), *rest)
        with (self.root / f"{name}.log").open("ab") as log:
            given = os.environ | ({tls.IDENTITY: str(self.identity)} if self.identity else {})
            if arguments[0] == "-m" and not self.inside:
                _, module, *words = arguments
                process = await spawn_process(module, *words, stdout=log, stderr=log, env=given)
            else:
                process = await asyncio.create_subprocess_exec(
                    *ending_with_us([*self.inside, sys.executable, *arguments]),
                    stdout=log,
                    stderr=log,
                    env=given,
                )
        self.processes[name] = process
        return process

    async def start_serving(self) -> None:
        log = self.root / "serving.log"
        log.unlink(missing_ok=True)
        port = self.serving_url.rpartition(":")[2] or "0"
        await self.spawn(
            "serving", "-m", "rose_engines.fake", "--token-seconds", "0.005", "--port", port
        )
        await self.until(lambda: "url=" in log.read_text(), "serving engine listens")
        self.serving_url = log.read_text().split("url=")[1].split()[0]
        self.write_replicas()

    def write_replicas(self, **changes: object) -> None:
        entry: dict[str, object] = {
            "uid": "serving-0",
            "pool": POOL,
            "port": int(self.serving_url.rpartition(":")[2]),
            "interfaces": ["lo"],
            "pids": [self.processes["serving"].pid],
            "gpus": ["GPU-0"],
            **changes,
        }
        target = self.root / "replicas.yaml"
        draft = self.root / ".replicas.yaml"
        draft.write_text(yaml.safe_dump({"replicas": [entry, *self.neighbours]}))
        draft.replace(target)

    async def start_tap(self) -> None:
        await self.spawn(
            "tap",
            *("-m", "rose_cli.main", "tap", "--rundir", str(self.root / "run")),
            *("--http-host", "127.0.0.1", "--http-port", "0", *self.tap_flags),
        )

    async def start_host(self) -> None:
        await self.spawn(
            "host",
            *("-m", "rose_cli.main", "engine-host", "--rundir", str(self.root / "run")),
            *("--models", str(self.root / "models"), "--engine-python", sys.executable),
            *("--data-port", "0", "--http-port", "0", "--cgroup", self.cgroup),
        )

    async def start_agent(self) -> None:
        await self.spawn(
            "agent",
            *("-m", "rose_cli.main", "agent", "--node", self.name),
            *("--rundir", str(self.root / "run"), "--operator", self.operator.address),
            *("--http-host", "127.0.0.1", "--http-port", "0", "--devices", "static"),
            *("--static-replicas", str(self.root / "replicas.yaml"), "--settle-seconds", "1"),
            *self.agent_flags,
        )

    async def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        if process.returncode is None:
            process.kill()
        await process.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    # --- looking

    async def until(
        self, condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS
    ) -> None:
        deadline = time.monotonic() + seconds
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"never happened: {what}\n{await self.story()}")
            await asyncio.sleep(0.05)

    async def story(self) -> str:
        """Everything that helps to understand a failure."""
        parts = [f"--- {p.name}\n{p.read_text()[-3000:]}" for p in self.root.glob("*.log")]
        parts.append(f"--- slot\n{self.operator.slot}\n--- engine\n{self.engine()}")
        with contextlib.suppress(aiohttp.ClientError, OSError):
            parts.append(f"--- report\n{json.dumps(await self.report(), indent=1)[:4000]}")
            parts += ["--- trace", *map(str, (await self.trace())[-30:])]
        return "\n".join(parts)

    def engine(self) -> EngineFile | None:
        return read_json(self.rundir.slot(SLOT.uid).engine, EngineFile)

    async def report(self) -> dict[str, Any]:
        return await node_verbs.fetch(self.rundir.root, "/report")

    async def trace(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = (await node_verbs.fetch(self.rundir.root, "/trace"))[
            "entries"
        ]
        return entries

    async def slot(self) -> dict[str, Any]:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            return next(iter((await self.report())["slots"]), {})
        return {}

    async def gate(self, *, is_open: bool) -> bool:
        return bool((await self.slot()).get("gateOpen") is is_open)

    def engine_processes(self) -> list[psutil.Process]:
        file = self.engine()
        found = []
        for pid in file.pids if file else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def cpu_seconds(self) -> float:
        """CPU the rollout engine has used: what it computes cannot be hidden from this."""
        total = 0.0
        for process in self.engine_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    async def tokens(self) -> int | None:
        """Tokens the rollout engine has made; None when it does not answer (frozen, gone)."""
        file = self.engine()
        timeout = aiohttp.ClientTimeout(total=1.0)
        try:
            async with self.http.get(f"{file.url if file else ''}/metrics", timeout=timeout) as got:
                text = await got.text()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None
        counts = [value for name, _, value in samples(text) if name.endswith(_GENERATED)]
        return int(counts[0]) if counts else None

    async def generate(
        self, tokens: int = 20, *, stream: bool = True, prompt: Sequence[int] = (1, 2, 3)
    ) -> int:
        """One serving request, read to its end; returns the events."""
        body = {
            "input_ids": list(prompt),
            "stream": stream,
            "sampling_params": {"max_new_tokens": tokens},
        }
        events = 0
        async with self.http.post(f"{self.serving_url}/generate", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                events += line.startswith(b"data: {")
        return events

    async def keep_rollouts_busy(self) -> asyncio.Task[None]:
        """Requests to the rollout engine itself, so that it computes whenever it may."""
        return asyncio.create_task(self._feed())

    async def _feed(self) -> None:
        body = {
            "input_ids": [1],
            "stream": True,
            "sampling_params": {"max_new_tokens": 100_000},
        }
        while True:
            file = self.engine()
            with contextlib.suppress(aiohttp.ClientError, OSError, json.JSONDecodeError):
                async with self.http.post(
                    f"{file.url if file else ''}/generate",
                    json=body,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as answer:
                    async for _ in answer.content:
                        pass
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        pids = [p.pid for p in self.engine_processes()]
        for process in self.processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                    process.kill()
            await process.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(sweep, self.root / "run", self.cgroup)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def node(
    root: Path,
    *agent_flags: str,
    cgroup: str = "signals",
    module: str = "",
    tap_flags: tuple[str, ...] = (),
) -> AsyncIterator[Node]:
    """Start everything; end everything, whatever happened.

    Args:
        agent_flags: of the guard.
        cgroup: the engine host's.
        module: instead of the command line's; its first argument is a file of the process's name.
        tap_flags: of the tap.
    """
    model = root / "models" / "small"
    model.mkdir(parents=True)
    save_file({"w": np.zeros((8, 8), np.float32)}, model / "model.safetensors")
    operator = FakeOperator()
    await operator.start()
    async with aiohttp.ClientSession() as http:
        parts = Node(
            *(root, operator, http),
            agent_flags=agent_flags,
            tap_flags=tap_flags,
            cgroup=cgroup,
            module=module,
        )
        try:
            await parts.start_serving()
            for start in (parts.start_tap, parts.start_host, parts.start_agent):
                await start()
            yield parts
        finally:
            await parts.stop()
            await operator.stop()
