"""A corpus of requests to a stock SGLang and to a lease of it: equal, or different by name.

A name that no longer tells a difference fails as well. What would end the stock engine is not here
(``test_real_poison``). Reasoning parsers stay off: the lease has none.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest

from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.owners import owner
from rose_router.config import Settings
from rose_router.main import running
from tests.router.scripts import RECIPE, folder
from tests.router.test_real_engines import VERSION, update_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.asyncio]

Json = dict[str, Any]
CONTEXT = 4096
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
FUNCTION = {"name": "bash", "description": "Runs a command.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "bash", "arguments": '{"command": "x"}'},
}


@dataclass(frozen=True)
class Case:
    """A request, and by what name its answers differ."""

    path: str
    body: Json
    differs: str = ""


def user(content: object) -> Json:
    return {"role": "user", "content": content}


CONVERSATIONS: list[list[Json]] = [
    [user("Look.")],
    [{"role": "system", "content": "Be brief."}, user("Look.")],
    [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    [user("Look."), {"role": "assistant", "content": "I did."}, user("Again.")],
    [
        user("Look."),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
    ],
    [user("Grüße, 世界 \U0001f600")],
]
SAMPLING: list[Json] = [
    {},
    {"max_tokens": 3},
    {"max_completion_tokens": 4},
    {"max_tokens": 30, "stop": ["all"]},
    {"max_tokens": 30, "stop": "there"},
    {"max_tokens": 30, "stop_token_ids": [262]},
    {"max_tokens": 3, "n": 2},
    {"max_tokens": 3, "logprobs": True},
    {"max_tokens": 3, "logprobs": True, "top_logprobs": 2},
    {"max_tokens": 8, "min_tokens": 8},
    {"max_tokens": 5, "ignore_eos": True},
    {"max_tokens": 3, "seed": 7, "user": "kim", "metadata": {"a": "b"}},
]
REFUSED: list[tuple[Json, str]] = [
    ({"messages": []}, ""),
    ({"messages": [user("x")], "temperature": -1}, ""),
    ({"messages": [user("x")], "top_p": 2}, ""),
    ({"messages": [user("x")], "max_tokens": 1_000_000}, ""),
    ({"messages": [{"content": "x"}]}, ""),
    ({"messages": "x"}, ""),
    ({"messages": [{"role": "wizard", "content": "x"}]}, ""),
    (
        {"messages": [user("x"), {"role": "tool", "tool_call_id": "c", "content": "y"}]},
        "a result answers a call, as at OpenAI",
    ),
    ({"messages": [user("x")], "max_tokens": 0}, "an answer has at least one token"),
    (
        {"messages": [user("x")], "tools": TOOLS, "tool_choice": "required"},
        "a grammar takes a dedicated engine",
    ),
]
PROMPTS: list[object] = ["hello", [1, 2, 3], ["hello", "you"], [[1, 2], [3, 4]]]
COMPLETIONS: list[Json] = [
    {},
    {"max_tokens": 5},
    {"max_tokens": 5, "n": 2},
    {"max_tokens": 3, "logprobs": 2},
    {"max_tokens": 20, "stop": ["bash"]},
]


def corpus() -> Iterator[Case]:
    """All requests; every one is greedy, so that answers can be compared."""
    greedy = {"temperature": 0, "model": "policy"}
    for messages, sampling in itertools.product(CONVERSATIONS, SAMPLING):
        yield Case("/v1/chat/completions", {"messages": messages, **greedy, **sampling})
    for messages in CONVERSATIONS:
        body = {"messages": messages, **greedy, "tools": TOOLS, "max_tokens": 100}
        yield Case("/v1/chat/completions", body, "SGLang adds defer_loading to tools")
        yield Case("/v1/chat/completions", {**body, "tool_choice": "none"})
    for body, name in REFUSED:
        yield Case("/v1/chat/completions", {"model": "policy", **body}, name)
    for prompt, sampling in itertools.product(PROMPTS, COMPLETIONS):
        yield Case("/v1/completions", {"prompt": prompt, **greedy, **sampling})
    yield Case("/v1/completions", {"prompt": "", **greedy})
    yield Case("/v1/completions", {"prompt": "a", **greedy, "echo": True}, "no echo")
    contents: list[object] = ["Look.", [{"type": "text", "text": "Look."}]]
    blocks = [{"type": "text", "text": "Be brief."}]
    systems: list[Json] = [{}, {"system": "Be brief."}, {"system": blocks}]
    for content, more in itertools.product(contents, systems):
        body = {"messages": [user(content)], **greedy, "max_tokens": 40, **more}
        yield Case("/v1/messages", body)
        yield Case("/v1/messages", {**body, "max_tokens": 5})
    body = {"messages": [user("Look.")], **greedy, "max_tokens": 40}
    stopped = "SGLang does not say which string ended an answer"
    yield Case("/v1/messages", {**body, "stop_sequences": ["all"]}, stopped)
    yield Case("/v1/messages", {**body, "messages": []})
    results = [{"type": "tool_result", "tool_use_id": "c", "content": "y"}]
    unasked = "a result answers a call, as at Anthropic"
    yield Case("/v1/messages", {**body, "messages": [user("x"), user(results)]}, unasked)
    endless = "max_tokens may be left out"
    yield Case("/v1/messages", {"messages": [user("Look.")], **greedy}, endless)
    long: Json = {"messages": [user("Look. " * CONTEXT)], **greedy, "max_tokens": 5}
    for path, name in (
        ("/v1/chat/completions", ""),
        ("/v1/messages", "SGLang says in the stream what Anthropic says before it"),
    ):
        yield Case(path, long)
        yield Case(path, {**long, "stream": True}, name)
    yield Case("/v1/completions", {"prompt": [1] * CONTEXT, **greedy})
    yield Case("/generate", {"input_ids": [1] * CONTEXT})
    for text in ("hello", "Grüße, 世界"):
        yield Case("/tokenize", {"prompt": text})


@pytest.fixture
async def urls(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, str]]:
    """A stock engine's and its lease's."""
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    folder()
    more = ["--tool-call-parser", "qwen25"]
    settings = Settings(
        lease="team/grpo",
        attach_token="secret",
        tokenizer=folder(),
        model="policy",
        context_tokens=CONTEXT,
    )
    async with AsyncExitStack() as stack:
        engine: RealEngine = stack.enter_context(
            start_engine(tmp_path_factory.mktemp("one"), RECIPE, version=VERSION, more=more)
        )
        router = await stack.enter_async_context(running(settings))
        reported = msgspec.structs.replace(update_of(engine, "one"), vocabulary=RECIPE.vocabulary)
        await stack.enter_async_context(owner(router.attach_port, reported, "secret"))
        yield engine.url, f"http://127.0.0.1:{router.http_port}"


async def test_a_lease_answers_as_the_engine_does_or_differs_by_name(
    urls: tuple[str, str],
) -> None:
    wrong = []
    cases = list(corpus())
    async with aiohttp.ClientSession() as http:
        for case in cases:
            direct, lease = [await answer(http, url, case) for url in urls]
            if (direct == lease) == bool(case.differs):
                what = f"no longer differs: {case.differs}" if case.differs else "differs"
                reported = json.dumps(case.body)[:300]
                wrong.append(f"{what}: {case.path} {reported}\n  engine {direct}\n  lease  {lease}")
    assert len(cases) > 100
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(wrong)


async def answer(http: aiohttp.ClientSession, url: str, case: Case) -> object:
    """What a client makes of a reply; of an error its status, which says whether to ask again."""
    async with http.post(url + case.path, json=case.body) as reply:
        if reply.content_type == "text/event-stream":
            assert "error" in await reply.text()  # no other case streams
            return "refused in events"
        body = await reply.json()
    if reply.status != 200:
        return f"refused {reply.status}"
    if case.path == "/tokenize":
        return body["tokens"], body["count"]
    if case.path == "/v1/messages":
        content = [{k: v for k, v in one.items() if k != "id"} for one in body["content"]]
        counts = body["usage"]["input_tokens"], body["usage"]["output_tokens"]
        return content, body["stop_reason"], body.get("stop_sequence"), counts
    usage = [body["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    return [_choice(one) for one in body["choices"]], usage


def _choice(choice: Json) -> object:
    message = choice.get("message", {})
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    reply = choice.get("text", message.get("content"))
    ended = choice["finish_reason"], choice["matched_stop"]
    return choice["index"], reply, calls, ended, choice["logprobs"]
