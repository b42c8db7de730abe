"""Agents' harnesses: Anthropic's and OpenAI's dialects, exact prompts, training rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest

from rose_core.wire.routing import EngineKind
from rose_dev.models import scripted_recipe
from rose_dev.scripted import Script
from rose_dev.waiting import until
from rose_engines.fake.model import next_token
from tests.router.conftest import VERSION, Stage
from tests.router.scripts import Follows, call, folder

pytestmark = pytest.mark.asyncio

TOOL = {"name": "bash", "description": "runs", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "bash", "parameters": {"type": "object"}}
Json = dict[str, Any]
UUID = "0191f3a0-7c4e-7d2b-9a51-3f6f1f0c2a10"
Staging = Callable[..., AbstractAsyncContextManager[Stage]]


def begun(stage: Stage) -> bool:
    """A turn has its first token."""
    return any(turn.first_token_at for turn in stage.router.service.ledger)


async def ask(stage: Stage, path: str, body: Json, **kwargs: Any) -> Json:  # noqa: ANN401  # of requests
    async with stage.post(path, body, **kwargs) as reply:
        answer: Json = await reply.json()
        assert reply.status == 200, answer
        return answer


async def events(stage: Stage, path: str, body: Json) -> list[Json]:
    async with stage.post(path, {**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        text = (await reply.read()).decode()
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def messages(*given: Json, **more: Any) -> Json:  # noqa: ANN401  # of requests
    return {"model": "m", "max_tokens": 200, "messages": list(given), "tools": [TOOL], **more}


def user(content: object) -> Json:
    return {"role": "user", "content": content}


def result(block: Json, text: str) -> Json:
    return user([{"type": "tool_result", "tool_use_id": block["id"], "content": text}])


async def task(stage: Stage, **more: Any) -> list[Json]:  # noqa: ANN401  # of requests
    """The script's whole task through ``/v1/messages``; the answers."""
    talk, answers = [user("Look into a.txt.")], []
    for outcome in ("", "one", None):
        answers.append(await ask(stage, "/v1/messages", messages(*talk, **more)))
        if outcome is not None:
            block = answers[-1]["content"][-1]
            talk += [{"role": "assistant", "content": answers[-1]["content"]}]
            talk += [result(block, outcome)]
    return answers


async def test_a_conversation_is_tokenized_as_its_turns_were(stage: Staging) -> None:
    """NeMo Gym trains on the ids that ``/tokenize`` gives for what it has asked before."""
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
        talk: list[Json] = [user("Look into a.txt.")]
        asked: list[list[int]] = []
        for outcome in ("", "one", ""):
            body = {"model": "m", "messages": list(talk), "tools": tools}
            answer = await ask(s, "/v1/chat/completions", body)
            asked.append((await ask(s, "/tokenize", body))["tokens"])
            message = answer["choices"][0]["message"]
            talk.append(message)
            calls = message.get("tool_calls") or []
            talk += [{"role": "tool", "tool_call_id": c["id"], "content": outcome} for c in calls]
        first = (await s.get("/turns"))["recent"][0]
        (row,) = (await s.get(f"/sessions/{first['session'] or first['id']}/rows"))["rows"]
        assert asked == [row["ids"][: turn["start"]] for turn in row["turns"]]
        assert len(asked) == 3


async def test_tokens_are_counted_as_a_turn_has_them(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        (first, second, _) = await task(s)
        talk = [user("Look into a.txt.")]
        for answer, outcome in ((first, ""), (second, "one")):
            talk += [{"role": "assistant", "content": answer["content"]}]
            talk += [result(answer["content"][-1], outcome)]
        counted = await ask(s, "/v1/messages/count_tokens", messages(*talk))
        assert (
            counted["input_tokens"]
            == (await ask(s, "/v1/messages", messages(*talk)))["usage"]["input_tokens"]
        )


async def test_a_harness_of_anthropics_plays_a_task_with_tools(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        first, second, third = await task(s, metadata={"user_id": f"kim_session_{UUID}"})
    assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
    assert first["content"][0]["text"] == "I shall look."
    assert first["content"][1]["input"] == {"command": "echo one > a.txt"}
    assert first["stop_reason"] == "tool_use"
    assert [block["type"] for block in second["content"]] == ["thinking", "text", "tool_use"]
    assert second["content"][0]["thinking"] == "Was it written?"
    assert third["content"] == [{"type": "text", "text": "The file says one."}]
    assert third["stop_reason"] == "end_turn"
    history = third["rose"]["history"]
    assert (history["messages"], history["known_messages"]) == (5, 4)
    assert third["rose"]["session_by"] == "metadata.user_id"
    assert third["weight_versions"][0]["version"] == VERSION
    assert third["usage"]["input_tokens"] == history["exact_tokens"] + history["rendered_tokens"]


async def test_twenty_turns_are_one_row_in_which_each_token_follows_from_those_before_it(
    stage: Staging,
) -> None:
    """The fake engine's next token is a hash of all before it: a row that is not exact shows."""
    async with stage(tokenizer=folder()) as s:
        await s.engine("a")
        talk = [user("go")]
        for number in range(20):
            answer = await ask(
                s, "/v1/messages", messages(*talk, max_tokens=9, rose={"session": "e"})
            )
            reported = answer["content"] or "nothing"
            talk += [{"role": "assistant", "content": reported}, user(f"result {number}")]
        rows = (await s.get("/sessions/e/rows"))["rows"]
    (row,) = rows
    assert len(row["turns"]) == 20
    check(row)


def check(row: Json) -> None:
    """Every sampled token is what the engine says after the row's own tokens before it."""
    for place, (token, sampled) in enumerate(zip(row["ids"], row["mask"], strict=True)):
        assert (row["logprobs"][place] is not None) == bool(sampled)
        if sampled:
            assert next_token(row["ids"][:place], VERSION)[0] == token
    spans = [(one["start"], one["end"]) for one in row["weight_versions"]]
    turns = [(one["start"], one["end"]) for one in row["turns"]]
    assert spans == turns


async def test_a_row_stays_exact_when_the_engine_dies_in_mid_answer(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        dying = await s.engine("a", token_seconds=0.02)
        body = messages(user("go"), max_tokens=40, rose={"session": "e"})
        asking = asyncio.create_task(ask(s, "/v1/messages", body))
        await until(lambda: begun(s))
        await s.engine("b")
        await dying.die()
        answer = await asking
        talk = [user("go"), {"role": "assistant", "content": answer["content"]}, user("more")]
        await ask(s, "/v1/messages", messages(*talk, max_tokens=5, rose={"session": "e"}))
        (row,) = (await s.get("/sessions/e/rows"))["rows"]
    assert answer["rose"]["moves"]
    assert len(row["turns"]) == 2
    assert [turn["end"] - turn["start"] for turn in row["turns"]] == [40, 5]
    assert sum(row["mask"]) == 45


async def test_a_stream_of_anthropics_says_what_the_whole_answer_says(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        talk = [user("Look into a.txt.")]
        whole = await ask(s, "/v1/messages", messages(*talk))
        talk += [{"role": "assistant", "content": whole["content"]}]
        talk += [result(whole["content"][-1], "")]
        whole = await ask(s, "/v1/messages", messages(*talk))
        reported = await events(s, "/v1/messages", messages(*talk))
    assert reported[0]["type"] == "message_start"
    assert reported[-1] == {"type": "message_stop"}
    assert reported[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert reported[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert [_text_of(block) for block in _blocks(reported)] == [
        _text_of(one) for one in whole["content"]
    ]


def _blocks(answer: list[Json]) -> list[Json]:
    """Blocks of a stream, put together as Anthropic's own client does."""
    blocks: list[Json] = []
    open_at = None
    for event in answer:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert open_at is None
                assert index == len(blocks)
                open_at = index
                blocks.append(dict(block))
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == open_at
                kind = delta["type"]
                if kind == "input_json_delta":
                    blocks[index]["input"] = json.loads(delta["partial_json"])
                else:
                    field = kind.removesuffix("_delta")
                    blocks[index][field] += delta[field]
            case {"type": "content_block_stop"}:
                open_at = None
    assert open_at is None
    return blocks


def _text_of(block: Json) -> Json:
    return {name: value for name, value in block.items() if name != "id"}


def responses(given: object, **more: Any) -> Json:  # noqa: ANN401  # of requests
    return {"model": "m", "input": given, "tools": [FUNCTION], **more}


async def test_openais_responses_go_on_from_the_one_before(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        first = await ask(s, "/v1/responses", responses("Look.", instructions="Be brief."))
        call = first["output"][-1]
        assert (call["type"], call["name"]) == ("function_call", "bash")
        assert json.loads(call["arguments"]) == {"command": "echo one > a.txt"}
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": ""}
        second = await ask(
            s,
            "/v1/responses",
            responses([output], previous_response_id=first["id"], instructions="Be brief."),
        )
        # The same, told whole, as a client without state does.
        stateless = await ask(
            s,
            "/v1/responses",
            responses([user("Look."), *first["output"], output], instructions="Be brief."),
        )
    assert [item["type"] for item in second["output"]] == ["reasoning", "message", "function_call"]
    assert second["output"][0]["content"][0]["text"] == "Was it written?"
    for answer in (second, stateless):
        assert answer["status"] == "completed"
        assert answer["rose"]["history"]["known_messages"] == 3
        assert answer["rose"]["session_by"] == "messages"
        assert answer["rose"]["session"] == first["rose"]["session"]


async def test_a_stream_of_responses_ends_with_the_whole_response(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        reported = await events(s, "/v1/responses", responses("Look."))
    assert [event["sequence_number"] for event in reported] == list(range(len(reported)))
    assert [reported[0]["type"], reported[-1]["type"]] == ["response.created", "response.completed"]
    items = reported[-1]["response"]["output"]
    done = [one["item"] for one in reported if one["type"] == "response.output_item.done"]
    assert done == items
    text = "".join(one["delta"] for one in reported if one["type"] == "response.output_text.delta")
    assert text == items[0]["content"][0]["text"] == "I shall look."
    arguments = [e for e in reported if e["type"] == "response.function_call_arguments.done"]
    assert arguments[0]["arguments"] == items[1]["arguments"]


async def test_a_custom_tool_gets_its_text_and_tools_of_the_provider_are_named(
    stage: Staging,
) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        tools = [{"type": "custom", "name": "bash"}, {"type": "web_search"}]
        answer = await ask(s, "/v1/responses", {"input": "Look.", "tools": tools})
    (called,) = [item for item in answer["output"] if item["type"] == "custom_tool_call"]
    assert json.loads(called["input"]) == {"command": "echo one > a.txt"}
    assert answer["rose"]["tools_not_shown"] == ["web_search"]


async def test_a_chat_is_recorded_and_says_log_probs_only_when_asked(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine("a")
        body = {"messages": [user("go")], "max_tokens": 6, "session_id": "c"}
        answer = await ask(s, "/v1/chat/completions", body)
        asked = await ask(s, "/v1/chat/completions", {**body, "logprobs": True})
        rows = (await s.get("/sessions/c/rows"))["rows"]
        off = {**body, "session_id": "off", "rose": {"record": False}}
        await ask(s, "/v1/chat/completions", off)
        missing = await s.get("/sessions/off/rows")
    assert answer["choices"][0]["logprobs"] is None
    assert len(asked["choices"][0]["logprobs"]["content"]) == 6
    assert [sum(row["mask"]) for row in rows] == [6, 6], "two answers to one prompt"
    for row in rows:
        check(row)
    assert missing["type"] == "UnknownSession"


async def test_an_altered_history_is_located_in_reply_and_row(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine("a")
        more = {"max_tokens": 6, "rose": {"session": "e"}}
        await ask(s, "/v1/messages", messages(user("go"), **more))
        before = await drift(s)
        changed = [user("go"), {"role": "assistant", "content": "I never said"}, user("so")]
        answer = await ask(s, "/v1/messages", messages(*changed, **more))
        rows = (await s.get("/sessions/e/rows"))["rows"]
        after = await drift(s)
    assert answer["rose"]["history"]["altered_at"] == 1
    assert answer["rose"]["history"]["exact_tokens"] == 0
    assert [row["turns"][-1]["altered_at"] for row in rows] == [None, 1]
    assert [new - old for old, new in zip(before, after, strict=True)] == [1, 6]


async def drift(stage: Stage) -> list[float]:
    """Altered histories, and tokens that they lost, as a scrape counts them."""
    async with stage.http.get(stage.url + "/metrics") as reply:
        lines = (await reply.text()).splitlines()
    names = ("rose_router_history_altered_total", "rose_router_history_lost_tokens_total")
    return [float(one.split()[-1]) for name in names for one in lines if one.startswith(name + " ")]


@pytest.mark.parametrize(
    ("headers", "more", "by", "session"),
    [
        ({"X-Session-ID": "h"}, {"metadata": {"session_id": "m"}}, "X-Session-ID", "h"),
        ({"session_id": "codex"}, {"prompt_cache_key": UUID}, "session_id", "codex"),
        ({}, {"metadata": {"session_id": "m"}}, "metadata.session_id", "m"),
        ({}, {"prompt_cache_key": UUID}, "prompt_cache_key", UUID),
        ({}, {"prompt_cache_key": "my-app"}, "rid", None),
        ({}, {"user": "everybody"}, "rid", None),
        ({}, {"metadata": {"user_id": UUID}}, "rid", None),
        ({}, {"metadata": {"user_id": f"user_1_account_{UUID}"}}, "rid", None),
        ({}, {"metadata": {"user_id": f"a_{UUID}_session_{UUID}"}}, "metadata.user_id", None),
        ({}, {"metadata": {"user_id": f'{{"session_id":"{UUID}"}}'}}, "metadata.user_id", None),
    ],
)
async def test_a_session_is_known_by_what_harnesses_send(
    stage: Staging, headers: dict[str, str], more: Json, by: str, session: str | None
) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine("a")
        body = {"input": "go", "max_output_tokens": 2, **more}
        answer = await ask(s, "/v1/responses", body, headers=headers)
    rose = answer["rose"]
    assert rose["session_by"] == by
    assert session is None or rose["session"] == session


async def test_anthropics_key_is_a_token_and_counting_runs_no_turn(stage: Staging) -> None:
    async with stage(tokenizer=folder(), turn_token="good") as s:
        body = messages(user("go"))
        async with s.post("/v1/messages/count_tokens", body) as reply:
            assert reply.status == 401
            refused = await reply.json()
        answer = await ask(s, "/v1/messages/count_tokens", body, headers={"x-api-key": "good"})
    assert refused["error"]["type"] == "authentication_error"
    assert answer["input_tokens"] > 10


USES = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {}}],
}
ANSWERED = result({"id": "toolu_1"}, "y")
CALLS = {"type": "function_call", "name": "bash", "call_id": "c1", "arguments": "{}"}


def output(call: str) -> Json:
    return {"type": "function_call_output", "call_id": call, "output": "y"}


_BAD: list[tuple[str, Json, str]] = [
    ("/v1/messages", {"messages": []}, "messages"),
    ("/v1/messages", messages(user("x"), max_tokens=0), "max_tokens"),
    ("/v1/messages", messages({"role": "tool", "content": "x"}), "role"),
    ("/v1/messages", messages(user([{"type": "image", "source": {}}])), "image"),
    ("/v1/messages", messages(user([{"type": "tool_use", "id": "1", "name": "x"}])), "ToolUse"),
    ("/v1/messages", messages(user("x"), tools=[{"type": "custom"}]), "tools"),
    ("/v1/messages", messages(user("x"), tools=[], tool_choice={"type": "any"}), "tool_choice"),
    ("/v1/messages", messages(user("x"), mcp_servers=[]), "mcp_servers"),
    ("/v1/messages", messages(user("x"), temperature="hot"), "temperature"),
    ("/v1/messages", messages(user("x"), session_id=7), "session_id"),
    ("/v1/messages", messages(user("x"), temperature=1e39), "temperature"),
    ("/v1/messages", messages(user("x"), top_p=1e-46), "top_p"),
    ("/v1/responses", {"input": "x", "temperature": 1e39}, "temperature"),
    ("/v1/responses", {"input": "x", "top_p": 1e-46}, "top_p"),
    ("/v1/messages", messages(user("x"), result({"id": "toolu_9"}, "y")), "toolu_9"),
    ("/v1/messages", messages(user("x"), USES, result({"id": "other"}, "y")), "other"),
    ("/v1/messages", messages(user("x"), USES), "messages.1: `tool_use` ids"),
    ("/v1/messages", messages(user("x"), USES, user("y")), "toolu_1"),
    (
        "/v1/messages",
        messages(user("x"), USES, user("y"), {"role": "assistant", "content": "z"}, user("w")),
        "immediately after: 'toolu_1'",
    ),
    (
        "/v1/messages",
        messages(user("x"), USES, ANSWERED, {"role": "assistant", "content": "z"}, ANSWERED),
        "messages.4.content.0: unexpected `tool_use_id`",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
    (
        "/v1/chat/completions",
        {"messages": [user("x"), {"role": "tool", "tool_call_id": "c9", "content": "y"}]},
        "messages[1].tool_call_id: no call before it has the id 'c9'",
    ),
    (
        "/v1/chat/completions",
        {"messages": [user("x"), {"role": "tool", "tool_call_id": [], "content": "y"}]},
        "tool_call_id",
    ),
    ("/v1/responses", {"input": [user("x"), output("c9")]}, "call_id 'c9'"),
    ("/v1/responses", {"input": [user("x"), CALLS]}, "No tool output found for function call 'c1'"),
    ("/v1/responses", {"input": [user("x"), output("c1"), CALLS]}, "No tool call found"),
    ("/v1/responses", {"input": 7}, "input"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ("/v1/responses", {"input": [{"type": "function_call", "name": "x"}]}, "call_id"),
    ("/v1/responses", {"input": [user([{"type": "input_image"}])]}, "input_image"),
    ("/v1/responses", {"input": [{"type": []}]}, "[]"),
    ("/v1/responses", {"input": [{"role": {}, "content": "x"}]}, "{}"),
    ("/v1/responses", {"input": [user([{"type": [], "text": "x"}])]}, "[]"),
    ("/v1/responses", {"input": "x", "background": True}, "background"),
    ("/v1/responses", {"input": "x", "conversation": "c"}, "conversation"),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_9"}, "resp_9"),
    ("/v1/responses", {"input": "x", "tool_choice": "required"}, "tool_choice"),
    ("/v1/responses", {"input": "x", "frequency": 1}, "frequency"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format"),
]


@pytest.mark.parametrize(("path", "body", "named"), _BAD)
async def test_bad_input_is_refused_by_name_in_the_dialects_own_shape(
    stage: Staging, path: str, body: Json, named: str
) -> None:
    async with stage(tokenizer=folder()) as s, s.post(path, body) as reply:
        answer = msgspec.json.decode(await reply.read())
    assert reply.status in {400, 404, 422}
    assert named in answer["error"]["message"]
    if path == "/v1/messages":
        assert answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error"


async def test_results_may_come_one_by_one_and_without_ids_where_engines_need_none(
    stage: Staging,
) -> None:
    uses: list[Json] = [
        {"type": "tool_use", "id": one, "name": "bash", "input": {}} for one in ("toolu_1", "b")
    ]
    talk = [user("x"), {"role": "assistant", "content": uses[:1]}]
    talk += [{"role": "assistant", "content": uses[1:]}]
    talk += [result({"id": "b"}, "y"), result({"id": "toolu_1"}, "z")]
    bare = [user("x"), {"role": "assistant", "content": "so"}, {"role": "tool", "content": "y"}]
    calls = [CALLS, {**CALLS, "call_id": "c2"}, output("c2"), output("c1")]
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        assert (await ask(s, "/v1/messages", messages(*talk)))["type"] == "message"
        assert (await ask(s, "/v1/chat/completions", {"messages": bare}))["choices"]
        assert (await ask(s, "/v1/responses", {"input": [user("x"), *calls]}))["output"]


async def test_an_answer_that_was_cut_short_is_an_error_that_clients_try_again(
    stage: Staging,
) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine("a", token_seconds=0.05)
        replies = []
        for path, body in (
            ("/v1/messages", messages(user("go"))),
            ("/v1/responses", responses("go")),
        ):
            asking = asyncio.create_task(s.post(path, body).__aenter__())
            await until(lambda: begun(s))
            s.router.service.abort_all()
            reply = await asking
            replies.append((reply.status, await reply.json()))
    assert [status for status, _ in replies] == [503, 503]
    assert replies[0][1]["error"]["type"] == "overloaded_error"


async def test_a_model_is_shown_under_the_name_that_a_harness_asks_for(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        assert (await s.get("/v1/models/org/some-model"))["id"] == "org/some-model"


FORCED = '[{"name": "bash", "parameters": {"command": "ls"}}]'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", messages(user("x"), tool_choice={"type": "any"})),
        ("/v1/messages", messages(user("x"), tool_choice={"type": "tool", "name": "bash"})),
        ("/v1/responses", {"input": "x", "tools": [FUNCTION], "tool_choice": "required"}),
        (
            "/v1/responses",
            {
                "input": "x",
                "tools": [FUNCTION],
                "tool_choice": {"type": "function", "name": "bash"},
            },
        ),
    ],
)
async def test_a_forced_call_runs_under_a_grammar_where_it_need_not_move(
    stage: Staging, path: str, body: Json
) -> None:
    recipe = scripted_recipe("forced", Script("", (FORCED,)))
    async with stage(tokenizer=folder(recipe)) as s:
        lent = await s.engine("lent", script=Follows(recipe))
        asked = asyncio.create_task(ask(s, path, body))
        await until(lambda: len(s.router.service.queue) == 1)
        own = await s.engine("own", EngineKind.DEDICATED, script=Follows(recipe))
        answer = await asked
        reported = await events(s, path, body)
    assert lent.scheduler.counters.requests == 0
    assert own.scheduler.counters.requests == 2
    items = answer.get("content") or answer["output"]
    assert [item["type"] for item in items] in (["tool_use"], ["function_call"])
    assert json.dumps(reported).count("command") >= 1


async def test_rollouts_of_one_task_that_answer_alike_keep_their_own_turns(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        rows = {}
        for key in ("a", "b"):
            await task(s, rose={"session": key})
        for key in ("a", "b"):
            rows[key] = (await s.get(f"/sessions/{key}/rows"))["rows"]
    assert [len(row["turns"]) for key in rows for row in rows[key]] == [3, 3]
    semantics = {turn["logprob_semantics"] for turn in rows["a"][0]["turns"]}
    assert semantics == {"log_softmax(logits) before top-k, top-p and min-p"}


async def test_a_responses_developer_messages_are_gone_on_from_too(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        found = [{"role": "developer", "content": "Be kind."}, user("Look.")]
        first = await ask(s, "/v1/responses", responses(found))
        call_id = first["output"][-1]["call_id"]
        output = {"type": "function_call_output", "call_id": call_id, "output": "x"}
        second = await ask(
            s, "/v1/responses", responses([output], previous_response_id=first["id"])
        )
    assert second["rose"]["history"]["known_messages"] == 3
    assert second["rose"]["history"]["exact_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
async def test_fields_that_are_null_are_left_out(stage: Staging, path: str) -> None:
    nulls: Json = {"tools": None, "temperature": None, "top_p": None, "stream": None, "rose": None}
    if path == "/v1/messages":
        text = {"type": "text", "text": "go", "cache_control": None, "citations": None}
        body = {"messages": [user([text])], "max_tokens": 2, "system": None, "stop_sequences": None}
    elif path == "/v1/responses":
        body = {"input": [{"type": "message", "id": None, **user("go")}], "instructions": None}
    else:
        body = {"messages": [user("go")], "max_tokens": 2, "stop": None}
    async with stage(tokenizer=folder(), context_tokens=400) as s:
        await s.engine()
        await ask(s, path, {**body, **nulls})


async def test_an_answer_that_is_begun_is_continued(stage: Staging) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine()
        talk = [user("go"), {"role": "assistant", "content": "Well"}]
        body = {"max_tokens": 3, "rose": {"session": "p"}}
        await ask(s, "/v1/messages", messages(*talk, **body))
        (row,) = (await s.get("/sessions/p/rows"))["rows"]
    given = bytes(one for one in row["ids"][: row["turns"][0]["start"]] if one < 256)
    assert given.endswith(b"Well")


WORDY = "\n\nI look.\n" + call("bash", '{"command": "x"}') + "after"
HALF = "Half: " + call("bash", '{"command": "\\ud83d"}')
NAN = "None: " + call("bash", "NaN")


@pytest.mark.parametrize("message", [WORDY, HALF, NAN])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
async def test_a_stream_shows_the_words_of_the_whole_answer(
    stage: Staging, path: str, message: str
) -> None:
    recipe = scripted_recipe("wordy", Script("", (message,)))
    body = messages(user("go"))
    if path == "/v1/responses":
        body = responses("go")
    elif path == "/v1/chat/completions":
        tools = [{"type": "function", "function": {"name": "bash"}}]
        body = {"messages": [user("go")], "tools": tools, "max_tokens": 200}
    async with stage(tokenizer=folder(recipe), context_tokens=4000) as s:
        await s.engine(script=Follows(recipe))
        whole = await ask(s, path, body)
        async with s.post(path, {**body, "stream": True}) as reply:
            text = (await reply.read()).decode()
    answer = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == "/v1/messages":
        shown = "".join(one["text"] for one in _blocks(answer) if one["type"] == "text")
        expected = "".join(one["text"] for one in whole["content"] if one["type"] == "text")
    elif path == "/v1/responses":
        kind = "response.output_text.delta"
        shown = "".join(one["delta"] for one in answer if one["type"] == kind)
        parts = [one["content"][0]["text"] for one in whole["output"] if one["type"] == "message"]
        expected = "".join(parts)
    else:
        shown = "".join(one["choices"][0]["delta"].get("content") or "" for one in answer)
        expected = whole["choices"][0]["message"]["content"]
    assert shown == expected
    assert ("tool_call" in expected) == (message is NAN), "what is no JSON stays among the words"


@pytest.mark.parametrize("at_once", [False, True])
async def test_pieces_of_each_part_add_up_to_what_is_said_at_its_end(
    stage: Staging, at_once: bool
) -> None:
    message = "<think>Was it written? I think so.</think>\nIt was."
    recipe = scripted_recipe("thinks", Script("", (message,)))
    body = responses("Look.", rid="asked twice")
    async with stage(tokenizer=folder(recipe)) as s:
        await s.engine(script=Follows(recipe))
        if at_once:  # a turn that is over says everything in one event
            await ask(s, "/v1/responses", body)
        reported = await events(s, "/v1/responses", body)
    for kind, text in (
        ("reasoning_text", "Was it written? I think so."),
        ("output_text", "It was."),
    ):
        pieces = [one["delta"] for one in reported if one["type"] == f"response.{kind}.delta"]
        (done,) = [one["text"] for one in reported if one["type"] == f"response.{kind}.done"]
        assert "".join(pieces) == done == text
        assert (len(pieces) == 1) == at_once


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
async def test_without_a_tokenizer_a_harness_is_told_who_gives_one(
    stage: Staging, path: str
) -> None:
    body = {"input": "go"} if path == "/v1/responses" else messages(user("go"))
    async with stage() as s:
        await s.engine()  # its node has none
        async with s.post(path, body) as reply:
            error = (await reply.json())["error"]
    assert reply.status == 400
    assert "add it to the model's folder there" in error["message"]


TWICE = scripted_recipe(
    "scripted-twice",
    Script(
        "bash",
        (
            "Both."
            + call("bash", '{"command": "echo one > a.txt"}')
            + "\n"
            + call("bash", '{"command": "echo two > b.txt"}'),
            "Done.",
        ),
    ),
    Script("", ("Hello.",)),
)
COMMANDS = [{"command": "echo one > a.txt"}, {"command": "echo two > b.txt"}]
CHAT_TOOL = {"type": "function", "function": {"name": "bash", "parameters": {}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_two_calls_in_one_answer_come_apart_and_their_results_go_on_from_its_tokens(
    stage: Staging, *, stream: bool
) -> None:
    async with stage(tokenizer=folder(TWICE)) as s:
        await s.engine(script=Follows(TWICE))
        if stream:
            content = _blocks(await events(s, "/v1/messages", messages(user("Go."))))
        else:
            content = (await ask(s, "/v1/messages", messages(user("Go."))))["content"]
        assert [one["type"] for one in content] == ["text", "tool_use", "tool_use"]
        uses = content[1:]
        assert [one["input"] for one in uses] == COMMANDS
        assert len({one["id"] for one in uses}) == 2
        results = [block for one in uses for block in result(one, "")["content"]]
        talk = [user("Go."), {"role": "assistant", "content": content}, user(results)]
        second = await ask(s, "/v1/messages", messages(*talk))
    assert second["content"] == [{"type": "text", "text": "Done."}]
    assert second["rose"]["history"]["known_messages"] == 2
    assert second["rose"]["history"]["altered_at"] is None


async def test_two_calls_in_one_response_come_apart_in_its_events_too(stage: Staging) -> None:
    async with stage(tokenizer=folder(TWICE)) as s:
        await s.engine(script=Follows(TWICE))
        told = await events(s, "/v1/responses", responses("Go."))
        whole = (await ask(s, "/v1/responses", responses("Go.")))["output"]
        items = [one["item"] for one in told if one["type"] == "response.output_item.done"]
        done = [
            one["arguments"]
            for one in told
            if one["type"] == "response.function_call_arguments.done"
        ]
        calls = [one for one in items if one["type"] == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": one["call_id"], "output": ""}
            for one in calls
        ]
        second = await ask(s, "/v1/responses", responses([user("Go."), *items, *outputs]))
    assert [one["type"] for one in whole] == ["message", "function_call", "function_call"]
    for found in (calls, whole[1:]):
        assert [json.loads(one["arguments"]) for one in found] == COMMANDS
    assert [json.loads(one) for one in done] == COMMANDS
    assert [one["output_index"] for one in told if one["type"] == "response.output_item.done"] == [
        *range(3)
    ]
    assert second["output"][-1]["content"][0]["text"] == "Done."
    assert second["rose"]["history"]["known_messages"] == 2


async def test_two_calls_in_one_chat_come_apart_and_one_alone_where_no_more_is_wanted(
    stage: Staging,
) -> None:
    body: Json = {"messages": [user("Go.")], "tools": [CHAT_TOOL]}
    alone = {**body, "parallel_tool_calls": False}
    async with stage(tokenizer=folder(TWICE)) as s:
        await s.engine(script=Follows(TWICE))
        message = (await ask(s, "/v1/chat/completions", body))["choices"][0]["message"]
        async with s.post("/v1/chat/completions", {**body, "stream": True}) as reply:
            lines = (await reply.text()).split("\n\n")
        chunks = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
        deltas = [one["choices"][0]["delta"] for one in chunks if one["choices"]]
        results = [
            {"role": "tool", "tool_call_id": one["id"], "content": ""}
            for one in message["tool_calls"]
        ]
        talk = {**body, "messages": [user("Go."), message, *results]}
        second = await ask(s, "/v1/chat/completions", talk)
        first = (await ask(s, "/v1/chat/completions", alone))["choices"][0]
        talk = {**alone, "messages": [user("Go."), first["message"], results[0]]}
        talk["messages"][-1] |= {"tool_call_id": first["message"]["tool_calls"][0]["id"]}
        third = await ask(s, "/v1/chat/completions", talk)
        refusing = {"type": "auto", "disable_parallel_tool_use": True}
        single = await ask(s, "/v1/messages", messages(user("Go."), tool_choice=refusing))
    streamed = [one for delta in deltas for one in delta.get("tool_calls", ())]
    assert [one["index"] for one in streamed] == [0, 1]
    for calls in (message["tool_calls"], streamed):
        assert [json.loads(one["function"]["arguments"]) for one in calls] == COMMANDS
    assert second["choices"][0]["message"]["content"] == "Done."
    assert second["choices"][0]["rose"]["history"]["known_messages"] == 2
    assert first["finish_reason"] == "tool_calls"
    assert len(first["message"]["tool_calls"]) == 1
    assert third["choices"][0]["rose"]["history"]["known_messages"] == 2
    assert [one["type"] for one in single["content"]] == ["text", "tool_use"]


async def test_tools_that_only_anthropics_models_know_are_named_and_not_shown(
    stage: Staging,
) -> None:
    own = [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "w"}]
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        without = await ask(s, "/v1/messages", messages(user("x")))
        answer = await ask(s, "/v1/messages", messages(user("x"), tools=[TOOL, *own]))
    assert answer["rose"]["tools_not_shown"] == ["bash_20250124", "web_search_20250305"]
    assert answer["usage"]["input_tokens"] == without["usage"]["input_tokens"]


async def test_half_a_character_is_named_and_where_it_stands(stage: Staging) -> None:
    """Harnesses in JavaScript cut texts between its halves."""
    whole, half = r'{"input": "\\ud83d \ud83d\ude00"}', r'{"input": "\ud83d\ude00 \ud83d"}'
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        async with s.http.post(s.url + "/v1/responses", data=whole) as reply:
            assert reply.status == 200, await reply.text()
        async with s.http.post(s.url + "/v1/responses", data=half) as reply:
            assert reply.status == 400
            complaint = (await reply.json())["error"]["message"]
    assert f"byte {half.rindex(chr(92))} begins half a character" in complaint
