"""Runs in a network namespace of its own: a fake engine and a client that measures itself.

Says ``ready PORT`` once the engine answers, waits for a line, then makes its requests and prints
what the client saw as one line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import signal
import socket
import struct
import sys
import time
from functools import partial
from typing import Any

import aiohttp

from rose_agent.os import kernel

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _UP = 0x8913, 0x8914, 0x1
STREAMED, PLAIN, SHORT, ABORTED = 40, 10, 200, 5
TOKEN_SECONDS = 0.002


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        name = b"lo".ljust(16, b"\0")
        reply = fcntl.ioctl(control, _SIOCGIFFLAGS, name + bytes(16))
        (flags,) = struct.unpack_from("H", reply, 16)
        fcntl.ioctl(control, _SIOCSIFFLAGS, name + struct.pack("H", flags | _UP) + bytes(14))


def body(tokens: int, *, stream: bool) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens}
    return {"input_ids": list(range(50)), "stream": stream, "sampling_params": sampling}


async def streamed(http: aiohttp.ClientSession, url: str, tokens: int) -> dict[str, Any]:
    sent = time.monotonic_ns()
    stamps = []
    async with http.post(f"{url}/generate", json=body(tokens, stream=True)) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                stamps.append(time.monotonic_ns())  # noqa: PERF401  # the moment counts
    done = time.monotonic_ns()
    return {"sent": sent, "first": stamps[0], "done": done, "tokens": len(stamps)}


async def aborted(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        answer = await http.post(f"{url}/generate", json=body(2000, stream=True))
        await answer.content.readline()
        answer.close()


async def talk(url: str) -> dict[str, Any]:
    found: dict[str, Any] = {"streamed": []}
    async with aiohttp.ClientSession() as http:
        gate = asyncio.Semaphore(4)

        async def one(number: int) -> None:
            async with gate:
                found["streamed"].append(await streamed(http, url, 10 + number % 20))

        await asyncio.gather(*(one(n) for n in range(STREAMED)))
        for _ in range(PLAIN):
            async with http.post(f"{url}/generate", json=body(3, stream=False)) as answer:
                await answer.read()
        for _ in range(3):
            async with http.get(f"{url}/metrics") as answer:
                await answer.read()
    for _ in range(SHORT):
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.post(f"{url}/generate", json=body(1, stream=False)) as answer,
        ):
            await answer.read()
    for _ in range(ABORTED):
        await aborted(url)
    await asyncio.sleep(1.0)
    return found


async def main() -> None:
    kernel.leave_network()
    loopback_up()
    engine = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "rose_engines.fake", "--token-seconds", str(TOKEN_SECONDS)),
        stdout=asyncio.subprocess.PIPE,
        # A signal that ends this process runs no ``finally``.
        preexec_fn=partial(kernel.die_with_parent, signal.SIGKILL),
    )
    try:
        assert engine.stdout is not None
        url = (await engine.stdout.readline()).decode().strip().removeprefix("url=")
        print("ready", url.rpartition(":")[2], flush=True)  # noqa: T201  # our protocol
        await asyncio.to_thread(sys.stdin.readline)
        print(json.dumps(await talk(url)), flush=True)  # noqa: T201  # our protocol
        await asyncio.to_thread(sys.stdin.readline)
    finally:
        with contextlib.suppress(ProcessLookupError):
            engine.kill()
        await engine.wait()


if __name__ == "__main__":
    asyncio.run(main())
