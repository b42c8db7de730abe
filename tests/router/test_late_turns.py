"""A reply comes, and its agent acts, before the sandbox host has heard that the turn began.

A real router and a real host on real sockets. What the router asks of the host is held up on its
way there or back, until the agent has acted; then it goes on, or the router or the host is gone.
Every record has the files that there were when the model was given its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from rose_dev.waiting import until
from rose_router.turns.turn_clock import TurnClock
from rose_sandbox.http import ServingTraffic, application
from rose_weights.store.records import Records
from rose_weights.store.store import Store
from tests.router.conftest import Stage
from tests.sandbox.test_host import World

Staging = Callable[..., AbstractAsyncContextManager[Stage]]


@dataclass
class Held:
    """A host whose calls of a kind are held up.

    Attributes:
        step: that is held: the last word of its path.
        back: its answer is, and not what is asked.
        came: calls that are held.
        freed: they go on.
    """

    world: World
    url: str = ""
    step: str = ""
    back: bool = False
    came: int = 0
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    @web.middleware
    async def hold(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path.rpartition("/")[2] != self.step:
            return await handler(request)
        answer = await handler(request) if self.back else None
        self.came += 1
        await self.freed.wait()
        return answer or await handler(request)


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Held]:
    world = World(tmp_path)
    made = Held(world)
    app = application(world.host, ServingTraffic(), lambda: "word")
    app.middlewares.append(made.hold)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


def idle(stage: Stage) -> bool:
    clock = stage.router.service.sandboxes
    assert isinstance(clock, TurnClock)
    return not clock._lines


async def turn(stage: Stage, ids: list[int]) -> None:
    """The agent asks the model, and has its answer."""
    body = {"input_ids": ids, "session_id": "s", "sampling_params": {"max_new_tokens": 4}}
    async with stage.post("/generate", body) as reply:
        assert reply.status == 200


async def check_moments(world: World, given: dict[tuple[int, ...], str]) -> list[tuple[int, ...]]:
    """The tokens of each record, whose files are those of when the model was given them."""
    records = Records(Store(world.root / "store"), "grpo")
    found: list[tuple[int, ...]] = []
    for number in reversed(records.turns("s")):
        ids = records.ids(records.read("s", number))
        await world.host.restore("s", number)
        log = await world.host.exec("s", "cat /home/log", 5)
        assert log.stdout.decode() == given[ids], f"record {number} has tokens {ids}"
        found.insert(0, ids)
    return found


@pytest.mark.parametrize("gone", ["nobody", "router", "host"])
@pytest.mark.parametrize(
    ("step", "back"),
    [("s", False), ("s", True), ("turn", False), ("turn", True), ("ready", False)],
    ids=["asks for the moment", "hears the moment", "tells", "hears of it", "tells of the reply"],
)
async def test_an_agent_that_acts_before_its_host_has_heard_of_the_turn_mixes_no_record(
    stage: Staging, held: Held, step: str, back: bool, gone: str
) -> None:
    """Its record had the tokens of the turn, and what the agent had done with the reply to it."""
    world = held.world
    given: dict[tuple[int, ...], str] = {(): ""}
    async with stage(sandbox_hosts={"": (held.url,)}, sandbox_token="word") as s:
        await s.engine()
        await world.host.create("s")
        for number, ids in enumerate([[5], [5, 6], [5, 6, 7]], 1):
            await world.output_of("s", f"echo {number} >> /home/log")
            log = (await world.host.exec("s", "cat /home/log", 5)).stdout.decode()
            given[tuple(ids)] = log
            if number == 2:
                held.step, held.back = step, back
            await turn(s, ids)
            if number != 2:
                await until(lambda: idle(s))
                continue
            await until(lambda: held.came > 0)
            await world.output_of("s", "echo acted >> /home/log")
            held.step = ""
            if gone == "router":
                clock = s.router.service.sandboxes
                await clock.close()
            elif gone == "host":
                await world.host.close()
                world.host = world.started()
                held.freed.set()
                await check_moments(world, given)
                return
            held.freed.set()
            await until(lambda: idle(s))
    found = await check_moments(world, given)
    assert found[:2] == [(), (5,)]
    assert found[-1] == (5, 6, 7), "what a late turn changed is saved with the next"
    # It is saved where the host heard of it before the agent had acted.
    in_time = step == "ready" or (step == "turn" and back)
    assert ((5, 6) in found) == in_time
    await world.host.close()


@pytest.mark.parametrize("back", [False, True], ids=["asks for the moment", "hears the moment"])
async def test_a_late_turn_has_its_record_where_its_agent_has_not_acted_yet(
    stage: Staging, held: Held, *, back: bool
) -> None:
    """One whose reply was there before its host had named a moment was saved with the next one."""
    world = held.world
    async with stage(sandbox_hosts={"": (held.url,)}, sandbox_token="word") as s:
        await s.engine()
        await world.host.create("s")
        await world.output_of("s", "echo 1 >> /home/log")
        await asyncio.sleep(0.5)  # as a model takes longer than an answer's way back
        held.step, held.back = "s", back
        await turn(s, [5])
        await until(lambda: held.came > 0)
        held.step = ""
        held.freed.set()
        await until(lambda: idle(s))
        assert (await world.host.state("s")).recoverable_to == 1
        await world.output_of("s", "echo acted >> /home/log")
    assert await check_moments(world, {(): "", (5,): "1\n"}) == [(), (5,)]
    await world.host.close()
