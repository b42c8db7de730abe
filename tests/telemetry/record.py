"""``python -m tests.telemetry.record ENGINE``: what a real server says before, in and after work.

Two streams, nothing else. Written below ``recordings/ENGINE-VERSION/``: ``idle``, ``busy`` (both
have shown a first token) and ``after``. Pages are as served, but for buckets of histograms and what
Python says of itself, which nobody here reads.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import aiohttp
import psutil

from bench.guard.node import Bench
from bench.guard.serving import SERVING
from rose_agent.signals.snapshot import Snapshot, mapped
from rose_core.telemetry.dialects import LOADS

FOLDER = Path(__file__).parent / "recordings"
STATES = ("idle", "busy", "after")
STREAMS, _TOKENS = 2, 400
_UNREAD = ("python_", "process_")


def _plain(page: str) -> str:
    kept = [
        line
        for line in page.splitlines()
        if "_bucket{" not in line and not line.removeprefix("# TYPE ").startswith(_UNREAD)
    ]
    return "\n".join(line for line in kept if not line.startswith("# HELP")) + "\n"


def _memory(process: int) -> bytes | None:
    """The load snapshot of the server's scheduler."""
    for child in psutil.Process(process).children(recursive=True):
        if mapped(Path(f"/proc/{child.pid}/maps").read_text()):
            snapshot = Snapshot(child.pid)
            snapshot.read()
            memory = snapshot._memory
            held = bytes(memory[:]) if memory is not None else b""
            snapshot.close()
            return held[: 16 + int.from_bytes(held[12:16], "little")]
    return None


async def _record(node: Bench, http: aiohttp.ClientSession, folder: Path) -> None:
    async with http.get(f"{node.serving_url}/metrics") as answer:
        page = _plain(await answer.text())
    async with http.get(f"{node.serving_url}{LOADS[node.serving.engine][0]}") as answer:
        loads = await answer.read()
    _write(folder, page, loads, _memory(node.processes["serving"].pid))


def _write(folder: Path, page: str, loads: bytes, memory: bytes | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.txt").write_text(page)
    (folder / "loads.json").write_bytes(loads)
    if memory:
        (folder / "snapshot.bin").write_bytes(memory)


async def _stream(node: Bench, http: aiohttp.ClientSession, begun: asyncio.Event) -> None:
    dialect = node.serving.dialect
    body = dialect.body([7] * 40, _TOKENS)
    async with http.post(f"{node.serving_url}{dialect.path}", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                begun.set()


async def record(name: str) -> None:
    """Start the engine, record it, end it."""
    serving = SERVING[name]
    with tempfile.TemporaryDirectory(prefix="rose") as root:
        node = Bench(Path(root), "tiny", serving)
        folder = FOLDER / f"{name}-{serving.version}"
        try:
            await node.start_serving()
            async with aiohttp.ClientSession() as http:
                await _record(node, http, folder / "idle")
                begun = [asyncio.Event() for _ in range(STREAMS)]
                streams = [asyncio.create_task(_stream(node, http, one)) for one in begun]
                await asyncio.gather(*(one.wait() for one in begun))
                await _record(node, http, folder / "busy")
                await asyncio.gather(*streams)
                await asyncio.sleep(2)
                await _record(node, http, folder / "after")
        finally:
            await node.end("serving")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=sorted(SERVING))
    asyncio.run(record(parser.parse_args().engine))
    sys.exit(0)
