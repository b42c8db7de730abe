"""``python -m bench.operator.node``: what guard and tap cost a node with eight serving replicas.

A node of processes without GPU: eight serving engines that answer like SGLang without computing, a
rollout engine beside each, engine host, tap and guard. Every gate stands open, so the guard extends
eight permits; then requests come, each of which closes a gate for a moment. Processor time is
counted, so that a busy machine changes it little. Needs root (packet sockets).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import yaml
from safetensors.numpy import save_file

from bench.record import Figure, figure, record
from bench.tap.cost import GUARD_AND_TAP, Part, Phase, memory, parts_of, phase
from rose_core.identity import GpuUuid, GrantKey, PodUid, SlotKey, SlotUid
from rose_core.telemetry.dialects import samples
from rose_core.wire.sync import EngineSpec, Grant, PoolPolicy, SyncReply, SyncRequest, WeightSource
from tests.agent.node import POOL, FakeOperator, Node

_SETTLE_SECONDS = 5.0
_OPEN_SECONDS = 180.0
_ENDING_SECONDS = 20.0
_GENERATE = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}
_ROUNDS = "rose_guard_tick_seconds_count"


class Lender(FakeOperator):
    """An operator that lends every replica of the node for ever."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.replicas = replicas
        self.sync_seconds = 2.0  # as an operator says by itself

    async def _sync(self, request: SyncRequest) -> SyncReply:
        self.requests.append(request)
        grants = tuple(map(_grant, range(self.replicas)))
        policy = PoolPolicy(POOL, "Lend", {"app": "chat"}, 1)
        return SyncReply(1, True, grants, (policy,), sync_period_seconds=self.sync_seconds)


def _grant(number: int) -> Grant:
    return Grant(
        key=GrantKey(1, SlotKey(SlotUid(f"slot-{number}"), 1)),
        ttl_seconds=600.0,
        slot_name=f"slot-{number}",
        lease="team/run",
        pool=POOL,
        pod_uid=PodUid(f"serving-{number}"),
        pod_name=f"serving-{number}",
        gpu_uuids=(GpuUuid(f"GPU-{number}"),),
        engine=EngineSpec("fake", "small"),
        weights=WeightSource("127.0.0.1:1", "run"),
        router="",
    )


@dataclass
class Crowd:
    """A node with many serving engines; ``urls`` are theirs."""

    node: Node
    urls: list[str] = field(default_factory=list)

    async def start(self, replicas: int) -> None:
        """Start everything, the guard last."""
        for number in range(replicas):
            await self._serve(f"serving-{number}")
        entries = [self._entry(number, url) for number, url in enumerate(self.urls)]
        (self.node.root / "replicas.yaml").write_text(yaml.safe_dump({"replicas": entries}))
        for start in (self.node.start_tap, self.node.start_host, self.node.start_agent):
            await start()

    async def _serve(self, name: str) -> None:
        log = self.node.root / f"{name}.log"
        await self.node.spawn(name, "-m", "rose_engines.fake")
        await self.node.until(lambda: "url=" in log.read_text(), f"{name} listens")
        self.urls.append(log.read_text().split("url=")[1].split()[0])

    def _entry(self, number: int, url: str) -> dict[str, object]:
        return {
            "uid": f"serving-{number}",
            "pool": POOL,
            "port": int(url.rpartition(":")[2]),
            "interfaces": ["lo"],
            "pids": [self.node.processes[f"serving-{number}"].pid],
            "gpus": [f"GPU-{number}"],
        }

    async def all_open(self) -> bool:
        """Whether every replica's gate stands open."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            slots = (await self.node.report())["slots"]
            return len(slots) == len(self.urls) and all(slot["gateOpen"] for slot in slots)
        return False

    async def rounds(self) -> int:
        """Rounds of the guard so far."""
        connector = aiohttp.UnixConnector(str(self.node.rundir.root / "agent.sock"))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get("http://agent/metrics") as answer,
        ):
            page = await answer.text()
        return int(next(value for name, _, value in samples(page) if name == _ROUNDS))

    async def ask(self, count: int, seconds: float) -> None:
        """So many requests in this time, each to the next replica."""
        async with asyncio.TaskGroup() as asked:
            for number in range(count):
                asked.create_task(self._one(self.urls[number % len(self.urls)]))
                await asyncio.sleep(seconds / count)

    async def _one(self, url: str) -> None:
        async with self.node.http.post(f"{url}/generate", json=_GENERATE) as answer:
            await answer.read()

    async def stop(self) -> None:
        """The engine host ends its engines, then everything ends."""
        host = self.node.processes.get("host")
        if host is not None and host.returncode is None:
            host.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(host.wait(), _ENDING_SECONDS)
        await self.node.stop()


@contextlib.asynccontextmanager
async def crowd(root: Path, replicas: int) -> AsyncIterator[Crowd]:
    """Start everything; end everything, whatever happened."""
    model = root / "models" / "small"
    model.mkdir(parents=True)
    save_file({"w": np.zeros((8, 8), np.float32)}, model / "model.safetensors")
    operator = Lender(replicas)
    await operator.start()
    async with aiohttp.ClientSession() as http:
        made = Crowd(Node(root, operator, http, cgroup="auto"))
        try:
            await made.start(replicas)
            yield made
        finally:
            await made.stop()
            await operator.stop()


def share(found: Phase) -> float:
    """Percent of a core that guard and tap used together."""
    return 100 * sum(found.cpu_s[name] for name in GUARD_AND_TAP) / found.seconds


def figures_of(rest: Phase, asked: Phase, rounds: float, parts: dict[str, Part]) -> list[Figure]:
    """Processor time of each part, then memory."""
    rate = asked.requests / asked.seconds
    both = sum(memory(parts[name]) for name in GUARD_AND_TAP)
    return [
        figure("rounds of the guard", rounds, "1/s"),
        *(
            figure(f"{name}: at rest", 100 * rest.cpu_s[name] / rest.seconds, "% of a core")
            for name in GUARD_AND_TAP
        ),
        figure("guard and tap: at rest", share(rest), "% of a core", at_most=3.0),
        figure(f"guard and tap: {rate:.0f} requests/s", share(asked), "% of a core"),
        *(
            figure(f"{name}: memory (PSS)", memory(parts[name]) / 1e6, "MB")
            for name in GUARD_AND_TAP
        ),
        figure("guard and tap: memory (PSS)", both / 1e6, "MB", at_most=100.0),
    ]


async def measure(options: argparse.Namespace) -> list[Figure]:
    """Start the node, let every gate open, count the phases."""
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with crowd(Path(folder), options.replicas) as made:
            await made.node.until(made.all_open, "every gate is open", _OPEN_SECONDS)
            await asyncio.sleep(_SETTLE_SECONDS)
            parts = parts_of(made.node)
            before = await made.rounds()
            rest = await phase(parts, asyncio.sleep(options.seconds))
            rounds = (await made.rounds() - before) / rest.seconds
            count = round(options.rate * options.seconds)
            asked = await phase(parts, made.ask(count, options.seconds), count)
            return figures_of(rest, asked, rounds, parts)


def main(argv: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="bench.operator.node", description=__doc__)
    add = parser.add_argument
    add("--replicas", type=int, default=8, help="serving replicas, each with a rollout engine")
    add("--seconds", type=float, default=30.0, help="of each phase")
    add("--rate", type=float, default=8.0, help="requests a second, all replicas together")
    options = parser.parse_args(argv)
    notes = [f"{options.replicas} replicas, a fake rollout engine beside each, all gates open"]
    record("operator-node", asyncio.run(measure(options)), notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
