"""The caller's side: many turns at once, plain or streamed, and what each took."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp
import msgspec


@dataclass(frozen=True)
class Result:
    """What a run of turns took.

    Attributes:
        seconds: of each turn, from request to last byte.
        first: of each stream, from request to first event; empty for plain turns.
        wall: of the whole run.
    """

    seconds: list[float]
    first: list[float]
    wall: float

    @property
    def per_second(self) -> float:
        """Turns per second."""
        return len(self.seconds) / self.wall


async def turns(
    url: str,
    *,
    count: int,
    at_once: int,
    tokens: int,
    prompt: int,
    stream: bool,
    spread: float = 0.0,
) -> Result:
    """Ask for ``count`` turns, ``at_once`` at a time, callers starting over ``spread`` seconds.

    Raises:
        RuntimeError: a turn came back short or refused.
    """
    body = msgspec.json.encode(
        {
            "input_ids": list(range(1, prompt + 1)),
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0},
            "return_logprob": True,
            "stream": stream,
        }
    )
    left = iter(range(count))
    seconds: list[float] = []
    first: list[float] = []
    last_id = str(tokens - 1).encode()

    async def caller(http: aiohttp.ClientSession, delay: float) -> None:
        await asyncio.sleep(delay)
        for _ in left:
            began = time.perf_counter()
            data = b""
            async with http.post(f"{url}/generate", data=body) as reply:
                async for chunk in reply.content.iter_any():
                    if stream and not data:
                        first.append(time.perf_counter() - began)
                    data = (data + chunk)[-65536:]
                if reply.status != 200 or last_id not in data:
                    message = f"{url}: HTTP {reply.status}: {data[-300:]!r}"
                    raise RuntimeError(message)
            seconds.append(time.perf_counter() - began)

    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as http:
        began = time.perf_counter()
        delays = [spread * number / at_once for number in range(at_once)]
        await asyncio.gather(*(caller(http, delay) for delay in delays))
        return Result(seconds, first, time.perf_counter() - began)
