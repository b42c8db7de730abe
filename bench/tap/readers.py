"""Both readers of the tap beside each other: CPU of guard and tap while replicas stream.

A whole node of processes with fake engines, as in ``cost``, and a pool that names TTFT and TPOT, so
that its busy replicas are watched closely. The tap reads tokens packet by packet, and then again
with the kernel counting them. What is counted is CPU time, not its share of a busy machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from bench.record import Figure, figure
from bench.tap.cost import GUARD_AND_TAP, parts_of, phase
from tests.agent.node import POOL, Node, node

READERS = ("packets", "kernel")
_TTFT_MS, _TPOT_MS = 2000, 50
_INTERVAL_MS = 20.0
TOKENS = 200  # of a request
_FEWEST_WAKINGS = 15  # a second; heartbeats are 20
_WARM_SECONDS = 8.0  # until replicas count as never idle, and are watched closely


class Blasts:
    """Serving replicas that stream."""

    def __init__(self, processes: list[asyncio.subprocess.Process], ports: list[int]) -> None:
        self._processes = processes
        self.ports = ports

    @property
    def neighbours(self) -> list[dict[str, object]]:
        """As the node's file names them."""
        return [
            {"uid": f"busy-{n}", "pool": POOL, "port": port, "pid": process.pid, "gpus": [f"G-{n}"]}
            for n, (process, port) in enumerate(zip(self._processes, self.ports, strict=True))
        ]

    async def stream(self, seconds: float) -> tuple[int, int]:
        """Stream; returns tokens and requests."""
        counts = await asyncio.gather(*(self._one(process, seconds) for process in self._processes))
        return sum(tokens for tokens, _ in counts), sum(requests for _, requests in counts)

    @staticmethod
    async def _one(process: asyncio.subprocess.Process, seconds: float) -> tuple[int, int]:
        assert process.stdin is not None  # noqa: S101  # piped
        assert process.stdout is not None  # noqa: S101  # piped
        process.stdin.write(f"{seconds}\n".encode())
        _, tokens, requests = (await process.stdout.readline()).split()
        return int(tokens), int(requests)


@contextlib.asynccontextmanager
async def blasting(replicas: int, tokens_per_second: float) -> AsyncIterator[Blasts]:
    """Start so many, which make so many tokens together."""
    streams = max(1, round(tokens_per_second * _INTERVAL_MS / 1e3 / replicas))
    made, ports = [], []
    try:
        for _ in range(replicas):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.tap.blast"),
                *(str(streams), str(_INTERVAL_MS), str(TOKENS)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            made.append(process)
            assert process.stdout is not None  # noqa: S101  # piped
            ports.append(int((await process.stdout.readline()).split()[1]))
        yield Blasts(made, ports)
    finally:
        for process in made:
            process.terminate()
            await process.wait()


async def _watched(running: Node, blasts: Blasts) -> None:
    running.neighbours = blasts.neighbours
    running.write_replicas()
    await running.until(lambda: running.gate(is_open=True), "gate opens")
    metrics = psutil.Process(running.processes["tap"].pid)
    await running.until(lambda: len(metrics.children()) == 1, "the tap has its parser")


async def share(
    reader: str, replicas: int, tokens_per_second: float, seconds: float
) -> list[Figure]:
    """CPU of guard and tap at this rate."""
    aim = 3.0 if replicas == 1 else 5.0
    name = f"{reader}: {tokens_per_second:,.0f} tokens/s on {replicas}"
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with (
            blasting(replicas, tokens_per_second) as blasts,
            node(Path(folder), cgroup="auto", tap_flags=("--tokens", reader)) as running,
        ):
            running.operator.sync_seconds = 2.0
            running.operator.ttft_ms, running.operator.tpot_ms = _TTFT_MS, _TPOT_MS
            await _watched(running, blasts)
            await blasts.stream(_WARM_SECONDS)
            parts = parts_of(running)
            task = asyncio.create_task(blasts.stream(seconds))
            found = await phase(parts, asyncio.wait([task]))
            tokens, requests = task.result()
    wakings = found.wakings["tap parser"] / found.seconds
    kept_up = wakings >= _FEWEST_WAKINGS
    core = {part: 100 * found.cpu_s[part] / found.seconds for part in GUARD_AND_TAP}
    tap = core["tap opener"] + core["tap parser"]
    return [
        # One that is behind all the time never waits; what it takes then says nothing.
        figure(f"{name}: tap kept up", float(kept_up), "0 or 1", at_least=1),
        figure(
            *(f"{name}: guard and tap", sum(core.values()), "% of a core"),
            at_most=aim if kept_up else None,
        ),
        figure(f"{name}: tap", tap, "% of a core"),
        figure(f"{name}: tokens seen to be sent", tokens / found.seconds, "1/s"),
        figure(f"{name}: requests", requests / found.seconds, "1/s"),
        figure(f"{name}: tap is woken", wakings, "1/s"),
    ]


async def compare(seconds: float) -> list[Figure]:
    """Every figure."""
    figures: list[Figure] = []
    for replicas, rate in ((1, 1_000.0), (8, 20_000.0)):
        for reader in READERS:
            figures += await share(reader, replicas, rate, seconds)
    return figures
