"""A router, ``rose batches`` and engines that are killed, and the batch that shows what of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web

from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.owners import owner
from rose_dev.process_testing import CLI, spawn_process
from rose_engines.fake.model import continuation
from rose_engines.fake.scheduler import FakeScheduler, Script
from rose_engines.fake.server import FakeServer
from rose_engines.weights.session import WeightSession
from rose_wire.ports import free_ports
from tests.router.conftest import LEASE, VERSION

COMPLETIONS: Final = "/v1/completions"
TOKENS = 12


def prompt_of(number: int) -> list[int]:
    return [5, 17, number % 250, number // 250 + 1]


def token_file(count: int, first: int = 0) -> bytes:
    """Lines of token ids: no tokenizer is needed, and each answer can be told."""
    lines = (
        {
            "custom_id": f"n{number}",
            "method": "POST",
            "url": COMPLETIONS,
            "body": {
                "model": "policy",
                "prompt": prompt_of(number),
                "max_tokens": TOKENS,
                "temperature": 0,
            },
        }
        for number in range(first, first + count)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def check_answers(lines: list[dict[str, Any]], count: int) -> None:
    """Each line once, in order, with the tokens that an undisturbed engine makes."""
    assert [one["custom_id"] for one in lines] == [f"n{number}" for number in range(count)]
    for number, one in enumerate(lines):
        found = one["response"]["body"]["choices"][0]["token_ids"]
        assert found == continuation(prompt_of(number), TOKENS, VERSION), number


class Process:
    """A process of ROSE's that a test kills and starts again with the same words."""

    def __init__(self, folder_: Path, name: str, *words: str) -> None:
        self.words = (name, *words)
        self.log = folder_ / f"{name}.log"
        self.child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.child = await spawn_process(CLI, *self.words, stdout=log, stderr=log)

    async def kill(self) -> None:
        if self.child is not None and self.child.returncode is None:
            self.child.kill()
            await self.child.wait()

    async def again(self) -> None:
        await self.kill()
        await self.start()


@dataclass(frozen=True)
class Pair:
    """A router and ``rose batches`` beside it, neither of them started yet.

    Attributes:
        url: the router's.
        attach: port on which it listens to owners of engines.
    """

    url: str
    attach: int
    router: Process
    batches: Process


def pair(folder: Path, lines: int) -> Pair:
    """Processes that know of each other; ``lines`` may be on their way at a time."""
    http_port, attach, port = free_ports(3)
    secret = folder / "secret"
    secret.write_text("secret\n")
    url = f"http://127.0.0.1:{http_port}"
    router = Process(
        folder, "router", f"--lease={LEASE}", f"--http-address=127.0.0.1:{http_port}",
        f"--attach-address=127.0.0.1:{attach}", f"--token-file={secret}",
        f"--batches=http://127.0.0.1:{port}", f"--batches-token-file={secret}",
    )  # fmt: skip
    batches = Process(
        folder, "batches", f"--router={url}", f"--folder={folder / 'kept'}",
        f"--address=127.0.0.1:{port}", f"--token-file={secret}", f"--lines={lines}",
    )  # fmt: skip
    return Pair(url, attach, router, batches)


async def ask(http: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """What is answered with 200, or nothing."""
    with contextlib.suppress(aiohttp.ClientError):
        async with http.get(url) as reply:
            return dict(await reply.json()) if reply.status == 200 else None
    return None


@contextlib.asynccontextmanager
async def engine_of(
    attach: int, name: str, cap: int = 8, script: Script | None = None
) -> AsyncIterator[asyncio.Event]:
    """A fake engine whose owner dials the router until it answers; set the event to kill it."""
    die = asyncio.Event()

    async def live() -> None:
        scheduler = FakeScheduler(WeightSession({}, VERSION), token_seconds=0.005, script=script)
        runner = web.AppRunner(
            FakeServer(scheduler).application(), handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        update = EngineUpdate(name, EngineKind.BORROWED, LEASE, url, gate_open=True, cap=cap,
                            version=VERSION)  # fmt: skip
        try:
            while not die.is_set():
                async with owner(attach, update, "secret") as mine:
                    killed = asyncio.create_task(die.wait())
                    await asyncio.wait({mine.task, killed}, return_when=asyncio.FIRST_COMPLETED)
                    killed.cancel()
                await asyncio.sleep(0.05)
        finally:
            if runner.server is not None:
                for connection in list(runner.server.connections):
                    if connection.transport is not None:
                        connection.transport.abort()
            await runner.cleanup()

    async def lives() -> None:
        while True:
            await live()
            die.clear()

    task = asyncio.create_task(lives())
    try:
        yield die
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
