"""A prompt beyond the context is told in the words by which clients know that they must condense.

What they look for is theirs: NeMo Gym 0.4.0 (``vllm_model``), LiteLLM 1.110.2
(``is_error_str_context_window_exceeded``, and so mini-swe-agent), LangChain 1.7.4
(``_handle_openai_bad_request``, ``_handle_openai_api_error``), verifiers 0.4.0 (``compaction``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.router.conftest import Stage
from tests.router.scripts import Follows, folder

pytestmark = pytest.mark.asyncio

Json = dict[str, Any]
Staging = Callable[..., AbstractAsyncContextManager[Stage]]
CONTEXT = 64
TALK = [{"role": "user", "content": "Look. " * 200}]
ASKED: list[tuple[str, Json]] = [
    ("/generate", {"input_ids": [5] * CONTEXT}),
    ("/v1/completions", {"prompt": [5] * CONTEXT}),
    ("/inference/v1/generate", {"token_ids": [5] * CONTEXT}),
    ("/v1/chat/completions", {"messages": TALK}),
    ("/v1/messages", {"messages": TALK, "max_tokens": 4}),
    ("/v1/responses", {"input": TALK}),
]


@pytest.mark.parametrize(
    ("path", "body"), [*ASKED, *((path, {**body, "stream": True}) for path, body in ASKED[:-1])]
)
async def test_a_prompt_beyond_the_context_is_a_400_that_says_so(
    stage: Staging, path: str, body: Json
) -> None:
    async with stage(tokenizer=folder(), context_tokens=CONTEXT) as s:
        await s.engine(script=Follows())
        async with s.post(path, body) as reply:
            text = await reply.text()
            assert (reply.status, reply.headers["X-Rose-Reason"]) == (400, "PromptTooLong")
    error = json.loads(text)["error"]
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("prompt is too long: ")
        assert error["message"].endswith(f" tokens > {CONTEXT - 1} maximum")
        return
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert "context length" in text  # NeMo Gym's
    known = {
        "/generate": "is longer than the model's context length",
        "/v1/responses": "exceeds the context window",
    }
    phrase = known.get(path, f"This model's maximum context length is {CONTEXT} tokens")
    assert phrase in error["message"]


async def test_a_stream_of_responses_fails_in_its_own_events(stage: Staging) -> None:
    """Codex condenses at ``response.failed`` with this code; SDKs raise what ``error`` says."""
    async with stage(tokenizer=folder(), context_tokens=CONTEXT) as s:
        await s.engine(script=Follows())
        async with s.post("/v1/responses", {"input": TALK, "stream": True}) as reply:
            assert (reply.status, reply.content_type) == (200, "text/event-stream")
            blocks = (await reply.text()).strip().split("\n\n")
        counted = (await (await s.http.get(s.url + "/metrics")).text()).splitlines()
    events = [json.loads(block.split("data: ", 1)[1]) for block in blocks]
    assert [one["type"] for one in events] == [
        "response.created",
        "response.in_progress",
        "error",
        "response.failed",
    ]
    assert [one["sequence_number"] for one in events] == [0, 1, 2, 3]
    failed = events[-1]["response"]
    for error in (events[2]["error"], failed["error"]):
        assert error["code"] == "context_length_exceeded"
        assert "exceeds the context window" in error["message"]
    assert failed["status"] == "failed"
    assert any('reason="PromptTooLong"' in one for one in counted)


async def test_a_conversation_that_grows_to_the_end_is_cut_and_then_refused(stage: Staging) -> None:
    """The last answer that has room ends as ``length``; the next request is too long."""
    async with stage(context_tokens=CONTEXT) as s:
        await s.engine()
        ids = [5] * (CONTEXT - 3)
        async with s.post("/v1/chat/completions", {"input_ids": ids}) as reply:
            answer = await reply.json()
        assert answer["choices"][0]["finish_reason"] == "length"
        ids += answer["choices"][0]["token_ids"]
        async with s.post("/v1/chat/completions", {"input_ids": ids}) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["code"] == "context_length_exceeded"
