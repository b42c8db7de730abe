"""The lease's URL over real sockets: dialects, errors, authentication, hung-up callers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import msgspec
import pytest

from rose_core.rollouts.capacity.admission import QueueLimits
from rose_core.rollouts.transcripts.spans import TokenSpan, covers
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.owners import owner
from rose_dev.waiting import until
from rose_engines.fake.model import continuation
from rose_router import metrics
from rose_router.http.routes.turns import _takes_long
from rose_wire.errors import Refused
from tests.router.conftest import LEASE, VERSION, Stage

pytestmark = pytest.mark.asyncio

Make = Callable[..., AbstractAsyncContextManager[Stage]]
PROMPT = [3, 1, 4, 1, 5]


def ask(most: int = 12, **fields: object) -> dict[str, Any]:
    return {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": most, "temperature": 0},
        "return_logprob": True,
        **fields,
    }


async def events(reply: aiohttp.ClientResponse) -> list[Any]:
    lines = [line async for line in reply.content if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]\n"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def test_generate_answers_as_sglang_does_with_versions_for_every_token(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        async with s.post("/generate", ask(rid="mine")) as reply:
            body = await reply.json()
    expected = continuation(PROMPT, 12, VERSION)
    meta = body["meta_info"]
    assert body["output_ids"] == expected
    assert [entry[1] for entry in meta["output_token_logprobs"]] == expected
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 12)
    assert meta["weight_version"] == VERSION
    assert meta["weight_versions"] == [{"version": VERSION, "start": 0, "end": 12, "kv": "own"}]
    assert meta["rose"]["borrowed"] is True
    assert meta["rose"]["engines"] == [{"engine": "a", "kind": "Borrowed", "tokens": 12}]
    assert meta["rose"]["moves"] == []
    assert "unknown" not in meta["rose"]["logprob_semantics"]


async def test_a_stream_is_cumulative_and_ends_with_the_whole_answer(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        async with s.post("/generate", ask(30, stream=True)) as reply:
            assert reply.content_type == "text/event-stream"
            seen = await events(reply)
    expected = continuation(PROMPT, 30, VERSION)
    assert seen[-1]["output_ids"] == expected
    assert seen[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert len(seen) > 2
    for event in seen:
        ids = event["output_ids"]
        assert ids == expected[: len(ids)]
        spans = [
            TokenSpan(w["version"], w["start"], w["end"])
            for w in event["meta_info"]["weight_versions"]
        ]
        assert covers(spans, len(ids))


async def test_a_batch_with_several_answers_is_a_list_in_order(stage: Make) -> None:
    prompts = [[1, 2], [3, 4, 5]]
    sampling = [{"max_new_tokens": 3, "n": 2}, {"max_new_tokens": 4}]
    async with stage() as s:
        await s.engine()
        body = ask(input_ids=prompts, sampling_params=sampling)
        async with s.post("/generate", body) as reply:
            answers = await reply.json()
    made = [answer["output_ids"] for answer in answers]
    one, two = (
        continuation(prompt, count, VERSION) for prompt, count in zip(prompts, (3, 4), strict=True)
    )
    assert made == [one, one, two]


async def test_trainers_learn_how_long_prompt_and_answer_may_be(stage: Make) -> None:
    """TRL sizes its batches by it, verifiers and renderers refuse by it; vLLM has it there."""
    async with stage(context_tokens=512) as s:
        (model,) = (await s.get("/v1/models"))["data"]
        assert model["max_model_len"] == 512
        await s.engine(context_tokens=256)  # an engine may bear less than the lease says
        (model,) = (await s.get("/v1/models"))["data"]
        assert model["max_model_len"] == 256
    async with stage() as s:
        (model,) = (await s.get("/v1/models"))["data"]
        assert "max_model_len" not in model, "nobody has said"


async def test_completions_answer_as_openai_does_with_token_ids(stage: Make) -> None:
    async with stage(model="policy-x") as s:
        await s.engine()
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 0}
        async with s.post("/v1/completions", body) as reply:
            answer = await reply.json()
        models = await s.get("/v1/models")
    expected = continuation(PROMPT, 6, VERSION)
    choice = answer["choices"][0]
    assert choice["token_ids"] == choice["response_token_ids"] == expected
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == 6
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in expected]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert answer["metadata"]["weight_version"] == VERSION
    assert models["data"][0]["id"] == answer["model"] == "policy-x"


async def test_completions_stream_in_pieces_that_add_up(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        body = {"prompt": PROMPT, "max_tokens": 20, "logprobs": 0, "stream": True}
        async with s.post("/v1/completions", body) as reply:
            seen = await events(reply)
    pieces = [event["choices"][0] for event in seen]
    joined = [token for piece in pieces for token in piece["token_ids"]]
    assert joined == continuation(PROMPT, 20, VERSION)
    assert "".join(piece["text"] for piece in pieces) == bytes(joined).decode("latin-1")
    assert sum(len(piece["logprobs"]["token_logprobs"]) for piece in pieces) == 20
    assert [piece["finish_reason"] for piece in pieces][-1] == "length"


async def test_vllms_dialect_answers_with_ids_log_probs_and_versions(stage: Make) -> None:
    sampling = {"max_tokens": 6, "temperature": 0, "logprobs": 0, "n": 2}
    async with stage() as s:
        await s.engine()
        body = {"model": "m", "token_ids": PROMPT, "sampling_params": sampling, "request_id": "r"}
        async with s.post("/inference/v1/generate", body) as reply:
            answer = await reply.json()
    expected = continuation(PROMPT, 6, VERSION)
    assert answer["request_id"].startswith("r")
    for index, choice in enumerate(answer["choices"]):
        assert (choice["index"], choice["finish_reason"]) == (index, "length")
        assert choice["token_ids"] == expected
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{t}" for t in expected]
        assert all(one["logprob"] <= 0 for one in content)
        assert choice["weight_versions"][0]["version"] == VERSION
    assert len(answer["choices"]) == 2


async def test_vllms_dialect_streams_pieces_that_add_up(stage: Make) -> None:
    sampling = {"max_tokens": 20, "logprobs": 0}
    async with stage() as s:
        await s.engine()
        body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}
        async with s.post("/inference/v1/generate", body) as reply:
            seen = await events(reply)
    pieces = [event["choices"][0] for event in seen]
    assert [t for piece in pieces for t in piece["token_ids"]] == continuation(PROMPT, 20, VERSION)
    assert sum(len(piece["logprobs"]["content"]) for piece in pieces) == 20
    assert pieces[-1]["finish_reason"] == "length"


async def test_an_engine_that_dies_under_a_stream_is_not_seen_by_the_caller(stage: Make) -> None:
    async with stage() as s:
        first = await s.engine("first", token_seconds=0.05)
        async with s.post("/generate", ask(80, stream=True)) as reply:
            await reply.content.readline()
            await s.engine("second")
            await first.die()
            seen = await events(reply)
    last = seen[-1]
    assert last["output_ids"] == continuation(PROMPT, 80, VERSION)
    assert [m["reason"] for m in last["meta_info"]["rose"]["moves"]] == ["Lost"]
    assert last["meta_info"]["rose"]["redone_tokens"] == 0


async def test_a_caller_that_hangs_up_frees_the_engine(stage: Make) -> None:
    async with stage() as s:
        engine = await s.engine(token_seconds=0.01)
        async with s.post("/generate", ask(5000, stream=True)) as reply:
            await reply.content.readline()
        await until(lambda: not len(s.router.service.ledger))
        await until(lambda: all(one.finish for one in engine.scheduler.running))
        turns = await s.get("/turns")
    assert turns["recent"][0]["finish"] == "abort"


async def test_abort_request_ends_exactly_the_turn_named(stage: Make) -> None:
    async with stage() as s:
        await s.engine(token_seconds=0.01)

        async def one(rid: str, most: int) -> dict[str, Any]:
            async with s.post("/generate", ask(most, rid=rid)) as reply:
                body: dict[str, Any] = await reply.json()
                return body

        long, short = asyncio.create_task(one("t-1", 5000)), asyncio.create_task(one("t-12", 200))
        await until(lambda: len(s.router.service.ledger) == 2)
        async with s.post("/abort_request", {"rid": "t-1"}) as reply:
            assert reply.status == 200
        ended, whole = await long, await short
    assert ended["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(whole["output_ids"]) == 200


MALFORMED: list[tuple[str, object, int, str]] = [
    ("/generate", ["no", "object"], 400, "JSON object"),
    ("/generate", {}, 400, "exactly one of input_ids and text"),
    ("/generate", {"input_ids": []}, 400, "input_ids"),
    ("/generate", {"input_ids": [1, "x"]}, 400, "input_ids"),
    ("/generate", {"input_ids": [1, -4]}, 400, "input_ids"),
    ("/generate", {"input_ids": [1], "sampling_params": 3}, 400, "sampling_params"),
    ("/generate", {"text": "hello"}, 400, "no tokenizer"),
    ("/generate", ask(0), 400, "max_new_tokens"),
    ("/generate", ask(sampling_params={"n": 0}), 400, "n: expected"),
    ("/generate", ask(input_ids=[[1]] * 65, stream=True), 400, "stream"),
    ("/generate", ask(input_embeds=[[0.1]]), 400, "input_embeds"),
    ("/generate", ask(rose={"min_version": "seven"}), 400, "rose.min_version"),
    ("/generate", ask(rose=7), 400, "rose: expected an object"),
    ("/generate", ask(rid=7), 400, "rid"),
    ("/generate", ask(priority="high"), 400, "priority"),
    ("/generate", ask(sampling_params={"min_new_tokens": 500}), 400, "min_new_tokens"),
    ("/generate", ask(sampling_params={"max_new_tokens": True}), 400, "max_new_tokens"),
    ("/generate", ask(sampling_params={"stop": "x"}), 422, "stop: may match"),
    (
        "/generate",
        ask(sampling_params={"dry_multiplier": 2}),
        422,
        "sampling_params.dry_multiplier",
    ),
    ("/generate", ask(positional_embed_overrides={"a": 1}), 422, "positional_embed_overrides"),
    ("/generate", ask(http_worker_ipc="/x"), 422, "http_worker_ipc"),
    ("/generate", ask(logprob_start_len=-5), 422, "logprob_start_len"),
    ("/generate", ask(top_logprobs_num=100_000), 422, "top_logprobs_num"),
    ("/generate", ask(custom_logit_processor="gASV"), 400, "custom_logit_processor: it is code"),
    ("/v1/completions", {"prompt": PROMPT, "logprobs": 1000}, 422, "top_logprobs_num"),
    ("/generate", ask(rose={"min_version": "run@1.9"}), 409, "run@1.9"),
    ("/generate", ask(rose={"version": "other@1.0"}), 400, "other@1.0"),
    ("/v1/completions", {"prompt": "text"}, 400, "no tokenizer"),
    ("/v1/completions", {"prompt": PROMPT, "echo": True}, 400, "echo"),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": "x"}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": PROMPT, "logprobs": "x"}, 400, "logprobs"),
    ("/inference/v1/generate", {"token_ids": []}, 400, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": 1}, 400, "sampling_params"),
    ("/inference/v1/generate", {"token_ids": [1], "features": "x"}, 400, "features"),
    ("/abort_request", {}, 400, "rid"),
    ("/nowhere", {}, 404, "Not Found"),
]


@pytest.mark.usefixtures("soon_refused")
async def test_what_is_wrong_is_answered_with_status_field_and_reason(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        for path, body, status, words in MALFORMED:
            async with s.post(path, body) as reply:
                answer = await reply.json()
                assert (reply.status, answer["code"]) == (status, status), (path, body)
                assert words in answer["message"], (path, body)
                assert answer["error"]["type"]
        async with s.http.post(s.url + "/generate", data=b'{"input_ids": [1') as reply:
            assert reply.status == 400
            assert "no JSON" in (await reply.json())["message"]
        assert not len(s.router.service.ledger)


async def test_an_oversized_body_is_413(stage: Make) -> None:
    big = ask(input_ids=list(range(2000)))
    async with stage(max_body_bytes=1000) as s, s.post("/generate", big) as reply:
        assert reply.status == 413
        assert (await reply.json())["code"] == 413


async def test_what_the_engine_finds_wrong_goes_to_the_caller_and_is_not_retried(
    stage: Make,
) -> None:
    async with stage() as s:
        engine = await s.engine()
        body = ask(
            sampling_params={"max_new_tokens": 4, "stop_token_ids": [7]}, logprob_start_len=10**6
        )
        async with s.post("/generate", body) as reply:
            answer = await reply.json()
            assert reply.status == 400
        assert "bad request" in answer["message"]
        assert engine.scheduler.counters.requests == 0


async def test_no_room_is_429_with_retry_after(stage: Make) -> None:
    async with stage(queue=QueueLimits(most=0, seconds=5)) as s:
        async with s.post("/generate", ask()) as reply:
            answer = await reply.json()
            assert reply.status == 429
            assert int(reply.headers["Retry-After"]) >= 1
        assert answer["type"] == "QueueFull"


async def test_health_is_there_before_any_engine_and_ready_is_not(stage: Make) -> None:
    async with stage() as s:
        statuses = {}
        for path in ("/health", "/healthz", "/ready", "/metrics"):
            async with s.http.get(s.url + path) as reply:
                statuses[path] = reply.status
        assert statuses == {"/health": 200, "/healthz": 200, "/ready": 503, "/metrics": 200}
        await s.engine()
        async with s.http.get(s.url + "/ready") as reply:
            assert reply.status == 200


async def test_state_pages_show_engines_and_totals(stage: Make) -> None:
    async with stage() as s:
        await s.engine("a")
        await s.engine("d", kind=EngineKind.DEDICATED, gate_open=False, version="")
        async with s.post("/generate", ask(7)) as reply:
            assert reply.status == 200
        state, turns = await s.get("/engines"), await s.get("/turns")
        async with s.http.get(s.url + "/metrics") as reply:
            text = await reply.text()
    rows = {row["engine"]: row for row in state["engines"]}
    assert (rows["a"]["gate"], rows["a"]["lag"], rows["a"]["tokens"]) == ("open", 0, 7)
    assert (rows["d"]["kind"], rows["d"]["gate"], rows["d"]["lag"]) == ("Dedicated", "closed", None)
    assert state["head"] == VERSION
    assert turns["totals"]["borrowed_turns"] == 1
    assert turns["totals"]["borrowed_tokens"] == 7
    assert 'rose_router_turns_total{finish="length",kind="borrowed"}' in text


async def test_callers_need_the_token_when_there_is_one(stage: Make) -> None:
    async with stage(turn_token="s3cret") as s:
        await s.engine()
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer s3cret"}, 200),
        ):
            async with s.post("/generate", ask(), headers=headers) as reply:
                assert reply.status == status
        async with s.http.get(s.url + "/health") as reply:
            assert reply.status == 200


async def test_owners_need_the_token_and_the_right_lease(stage: Make) -> None:
    async with stage(attach_token="secret") as s:
        for token, lease in (("", LEASE), ("wrong", LEASE), ("secret", "team/other")):
            update = EngineUpdate("x", EngineKind.BORROWED, lease, "http://127.0.0.1:9")
            async with owner(s.router.attach_port, update, token) as made:
                await until(made.task.done)
                assert isinstance(made.task.exception(), Refused)
        assert not len(s.router.service.fleet)


async def test_the_end_of_the_attach_stream_closes_the_gate(stage: Make) -> None:
    async with stage() as s:
        update = EngineUpdate(
            "x", EngineKind.BORROWED, LEASE, "http://127.0.0.1:9", gate_open=True, cap=1
        )
        async with owner(s.router.attach_port, update) as made:
            await until(lambda: bool(made.notes) and len(s.router.service.fleet) == 1)
            (engine,) = s.router.service.fleet
            assert engine.gate_open
        await until(lambda: not engine.gate_open)


async def test_a_retried_request_gets_the_same_answer_without_sampling_again(stage: Make) -> None:
    async with stage() as s:
        engine = await s.engine()
        answers = []
        for _ in range(2):
            async with s.post("/generate", ask(rid="again")) as reply:
                answers.append(await reply.read())
        assert answers[0] == answers[1]
        assert engine.scheduler.counters.requests == 1
        assert msgspec.json.decode(answers[0])["meta_info"]["id"] == "again"


async def test_a_dedicated_engine_that_the_lease_does_not_name_is_refused(stage: Make) -> None:
    async with stage(dedicated=frozenset({"ours"})) as s:
        await s.engine("ours", kind=EngineKind.DEDICATED)
        await s.engine("lent")
        update = EngineUpdate("other", EngineKind.DEDICATED, LEASE, "http://127.0.0.1:9")
        async with owner(s.router.attach_port, update, "") as made:
            await until(made.task.done)
            error = made.task.exception()
        assert isinstance(error, Refused)
        assert "spec.dedicatedEngines" in str(error)


@pytest.mark.parametrize("path", ["/v1/responses", "/tokenize", "/detokenize", "/v1/messages"])
async def test_a_body_without_words_is_refused_with_a_reason_before_a_tokenizer_came(
    stage: Make, path: str
) -> None:
    async with stage() as s, s.post(path, {"model": "m"}) as reply:
        assert reply.status == 400
        answer = await reply.json()
        assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "long"),
    [
        ({"input_ids": [1, 2]}, False),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 4, "stop": None}}, False),
        ({"input_ids": [[1], [2]]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt": [1, 2], "stop": "a"}, True),
        ({"prompt": "a"}, True),
        ({"prompt": ["a"]}, True),
        ({"input_ids": [1], "sampling_params": {"stop": ["a"]}}, True),
        ({"input_ids": [1], "sampling_params": {"stop_regex": "a+"}}, True),
        ({"input_ids": [[1], [2]], "sampling_params": [{"stop": "a"}, None]}, True),
        ({"messages": [{"role": "user", "content": "a"}]}, True),
    ],
)
async def test_a_long_body_is_left_to_a_thread_where_it_takes_longer_than_its_bytes(
    body: dict[str, Any], long: bool
) -> None:
    assert _takes_long(body) == long


async def test_durations_are_counted_as_prometheus_counts_them() -> None:
    def counted() -> list[float]:
        name, get = "rose_router_barrier_seconds", metrics.REGISTRY.get_sample_value
        bounds = ("0.001", "0.005", "0.02", "300.0", "+Inf")
        found = [get(f"{name}_bucket", {"le": bound}) for bound in bounds]
        return [one or 0.0 for one in (*found, get(f"{name}_count"), get(f"{name}_sum"))]

    before = counted()
    for seconds in (0.001, 0.004, 0.02, 400.0):
        metrics.BARRIER_SECONDS.observe(seconds)
    more = [new - old for new, old in zip(counted(), before, strict=True)]
    assert more == pytest.approx([1, 2, 3, 3, 4, 4, 400.025])


@pytest.mark.parametrize("kind", [{"input_ids": [[3, 1], [4, 1]]}, {"n": 2}, {"input_ids": [[3]]}])
async def test_several_answers_stream_as_sglang_streams_them(stage: Make, kind: Any) -> None:  # noqa: ANN401  # JSON
    """Each event is all of an answer so far, with its number."""
    sampling = {"max_new_tokens": 6, "n": kind.get("n", 1)}
    body = {"input_ids": kind.get("input_ids", PROMPT), "sampling_params": sampling}
    async with stage() as s:
        await s.engine()
        async with s.post("/generate", {**body, "stream": True}) as reply:
            assert reply.status == 200
            told = await events(reply)
        async with s.post("/generate", body) as reply:
            whole = await reply.json()
    last = {one["index"]: one for one in told}
    assert sorted(last) == list(range(len(whole)))
    for index, answer in enumerate(whole):
        assert last[index]["output_ids"] == answer["output_ids"]
        assert last[index]["meta_info"]["finish_reason"] == answer["meta_info"]["finish_reason"]
        counts = [len(one["output_ids"]) for one in told if one["index"] == index]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1]


async def test_several_answers_stream_as_vllms_token_route_streams_them(stage: Make) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "n": 2}}
    async with stage() as s:
        await s.engine()
        async with s.post("/inference/v1/generate", {**body, "stream": True}) as reply:
            told = [one["choices"][0] for one in await events(reply)]
        async with s.post("/inference/v1/generate", body) as reply:
            whole = (await reply.json())["choices"]
    for index, answer in enumerate(whole):
        ids = [token for one in told if one["index"] == index for token in one["token_ids"]]
        assert ids == answer["token_ids"]
