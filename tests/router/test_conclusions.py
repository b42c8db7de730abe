"""What a trainer says of its trajectories, counted for the lease's totals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rose_router.turns.demand import DemandFeed
from tests.router.conftest import Stage

pytestmark = pytest.mark.asyncio

Make = Callable[..., AbstractAsyncContextManager[Stage]]


async def play(s: Stage, *keys: str) -> None:
    for key in keys:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
        async with s.post("/generate", {**body, "rose": {"session": key}}) as reply:
            assert reply.status == 200


async def conclude(s: Stage, **fields: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    async with s.post("/trajectories", fields) as reply:
        return {"status": reply.status, **(await reply.json())}


async def counts(s: Stage) -> tuple[int, int]:
    totals = (await s.get("/turns"))["totals"]
    return totals["accepted"], totals["correct"]


async def test_trained_trajectories_count_once_and_by_their_reward(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        await play(s, "a", "b", "c", "d")
        rewards = {"a": 1.0, "b": 0.5, "d": 1.0}
        await conclude(s, trained=["a", "b", "c"], dropped=["d"], rewards=rewards)
        assert await counts(s) == (3, 1)
        result = await conclude(s, trained=["a", "b", "never"], rewards={"a": 1.0, "never": 1.0})
        assert set(result["unknown"]) == {"a", "b", "never"}
        assert await counts(s) == (3, 1)


async def test_who_says_what_is_correct_is_believed_before_the_reward(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        await play(s, "a", "b")
        await conclude(s, trained=["a", "b"], correct=["b"], rewards={"a": 7.0, "b": 0.2})
        assert await counts(s) == (2, 1)
        assert (await conclude(s, trained=[], correct="b"))["status"] == 400


async def test_the_operator_hears_the_counts_of_this_process(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        await play(s, "a")
        await conclude(s, trained=["a"], rewards={"a": 1.0})
        service = s.router.service
        received, other = DemandFeed(service).note(), DemandFeed(service).note()
    assert (received.accepted, received.correct) == (1, 1)
    assert received.instance
    assert received.instance != other.instance, "counts begin anew with a process"
