"""The tap beside a real engine: every request as the client saw it, and the engine's own count.

Requests go to ``/v1/completions`` of an engine on this machine's loopback. Each body has a size of
its own, by which the tap's account of the request is found again.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from bench.tap.traffic import Seen
from bench.tap.watcher import Listener, Watched, tap_process
from rose_agent.signals import verify
from rose_agent.signals.http import EngineReader
from rose_agent.tap.frames import TapWatch
from rose_core.identity import PodUid
from rose_core.telemetry.verify import SignalVerification
from rose_dev.waiting import until

_AT_ONCE = 4
_LONGEST_HEADERS = 1024


def _bodies(model: str, requests: int) -> list[bytes]:
    """Mixed prompts and lengths; every fourth is not streamed. Padded to sizes of their own."""
    bodies = []
    for number in range(requests):
        wanted = {
            "model": model,
            "prompt": [5 + (number * 7 + k) % 200 for k in range(20 + 37 * (number % 9))],
            "max_tokens": 8 + number % 17,
            "temperature": 0,
            "ignore_eos": True,
            "stream": number % 4 != 3,
        }
        body = msgspec.json.encode(wanted)
        bodies.append(body.ljust(_LONGEST_HEADERS * 4 + number))
    return bodies


async def _ask(http: aiohttp.ClientSession, url: str, body: bytes) -> Seen:
    seen = Seen(str(len(body)), time.monotonic_ns(), 0, 0, 0)
    headers = {"Content-Type": "application/json"}
    async with http.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                seen.last = time.monotonic_ns()
                seen.first = seen.first or seen.last
                seen.tokens += 1
    return seen


async def _talk(url: str, model: str, requests: int) -> list[Seen]:
    gate = asyncio.Semaphore(_AT_ONCE)
    async with aiohttp.ClientSession() as http:

        async def one(body: bytes) -> Seen:
            async with gate:
                return await _ask(http, url, body)

        return list(await asyncio.gather(*(one(b) for b in _bodies(model, requests))))


async def _abort(url: str, model: str) -> None:
    """Ask for a long answer and go away after its first token."""
    wanted = {"model": model, "prompt": [7] * 30, "max_tokens": 400, "ignore_eos": True}
    async with aiohttp.ClientSession() as http:
        answer = await http.post(f"{url}/v1/completions", json=wanted | {"stream": True})
        await answer.content.readline()
        answer.close()


@contextlib.asynccontextmanager
async def _reading(listener: Listener) -> AsyncIterator[None]:
    async def read() -> None:
        while True:
            await listener.beat(0)

    task = asyncio.create_task(read())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def against(url: str, model: str, engine: str, requests: int, aborts: int) -> Watched:
    """Talk to the engine at ``url`` with the tap beside it; ``engine`` is the pool's word for it.

    Raises:
        RuntimeError: tap and engine do not agree about how many requests there were.
    """
    port = urlsplit(url).port or 80
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        watch = TapWatch(PodUid("engine"), 0, port, interfaces=("lo",))
        # Unsampled: sampled token counts are estimates, and here every one is compared.
        async with tap_process(Path(folder), watch, "--sample-from", "0") as (listener, _):
            async with _reading(listener), aiohttp.ClientSession() as http:
                reader = EngineReader(http, url, engine)
                before = await _compared(reader, listener, SignalVerification())
                listener.watched.client = await _talk(url, model, requests)
                for _ in range(aborts):
                    await _abort(url, model)
                await _until_idle(listener)
                after = await _compared(reader, listener, before)
            if after.verified is not True:
                raise RuntimeError(f"the tap missed {after.missed} requests that {engine} counted")
            return listener.watched


async def _compared(
    reader: EngineReader, listener: Listener, before: SignalVerification
) -> SignalVerification:
    async with asyncio.timeout(60):
        while True:
            made = await verify.compare(reader, listener.book, before)
            if made is not None and made[1] is not None:
                return made[0]
            await asyncio.sleep(0.2)


async def _until_idle(listener: Listener) -> None:
    await until(lambda: not listener.book.live)
    await asyncio.sleep(0.5)
