"""A stream that has begun and is cut says why, in its dialect's own shape of an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rose_core.wire.routing import EngineKind
from rose_dev.waiting import until
from tests.router.conftest import Fake, Stage
from tests.router.scripts import folder

pytestmark = pytest.mark.asyncio

Json = dict[str, Any]
Staging = Callable[..., AbstractAsyncContextManager[Stage]]

CHAT: Json = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "go"}]}
COMPLETION: Json = {"model": "m", "max_tokens": 500, "prompt": [1, 2, 3]}
GENERATE: Json = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 500}}
RESPONSE: Json = {"model": "m", "max_output_tokens": 500, "input": "go"}
IN_PIECES = (
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETION),
    ("/inference/v1/generate", GENERATE),
)


def shown(stage: Stage) -> int:
    """Tokens of the turn that is live which its caller may see."""
    return sum(len(turn.shown().tokens) for turn in stage.router.service.ledger)


async def end_engines(stage: Stage, first: Fake) -> None:
    """Kill the engine of a turn with tokens, then two more before they have given it one."""
    await until(lambda: shown(stage) > 1)
    await first.die()
    for name in ("second", "third"):
        slow = await stage.engine(name, token_seconds=60.0)
        while not slow.scheduler.counters.requests:  # noqa: ASYNC110  # of a fake engine
            await asyncio.sleep(0.01)
        await slow.die()


async def events(stage: Stage, path: str, body: Json) -> list[Json]:
    """The events of a stream, up to its end."""
    async with stage.post(path, {**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        blocks = (await reply.read()).decode().strip().split("\n\n")
    lines = [block.rpartition("data: ")[2] for block in blocks]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def ended_engines(stage: Stage, path: str, body: Json) -> list[Json]:
    """The events of a turn that ends its engines after its first tokens."""
    first = await stage.engine("first", token_seconds=0.02)
    asked = asyncio.create_task(events(stage, path, body))
    await end_engines(stage, first)
    return await asked


@pytest.mark.parametrize(("path", "body"), IN_PIECES)
async def test_a_turn_that_ends_engines_ends_its_stream_with_the_reason(
    stage: Staging, path: str, body: Json
) -> None:
    async with stage(tokenizer=folder()) as s:
        *_, last, failed = await ended_engines(s, path, body)
    error = failed["error"]
    assert (error["type"], error["code"]) == ("EndsEngines", 422)
    assert "second, third" in error["message"]
    (choice,) = last["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["rose"]["abort"]["err_type"] == "EndsEngines"


async def test_an_sdk_raises_at_it_instead_of_taking_half_an_answer_for_whole(
    stage: Staging,
) -> None:
    import openai  # noqa: PLC0415  # slow to import, and one test needs it

    async with stage(tokenizer=folder()) as s:
        first = await s.engine("first", token_seconds=0.02)
        ending = asyncio.create_task(end_engines(s, first))
        client = openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="x", max_retries=0)
        async with client:
            pieces = await client.chat.completions.create(**CHAT, stream=True)
            with pytest.raises(openai.APIError, match="ended while this turn ran on them"):
                [piece async for piece in pieces]
        await ending


async def test_messages_say_that_asking_again_does_not_help(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        *_, failed = await ended_engines(s, "/v1/messages", CHAT)
    assert failed["type"] == "error"
    assert failed["error"]["type"] == "invalid_request_error"
    assert failed["error"]["reason"] == "EndsEngines"
    assert "ask again" not in failed["error"]["message"]


async def test_responses_say_that_asking_again_does_not_help(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        *_, failed = await ended_engines(s, "/v1/responses", RESPONSE)
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "invalid_prompt"
    assert "second, third" in failed["response"]["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_whole_answer_to_a_harness_is_refused_with_the_same_status(
    stage: Staging, path: str
) -> None:
    body = CHAT if path == "/v1/messages" else RESPONSE
    async with stage(tokenizer=folder()) as s:
        first = await s.engine("first", token_seconds=0.02)
        ending = asyncio.create_task(end_engines(s, first))
        async with s.post(path, body) as reply:
            answer = await reply.json()
        await ending
    assert reply.status == 422
    assert "second, third" in answer["error"]["message"]


async def test_a_turn_that_cannot_move_says_that_asking_again_helps(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        own = await s.engine("own", EngineKind.DEDICATED, token_seconds=0.02)
        body = {**CHAT, "presence_penalty": 0.5}
        asked = asyncio.create_task(events(s, "/v1/chat/completions", body))
        await until(lambda: shown(s) > 1)
        await own.die()
        *_, failed = await asked
    assert (failed["error"]["type"], failed["error"]["code"]) == ("NotSpliceable", 503)


@pytest.mark.parametrize(("path", "body"), IN_PIECES)
async def test_an_abort_that_was_asked_for_is_no_error(
    stage: Staging, path: str, body: Json
) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(token_seconds=0.02)
        asked = asyncio.create_task(events(s, path, body))
        await until(lambda: shown(s) > 1)
        s.router.service.abort_all()
        *_, last = await asked
    (choice,) = last["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["rose"]["abort"]["message"] == "Aborted"


async def test_a_router_that_stops_says_so_where_nobody_asked_for_it(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(token_seconds=0.02)
        asked = asyncio.create_task(events(s, "/v1/completions", COMPLETION))
        await until(lambda: shown(s) > 1)
        await s.router.service.close()
        *_, failed = await asked
    assert failed["error"]["code"] == 503
    assert failed["error"]["message"] == "the router stops"


async def test_of_several_answers_one_that_is_cut_takes_no_other_along(stage: Staging) -> None:
    body = {**COMPLETION, "n": 2, "stream_options": {"include_usage": True}}
    async with stage(tokenizer=folder()) as s:
        await s.engine("lent", token_seconds=0.02)
        asked = asyncio.create_task(events(s, "/v1/completions", {**body, "max_tokens": 50}))
        await until(lambda: shown(s) > 1)
        turns = list(s.router.service.ledger)
        turns[0].abort_status = 503
        s.router.service.abort(turns[0].request.rid)
        *_, counted = await asked
        asked = asyncio.create_task(events(s, "/v1/completions", body))
        await until(lambda: shown(s) > 1)
        for turn in s.router.service.ledger:
            turn.abort_status = 503
        s.router.service.abort_all()
        *_, failed = await asked
    assert counted["usage"]["completion_tokens"] >= 50
    assert failed["error"]["code"] == 503
