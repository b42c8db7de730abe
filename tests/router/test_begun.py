"""A task whose first step is taken at once is else like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from rose_router import begun as begun_module
from rose_router.begun import BegunTask

SAID: ContextVar[str] = ContextVar("SAID", default="nothing")


def begun(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    made = BegunTask(asyncio.get_running_loop(), coroutine)
    made.begin()
    return made.task


async def test_its_first_step_is_over_when_it_is_begun_and_the_rest_goes_on_by_itself() -> None:
    steps = list[int]()

    async def steps_of() -> str:
        for number in range(3):
            steps.append(number)
            await asyncio.sleep(0)
        return "end"

    task = begun(steps_of())
    assert steps == [0]
    assert await task == "end"
    assert steps == [0, 1, 2]


async def test_who_waits_for_what_has_come_before_its_task_looks_goes_on() -> None:
    wanted: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait() -> str:
        return await wanted

    task = begun(wait())
    wanted.set_result("there")
    assert await asyncio.wait_for(task, 60) == "there"


async def test_the_step_is_the_tasks_own_and_whoever_begins_it_stays_who_it_is() -> None:
    async def look() -> tuple[object, str]:
        before = SAID.get()
        SAID.set("inside")
        current = asyncio.current_task()
        async with asyncio.timeout(60):  # which asks for the task
            await asyncio.sleep(0)
        assert SAID.get() == "inside"
        assert asyncio.current_task() is current
        return current, before

    SAID.set("outside")
    outer = asyncio.current_task()
    task = begun(look())
    assert asyncio.current_task() is outer
    assert await task == (task, "outside")
    assert SAID.get() == "outside"


async def test_it_may_be_begun_where_no_task_runs() -> None:
    made = list[asyncio.Task[Any]]()

    async def nothing() -> object:
        return asyncio.current_task()

    asyncio.get_running_loop().call_soon(lambda: made.append(begun(nothing())))
    await asyncio.sleep(0)
    assert await made[0] is made[0]


@pytest.mark.parametrize("waits", [False, True])
async def test_its_errors_are_the_tasks(waits: bool) -> None:
    async def fail() -> None:
        if waits:
            await asyncio.sleep(0)
        raise KeyError("gone")

    task = begun(fail())
    with pytest.raises(KeyError, match="gone"):
        await task


async def test_who_is_cancelled_before_its_task_looks_hears_of_it() -> None:
    heard = list[bool]()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append(True)
            raise

    task = begun(wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard == [True]


async def test_who_has_ended_in_its_first_step_is_not_cancelled_any_more() -> None:
    async def done() -> str:
        return "done"

    task = begun(done())
    task.cancel()
    assert await task == "done"


async def test_what_is_awaited_is_cancelled_with_a_task_that_has_not_looked_yet() -> None:
    heard = list[str]()

    async def inner() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            heard.append("inner")
            raise

    async def outer() -> None:
        try:
            await asyncio.create_task(inner())
        finally:
            heard.append("outer")

    task = begun(outer())
    await asyncio.sleep(0)
    again = begun(outer())
    again.cancel()
    task.cancel()
    await asyncio.wait({task, again})
    assert task.cancelled()
    assert again.cancelled()
    assert heard.count("outer") == 2
    assert "inner" in heard


async def test_an_asyncio_without_its_private_names_takes_the_first_step_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert begun_module.lacking() == []
    monkeypatch.setattr(begun_module, "PRIVATE_NAMES", ("_no_such_name",))
    assert begun_module.lacking() == ["_no_such_name"]
    monkeypatch.setattr(begun_module, "_AT_ONCE", False)
    steps = list[int]()

    async def step() -> str:
        steps.append(1)
        await asyncio.sleep(0)
        return "end"

    task = begun(step())
    assert steps == []
    assert await task == "end"
