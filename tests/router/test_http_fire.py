"""Many callers over real sockets while engines die and callers hang up; nothing may be left."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rose_dev.waiting import until
from rose_engines.fake.model import continuation
from rose_router import metrics
from tests.router.conftest import VERSION, Fake, Stage

pytestmark = pytest.mark.asyncio

TURNS = 120


def counted() -> tuple[float, float]:
    """Tokens that routers of this process have counted, and those that nobody got."""
    kinds = {
        sample.labels["kind"]: sample.value
        for metric in metrics.TOKENS.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    return sum(kinds.values()), metrics.UNDELIVERED._value.get()


async def _caller(s: Stage, number: int, chance: random.Random, got: list[int]) -> str:
    await asyncio.sleep(chance.uniform(0, 1.0))
    most = chance.randint(5, 60)
    prompt = [number % 256, 1, 2]
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": most},
        "return_logprob": True,
        "rid": f"t{number}",
        "stream": number % 3 == 0,
    }
    if number % 10 == 1:
        return await _hang_up(s, body)
    if body["stream"]:
        async with s.post("/generate", body) as reply:
            lines = [line async for line in reply.content if line.startswith(b"data: {")]
            answer = json.loads(lines[-1][6:])
    else:
        async with s.post("/generate", body) as reply:
            answer = await reply.json()
    assert reply.status == 200, answer
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": most}
    assert answer["output_ids"] == continuation(prompt, most, VERSION)
    assert len(answer["meta_info"]["output_token_logprobs"]) == most
    got.append(most)
    return "whole"


async def _hang_up(s: Stage, body: dict[str, Any]) -> str:
    body["sampling_params"]["max_new_tokens"] = 10_000
    body["stream"] = True
    async with s.post("/generate", body) as reply:
        await reply.content.readline()
    return "hung up"


async def test_callers_never_notice_and_nothing_is_left_behind(
    stage: Callable[..., AbstractAsyncContextManager[Stage]],
) -> None:
    chance = random.Random(7)
    got: list[int] = []
    tokens, undelivered = counted()
    async with stage(max_losses=100) as s:
        engines: list[Fake] = [await s.engine(f"e{i}", token_seconds=0.005) for i in range(4)]
        callers = asyncio.gather(*(_caller(s, n, chance, got) for n in range(TURNS)))
        for victim in engines[:3]:
            await asyncio.sleep(0.4)
            await victim.die()
            engines.append(await s.engine(f"{victim.name}-again", token_seconds=0.005))
        outcomes = Counter(await callers)
        assert outcomes == {"whole": TURNS - TURNS // 10, "hung up": TURNS // 10}

        await until(lambda: not len(s.router.service.ledger))
        await until(
            lambda: all(one.finish for fake in engines[3:] for one in fake.scheduler.running)
        )
        await until(lambda: not any(engine.fences for engine in s.router.service.fleet))
        assert all(not e.legs and e.reserved == 0 for e in s.router.service.fleet)
        totals = s.router.service.ledger.totals
        assert totals.turns == TURNS
        now, nobodys = counted()
        assert nobodys > undelivered
        assert now - tokens == sum(got) + nobodys - undelivered, "every token has a place"
        assert totals.aborted_turns == outcomes["hung up"]
        assert totals.redone_tokens == 0
