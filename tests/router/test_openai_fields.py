"""No field of OpenAI's or vLLM's requests is forgotten: it works, goes on, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rose_core.rollouts.errors import InvalidTurn, UnsafeTurn
from rose_router.http.dialects import chat, completions, vllm
from rose_router.http.dialects.terms import ParsedRequest
from rose_router.turns.request import TurnRequest
from tests.router.conftest import Stage
from tests.router.test_http import events

Make = Callable[..., AbstractAsyncContextManager[Stage]]
PROMPT = [3, 1, 4]


def completion(**body: Any) -> TurnRequest:  # noqa: ANN401  # of a request
    (turn,) = completions.read({"prompt": PROMPT, **body}, {}, None, lambda: "r").turns
    return turn


def chatted(**body: Any) -> TurnRequest:  # noqa: ANN401  # of a request
    (turn,) = chat.read({"input_ids": PROMPT, **body}, {}, None, lambda: "r").turns
    return turn


def inference(sampling: dict[str, Any], **body: Any) -> TurnRequest:  # noqa: ANN401  # of a request
    asked = {"token_ids": PROMPT, "sampling_params": sampling, **body}
    (turn,) = vllm.read(asked, {}, None, lambda: "r").turns
    return turn


@pytest.mark.parametrize("read", [chat.read, vllm.read])
def test_an_answer_may_go_to_the_contexts_end_unless_a_number_is_named(
    read: Callable[..., ParsedRequest],
) -> None:
    def most(context: int, **named: int) -> int:
        body = {"input_ids": PROMPT, "token_ids": PROMPT, "sampling_params": named, **named}
        (turn,) = read(body, {}, None, lambda: "r", context=context).turns
        return turn.most_tokens

    assert most(4096) == 4096 - len(PROMPT)
    assert most(4096, max_tokens=7) == 7
    assert most(0) < 4096  # nobody has said how long an answer may become
    assert most(1) == 1  # refused later, by the bounds, and not as a wrong number


@pytest.mark.parametrize(
    ("field", "value", "name", "becomes"),
    [
        ("seed", 7, "sampling_seed", 7),
        ("min_tokens", 2, "min_new_tokens", 2),
        ("include_stop_str_in_output", True, "no_stop_trim", True),
        ("guided_json", {"type": "object"}, "json_schema", '{"type": "object"}'),
        ("guided_regex", "a+", "regex", "a+"),
        ("stop_regex", "a+", "stop_regex", "a+"),
        ("custom_params", {"return_top_p_token_ids": True}, "custom_params", None),  # slime's
        ("response_format", {"type": "json_object"}, "json_schema", '{"type": "object"}'),
        ("response_format", {"type": "text"}, "json_schema", None),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}},
            "json_schema",
            '{"type": "array"}',
        ),
    ],
)
def test_what_has_another_name_works_in_every_dialect(
    field: str, value: object, name: str, becomes: object
) -> None:
    for turn in (completion(**{field: value}), chatted(**{field: value})):
        assert turn.sampling.get(name) == becomes
        assert field not in turn.passed
    if field != "response_format":
        assert inference({field: value}).sampling.get(name) == becomes


def test_a_structural_tag_is_asked_for_in_the_engines_words() -> None:
    tag = {"type": "structural_tag", "structures": [], "triggers": ["<f"]}
    assert json.loads(completion(response_format=tag).sampling["structural_tag"]) == tag


@pytest.mark.parametrize("asked", [7, {"type": "xml"}, {"type": "json_schema"}])
def test_a_format_that_is_none_is_refused(asked: object) -> None:
    with pytest.raises(InvalidTurn, match="response_format"):
        completion(response_format=asked)


@pytest.mark.parametrize(
    "field", ["echo", "bad_words", "allowed_token_ids", "prompt_logprobs", "use_beam_search"]
)
def test_what_would_have_to_be_ignored_is_refused_by_name(field: str) -> None:
    for ask in (completion, chatted):
        for asked in (1, 0, ["x"]):
            with pytest.raises(InvalidTurn, match=field):
                ask(**{field: asked})
        for nothing in (None, False):
            ask(**{field: nothing})
        ask(**{field: []})
    with pytest.raises(InvalidTurn, match=field):
        inference({field: 1})


def test_a_field_nobody_here_knows_reaches_no_engine_and_is_refused_by_name() -> None:
    for ask in (completion, chatted, lambda **new: inference({}, **new)):
        with pytest.raises(UnsafeTurn, match="bootstrap_host"):
            ask(bootstrap_host="10.0.0.1")
        assert ask(bootstrap_host=None).passed == {}  # asks for nothing


def test_a_parameter_nobody_here_knows_is_refused_by_name() -> None:
    with pytest.raises(UnsafeTurn, match="thinking_token_budget"):
        inference({"thinking_token_budget": 9})
    turn = inference({"n": 1, "detokenize": False, "skip": False})
    assert turn.sampling.keys() == {"max_new_tokens"}


def test_what_prime_rl_says_with_every_further_turn_is_no_reason_to_refuse_it() -> None:
    turn = inference({"routed_experts_prompt_start": 17})
    assert (turn.dedicated_because, turn.passed) == ((), {})


def test_what_says_nothing_of_the_answer_does_not_reach_the_engine() -> None:
    turn = completion(
        model="m", user="u", metadata={"a": "b"}, stream_options={"include_usage": True}, text={}
    )
    assert turn.passed == {}


def test_the_callers_salt_is_part_of_the_caches_key() -> None:
    assert completion(cache_salt="s", extra_key="k").passed == {"extra_key": "sk"}
    assert inference({}, cache_salt="s").passed == {"extra_key": "s"}


@pytest.mark.parametrize("asked", [True, False])
async def test_a_stream_counts_its_tokens_where_that_is_asked_for(stage: Make, asked: bool) -> None:
    async with stage() as s:
        await s.engine()
        body = {"prompt": PROMPT, "max_tokens": 6, "stream": True}
        options = {"stream_options": {"include_usage": True}} if asked else {}
        async with s.post("/v1/completions", body | options) as reply:
            *pieces, last = await events(reply)
    if asked:
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert all("usage" not in piece for piece in pieces)
    assert ("usage" in last) is asked


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/inference/v1/generate"])
async def test_without_a_number_an_answer_ends_with_the_context_of_the_engines(
    stage: Make, path: str
) -> None:
    async with stage(context_tokens=400) as s:
        await s.engine(context_tokens=40)
        body = {"input_ids": PROMPT} if "chat" in path else {"token_ids": PROMPT}
        async with s.post(path, body) as reply:
            (choice,) = (await reply.json())["choices"]
    assert len(choice["token_ids"]) == 40 - len(PROMPT)
    assert choice["finish_reason"] == "length"


async def test_a_prompt_counts_once_however_many_answers_it_has(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        body: dict[str, Any] = {"prompt": PROMPT, "n": 3, "max_tokens": 4}
        async with s.post("/v1/completions", body) as reply:
            usage = (await reply.json())["usage"]
        assert usage == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
        async with s.post("/v1/completions", body | {"prompt": [PROMPT, PROMPT]}) as reply:
            usage = (await reply.json())["usage"]
        assert usage == {"prompt_tokens": 6, "completion_tokens": 24, "total_tokens": 30}


WRONG: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (completion, {"n": 0}, "n: expected a whole number >= 1"),
    (completion, {"max_tokens": 0}, "max_tokens: expected a whole number >= 1"),
    (completion, {"logprobs": "x"}, "logprobs: expected true or false or a whole number, got text"),
    (completion, {"rid": "r" * 300}, "rid: expected text of length <= 256"),
    (completion, {"stream_options": 7}, "stream_options: expected an object"),
    (completion, {"priority": 2**40}, "priority: expected a whole number <= "),
    (completion, {"rose": {"turn": -1}}, "rose.turn: expected a whole number >= 0"),
    (completion, {"rose": {"group": "g" * 600}}, "rose.group: expected text of length <= 512"),
    (completion, {"session_id": 7}, "session_id: expected text, got a whole number"),
    (completion, {"response_format": {"type": "xml"}}, "response_format.type: invalid value 'xml'"),
    (chatted, {"n": 5000}, "n: expected a whole number <= 4096"),
    (chatted, {"logprobs": True, "top_logprobs": 129}, "top_logprobs: expected a whole number"),
    (chatted, {"tools": 7}, "tools: expected a list, got a whole number"),
    (chatted, {"chat_template_kwargs": []}, "chat_template_kwargs: expected an object"),
    (chatted, {"max_completion_tokens": 1.5}, "max_completion_tokens: expected a whole number"),
]


@pytest.mark.parametrize(("ask", "fields", "complaint"), WRONG)
def test_a_field_of_another_type_is_named_with_what_it_must_be(
    ask: Callable[..., object], fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidTurn) as refused:
        ask(**fields)
    assert str(refused.value).startswith(complaint)


@pytest.mark.parametrize(
    ("sampling", "complaint"),
    [
        ({"n": "x"}, "sampling_params.n: expected a whole number, got text"),
        ({"max_tokens": 0}, "sampling_params.max_tokens: expected a whole number >= 1"),
    ],
)
def test_a_parameter_of_another_type_is_named_by_its_path(
    sampling: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidTurn) as refused:
        inference(sampling)
    assert str(refused.value).startswith(complaint)


@pytest.mark.parametrize(
    "field", [{"best_of": 1}, {"modalities": ["text"]}, {"parallel_tool_calls": False}]
)
def test_what_asks_for_no_more_than_every_answer_is_passes(field: dict[str, Any]) -> None:
    assert chatted(**field).passed == chatted().passed


@pytest.mark.parametrize(
    "field", [{"best_of": 2}, {"modalities": ["text", "audio"]}, {"audio": {"voice": "x"}}]
)
def test_what_asks_for_more_is_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidTurn, match=next(iter(field))):
        chatted(**field)


async def test_a_chats_prompt_stands_where_vllm_has_it_and_its_meta_info_where_sglang_has_it(
    stage: Make,
) -> None:
    """Verifiers' token client reads the one, miles' session server the other."""
    body = {"input_ids": PROMPT, "max_tokens": 3, "logprobs": True}
    async with stage() as s:
        await s.engine()
        path = "/v1/chat/completions"
        async with s.post(path, {**body, "return_token_ids": True}) as reply:
            asked = await reply.json()
        async with s.post(path, {**body, "return_meta_info": True}) as reply:
            beside = await reply.json()
        async with s.post(path, {**body, "return_token_ids": True, "stream": True}) as reply:
            pieces = await events(reply)
    assert asked["prompt_token_ids"] == PROMPT
    assert "prompt_token_ids" not in beside
    (choice,) = beside["choices"]
    made = [entry[1] for entry in choice["meta_info"]["output_token_logprobs"]]
    assert made == choice["token_ids"]
    assert choice["meta_info"]["finish_reason"]["type"] == "length"
    assert "meta_info" not in asked["choices"][0]
    assert pieces[0]["prompt_token_ids"] == PROMPT
    assert not any("prompt_token_ids" in one for one in pieces[1:])
