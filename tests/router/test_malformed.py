"""Whatever a caller sends, the answer is its dialect's, and none says that the router failed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rose_core.wire.routing import EngineKind
from rose_router.http.routes.turns import TurnHandlers
from tests.router.conftest import Stage
from tests.router.scripts import Follows, folder

pytestmark = pytest.mark.asyncio

Json = dict[str, Any]
Staging = Callable[..., AbstractAsyncContextManager[Stage]]
SEEDS = range(6)
EACH = 60


DEEP = "nested deeply"
"""Stands in bodies for what no recursive function of Python goes through."""


def written(body: Json, levels: int = 900) -> str:
    """The body as it is sent."""
    return json.dumps(body).replace(
        json.dumps(DEEP), '{"properties": ' * levels + '"x"' + "}" * levels
    )


CALL = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}}
FUNCTION = {"name": "bash", "description": "runs", "parameters": {"type": "object"}}
VALID: list[tuple[str, Json]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Look."}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "found"},
                {"role": "assistant", "content": "And"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "continue_final_message": True,
            "temperature": 0.5,
            "logit_bias": {"5": 1.0},
            "max_tokens": 2,
        },
    ),
    (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": "Look."},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "I do."},
                        {"type": "tool_use", "id": "c", "name": "bash", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "found"}],
                },
                {"role": "assistant", "content": "And"},
            ],
            "tools": [{"name": "bash", "input_schema": {"type": "object"}}],
            "metadata": {"user_id": "kim"},
            "max_tokens": 2,
        },
    ),
    (
        "/v1/responses",
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
                {"type": "reasoning", "summary": [], "content": []},
                {"type": "function_call", "name": "bash", "call_id": "c", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "found"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "max_output_tokens": 2,
        },
    ),
    (
        "/generate",
        {
            "input_ids": [5, 6],
            "sampling_params": {"max_new_tokens": 2, "top_p": 0.9, "stop": ["x"]},
            "return_logprob": True,
        },
    ),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 2}}),
]
JUNK: list[object] = [
    *(None, True, -1, 0, 2**70, 10**400, 0.5, 1e39, "", "x", "\ud83d", "\x00" * 3),
    *([], {}, [[]], [None], {"type": []}, {"role": "wizard"}, {"role": {}, "content": 7}),
    *({"type": "text"}, {"type": "tool_result"}, DEEP, [DEEP], [[[[]]]]),
]


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a body."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*path, key))


def broken(body: Json, chance: random.Random) -> Json:
    """The body with one to three of its parts gone, doubled, moved or made something else."""
    made = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        found = list(places(made))
        if not found:
            break
        *way, last = chance.choice(found)
        at: Any = made
        for key in way:
            at = at[key]
        match chance.randrange(4):
            case 0:
                del at[last]
            case 1 if isinstance(at, list):
                at.insert(last, copy.deepcopy(at[last]))
            case 2 if isinstance(at, list):
                chance.shuffle(at)
            case _:
                at[last] = copy.deepcopy(chance.choice(JUNK))
    return made


def in_shape(path: str, answer: Any) -> bool:  # noqa: ANN401  # JSON
    error = answer["error"]
    if path == "/v1/messages" and answer["type"] != "error":
        return False
    return bool(error["message"] and error["type"])


@pytest.mark.usefixtures("soon_refused")
@pytest.mark.parametrize("seed", SEEDS)
async def test_no_malformed_history_makes_the_router_fail(stage: Staging, seed: int) -> None:
    chance, wrong, refused = random.Random(seed), list[str](), 0
    async with stage(tokenizer=folder()) as s:
        await s.engine(kind=EngineKind.DEDICATED, script=Follows(), vocabulary=5000)
        for _ in range(EACH):
            path, body = chance.choice(VALID)
            text = written(broken(body, chance))
            async with s.http.post(s.url + path, data=text) as reply:
                raw = await reply.read()
                if reply.status == 200:
                    continue
                refused += 1
                shaped = reply.content_type == "application/json"
                if reply.status >= 500 or not shaped or not in_shape(path, json.loads(raw)):
                    wrong.append(f"{path} {reply.status} {raw[:200]!r} {text[:600]}")
        async with s.post(*VALID[0]) as reply:
            assert reply.status == 200, await reply.text()
    assert not wrong, "\n".join(wrong)
    assert refused > EACH / 4, "most are malformed"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "assistant", "content": "I shall"}]}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "assistant", "content": "I shall"}],
                "continue_final_message": True,
            },
        ),
    ],
)
async def test_a_conversation_that_is_an_answers_beginning_is_answered_and_recorded(
    stage: Staging, path: str, body: Json
) -> None:
    body = {**body, "max_tokens": 3, "session_id": "begun"}
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        async with s.post(path, body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
        usage = answer["usage"]
        sampled = usage.get("output_tokens", usage.get("completion_tokens"))
        (row,) = (await s.get("/sessions/begun/rows"))["rows"]
    assert sum(row["mask"]) == sampled > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {**VALID[1][1], "tools": [{"name": "a", "input_schema": DEEP}]}),
        ("/v1/messages", {**VALID[1][1], "messages": DEEP}),
        ("/v1/responses", {"input": [DEEP]}),
        ("/v1/chat/completions", {**VALID[0][1], "tools": [DEEP]}),
    ],
)
async def test_a_body_that_is_nested_too_deeply_is_refused_in_the_dialects_shape(
    stage: Staging, path: str, body: Json
) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        async with s.http.post(s.url + path, data=written(body)) as reply:
            answer = await reply.json()
            assert reply.status == 400, answer
    assert in_shape(path, answer)


@pytest.mark.parametrize(("path", "body"), VALID)
async def test_a_mistake_that_nobody_foresaw_is_a_500_in_the_dialects_shape_logged_and_counted(
    stage: Staging,
    path: str,
    body: Json,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def mistaken(*_: object) -> None:
        raise KeyError("a secret of the router's")

    monkeypatch.setattr(TurnHandlers, "_turns", mistaken)
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        before = await refused_by_mistake(s)
        async with s.post(path, body) as reply:
            text = await reply.text()
            assert (reply.status, reply.headers["X-Rose-Reason"]) == (500, "Internal")
        assert await refused_by_mistake(s) == before + 1
    assert in_shape(path, json.loads(text))
    assert "secret" not in text
    (record,) = [one for one in caplog.records if one.exc_info and path in one.getMessage()]
    assert record.levelname == "ERROR"


async def refused_by_mistake(stage: Stage) -> float:
    async with stage.http.get(stage.url + "/metrics") as reply:
        lines = (await reply.text()).splitlines()
    found = [one for one in lines if one.startswith('rose_router_refused_total{reason="Internal"}')]
    return float(found[0].split()[-1]) if found else 0.0
