"""Serving load from a trace slice, rollout load without an end; both measure as clients."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

TRACE = Path(__file__).parent.parent / "traces" / "azure2023_conv_120s.csv"
_GREEDY = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Arrival:
    """One request of the trace, scaled to a small model."""

    at_s: float
    prompt: int
    output: int


@dataclass
class Measured:
    """What the clients saw."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    failed: int = 0
    rollout_stamps: list[float] = field(default_factory=list)


def schedule(seconds: float, keep: float, seed: int = 7) -> list[Arrival]:
    """A thinned slice of the trace; lengths a sixth, prompt <= 700, output <= 100."""
    draw = random.Random(seed)
    with TRACE.open() as file:
        rows = list(csv.DictReader(file))
    return [
        Arrival(
            float(row["t_s"]),
            min(700, max(4, int(row["in_tokens"]) // 6)),
            min(100, max(2, int(row["out_tokens"]) // 6)),
        )
        for row in rows
        if float(row["t_s"]) < seconds and draw.random() < keep
    ]


async def _events(
    http: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int
) -> list[float]:
    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"max_new_tokens": tokens, **_GREEDY},
    }
    stamps: list[float] = []
    async with http.post(f"{url}/generate", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                stamps.append(time.monotonic())  # noqa: PERF401  # the moment counts
    return stamps


async def serve(url: str, arrivals: list[Arrival], seconds: float, measured: Measured) -> None:
    """Send the schedule; returns when ``seconds`` have passed and every answer has ended."""
    began = time.monotonic()
    draw = random.Random(1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:

        async def one(arrival: Arrival) -> None:
            prompt = [draw.randrange(10, 200) for _ in range(arrival.prompt)]
            await asyncio.sleep(max(0.0, began + arrival.at_s - time.monotonic()))
            sent = time.monotonic()
            try:
                stamps = await _events(http, url, prompt, arrival.output)
            except aiohttp.ClientError:
                measured.failed += 1
                return
            measured.ttft_s.append(stamps[0] - sent)
            if len(stamps) > 1:
                measured.tpot_s.append((stamps[-1] - stamps[0]) / (len(stamps) - 1))

        await asyncio.gather(*(one(arrival) for arrival in arrivals))
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))


async def roll_out(url: str, streams: int, measured: Measured) -> None:
    """Keep ``streams`` long generations running until cancelled."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http:

        async def one(number: int) -> None:
            body = {
                "input_ids": [10 + number] * 64,
                "stream": True,
                "sampling_params": {"max_new_tokens": 400, **_GREEDY},
            }
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.post(f"{url}/generate", json=body) as answer:
                        async for line in answer.content:
                            if line.startswith(b"data: {"):
                                measured.rollout_stamps.append(time.monotonic())
                await asyncio.sleep(0.05)

        await asyncio.gather(*(one(n) for n in range(streams)))
