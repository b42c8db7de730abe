"""Both readers of the tap beside each other: CPU of guard and tap while replicas stream.

A whole node of processes with fake engines, as in ``cost``, and a pool that names TTFT and TPOT.
The tap reads tokens packet by packet, and then again with the kernel counting them. What is counted
is CPU time, not its share of a busy machine's.

| place | beside each busy replica |
|---|---|
| not lent | nothing |
| gates shut | a slot whose gate is shut: the replica answers no page and is not verified |
| gates open | a slot whose permit is paced by the replica's tokens |
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import platform
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil

from bench.record import Figure, figure
from bench.tap.cost import GUARD_AND_TAP, parts_of, phase
from rose_agent.os.bpf_maps import CALLS
from rose_core.identity import GpuUuid, PodUid
from tests.agent.node import POOL, SLOT, Node, node

READERS = ("packets", "kernel")
PLACES = ("not lent", "gates shut", "gates open")
_TTFT_MS, _TPOT_MS = 2000, 50
_INTERVAL_MS = 20.0
TOKENS = 200  # of a request
_FEWEST_WAKINGS = 5  # a second; heartbeats are 8 where nothing may have to be stopped
_WARM_SECONDS = 12.0  # until replicas count as never idle, and are watched closely and paced


_libc = ctypes.CDLL(None, use_errno=True)
_NEXT_ID, _FD_BY_ID = 11, 13  # of programs
_STATS = Path("/proc/sys/kernel/bpf_stats_enabled")


def _bpf(command: int, number: int) -> tuple[int, int]:
    """A system call that takes the number of a program; its result, and the number it writes."""
    attributes = (ctypes.c_uint32 * 4)(number)
    result = _libc.syscall(
        CALLS[platform.machine()], command, attributes, ctypes.sizeof(attributes)
    )
    return result, attributes[1]


def _filters() -> dict[int, int]:
    """Nanoseconds that each socket filter of the kernel's has run, while they are counted."""
    found: dict[int, int] = {}
    number = 0
    while True:
        result, number = _bpf(_NEXT_ID, number)
        if result:
            return found
        descriptor, _ = _bpf(_FD_BY_ID, number)
        if descriptor >= 0:
            info = dict(
                line.split(":", 1)
                for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
            )
            os.close(descriptor)
            if int(info["prog_type"]) == 1:
                found[number] = int(info["run_time_ns"])


@contextlib.contextmanager
def _filter_seconds() -> Iterator[Callable[[], float]]:
    """What the socket filters that exist now run from now on, in whoever sends: asks for seconds.

    The kernel counts only what was loaded as a program, so not the tap's two classic filters.
    """
    before = _STATS.read_text()
    _STATS.write_text("1")
    try:
        began = _filters()
        yield lambda: sum(ran - began.get(one, ran) for one, ran in _filters().items()) / 1e9
    finally:
        _STATS.write_text(before)


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

    @property
    def gpus(self) -> dict[PodUid, GpuUuid]:
        """Whose GPU each one is on."""
        return {PodUid(f"busy-{n}"): GpuUuid(f"G-{n}") for n in range(len(self.ports))}

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
async def blasting(
    replicas: int, tokens_per_second: float, *, silent: bool
) -> AsyncIterator[Blasts]:
    """Start so many, which make so many tokens together; silent ones answer no page."""
    streams = max(1, round(tokens_per_second * _INTERVAL_MS / 1e3 / replicas))
    made, ports = [], []
    try:
        for _ in range(replicas):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.tap.blast"),
                *(str(streams), str(_INTERVAL_MS), str(TOKENS), *(["silent"] if silent else [])),
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


def _slots(running: Node, replicas: int, *, gate_open: bool) -> bool:
    """Whether the guard has a slot beside each of so many replicas, and their gates stand so."""
    if not running.operator.requests:
        return False
    busy = [one for one in running.operator.requests[-1].slots if one.slot.uid != SLOT.uid]
    return len(busy) == replicas and all(one.gate_open is gate_open for one in busy)


async def _verified(running: Node) -> bool:
    """Whether every replica's own count has been found to agree with the tap's."""
    return all(one["verified"] for one in (await running.report())["replicas"])


async def _open_seconds(running: Node) -> float:
    """How long permits beside busy replicas have been open, all of them together."""
    slots = (await running.report())["slots"]
    return sum(float(one["openSeconds"]) for one in slots if one["uid"] != SLOT.uid)


async def share(
    reader: str, replicas: int, tokens_per_second: float, seconds: float, place: str
) -> list[Figure]:
    """CPU of guard and tap at this rate, with this beside each busy replica."""
    aim = 3.0 if replicas == 1 else 5.0
    is_open = place == "gates open"
    name = f"{reader}: {tokens_per_second:,.0f} tokens/s on {replicas}, {place}"
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with (
            blasting(replicas, tokens_per_second, silent=place == "gates shut") as blasts,
            node(Path(folder), cgroup="auto", tap_flags=("--tokens", reader)) as running,
        ):
            running.operator.sync_seconds = 2.0
            running.operator.ttft_ms, running.operator.tpot_ms = _TTFT_MS, _TPOT_MS
            await _watched(running, blasts)
            if place != "gates shut":  # while they stand still; it takes long where many hide
                await running.until(lambda: _verified(running), "their taps are verified")
            if place != "not lent":
                running.operator.beside = blasts.gpus
                await running.until(
                    lambda: _slots(running, replicas, gate_open=is_open), f"{place} beside them"
                )
            await blasts.stream(_WARM_SECONDS)
            parts, opened = parts_of(running), await _open_seconds(running)
            with _filter_seconds() as filtered:
                task = asyncio.create_task(blasts.stream(seconds))
                found = await phase(parts, asyncio.wait([task]))
                program_s = filtered()
            tokens, requests = task.result()
            opened = (await _open_seconds(running) - opened) / found.seconds / replicas
    wakings = found.wakings["tap parser"] / found.seconds
    kept_up = wakings >= _FEWEST_WAKINGS
    core = {part: 100 * found.cpu_s[part] / found.seconds for part in GUARD_AND_TAP}
    host = 100 * found.cpu_s["engine host"] / found.seconds
    tap = core["tap opener"] + core["tap parser"]
    return [
        # One that is behind all the time never waits; what it takes then says nothing.
        figure(f"{name}: tap kept up", float(kept_up), "0 or 1", at_least=1),
        figure(
            *(f"{name}: guard and tap", sum(core.values()), "% of a core"),
            at_most=aim if kept_up else None,
        ),
        figure(f"{name}: tap", tap, "% of a core"),
        figure(f"{name}: readers of pages", core["readers"], "% of a core"),
        figure(f"{name}: engine host, on top", host, "% of a core"),
        figure(f"{name}: permits open", 100 * opened, "% of the time"),
        figure(f"{name}: guard is woken", found.wakings["guard"] / found.seconds, "1/s"),
        figure(f"{name}: tokens seen to be sent", tokens / found.seconds, "1/s"),
        figure(f"{name}: requests", requests / found.seconds, "1/s"),
        figure(f"{name}: tap is woken", wakings, "1/s"),
        figure(f"{name}: program, in the sender", 100 * program_s / found.seconds, "% of a core"),
    ]


async def compare(seconds: float) -> list[Figure]:
    """Every figure."""
    figures: list[Figure] = []
    for replicas, rate in ((1, 1_000.0), (8, 20_000.0)):
        for reader, place in itertools.product(READERS, PLACES):
            figures += await share(reader, replicas, rate, seconds, place)
    return figures
