"""Two hosts of sandboxes with one store, in processes of their own, for tests that kill one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.sandboxes.own import remove
from rose_dev.engine_template import ProcessHandle
from rose_dev.process_testing import CLI, start_process
from rose_sandbox.runtimes.container import ContainerRuntime
from rose_sandbox.runtimes.parts import Parts
from rose_wire.ports import free_port


@dataclass
class Running:
    """A host in a process of its own."""

    url: str
    process: ProcessHandle


@asynccontextmanager
async def two_hosts(
    folder: Path, parts: Parts, kind: type[ContainerRuntime]
) -> AsyncIterator[list[Running]]:
    """They answer; nothing of them is left."""
    (folder / "token").write_text("word")
    made: list[Running] = []
    for name in ("one", "two"):
        port = free_port()
        flags = [
            *("--store", str(folder / "store"), "--run", "grpo", "--owner", name),
            *("--folder", str(folder / name), "--address", f"127.0.0.1:{port}"),
            *("--token-file", str(folder / "token"), "--runtime", kind.name),
        ]
        given = os.environ | {"ROSE_SANDBOX_PARTS": str(parts.folder)}
        process = start_process(CLI, "sandbox-host", *flags, env=given)
        made.append(Running(f"http://127.0.0.1:{port}", process))
    try:
        for one in made:
            await _answers(one)
        yield made
    finally:
        for one, name in zip(made, ("one", "two"), strict=True):
            one.process.kill()
            one.process.wait()
            remove(kind(folder / name / kind.name, parts).group)


async def _answers(host: Running) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while host.process.poll() is None:
            try:
                async with http.get(f"{host.url}/healthz"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
    raise AssertionError("a host ended")
