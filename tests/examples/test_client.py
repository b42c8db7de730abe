import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.grpo.client import Counters, LeaseClient, Span, Turn, parse_reply, pause_before_retry
from examples.grpo.errors import MalformedReply, OutOfTime, TurnRefused


def reply(tokens: tuple[int, ...] = (7, 8), **meta: object) -> dict[str, Any]:
    fields: dict[str, object] = {
        "finish_reason": {"type": "length", "length": len(tokens)},
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_version": "grpo@1.3",
        "weight_versions": [{"version": "grpo@1.3", "start": 0, "end": len(tokens)}],
    }
    return {"output_ids": list(tokens), "meta_info": fields | meta}


def test_a_reply_gives_tokens_logprobs_and_spans() -> None:
    turn = parse_reply(reply())
    assert turn is not None
    assert turn.tokens == (7, 8)
    assert turn.logprobs == (-0.5, -0.5)
    assert turn.spans == (Span("grpo@1.3", 0, 2),)


def test_one_version_without_spans_covers_the_turn() -> None:
    turn = parse_reply(reply(weight_versions=None))
    assert turn is not None
    assert turn.spans == (Span("grpo@1.3", 0, 2),)


def test_an_abort_is_no_turn() -> None:
    assert parse_reply(reply(finish_reason={"type": "abort", "message": "cut"})) is None


@pytest.mark.parametrize(
    "body",
    [
        {"output_ids": [1]},
        reply(tokens=()),
        reply(output_token_logprobs=[[-0.5, 7, None]]),
        reply(weight_versions=[{"version": "a@1.1", "start": 0, "end": 1}]),
        reply(weight_versions=[{"version": "a@1.1", "start": 1, "end": 2}]),
        reply(output_token_logprobs=None),
    ],
)
def test_an_incomplete_reply_is_never_an_empty_turn(body: dict[str, Any]) -> None:
    with pytest.raises(MalformedReply):
        parse_reply(body)


def test_pauses_follow_the_router_and_else_grow_to_a_limit() -> None:
    assert pause_before_retry(0, "2") == 2.0
    assert (
        pause_before_retry(0, "later") == pause_before_retry(0, None) < pause_before_retry(3, None)
    )
    assert pause_before_retry(99, None) == pause_before_retry(0, "3600") == 5.0


async def ask(
    handler: Callable[[web.Request], Awaitable[web.Response]], seconds: float = 30.0
) -> tuple[Turn, Counters]:
    app = web.Application()
    app.router.add_post("/generate", handler)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        deadline = asyncio.get_running_loop().time() + seconds
        client = LeaseClient(str(server.make_url("/")), session, deadline)
        turn = await client.turn([1, 2], session_key="t.", max_tokens=2)
        return turn, client.counters


async def test_503_is_tried_again_and_a_cut_turn_is_asked_again() -> None:
    answers = iter(
        [
            web.Response(status=503, headers={"Retry-After": "0.01"}),
            web.json_response(reply(finish_reason={"type": "abort"})),
            web.json_response(reply()),
        ]
    )

    async def handler(_request: web.Request) -> web.Response:
        return next(answers)

    turn, counters = await ask(handler)
    assert turn.tokens == (7, 8)
    assert (counters.retries, counters.cut, counters.turns, counters.tokens) == (1, 1, 1, 2)


async def test_attempts_share_an_id_and_turns_do_not() -> None:
    ids: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        ids.append((await request.json())["rid"])
        return web.Response(status=503) if len(ids) == 1 else web.json_response(reply())

    await ask(handler)
    await ask(handler)
    assert ids[0] == ids[1] != ids[2]


async def test_400_ends_the_run_with_the_routers_words() -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "prompt too long"}}, status=400)

    with pytest.raises(TurnRefused, match="prompt too long"):
        await ask(handler)


async def test_the_request_carries_session_and_asks_for_logprobs() -> None:
    seen: dict[str, object] = {}

    async def handler(request: web.Request) -> web.Response:
        seen.update(await request.json(), key=request.headers["X-Session-ID"])
        return web.json_response(reply())

    await ask(handler)
    assert seen["input_ids"] == [1, 2]
    assert seen["return_logprob"] is True
    assert seen["key"] == "t."


async def test_group_and_end_of_a_trajectory_are_told() -> None:
    seen: list[str] = []

    async def generate(request: web.Request) -> web.Response:
        seen.append(request.headers["X-Rose-Group"])
        return web.json_response(reply())

    async def finish(request: web.Request) -> web.Response:
        seen.append(request.query["session_id"])
        return web.Response(status=500)  # a hint: whatever comes of it, nothing fails

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/finish_session", finish)
    async with aiohttp.ClientSession() as session:
        async with TestServer(app) as server:
            client = LeaseClient(str(server.make_url("/")), session, time.monotonic() + 30)
            await client.turn([1], session_key="t.", max_tokens=1, group="g")
            await client.finished("t.")
        await client.finished("t.")  # the router is gone
    assert seen == ["g", "t."]


async def test_an_unreachable_router_is_waited_for_until_the_limit() -> None:
    async with aiohttp.ClientSession() as session:
        now = asyncio.get_running_loop().time()
        client = LeaseClient("http://127.0.0.1:1", session, now + 0.4)
        with pytest.raises(OutOfTime, match="before the time limit"):
            await client.turn([1], session_key="t.", max_tokens=1)
        assert client.counters.unreachable >= 2
