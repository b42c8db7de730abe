"""Chats, tokenizing, hints, the bias meter, and what trainers ask at start-up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.placement.selection import Policy
from rose_core.rollouts.trajectories.inclusion import Arm, assigned
from rose_core.rollouts.trajectories.prospects import Deadline
from rose_core.wire.routing import EngineKind
from rose_dev.waiting import until
from rose_engines.fake.model import continuation
from rose_router.http.dialects import chat
from rose_router.http.dialects.common import Hints, deadline
from rose_router.http.tokenizer.tokenization import Tokenizer
from tests.router.conftest import VERSION, Fake, Stage
from tests.router.test_http import events

Make = Callable[..., AbstractAsyncContextManager[Stage]]
PROMPT = [3, 1, 4, 1, 5]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | tojson }}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tokenizer with one token per byte, with a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tmp_path


# --- chats


async def test_token_ids_become_text_again(stage: Make, model: Path) -> None:
    ids = Tokenizer(model).encode("hi there", special=False)
    async with stage(tokenizer=model) as s:
        async with s.post("/detokenize", {"model": "policy", "tokens": ids}) as reply:
            assert await reply.json() == {"prompt": "hi there"}
        async with s.post("/detokenize", {"model": "policy", "tokens": "hi"}) as reply:
            assert reply.status == 400
    async with stage() as s:
        await s.engine()
        async with s.post("/detokenize", {"tokens": ids}) as reply:
            assert "--tokenizer" in (await reply.json())["message"]


async def test_a_chat_is_answered_with_words_ids_log_probs_and_versions(
    stage: Make, model: Path
) -> None:
    prompt = Tokenizer(model).encode("<user>hi<assistant>", special=False)
    async with stage(tokenizer=model) as s:
        await s.engine()
        messages = [{"role": "user", "content": "hi"}]
        body = {"messages": messages, "max_completion_tokens": 6, "logprobs": True}
        async with s.post("/v1/chat/completions", body) as reply:
            answer = await reply.json()
    choice = answer["choices"][0]
    expected = continuation(prompt, 6, VERSION)
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == expected
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == bytes(expected).decode("latin-1")
    assert len(choice["logprobs"]["content"]) == 6
    assert choice["weight_versions"][0]["version"] == VERSION
    assert answer["usage"]["total_tokens"] == len(prompt) + 6


async def test_a_streamed_chat_adds_up(stage: Make, model: Path) -> None:
    async with stage(tokenizer=model) as s:
        await s.engine()
        body = {"input_ids": PROMPT, "max_tokens": 20, "stream": True, "logprobs": True}
        async with s.post("/v1/chat/completions", body) as reply:
            seen = await events(reply)
    expected = continuation(PROMPT, 20, VERSION)
    pieces = [event["choices"][0] for event in seen]
    assert [t for piece in pieces for t in piece["token_ids"]] == expected
    words = "".join(piece["delta"]["content"] for piece in pieces)
    assert words == bytes(expected).decode("latin-1")
    assert pieces[0]["delta"]["role"] == "assistant"
    assert pieces[-1]["finish_reason"] == "length"
    assert seen[-1]["usage"]["completion_tokens"] == 20


async def test_a_chat_without_tokenizer_is_refused_by_name(stage: Make) -> None:
    async with stage() as s:
        await s.engine()  # its node has none
        body = {"messages": [{"role": "user", "content": "hi"}]}
        async with s.post("/v1/chat/completions", body) as reply:
            assert reply.status == 400
            assert "input_ids" in (await reply.json())["message"]


def test_tools_reach_the_template(model: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    ids = chat.prompt_of(asked, {}, Tokenizer(model))
    assert '"name": "look"' in Tokenizer(model).decode(ids)


def test_tools_that_must_not_be_called_are_not_shown_to_the_model(model: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}]}
    tools = {"tools": TOOLS, "tool_choice": "none"}
    shown = chat.prompt_of(asked | tools, {}, Tokenizer(model))
    assert shown == chat.prompt_of(asked, {}, Tokenizer(model))


def test_calls_of_tools_are_read_when_tools_were_named() -> None:
    text = 'So.<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    message = chat.message_of(text, {"tools": TOOLS}, "r")
    assert message["content"] == "So."
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert chat.message_of(text, {}, "r") == {"role": "assistant", "content": text}


def test_a_broken_call_stays_in_the_text() -> None:
    text = "<tool_call>{nonsense}</tool_call>"
    assert chat.message_of(text, {"tools": TOOLS}, "r")["content"] == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("words", "words"),
        ("words <tool_c", "words"),
        ("words <tool_call>{", "words"),
        ("a < b", "a < b"),
    ],
)
def test_what_may_become_a_call_is_not_streamed_as_words(text: str, shown: str) -> None:
    assert chat.shown_text(text, {"tools": TOOLS}) == shown


async def test_a_template_that_refuses_says_why(stage: Make, model: Path) -> None:
    config = {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    async with stage(tokenizer=model) as s:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        async with s.post("/v1/chat/completions", body) as reply:
            assert reply.status == 400
            assert "roles must alternate" in (await reply.json())["message"]


async def test_text_and_conversations_are_tokenized(stage: Make, model: Path) -> None:
    async with stage(tokenizer=model) as s:
        async with s.post("/tokenize", {"prompt": "ab"}) as reply:
            words = await reply.json()
        async with s.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]}) as reply:
            talk = await reply.json()
    assert Tokenizer(model).decode(words["tokens"]) == "ab"
    assert words["count"] == len(words["tokens"])
    assert Tokenizer(model).decode(talk["tokens"]) == "<user>a<assistant>"


# --- hints


def test_hints_are_read_from_body_and_headers() -> None:
    hints = Hints(
        {"rose": {"group": "g", "turn": 4, "deadline": 3}},
        {"X-Rose-Group": "other", "X-Session-ID": "s"},
    )
    assert (hints.trajectory.group, hints.trajectory.turn) == ("g", 4)
    assert hints.trajectory.deadline == Deadline(publishes=3)
    assert hints.session == "s"
    assert deadline("90s") == Deadline(seconds=90)


@pytest.mark.parametrize("value", ["soon", "-1", True, [3], "s"])
def test_a_deadline_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(InvalidTurn, match="deadline"):
        deadline(value)


async def test_turns_without_a_key_stay_together_by_their_prefix(stage: Make) -> None:
    async with stage() as s:
        for name in ("a", "b", "c"):
            await s.engine(name)
        homes, prompt = set(), list(range(1, 40))
        for _ in range(6):
            body = {"prompt": prompt, "max_tokens": 20, "logprobs": 0}
            async with s.post("/v1/completions", body) as reply:
                choice = (await reply.json())["choices"][0]
            homes.add(choice["rose"]["engines"][0]["engine"])
            prompt = [*prompt, *choice["token_ids"], 7, 8]
        assert len(homes) == 1
        assert len(s.router.service.prospects) == 1


# --- the bias meter

GROUP = "of the arm that may borrow"


async def test_the_trainers_report_shows_in_the_meter(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}, "session_id": "t"}
        body |= {"rose": {"group": GROUP}}
        async with s.post("/generate", body) as reply:
            assert reply.status == 200
        report = {"trained": ["t", "stranger"], "rewards": {"t": 1.0}}
        async with s.post("/trajectories", report) as reply:
            assert await reply.json() == {"unknown": ["stranger"]}
        meter = await s.get("/trajectories")
    rows = {(row["dimension"], row["stratum"]): row for row in meter["inclusion"]}
    arm = {Arm.ANY: "any", Arm.CONTROL: "dedicated"}[assigned(GROUP, Policy().control)]
    assert rows["length", "<1k"][arm]["trained"] == 1
    assert rows["reward", "above 0"][arm]["value"] == 1.0
    assert rows["all", "all"][arm]["groups"] == 1
    assert rows["staleness", "0"]["gap"]["value"] is None
    assert meter["pool_correlation"] == {}  # of one trajectory there is none


async def test_engines_that_a_trajectory_lost_count_in_the_meter(stage: Make) -> None:
    async with stage() as s:
        fakes = {name: await s.engine(name, token_seconds=0.01) for name in "ab"}
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 200}, "session_id": "t"}
        body |= {"rose": {"group": GROUP}}
        running = asyncio.create_task(asyncio.wait_for(whole(s, body), 60))
        await until(lambda: any(len(one.output) for one in running_on(fakes)))
        await next(one for one in fakes.values() if one.scheduler.running).die()
        assert len((await running)["meta_info"]["rose"]["moves"]) == 1
        async with s.post("/trajectories", {"dropped": ["t"]}) as reply:
            assert reply.status == 200
        rows = (await s.get("/trajectories"))["inclusion"]
    (row,) = (row for row in rows if row["dimension"] == "moves")
    assert (row["stratum"], row["any"]["dropped"], row["any"]["value"]) == ("1", 1, 0.0)


def running_on(fakes: dict[str, Fake]) -> list[Any]:
    return [one for fake in fakes.values() for one in fake.scheduler.running]


async def whole(s: Stage, body: dict[str, Any]) -> dict[str, Any]:
    async with s.post("/generate", body) as reply:
        answer: dict[str, Any] = await reply.json()
        return answer


@pytest.mark.parametrize("body", [{"trained": "t"}, {"dropped": [1]}, {"rewards": {"t": "high"}}])
async def test_a_report_that_is_none_is_refused(stage: Make, body: dict[str, Any]) -> None:
    async with stage() as s, s.post("/trajectories", body) as reply:
        assert reply.status == 400


# --- start-up checks


async def test_the_lease_looks_like_one_server_of_stable_size(stage: Make) -> None:
    async with stage(model="m", reported_gpus=4) as s:
        before = await s.get("/server_info")
        await s.engine(kind=EngineKind.BORROWED, cap=64)
        after = await s.get("/server_info")
        info = await s.get("/get_model_info")
    assert before["num_gpus"] == after["num_gpus"] == 4
    assert before["max_running_requests"] == after["max_running_requests"]
    assert info["weight_version"] == VERSION
    assert info["served_model_name"] == "m"


async def test_the_only_worker_is_the_router_so_that_aborts_come_here(stage: Make) -> None:
    async with stage() as s:
        engine = await s.engine()
        found = await s.get("/workers")
        urls = (await s.get("/list_workers"))["urls"]
    assert [worker["url"] for worker in found["workers"]] == [s.url] == urls
    assert found["workers"][0]["is_healthy"]
    assert engine.url not in json.dumps(found)


async def test_registering_the_router_at_itself_does_nothing_and_anything_else_is_refused(
    stage: Make,
) -> None:
    async with stage() as s:
        async with s.post("/workers", {"url": s.url}) as reply:
            assert reply.status == 202
        async with s.post("/workers", {"url": "http://127.0.0.1:1"}) as reply:
            assert reply.status == 400
            assert "ATTACH" in (await reply.json())["message"]


@pytest.mark.parametrize("name", ["X-Rose-Group", "X-Session-ID", "X-Rose-Job", "session-id"])
def test_a_header_that_is_no_text_is_refused_by_name(name: str) -> None:
    # It would be in the list of turns, which then nobody could read.
    with pytest.raises(InvalidTurn, match=name):
        Hints({}, {name: b"\xff".decode("utf-8", "surrogateescape")})
