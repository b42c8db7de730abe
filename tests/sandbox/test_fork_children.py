"""Children of a fork: whose names they have, and that a fork with a name is made once."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose_sandbox import fork_children
from rose_sandbox.answers import Forked
from rose_sandbox.client import RemoteHost
from rose_sandbox.errors import AlreadyThere
from rose_sandbox.runtimes.runtime import CheckpointParts, Handle, SandboxSpec
from rose_weights.errors import Fenced
from tests.sandbox.test_host import World


async def test_children_of_forks_have_names_that_nobody_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child by the name of another would have fenced and replaced it."""
    world = World(tmp_path)
    drawn = iter(["a", "a", "b", "a", "b", "c"])
    monkeypatch.setattr(fork_children, "draw_name", lambda: next(drawn))
    await world.host.create("s")
    await world.host.checkpoint("s", [1])
    first = await world.host.fork("s", 2)
    assert first.sessions == ("s.1-a", "s.1-b")
    await world.host.end("s.1-a")  # away, and its records are there
    assert (await world.host.fork("s", 1)).sessions == ("s.1-c",)


async def test_a_fork_with_a_name_is_made_once_at_whichever_host_it_is_asked_again(
    tmp_path: Path,
) -> None:
    """Its first answer may have been lost with the router that had asked for it."""
    world = World(tmp_path)
    host, other = world.host, World(tmp_path, "two")
    await host.create("s")
    await world.output_of("s", "echo 1 > /home/a")
    await host.checkpoint("s", [1])
    made = await host.fork("s", 2, name="group")
    await world.output_of("s", "echo 2 > /home/a")
    await host.checkpoint("s", [1, 2])
    for again, here in ((host, made.sessions), (other.host, ())):
        assert await again.fork("s", 2, name="group") == replace(made, here=here)
        assert await again.fork("s", 2, 1, name="group") == replace(made, here=here)
    assert set(host.sessions()) == {"s", *made.sessions}
    assert other.host.sessions() == ()
    with pytest.raises(AlreadyThere, match="was of turn 1"):
        await host.fork("s", 2, 2, name="group")
    another = await host.fork("s", 2, name="another")
    assert not set(another.sessions) & set(made.sessions)
    assert another.turn == 2
    await host.end(made.sessions[1], forget=True)  # as one that a host died before it had made
    three = (await host.fork("s", 3, name="group")).sessions
    assert three[:2] == made.sessions
    for child in three:
        assert await world.output_of(child, "cat /home/a") == "1"
    await host.checkpoint(three[0], [1, 7])
    await host.end("s", forget=True)
    last = await host.fork("s", 3, name="group")
    assert (last.sessions, last.turn, last.ids) == (three, 1, (1,)), "its parent is gone"
    await other.host.close()


async def test_a_host_that_slept_in_a_named_fork_takes_no_child_from_the_one_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaced them, with all that their agents had done since, or had them forgotten."""
    world, other = World(tmp_path), World(tmp_path, "two")
    await world.host.create("s")
    await world.host.checkpoint("s", [1])
    asleep, awake, restore = asyncio.Event(), asyncio.Event(), world.runtime.restore_all

    async def slow(parts: CheckpointParts, specs: Sequence[SandboxSpec]) -> tuple[Handle, ...]:
        asleep.set()
        await awake.wait()
        return await restore(parts, specs)

    monkeypatch.setattr(world.runtime, "restore_all", slow)
    forking = asyncio.create_task(world.host.fork("s", 2, name="group"))
    await asleep.wait()
    made = await other.host.fork("s", 1, name="group")
    await other.output_of(made.sessions[0], "echo mine > /home/a")
    await other.host.checkpoint(made.sessions[0], [1, 2])
    awake.set()
    with pytest.raises(Fenced):
        await forking
    monkeypatch.undo()
    assert await other.output_of(made.sessions[0], "cat /home/a") == "mine"
    assert (await other.host.checkpoint(made.sessions[0], [1, 2, 3])).recoverable_to == 3
    whole = await other.host.fork("s", 2, name="group")
    assert whole.sessions[0] == made.sessions[0]
    assert set(world.host.sessions()) == {"s", whole.sessions[1]}, "it had made the other one"
    assert await world.output_of(whole.sessions[1], "echo there") == "there"
    for one in (world, other):
        await one.host.close()


async def test_a_session_that_is_no_child_keeps_its_name(tmp_path: Path) -> None:
    """It was taken for a child that is missing, and replaced."""
    world = World(tmp_path)
    await world.host.create("s")
    await world.host.checkpoint("s", [1])
    (name,) = fork_children.names_of("s", "group", 1)
    await world.host.create(name)
    await world.output_of(name, "echo 1 > /home/a")
    with pytest.raises(AlreadyThere, match="is no child of s"):
        await world.host.fork("s", 1, name="group")
    assert await world.output_of(name, "cat /home/a") == "1"
    await world.host.close()


async def test_a_fork_without_a_name_asks_a_host_that_knows_none_as_before() -> None:
    bodies: list[object] = []

    async def fork(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        answer = Forked(("s.1-a",), 1, ())
        return web.json_response(msgspec.to_builtins(answer))

    app = web.Application()
    app.router.add_post("/sessions/s/fork", fork)
    async with TestServer(app) as server:
        host = RemoteHost(str(server.make_url("")))
        await host.fork("s", 1, None)
        await host.fork("s", 1, None, name="group")
        await host.close()
    assert bodies == [{"n": 1, "turn": None}, {"n": 1, "turn": None, "name": "group"}]
