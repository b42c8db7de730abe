"""``python -m tests.telemetry.record ENGINE``: what a real server says before, in and after work.

Two streams, nothing else. Written below ``recordings/ENGINE-VERSION/``: ``idle``, ``busy`` (both
have shown a first token) and ``after``. Pages are as served, but for buckets of histograms and what
Python says of itself, which nobody here reads. A page that the server does not have is left out.
``--python`` and ``--version`` record another version than the one that is tested with (``older``).
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
from bench.guard.serving import SERVING, Serving
from rose_agent.signals.snapshot import Snapshot, open_snapshot
from rose_core.telemetry.dialects import LOADS
from tests.telemetry.older import older

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
        descriptor = open_snapshot(child.pid)
        if descriptor is not None:
            snapshot = Snapshot(descriptor)
            held = snapshot.raw()
            snapshot.close()
            return held[: 16 + int.from_bytes(held[12:16], "little")]
    return None


async def _record(node: Bench, http: aiohttp.ClientSession, folder: Path) -> None:
    page = await _page(http, f"{node.serving_url}/metrics")
    found = {
        "metrics.txt": _plain(page.decode()).encode() if page else None,
        "loads.json": await _page(http, f"{node.serving_url}{LOADS[node.serving.engine][0]}"),
        "snapshot.bin": _memory(node.processes["serving"].pid),
    }
    _write(folder, found)


async def _page(http: aiohttp.ClientSession, url: str) -> bytes | None:
    async with http.get(url) as answer:
        return await answer.read() if answer.status == 200 else None


def _write(folder: Path, found: dict[str, bytes | None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in found.items():
        if content:
            (folder / name).write_bytes(content)


async def _stream(node: Bench, http: aiohttp.ClientSession, begun: asyncio.Event) -> None:
    dialect = node.serving.dialect
    body = dialect.body([7] * 40, _TOKENS)
    async with http.post(f"{node.serving_url}{dialect.path}", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                begun.set()


async def record(name: str, serving: Serving) -> None:
    """Start the engine, record it, end it."""
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
    parser.add_argument("--python", type=Path, help="of an environment with another version")
    parser.add_argument("--version", default="", help="that version")
    asked = parser.parse_args()
    chosen = SERVING[asked.engine]
    if asked.python is not None:
        chosen = older(asked.engine, asked.version, asked.python)
    asyncio.run(record(asked.engine, chosen))
    sys.exit(0)
