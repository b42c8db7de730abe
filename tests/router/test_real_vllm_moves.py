"""Turns that move between a real SGLang and a real vLLM: the tokens are those of one engine."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from rose_core.rollouts.requests.fields import NOT_IN_VLLM
from rose_dev.engine_testing import RealEngine
from rose_dev.owners import Owner
from rose_dev.waiting import until
from rose_router.main import RunningRouter
from tests.router.pushing import json_of
from tests.router.real_fleet import before_two, bring, written
from tests.router.test_real_engines import PROMPT, VERSION

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio]

MOST = 400
Engines = dict[str, RealEngine]


@pytest.fixture(scope="module")
def engines(
    real_engine: RealEngine, vllm_engine: RealEngine, tmp_path_factory: pytest.TempPathFactory
) -> Engines:
    """Those that all tests share, brought to one version."""
    for engine in (real_engine, vllm_engine):
        asyncio.run(bring(engine, VERSION, tmp_path_factory.mktemp("version")))
    return {"sglang": real_engine, "vllm": vllm_engine}


def turn(**sampling: object) -> dict[str, Any]:
    given = {"max_new_tokens": MOST, "temperature": 0, "ignore_eos": True, **sampling}
    return {"input_ids": PROMPT, "sampling_params": given, "return_logprob": True}


async def moved_once(
    router: RunningRouter, http: aiohttp.ClientSession, owners: tuple[Owner, Owner]
) -> Any:  # noqa: ANN401  # JSON
    """A turn whose engine is taken back in the middle of its answer."""
    first, second = owners
    url = f"http://127.0.0.1:{router.http_port}/generate"
    asked = asyncio.create_task(json_of(http.post(url, json=turn())))
    await until(lambda: written(router) > 20)
    second.send(gate_open=True)
    first.send(gate_open=False, leaving=True)
    return await asked


@pytest.mark.parametrize(("begins", "ends"), [("sglang", "vllm"), ("vllm", "sglang")])
async def test_a_greedy_turn_that_changes_engines_has_the_tokens_of_one(
    engines: Engines, begins: str, ends: str
) -> None:
    async with before_two(engines[begins], engines[ends]) as (router, http, owners):
        alone = await json_of(http.post(f"{engines[begins].url}/generate", json=turn()))
        other = await json_of(http.post(f"{engines[ends].url}/generate", json=turn()))
        answer = await moved_once(router, http, owners)
    rose = answer["meta_info"]["rose"]
    assert [leg["engine"] for leg in rose["engines"]] == ["first", "second"]
    assert 0 < rose["moves"][0]["at_token"] < MOST
    assert answer["output_ids"] == alone["output_ids"] == other["output_ids"]
    # One distribution for all tokens, whichever engine sampled them.
    assert rose["logprob_semantics"].startswith("log_softmax(logits) before")
    output = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    wanted = [entry[0] for entry in alone["meta_info"]["output_token_logprobs"]]
    assert output == pytest.approx(wanted, abs=0.06)


async def test_a_turn_that_vllm_refuses_waits_for_an_sglang(engines: Engines) -> None:
    body = turn(max_new_tokens=8, temperature=1.0, sampling_seed=3)
    async with before_two(engines["vllm"], engines["sglang"]) as (router, http, owners):
        url = f"http://127.0.0.1:{router.http_port}/generate"
        owners[0].send(refuses=tuple(NOT_IN_VLLM))
        await until(lambda: any(one.update.refuses for one in router.service.fleet))
        asked = asyncio.create_task(json_of(http.post(url, json=body)))
        await until(lambda: len(router.service.queue) == 1)
        owners[1].send(gate_open=True)
        answer = await asked
    assert [leg["engine"] for leg in answer["meta_info"]["rose"]["engines"]] == ["second"]
    assert len(answer["output_ids"]) == 8


async def test_beside_ignore_eos_stop_ids_end_neither(engines: Engines) -> None:
    whole = (await _of(engines["sglang"], turn(max_new_tokens=12)))["output_ids"]
    for engine in engines.values():
        given = turn(max_new_tokens=12, stop_token_ids=[whole[5]])
        assert (await _of(engine, given))["output_ids"] == whole


async def test_both_say_the_same_of_the_likeliest_tokens(engines: Engines) -> None:
    body = turn(max_new_tokens=8, temperature=1.5, top_k=4) | {"top_logprobs_num": 2}
    for engine in engines.values():
        meta = (await _of(engine, body | {"input_ids": [104]}))["meta_info"]
        first = meta["output_top_logprobs"][0]
        assert len(meta["output_top_logprobs"]) == 8
        assert len(first) == 2
        assert first[0][0] > first[1][0]
    output = [
        (await _of(engine, body | {"input_ids": [104]}))["meta_info"]["output_top_logprobs"][0]
        for engine in engines.values()
    ]
    assert [entry[1] for entry in output[0]] == [entry[1] for entry in output[1]]
    assert [entry[0] for entry in output[0]] == pytest.approx([e[0] for e in output[1]], abs=0.06)


async def test_a_stop_string_ends_both_at_the_same_token(engines: Engines) -> None:
    whole = await _of(engines["sglang"], turn(max_new_tokens=60))
    stop = whole["text"][30:34]
    ends = [await _of(one, turn(max_new_tokens=60, stop=[stop])) for one in engines.values()]
    assert ends[0]["output_ids"] == ends[1]["output_ids"]
    assert len(ends[0]["output_ids"]) < 60
    assert [one["text"] for one in ends] == [ends[0]["text"]] * 2
    assert [one["meta_info"]["finish_reason"] for one in ends] == [
        {"type": "stop", "matched": stop}
    ] * 2


async def _of(engine: RealEngine, body: dict[str, Any]) -> Any:  # noqa: ANN401  # JSON
    async with aiohttp.ClientSession() as http:
        return await json_of(http.post(f"{engine.url}/generate", json=body))
