"""Experts of every token survive moves and turns: a row for each, aligned with the ids."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rose_core.rollouts.conversations.message_tree import Routing
from rose_core.rollouts.transcripts.transcript import Leg, StreamEvent, Transcript
from rose_core.wire.routing import EngineKind
from rose_dev.waiting import until
from rose_router.http.conversations.history import routing_of
from rose_router.http.replies.parts import sglang
from rose_router.turns.request import TurnRequest
from rose_router.turns.turn import Turn, TurnState
from tests.router.conftest import Stage
from tests.router.scripts import Follows, folder

Make = Callable[..., AbstractAsyncContextManager[Stage]]


def rows_of(data: str) -> list[tuple[int, int]]:
    """What a fake engine says of a token: itself, and which engine it was."""
    numbers = array("i", base64.b64decode(data))
    return list(zip(numbers[::2], numbers[1::2], strict=True))


async def chat(s: Stage, talk: list[dict[str, Any]], *, asked: bool = True) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": talk, "max_tokens": 60, "rose": {"session": "t1"}}
    async with s.post("/v1/chat/completions", body | {"return_routed_experts": asked}) as reply:
        answer: dict[str, Any] = await reply.json()
        assert reply.status == 200, answer
    talk.append(answer["choices"][0]["message"])
    return answer


async def lose(s: Stage, first: Any, work: asyncio.Task[Any]) -> Any:  # noqa: ANN401  # of the task
    """End an engine in the middle of a turn that goes on at another."""
    ledger = s.router.service.ledger
    await until(lambda: any(turn.leg is not None and turn.leg.placed for turn in ledger))
    await s.engine("b", EngineKind.DEDICATED, script=Follows())
    await first.die()
    return await work


async def test_rows_of_a_session_are_one_for_each_token_over_moves_and_turns(stage: Make) -> None:
    async with stage(tokenizer=folder()) as s:
        first = await s.engine("a", script=Follows())
        talk: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
        await chat(s, talk)
        first.scheduler.token_seconds = 0.02
        talk.append({"role": "user", "content": "two"})
        moved = await lose(s, first, asyncio.create_task(chat(s, talk)))
        talk.append({"role": "user", "content": "three"})
        await chat(s, talk)
        (row,) = (await s.get("/sessions/t1/rows"))["rows"]
    experts, (one, two, _) = row["routed_experts"], row["turns"]
    rows = rows_of(experts["data"])
    assert [token for token, _ in rows] == row["ids"][:-1], "a row for each token, in order"
    assert (experts["rows"], experts["row_bytes"]) == (len(row["ids"]) - 1, 8)
    engines = [engine for _, engine in rows]
    assert len(set(engines[: one["end"] - 1])) == 1, "the first turn's are of the engine it ran on"
    assert len(set(engines[one["end"] - 1 :])) == 1
    assert engines[0] != engines[-1]
    # What the lost engine had sampled was computed again, and is counted.
    (move,) = moved["choices"][0]["rose"]["moves"]
    assert 0 < move["at_token"] < two["end"] - two["start"]
    assert experts["recomputed"] == move["at_token"]


async def test_trainers_are_told_whether_the_leases_engines_say_experts(stage: Make) -> None:
    for exported in (False, True):
        async with stage(routed_experts=exported) as s:
            assert (await s.get("/server_info"))["enable_return_routed_experts"] is exported


async def test_a_row_with_a_turn_that_did_not_ask_has_none_until_one_asks_again(
    stage: Make,
) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine("a", script=Follows())
        talk: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
        await chat(s, talk, asked=False)
        (row,) = (await s.get("/sessions/t1/rows"))["rows"]
        assert row["routed_experts"] is None
        talk.append({"role": "user", "content": "two"})
        await chat(s, talk)  # says of all tokens before it, too
        (row,) = (await s.get("/sessions/t1/rows"))["rows"]
        assert [token for token, _ in rows_of(row["routed_experts"]["data"])] == row["ids"][:-1]
        talk.append({"role": "user", "content": "three"})
        await chat(s, talk, asked=False)
        (row,) = (await s.get("/sessions/t1/rows"))["rows"]
        assert row["routed_experts"] is None


@pytest.mark.parametrize("more", [0, 1])
def test_rows_of_tokens_that_a_turn_does_not_have_are_left_out(more: int) -> None:
    request = TurnRequest("r", (1, 2, 3), {}, passed={"return_routed_experts": True})
    turn = Turn(request, 0.0, Transcript((1, 2, 3)))
    leg = Leg("a", EngineKind.DEDICATED, "r", "run@1.0", 0)
    rows = base64.b64encode(bytes(8 * (4 + 2 * more))).decode()
    ids, reported = [7, 8, 9, 10][: 2 + 2 * more], {"type": "stop"}
    meta = {"routed_experts": rows, "completion_tokens": len(ids)}
    leg.take(StreamEvent(ids, len(ids), finish=reported, label="run@1.0", meta=meta))
    leg.end(2, reported)
    turn.transcript.fold(leg)
    turn.last_meta = leg.meta
    found = routing_of(turn)
    assert found == Routing(bytes(32), 0, 8)
    turn.state, turn.finish = TurnState.DONE, reported
    shown = sglang(turn, None)["meta_info"]["routed_experts"]
    assert base64.b64decode(shown) == bytes(32)
    assert (shown is rows) is (not more), "what the engine said is handed on where nothing is cut"


async def test_a_turn_that_moved_between_borrowed_engines_has_the_rows_of_all_its_tokens(
    stage: Make,
) -> None:
    async with stage() as s:
        first = await s.engine("a", token_seconds=0.02)
        body = {
            "input_ids": [3, 1, 4],
            "sampling_params": {"max_new_tokens": 20},
            "return_routed_experts": True,
        }

        async def ask() -> dict[str, Any]:
            async with s.post("/generate", body) as reply:
                answer: dict[str, Any] = await reply.json()
                assert reply.status == 200, answer
                return answer

        answer = await lose(s, first, asyncio.create_task(ask()))
        meta = answer["meta_info"]
        rows = rows_of(meta["routed_experts"])
        assert [token for token, _ in rows] == [3, 1, 4, *answer["output_ids"]][:-1]
        assert meta["routed_experts_recomputed"] == meta["rose"]["moves"][0]["at_token"]
