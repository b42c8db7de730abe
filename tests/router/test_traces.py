"""A trajectory is one trace in a collector that speaks OTLP; where nobody asks, no span is made."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from xml.etree import ElementTree as ET

import aiohttp
import grpc
import msgspec
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from rose_core.wire.routing import EngineKind
from rose_demo.span_receiver import Receiver, receiving
from rose_demo.spans import SpanRecord, most_eventful, since
from rose_demo.waterfall import waterfall
from rose_dev.waiting import until
from rose_engines.weights.session import WeightSession
from rose_router.turns.turn_clock import TurnClock
from tests.router.conftest import Stage
from tests.router.scripts import Follows, folder

Make = Callable[..., AbstractAsyncContextManager[Stage]]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What an OTLP collector does: takes spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.endpoint = ""

    async def Export(  # noqa: N802  # gRPC's
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: Any,  # noqa: ANN401  # gRPC's
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for of_resource in request.resource_spans:
            self.resources.append(values(of_resource.resource.attributes))
            for scope in of_resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        found = [one for one in self.spans if one.name == name]
        return sorted(found, key=lambda one: one.start_time_unix_nano)


def values(attributes: Any) -> dict[str, Any]:  # noqa: ANN401  # a repeated field
    def plain(value: AnyValue) -> Any:  # noqa: ANN401  # of any kind
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(one) for one in value.array_value.values]
        return getattr(value, kind) if kind else None

    listed: list[KeyValue] = list(attributes)
    return {one.key: plain(one.value) for one in listed}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector on a free port, as long as the block runs."""
    collector, server = Collector(), grpc.aio.server()
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)  # type: ignore[no-untyped-call]  # generated
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield collector
    await server.stop(None)


async def chat(s: Stage, text: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # of a request
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, **more}
    async with s.post("/v1/chat/completions", body) as reply:
        assert reply.status == 200, await reply.text()
        answer: dict[str, Any] = await reply.json()
        return answer


async def test_a_trajectory_is_one_trace_from_its_first_turn_to_its_reward(stage: Make) -> None:
    async with collecting() as collector:
        async with stage(tokenizer=folder(), traces=collector.endpoint, model="m") as s:
            first = await s.engine("a", script=Follows(), token_seconds=0.02)
            rose = {"session": "t1", "group": "g"}
            moved = asyncio.create_task(chat(s, "one", rose=rose))
            ledger = s.router.service.ledger
            await until(lambda: any(turn.first_token_at for turn in ledger))
            await s.engine("b", EngineKind.DEDICATED, script=Follows())
            await first.die()
            answers = [await moved, await chat(s, "two", rose=rose)]
            report = {"trained": ["t1"], "rewards": {"t1": 0.5}}
            async with s.post("/trajectories", report) as reply:
                assert reply.status == 200
        # The router is gone: what it had is exported.
        (root,), (reward,) = collector.named("rl.sample"), collector.named("rl.reward")
        turns = collector.named("chat m")
        legs = [*collector.named("generate a"), *collector.named("generate b")]
        assert len({one.trace_id for one in collector.spans}) == 1
        assert (len(turns), len(legs), len(collector.spans)) == (2, 3, 7)
        assert {one.parent_span_id for one in [*turns, reward]} == {root.span_id}
        assert [one.parent_span_id for one in legs] == [turns[0].span_id] * 2 + [turns[1].span_id]
        assert not root.parent_span_id
        assert root.start_time_unix_nano <= turns[0].start_time_unix_nano
        assert root.end_time_unix_nano >= turns[1].end_time_unix_nano - 50_000_000
        assert collector.resources[0]["service.name"] == "rose-router"

        reported = values(turns[0].attributes)
        assert reported["gen_ai.operation.name"] == "chat"
        assert reported["gen_ai.request.model"] == "m"
        assert reported["gen_ai.conversation.id"] == reported["rl.trajectory.id"] == "t1"
        assert reported["rl.group.id"] == "g"
        assert [values(one.attributes)["rl.turn.number"] for one in turns] == [1, 2]
        usage = answers[0]["usage"]
        assert reported["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert reported["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert reported["gen_ai.response.finish_reasons"] == ["stop"]
        assert reported["rl.policy.versions"] == ["run@1.0"]
        (event,) = turns[0].events
        assert event.name == "rose.move"
        move = answers[0]["choices"][0]["rose"]["moves"][0]
        assert values(event.attributes) == {
            "rose.move.reason": move["reason"],
            "rose.engine.name": "a",
            "rose.move.at_token": move["at_token"],
        }
        of_legs = [values(one.attributes) for one in legs[:2]]
        assert [one["rose.leg.number"] for one in of_legs] == [1, 2]
        assert [one["rose.leg.whole"] for one in of_legs] == [False, True]
        made = sum(one["gen_ai.usage.output_tokens"] for one in of_legs)
        assert made == usage["completion_tokens"]

        assert values(root.attributes)["rl.trajectory.outcome"] == "trained"
        assert values(root.attributes)["rl.trajectory.turns"] == 2
        assert values(reward.attributes)["rl.reward.value"] == 0.5


async def test_the_demos_report_draws_what_a_router_exported(stage: Make) -> None:
    receiver = Receiver()
    async with receiving(receiver, "127.0.0.1:0", "127.0.0.1:0") as (grpc_port, http_port):
        endpoint = f"http://127.0.0.1:{grpc_port}"
        began = time.time()
        async with stage(tokenizer=folder(), traces=endpoint, model="m") as s:
            first = await s.engine("a", EngineKind.BORROWED, script=Follows(), token_seconds=0.02)
            moved = asyncio.create_task(chat(s, "one", rose={"session": "moves"}))
            ledger = s.router.service.ledger
            await until(lambda: any(turn.first_token_at for turn in ledger))
            await s.engine("b", EngineKind.DEDICATED, script=Follows())
            await first.die()
            await moved
            for name in ("moves", "stays"):
                await chat(s, "two", rose={"session": name})
            report = {"trained": ["moves", "stays"], "rewards": {"moves": 0.5, "stays": 1.0}}
            async with s.post("/trajectories", report) as reply:
                assert reply.status == 200
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{http_port}/spans") as page,
        ):
            spans = msgspec.json.decode(await page.read(), type=list[SpanRecord])
    assert len(spans) == 7 + 4
    shown = since(most_eventful(spans), began)
    assert {one.attributes.get("rl.trajectory.id", "moves") for one in shown} == {"moves"}
    assert len(shown) == 7
    middle = (shown[0].began_s + shown[0].ended_s) / 2
    picture = ET.fromstring(waterfall(shown, [(-1.0, middle)]))  # noqa: S314  # our own
    output = [one.text or "" for one in picture.iter("text")]
    rows = ["trajectory", "turn 1", "leg 1", "leg 2", "turn 2", "leg 1", "reward"]
    assert [one for one in output if one in rows] == rows
    assert len(picture.findall("circle")) == 1
    (move,) = picture.findall("polygon")
    assert move.attrib["data-event"] == "rose.move"
    assert "rose.engine.name a" in (move.findtext("title") or "")
    assert len([one for one in picture if one.get("data-gate") == "closed"]) == 1
    colours = [one.get("fill") for one in picture.iter("rect")]
    assert colours.count("var(--rollout)") == 1  # the leg on the borrowed engine
    assert colours.count("var(--serving)") == 2
    assert any(one.startswith("a (borrowed), run@1.0") for one in output)
    assert "0.5" in output


async def test_a_callers_traceparent_is_taken_and_passed_on_to_engines(stage: Make) -> None:
    async with collecting() as collector:
        async with stage(traces=collector.endpoint) as s:
            engine = await s.engine("a")
            body = {"input_ids": [3, 1, 4], "sampling_params": {"max_new_tokens": 3}}
            headers = {"traceparent": PARENT}
            async with s.post("/generate", body, headers=headers) as reply:
                assert reply.status == 200
            async with s.post("/generate", body, headers={"traceparent": "nonsense"}) as reply:
                assert reply.status == 200
            sent = engine.traceparents
        turns = collector.named("text_completion policy")
        assert [one.trace_id.hex() == PARENT.split("-")[1] for one in turns] == [True, False]
        assert turns[0].parent_span_id.hex() == PARENT.split("-")[2]
        legs = collector.named("generate a")
        assert sent == [f"00-{one.trace_id.hex()}-{one.span_id.hex()}-01" for one in legs]
        # The caller makes its own first span.
        assert len(collector.named("rl.sample")) == 1


async def test_a_traceparent_that_is_none_leaves_a_trajectory_in_its_trace(stage: Make) -> None:
    async with collecting() as collector:
        async with stage(tokenizer=folder(), traces=collector.endpoint, model="m") as s:
            await s.engine("a", script=Follows())
            for reported, shown in (("one", ""), ("two", PARENT), ("three", "nonsense")):
                body = {
                    "messages": [{"role": "user", "content": reported}],
                    "max_tokens": 8,
                    "rose": {"session": "t1"},
                }
                headers = {"traceparent": shown} if shown else {}
                async with s.post("/v1/chat/completions", body, headers=headers) as reply:
                    assert reply.status == 200
        (root,), turns = collector.named("rl.sample"), collector.named("chat m")
        caller = PARENT.split("-")[2]
        assert [one.parent_span_id.hex() for one in turns] == [root.span_id.hex(), caller, caller]
        assert len({one.trace_id for one in turns[1:]}) == 1


async def test_a_commit_inside_a_turn_and_a_turn_that_failed_are_seen(stage: Make) -> None:
    async with collecting() as collector:
        async with stage(traces=collector.endpoint) as s:
            engine = await s.engine("a", token_seconds=0.01)
            body = {"input_ids": [3, 1], "sampling_params": {"max_new_tokens": 40}, "stream": True}
            async with s.post("/generate", body) as reply:
                await reply.content.readany()
                engine.scheduler.session = WeightSession({}, "run@1.1")
                assert b"run@1.1" in await reply.read()
            wrong = {**body, "logprob_start_len": 10**6, "stream": False}
            async with s.post("/generate", wrong) as reply:
                assert reply.status == 400
        whole, failed = collector.named("text_completion policy")
        (event,) = whole.events
        assert (event.name, values(event.attributes)) == (
            "rl.sync",
            {"rl.policy.version": "run@1.1"},
        )
        assert values(whole.attributes)["rl.policy.versions"] == ["run@1.0", "run@1.1"]
        assert whole.status.code == Status.STATUS_CODE_UNSET
        assert failed.status.code == Status.STATUS_CODE_ERROR
        assert "bad request" in failed.status.message


async def test_what_a_sandboxs_host_is_told_stands_in_the_trajectorys_trace(stage: Make) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.match_info["rest"].startswith("t1"):
            return web.json_response({})
        raise web.HTTPNotFound  # it has a sandbox of t1 alone

    app = web.Application()
    app.router.add_route("*", "/sessions/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with collecting() as collector:
        async with stage(traces=collector.endpoint, sandbox_hosts={"": (host,)}) as s:
            await s.engine("a", token_seconds=0.02)
            body = {"input_ids": [3, 1], "sampling_params": {"max_new_tokens": 20}}
            for session in ("t1", "t2"):
                async with s.post("/generate", body | {"session_id": session}) as reply:
                    assert reply.status == 200
            reported = s.router.service.sandboxes
            assert isinstance(reported, TurnClock)
            await until(lambda: not reported._lines)
        roots = {
            values(one.attributes)["rl.trajectory.id"]: one for one in collector.named("rl.sample")
        }
        root = roots["t1"]
        steps = [*collector.named("rose.checkpoint"), *collector.named("rose.sandbox ready")]
        assert [values(one.attributes)["rose.sandbox.step"] for one in steps] == ["turn", "ready"]
        assert {(one.trace_id, one.parent_span_id) for one in steps} == {
            (root.trace_id, root.span_id)
        }
        assert all(values(one.attributes)["rose.sandbox.took"] for one in steps)
    await runner.cleanup()


async def test_where_nobody_asked_no_span_is_made_and_nothing_imported(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "rose_router.turns.tracing", raising=False)
    async with stage() as s:
        await s.engine("a")
        body = {"input_ids": [3, 1, 4], "sampling_params": {"max_new_tokens": 3}, "rid": "r"}
        async with s.post("/generate", body, headers={"traceparent": PARENT}) as reply:
            assert reply.status == 200
        service = s.router.service
        turn = service.ledger.find(next(iter(service.ledger._finished.values())).request, 0.0)
        assert turn is not None
        assert turn.trace is None
        assert service.tracing is None
    assert "rose_router.turns.tracing" not in sys.modules
