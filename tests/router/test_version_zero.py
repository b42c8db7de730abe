"""A lease before the first publish: engines sample with their own checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rose_core.identity import WeightVersion
from rose_core.rollouts.capacity.admission import QueueLimits
from rose_core.wire.routing import EngineKind
from rose_dev.waiting import until
from rose_engines.fake.model import continuation
from tests.router.conftest import Fake, Stage

pytestmark = pytest.mark.asyncio

Make = Callable[..., AbstractAsyncContextManager[Stage]]
PROMPT = [3, 1, 4, 1, 5]
BASE = str(WeightVersion.of_base("run", "a" * 32))
OTHER = str(WeightVersion.of_base("run", "b" * 32))
FIRST = "run@1.0"


def ask(most: int = 12, **fields: object) -> dict[str, Any]:
    sampling = {"max_new_tokens": most, "temperature": 0}
    return {"input_ids": PROMPT, "sampling_params": sampling, **fields}


async def on_base(s: Stage, name: str = "a", version: str = BASE, **more: Any) -> Fake:  # noqa: ANN401
    return await s.engine(name, label="base", version=version, **more)


async def test_turns_are_taken_before_anything_is_published_and_say_by_what(stage: Make) -> None:
    async with stage() as s:
        await on_base(s)
        async with s.http.get(f"{s.url}/ready") as ready:
            assert ready.status == 200
        async with s.post("/generate", ask()) as reply:
            body = await reply.json()
        shown = await s.get("/get_weight_version")
    assert body["output_ids"] == continuation(PROMPT, 12, "base")
    meta = body["meta_info"]
    assert meta["weight_versions"] == [{"version": BASE, "start": 0, "end": 12, "kv": "own"}]
    assert meta["weight_version"] == shown["weight_version"] == BASE


async def test_a_turn_in_mid_flight_sees_the_first_publish(stage: Make) -> None:
    async with stage() as s:
        engine = await on_base(s, token_seconds=0.01)
        turn = asyncio.create_task(answer(s, ask(60)))
        await until(lambda: any(len(run.output) >= 10 for run in engine.scheduler.running))
        engine.scheduler.session._version = FIRST
        engine.owner.send(version=FIRST)
        body = await turn
    before, after = body["meta_info"]["weight_versions"]
    assert (before["version"], before["kv"]) == (BASE, "own")
    assert (after["version"], after["kv"]) == (FIRST, "mixed")
    assert (before["start"], after["end"]) == (0, 60)
    assert before["end"] == after["start"] >= 10


async def test_a_turn_moves_between_engines_of_one_checkpoint(stage: Make) -> None:
    async with stage() as s:
        engines = {name: await on_base(s, name, token_seconds=0.01) for name in ("a", "b")}
        turn = asyncio.create_task(answer(s, ask(60)))
        await until(
            lambda: any(leg.tokens >= 10 for e in s.router.service.fleet for leg in e.legs.values())
        )
        (on,) = (e.name for e in s.router.service.fleet if e.legs)
        await engines[on].die()
        body = await turn
    assert body["output_ids"] == continuation(PROMPT, 60, "base")
    spans = [
        (one["version"], one["start"], one["end"]) for one in body["meta_info"]["weight_versions"]
    ]
    assert spans == [(BASE, 0, 60)]
    assert len(body["meta_info"]["rose"]["moves"]) == 1


async def test_engines_with_different_checkpoints_do_not_count_as_one_version(stage: Make) -> None:
    async with stage() as s:
        first = await on_base(s, "first", cap=2)
        other = await on_base(s, "other", OTHER)
        bodies = await asyncio.gather(*(answer(s, ask()) for _ in range(8)))
        assert {used(body) for body in bodies} == {("first", BASE)}
        assert other.scheduler.counters.requests == 0
        lags = {one["engine"]: one["lag"] for one in (await s.get("/engines"))["engines"]}
        assert lags == {"first": 0, "other": None}
        # When none is left that has it, another checkpoint takes the turns, under its own name.
        first.owner.send(leaving=True)
        await until(lambda: str(s.router.service.fleet.head) == OTHER)
        assert used(await answer(s, ask())) == ("other", OTHER)


async def test_a_turn_goes_on_with_another_checkpoint_only_when_its_own_is_gone_and_says_so(
    stage: Make,
) -> None:
    async with stage() as s:
        first = await on_base(s, "first", token_seconds=0.01)
        other = await on_base(s, "other", OTHER)
        turn = asyncio.create_task(answer(s, ask(60)))
        await until(lambda: any(len(run.output) >= 10 for run in first.scheduler.running))
        first.owner.send(gate_open=False)
        await until(lambda: not any(e.gate_open for e in s.router.service.fleet if e.legs))
        assert other.scheduler.counters.requests == 0
        first.owner.send(leaving=True)
        body = await turn
    before, after = body["meta_info"]["weight_versions"]
    assert (before["version"], after["version"]) == (BASE, OTHER)
    assert (before["start"], after["end"]) == (0, 60)
    assert before["end"] == after["start"] >= 10


async def test_a_turn_that_is_pinned_to_its_checkpoint_ends_with_it(stage: Make) -> None:
    async with stage(queue=QueueLimits(seconds=0.3)) as s:
        first = await on_base(s, "first", token_seconds=0.01)
        await on_base(s, "other", OTHER)
        turn = asyncio.create_task(answer(s, ask(60, rose={"version": BASE})))
        await until(lambda: any(len(run.output) >= 10 for run in first.scheduler.running))
        first.owner.send(leaving=True)
        body = await turn
    assert used(body) == ("first", BASE)
    assert body["meta_info"]["finish_reason"]["type"] == "abort"


async def test_from_the_first_publish_on_no_turn_begins_with_the_checkpoint(stage: Make) -> None:
    async with stage(queue=QueueLimits(seconds=0.3)) as s:
        engine = await on_base(s, kind=EngineKind.DEDICATED)
        engine.owner.send(head=FIRST)
        await until(lambda: str(s.router.service.fleet.head) == FIRST)
        async with s.post("/generate", ask()) as reply:
            assert reply.status == 503
            assert "Stale" in await reply.text()
        engine.scheduler.session._version = FIRST
        engine.owner.send(version=FIRST)
        assert used(await answer(s, ask())) == ("a", FIRST)


async def test_who_wants_what_is_published_does_not_get_the_checkpoint(stage: Make) -> None:
    async with stage() as s:
        await on_base(s)
        async with s.post("/generate", ask(rose={"min_version": FIRST})) as reply:
            assert reply.status == 409
            assert BASE in await reply.text()
        pinned = await answer(s, ask(rose={"version": BASE}))
        assert used(pinned) == ("a", BASE)


async def answer(s: Stage, body: dict[str, Any]) -> Any:  # noqa: ANN401  # JSON
    async with s.post("/generate", body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


def used(body: Any) -> tuple[str, str]:  # noqa: ANN401  # JSON
    meta = body["meta_info"]
    (engine,), (span,) = meta["rose"]["engines"], meta["weight_versions"]
    return engine["engine"], span["version"]
