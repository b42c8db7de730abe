"""Every reply says which distribution its log-probs belong to, as its engines report it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rose_dev.waiting import until
from tests.router.conftest import Fake, Stage
from tests.router.pushing import json_of

Make = Callable[..., AbstractAsyncContextManager[Stage]]
SCALED = "log_softmax(logits / 0.5) before top-k, top-p and min-p"
RAW = "log_softmax(logits) before temperature 0.5, top-k, top-p and min-p"


def written(fake: Fake) -> int:
    return sum(len(one.output) for one in fake.scheduler.running)


def sglang(most: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": most, "temperature": 0.5}
    return {"input_ids": [3, 1, 4], "sampling_params": sampling, "return_logprob": True}


@pytest.mark.parametrize(("scale", "expected"), [("temperature", SCALED), ("original", RAW)])
async def test_in_every_dialect_it_is_what_the_engine_says(
    stage: Make, scale: str, expected: str
) -> None:
    async with stage() as s:
        await s.engine(scale=scale)
        answer = await json_of(s.post("/generate", sglang(4)))
        openai = {"prompt": [3, 1, 4], "max_tokens": 4, "temperature": 0.5}
        (completion,) = (await json_of(s.post("/v1/completions", openai)))["choices"]
        inside = {"max_tokens": 4, "temperature": 0.5}
        vllm = {"token_ids": [3, 1, 4], "sampling_params": inside}
        (choice,) = (await json_of(s.post("/inference/v1/generate", vllm)))["choices"]
    assert answer["meta_info"]["rose"]["logprob_semantics"] == expected
    assert completion["rose"]["logprob_semantics"] == expected
    assert choice["rose"]["logprob_semantics"] == expected
    # One word for one thing: the engine's own is not passed on beside it.
    assert "logprob_scale" not in answer["meta_info"]


async def test_an_engine_that_says_nothing_is_unknown_in_the_reply(stage: Make) -> None:
    async with stage() as s:
        await s.engine(scale="")
        answer = await json_of(s.post("/generate", sglang(4)))
    assert answer["meta_info"]["rose"]["logprob_semantics"] == "unknown"


async def test_a_turn_that_moved_between_engines_that_differ_names_the_token(stage: Make) -> None:
    async with stage() as s:
        first = await s.engine("a", token_seconds=0.02)
        asked = asyncio.create_task(json_of(s.post("/generate", sglang(40))))
        await until(lambda: written(first) > 8)
        await s.engine("b", scale="original")
        await first.die()
        meta = (await asked)["meta_info"]
    (move,) = meta["rose"]["moves"]
    expected = f"mixed: from token 0: {SCALED}; from token {move['at_token']}: {RAW}"
    assert meta["rose"]["logprob_semantics"] == expected
    assert len(meta["output_token_logprobs"]) == 40
