"""A node with fake engines, real cgroups and limits, on which faults happen.

Processes as in production, each of its own: serving, tap, engine host, guard. The run directory is
a small tmpfs, as on a node, so that it can be full; engines are stopped by the best driver this
machine has and are bounded in processes and memory. The client that reads the rollouts' stream
tells when the last token came and when the first one came again.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import aiohttp
import numpy as np
from safetensors.numpy import save_file

from rose_agent.os.mounts import locate, parse_mountinfo
from rose_core.wire.sync import SyncReply, SyncRequest
from tests.agent.node import FakeOperator, Node

PROCESSES = 96
MEMORY_MIB = 512
_TMPFS = "size=16m,mode=0700"
_FOR_EVER = 10_000_000
_NO_LIMIT = aiohttp.ClientTimeout(total=None)


@dataclass
class Tokens:
    """When tokens of the rollout engine reached their client, CLOCK_MONOTONIC seconds."""

    times: list[float] = field(default_factory=list)

    def last_before(self, began: float, ended: float) -> float | None:
        """The last one of a span; None without."""
        inside = [time_s for time_s in self.times if began <= time_s < ended]
        return inside[-1] if inside else None

    def between(self, began: float, ended: float) -> int:
        """How many came in a span."""
        return sum(began <= time_s < ended for time_s in self.times)

    def first_after(self, began: float) -> float | None:
        """The first one from then on; None without."""
        return next((time_s for time_s in self.times if time_s >= began), None)


class PromptOperator(FakeOperator):
    """Does something between a guard's question and its answer."""

    def __init__(self) -> None:
        super().__init__()
        self._errand: tuple[Callable[[], float], asyncio.Future[float]] | None = None

    async def when_asked(self, errand: Callable[[], float]) -> float:
        """What it returned, once the guard has asked."""
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._errand = (errand, done)
        return await done

    async def _sync(self, request: SyncRequest) -> SyncReply:
        if self._errand is not None:
            (errand, done), self._errand = self._errand, None
            done.set_result(errand())
        return await super()._sync(request)


@dataclass
class FaultNode(Node):
    """A node whose rollouts are watched."""

    operator: PromptOperator
    tokens_seen: Tokens = field(default_factory=Tokens)

    async def start_host(self) -> None:
        """The engine host, with limits for its engines."""
        await self.spawn(
            "host",
            *("-m", "rose_cli.main", "engine-host", "--rundir", str(self.root / "run")),
            *("--models", str(self.root / "models"), "--engine-python", sys.executable),
            *("--data-port", "0", "--http-port", "0", "--cgroup", self.cgroup),
            *("--engine-pids", str(PROCESSES), "--engine-memory-mib", str(MEMORY_MIB)),
        )

    @property
    def skew(self) -> Path:
        """Seconds by which the guard's wall clock is wrong."""
        return self.root / "skew"

    async def spawn(self, name: str, *arguments: str) -> asyncio.subprocess.Process:
        """As a node's, but the guard believes in another clock."""
        if name == "agent":
            arguments = ("-m", "bench.faults.skewed", str(self.skew), *arguments[2:])
        return await super().spawn(name, *arguments)

    async def watch(self) -> None:
        """Read a stream of the rollout engine without an end, whatever becomes of the engine."""
        body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": _FOR_EVER}}
        while True:
            file = self.engine()
            url = f"{file.url if file else ''}/generate"
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
                async with self.http.post(url, json=body, timeout=_NO_LIMIT) as answer:
                    async for line in answer.content:
                        if line.startswith(b"data: {"):
                            self.tokens_seen.times.append(time.monotonic())
            await asyncio.sleep(0.05)

    async def flowing(self, since_s: float) -> float:
        """When tokens came again; waits for them."""
        await self.until(
            lambda: self.tokens_seen.first_after(since_s) is not None, "tokens come again"
        )
        found = self.tokens_seen.first_after(since_s)
        assert found is not None  # noqa: S101  # waited for
        return found

    def inside_the_engine(self, script: str) -> subprocess.Popen[bytes]:
        """A process that is a member of the engine's cgroups, as if the engine had started it."""
        file = self.engine()
        if file is None:
            raise RuntimeError("there is no engine")
        folders = member_folders(file.pids[0])
        enter = "from pathlib import Path; import sys; Path('/proc/self/oom_score_adj')"
        enter += ".write_text('1000')\nfor path in sys.argv[1:]: Path(path).write_text('0')"
        argv = [sys.executable, "-c", f"{enter}\n{script}", *map(str, folders)]
        return subprocess.Popen(argv, start_new_session=True)


def member_folders(pid: int) -> Sequence[Path]:
    """``cgroup.procs`` of every cgroup below the host's own that a process is a member of."""
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    found = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "/rose-" not in path:
            continue
        version = 2 if number == "0" else 1
        controller = controllers.split(",")[0] or "freezer"
        folder = locate(mounts, version, PurePosixPath(path), controller)
        if folder is not None:
            found.append(folder / "cgroup.procs")
    return found


@contextlib.asynccontextmanager
async def world(root: Path) -> AsyncIterator[FaultNode]:
    """Start everything, wait until tokens flow; end everything, whatever happened."""
    model = root / "models" / "small"
    model.mkdir(parents=True)
    save_file({"w": np.zeros((8, 8), np.float32)}, model / "model.safetensors")
    (root / "run").mkdir()
    await asyncio.to_thread(_run, "mount", "-t", "tmpfs", "-o", _TMPFS, "tmpfs", str(root / "run"))
    operator = PromptOperator()
    await operator.start()
    async with aiohttp.ClientSession() as http:
        made = FaultNode(root, operator, http, cgroup="auto")
        watching = asyncio.create_task(made.watch())
        try:
            await made.start_serving()
            for start in (made.start_tap, made.start_host, made.start_agent):
                await start()
            await made.flowing(0.0)
            yield made
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await made.stop()
            await operator.stop()
            await asyncio.to_thread(_run, "umount", "--lazy", str(root / "run"))


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True)
