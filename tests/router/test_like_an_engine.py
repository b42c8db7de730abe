"""What a direct SGLang or vLLM does where nobody looks, a lease does too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from rose_engines.fake.model import continuation
from tests.router.conftest import VERSION, Stage
from tests.router.scripts import folder
from tests.router.test_http import PROMPT, events

pytestmark = pytest.mark.asyncio

Staging = Callable[..., AbstractAsyncContextManager[Stage]]
CHAT = {"messages": [{"role": "user", "content": "go"}]}


async def streamed(stage: Stage, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with stage.post(path, {**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        return await events(reply)


@pytest.mark.parametrize("several", [{"n": 3}, {"prompt": [PROMPT, PROMPT, PROMPT]}])
async def test_several_answers_come_in_one_stream_each_whole(
    stage: Staging, several: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, **several}
    async with stage() as s:
        await s.engine()
        seen = await streamed(
            s, "/v1/completions", {**body, "stream_options": {"include_usage": True}}
        )
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in seen[:-1]:
        (choice,) = event["choices"]
        tokens[choice["index"]] += choice["token_ids"]
    assert all(one == continuation(PROMPT, 12, VERSION) for one in tokens.values())
    assert seen[-1]["choices"] == []
    assert seen[-1]["usage"]["completion_tokens"] == 36


async def test_several_chats_come_in_one_stream_and_are_recorded_each(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine()
        body = {**CHAT, "n": 2, "max_tokens": 5, "session_id": "s"}
        seen = await streamed(s, "/v1/chat/completions", body)
        rows = (await s.get("/sessions/s/rows"))["rows"]
    ends = [one["choices"][0] for one in seen if one["choices"]]
    assert sorted(one["index"] for one in ends if one["finish_reason"]) == [0, 1]
    assert [one["delta"].get("role") for one in ends].count("assistant") == 2
    assert [sum(row["mask"]) for row in rows] == [5, 5]


async def test_log_probs_name_tokens_by_their_text_unless_ids_are_asked_for(
    stage: Staging,
) -> None:
    body = {**CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 0}
    async with stage(tokenizer=folder()) as s:
        await s.engine()
        replies = []
        for more in ({}, {"return_tokens_as_token_ids": True}):
            async with s.post("/v1/chat/completions", {**body, **more}) as reply:
                replies.append((await reply.json())["choices"][0])
    for choice, by_id in zip(replies, (False, True), strict=True):
        for entry, token in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
            if by_id:
                assert (entry["token"], entry["bytes"]) == (f"token_id:{token}", None)
            else:
                assert bytes(entry["bytes"]) == entry["token"].encode()
                assert not entry["token"].startswith("token_id:")


async def test_a_model_is_sampled_as_its_makers_say_where_the_request_does_not(
    stage: Staging, tmp_path: Path
) -> None:
    """Penalties apart: a turn that has one cannot move between engines."""
    model = Path(shutil.copytree(folder(), tmp_path / "model"))
    found = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    (model / "generation_config.json").write_text(json.dumps(found))
    async with stage(tokenizer=model) as s:
        await s.engine()
        semantics = []
        for body in (CHAT, {**CHAT, "temperature": 1.0}):
            async with s.post("/v1/chat/completions", {**body, "max_tokens": 1}) as reply:
                (choice,) = (await reply.json())["choices"]
                semantics.append(choice["rose"]["logprob_semantics"])
    assert [one.split(" before")[0] for one in semantics] == [
        "log_softmax(logits / 0.6)",
        "log_softmax(logits)",
    ]
