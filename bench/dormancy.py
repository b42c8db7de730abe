"""``python -m bench.dormancy``: rung 4 on a real SGLang on CPU, again and again.

An engine host holds an engine, has it let go of its memory, takes it back under an open permit, and
so on for ``--cycles``. Times of both ways, memory that was measured free, and whether the residue
grows (a leak) or activation slows down. On a GPU the memory saver does what ``madvise`` does
here, so the times say nothing about one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.record import Figure, figure, log, record
from rose_agent.host import main
from rose_agent.host.options.arguments import parser
from rose_agent.os import freezers
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.host import EngineState, EnsureEngine, HostStatusRequest, SetDormant
from rose_core.wire.sync import EngineSpec, WeightSource
from rose_dev.engine_environment import engine_python
from rose_dev.models import RECIPES, make_named
from rose_engines.node.permit import Permit
from rose_engines.node.rundir import RunDir

SLOT = SlotKey(SlotUid("bench"), 1)
_PERMIT_NS = 200_000_000


@contextlib.contextmanager
def holder(permit: Permit, wanted: threading.Event) -> Iterator[None]:
    """Keep the permit open while ``wanted``, from a thread, as the guard does."""
    ending = threading.Event()

    def run() -> None:
        while not ending.wait(0.02):
            if wanted.is_set():
                permit.extend(time.monotonic_ns() + _PERMIT_NS)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


async def reach(host: main.RunningHost, state: EngineState, *, dormant: bool | None) -> float:
    """Order until the engine is in the state; returns the seconds it took."""
    began = time.monotonic()
    while True:
        status = (await host.host.status(HostStatusRequest())).engines[0]
        if status.state is state:
            return time.monotonic() - began
        if status.state is EngineState.FAILED or time.monotonic() - began > 240:
            raise SystemExit(f"the engine is {status.state}: {status.message}")
        if dormant is not None:
            await host.host.set_dormant(SetDormant(SLOT, dormant=dormant))
        await asyncio.sleep(0.005)


async def cycles(
    host: main.RunningHost, opened: threading.Event, count: int
) -> dict[str, list[float]]:
    """Release and activate; lists of seconds and bytes by name."""
    found: dict[str, list[float]] = {name: [] for name in ("release", "activate", "free", "left")}
    for number in range(count):
        log(f"cycle {number + 1} of {count}")
        opened.clear()
        found["release"].append(await reach(host, EngineState.DORMANT, dormant=True))
        status = (await host.host.status(HostStatusRequest())).engines[0]
        found["free"].append(status.released_bytes)
        found["left"].append(status.residue_bytes or 0)
        opened.set()
        found["activate"].append(await reach(host, EngineState.SERVING, dormant=False))
    return found


async def run(arguments: argparse.Namespace, folder: Path) -> list[Figure]:
    """Start a host with one engine and measure."""
    model = make_named(arguments.model)
    options = parser().parse_args(
        [
            *("--rundir", str(folder), "--models", str(model.parent)),
            *("--engine-python", str(engine_python()), "--data-port", "0", "--http-port", "0"),
        ]
    )
    host = await main.start(options, freezers.detect("auto", scope=str(folder)))
    try:
        spec = EngineSpec("sglang-cpu", model.name, kv_tokens=arguments.kv_tokens)
        await host.host.ensure(EnsureEngine(SLOT, "bench", spec, WeightSource("127.0.0.1:1", "x")))
        opened = threading.Event()
        opened.set()
        permit = Permit.attach(RunDir(folder).slot(SLOT.uid).permit)
        with holder(permit, opened):
            await reach(host, EngineState.SERVING, dormant=None)
            return figures(await cycles(host, opened, arguments.cycles))
    finally:
        await host.stop(0.0)


def figures(found: dict[str, list[float]]) -> list[Figure]:
    """Medians, extremes, and the growth of the residue after the first tenth of the cycles."""
    warm = max(1, len(found["left"]) // 10)
    early, late = found["left"][warm], found["left"][-1]
    return [
        figure("cycles", len(found["release"]), ""),
        figure("release, p50", 1e3 * statistics.median(found["release"]), "ms"),
        figure("release, max", 1e3 * max(found["release"]), "ms"),
        figure("activation, p50", 1e3 * statistics.median(found["activate"]), "ms"),
        figure("activation, max", 1e3 * max(found["activate"]), "ms"),
        figure("measured free, p50", statistics.median(found["free"]) / 2**20, "MiB"),
        figure("residue, last", late / 2**20, "MiB"),
        figure("residue, growth after the first tenth", (late - early) / 2**20, "MiB"),
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Flags of the benchmark."""
    flags = argparse.ArgumentParser(prog="bench.dormancy", description=__doc__)
    flags.add_argument("--cycles", type=int, default=200)
    flags.add_argument("--kv-tokens", type=int, default=400_000)
    flags.add_argument("--model", choices=sorted(RECIPES), default="tiny-peaked")
    return flags.parse_args(argv)


def start(argv: list[str] | None = None) -> int:
    """Measure and record."""
    arguments = parse(argv)
    # Short: Unix sockets lie below it.
    folder = Path(tempfile.mkdtemp(prefix="rose", dir="/tmp"))
    try:
        found = asyncio.run(run(arguments, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record("dormancy", found, notes=["control path on CPU; a GPU's memory saver is another thing"])
    return 0


if __name__ == "__main__":
    sys.exit(start())
