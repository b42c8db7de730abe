"""A record has the files of the moment in which the model was given its tokens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from rose_core.sandboxes.policy import HostPressure, ModelWait
from rose_core.sandboxes.turns import SandboxPhase
from rose_dev.waiting import until
from rose_sandbox import host as host_module
from rose_sandbox.box import BoundTokens
from rose_sandbox.errors import HeardLate, NotListening
from rose_sandbox.http import ServingTraffic, application
from rose_sandbox.inspector.inspector import Effects
from rose_sandbox.runtimes.runtime import CheckpointParts, Facts, Handle, Kind, State
from rose_weights.errors import StoreFailed
from tests.sandbox.test_host import World

Act = Callable[[World], Awaitable[None]]


async def runs(world: World) -> None:
    await world.output_of("s", "echo 2 > /home/a")


async def writes(world: World) -> None:
    await world.host.write_file("s", "/home/a", b"2")


async def connects(world: World) -> None:
    with suppress(NotListening):
        await world.host.connect("s", 80)


async def tunnels(world: World) -> None:
    with suppress(NotListening):
        async with world.host.tunnel("s", 80):
            pass


async def takes_another_turn(world: World) -> None:
    await world.host.checkpoint("s", [1, 2])


async def comes_back(world: World) -> None:
    """In a new life it has done as much as in the one before: nothing."""
    await world.host.restore("s")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("act", [runs, writes, connects, tunnels, takes_another_turn, comes_back])
async def test_a_turn_of_a_moment_before_the_last_act_is_saved_for_nobody(
    world: World, act: Act
) -> None:
    await world.host.create("s")
    asked = (await world.host.moment("s"))[0]
    await act(world)
    before = world.records.turns("s"), (await world.host.state("s")).turn
    with pytest.raises(HeardLate, match="its agent did since is saved with the next turn"):
        await world.host.turn_began("s", [1, 2, 3], if_match=asked)
    assert (world.records.turns("s"), (await world.host.state("s")).turn) == before
    await world.host.turn_began("s", [1, 2, 3], if_match=(await world.host.moment("s"))[0])
    assert (await world.host.tokens_ready("s")).recoverable_to == before[1] + 1
    assert world.records.ids(world.records.read("s")) == (1, 2, 3)


async def test_an_act_that_waits_for_another_is_of_no_turn_that_began_in_between(
    world: World,
) -> None:
    """It had found no turn as it came, and went before the look of the one that began then."""
    host = world.host
    await host.create("s")
    await host.checkpoint("s", [1])
    box = host._box("s")
    running = asyncio.create_task(host.exec("s", "sleep 0.2", 5))
    await until(box.lock.locked)
    began = asyncio.create_task(host.turn_began("s", [1, 2]))
    await asyncio.sleep(0)
    act = asyncio.create_task(host.exec("s", "echo of the next turn > /home/a", 5))
    await asyncio.gather(running, began, act)
    assert world.records.ids(world.records.read("s", 2)) == (1, 2)
    assert await world.output_of("s", "cat /home/a") == "of the next turn"
    await host.restore("s", 2)
    assert (await host.exec("s", "cat /home/a", 5)).exit_code == 1


async def test_a_turn_that_waits_for_acts_to_end_is_late_by_what_they_did(world: World) -> None:
    """Its moment had not passed as it came, and had when it was its turn."""
    host = world.host
    await host.create("s")
    box = host._box("s")
    running = asyncio.create_task(host.exec("s", "sleep 0.2", 5))
    await until(box.lock.locked)
    act = asyncio.create_task(host.exec("s", "echo 1 > /home/a", 5))
    await asyncio.sleep(0)
    asked = (await host.moment("s"))[0]
    with pytest.raises(HeardLate):
        await host.turn_began("s", [1], if_match=asked)
    await asyncio.gather(running, act)
    assert (await host.state("s")).turn == 0


@pytest.mark.parametrize("patient", [True, False], ids=["waits", "has waited long enough"])
async def test_a_connection_that_begins_before_the_record_of_its_turn_is_not_in_it(
    world: World, monkeypatch: pytest.MonkeyPatch, *, patient: bool
) -> None:
    """A reply that has come may be acted on by a server's port, of which a host is told nothing."""
    host, look = world.host, world.inspector.effects
    await host.create("s")
    await host.checkpoint("s", [1])
    connected = asyncio.Event()

    async def slow(key: str, facts: Facts) -> Effects:
        await asyncio.sleep(0.2)
        if not patient:
            await connected.wait()
        return await look(key, facts)

    monkeypatch.setattr(world.inspector, "effects", slow)
    monkeypatch.setattr(host_module, "HOLD_SECONDS", 20.0 if patient else 0.05)
    await host.turn_began("s", [1, 2])
    await connects(world)
    assert (await host.state("s")).recoverable_to == 1 + patient
    connected.set()
    boundary = host._box("s").boundary
    assert boundary is not None
    await boundary
    assert (await host.tokens_ready("s")).recoverable_to == 1 + patient
    assert (await host.checkpoint("s", [1, 2, 3])).recoverable_to == 3
    assert world.records.turns("s") == ((0, 1, 2, 3) if patient else (0, 1, 3))


@pytest.mark.parametrize("step", ["facts", "checkpoint"], ids=["a suspend's look", "a cut"])
async def test_what_is_acted_in_during_its_save_is_of_no_record(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Acts wait for a save. Whatever comes through all the same costs the record, not its truth."""
    host, through = world.host, getattr(world.runtime, step)
    await host.create("s")

    async def acting(*asked: object) -> object:
        host._box("s").acts += 1
        return await through(*asked)

    with monkeypatch.context() as patched:
        patched.setattr(world.runtime, step, acting)
        await host.turn_began("s", [1], wait=ModelWait(1e4 if step == "facts" else 0.0, 1.0))
        result = await host.tokens_ready("s")
        assert (result.phase, result.unsaved) == ("acting", "a connection")
    assert world.records.turns("s") == (0,)
    assert (await host.checkpoint("s", [1, 2])).recoverable_to == 2


@pytest.mark.parametrize(
    ("whole", "acts", "bound"),
    [
        (BoundTokens((1, 2, 3)), True, (1, 2, 3)),
        (BoundTokens(), True, ()),
        (BoundTokens((1,)), True, ()),
        (BoundTokens((9, 9, 9)), True, ()),
        (BoundTokens((1, 2, 3)), False, (1, 2, 3)),
        (BoundTokens(), False, (1, 2)),
    ],
    ids=["all", "unknown", "of a turn before", "of another", "all, no act", "unknown, no act"],
)
async def test_what_the_end_of_a_session_saves_goes_with_all_its_tokens_or_with_none(
    world: World, whole: BoundTokens, acts: bool, bound: tuple[int, ...]
) -> None:
    """It went with those of the last turn, whose reply its agent had acted on."""
    await world.host.create("s")
    await world.host.turn_began("s", [1, 2])
    await world.host.tokens_ready("s")
    if acts:
        await world.output_of("s", "echo 1 > /home/a")
    result = await world.host.ended("s", whole)
    assert (result.phase, result.recoverable_to) == ("suspended", 2)
    assert world.records.ids(world.records.read("s", 2)) == bound
    assert world.records.ids(world.records.read("s", 1)) == (1, 2)
    back = await world.host.restore("s")
    assert back.ids == bound
    assert (await world.host.exec("s", "cat /home/a", 5)).exit_code == (not acts)


@pytest.mark.parametrize("acts", [True, False], ids=["acted", "not acted"])
async def test_a_checkpoint_without_tokens_goes_with_those_of_its_moment_or_with_none(
    world: World, *, acts: bool
) -> None:
    await world.host.create("s")
    await world.host.turn_began("s", [1, 2], weight_versions=["run@1.0"], history=b"all")
    await world.host.tokens_ready("s")
    if acts:
        await world.output_of("s", "echo 1 > /home/a")
    assert (await world.host.checkpoint("s")).recoverable_to == 2
    back = await world.host.restore("s")
    assert back.ids == (() if acts else (1, 2))
    assert back.weight_versions == (() if acts else ("run@1.0",))
    assert back.history == b"all", "what the router knew before, of which these are the tokens"


async def test_over_http_the_moment_is_an_etag_and_a_late_turn_a_failed_precondition(
    world: World,
) -> None:
    app: web.Application = application(world.host, ServingTraffic(), lambda: "word")
    word = {"Authorization": "Bearer word"}
    async with TestClient(TestServer(app), headers=word) as http:
        await world.host.create("s")
        async with http.get("/sessions/s") as answer:
            asked = answer.headers["ETag"]
        await world.output_of("s", "echo 1 > /home/a")
        late = {"If-Match": asked}
        async with http.post("/sessions/s/turn", json={"ids": [1]}, headers=late) as answer:
            assert answer.status == 412
            assert (await answer.json())["error"] == "HeardLate"
        assert world.records.turns("s") == (0,)
        async with http.get("/sessions/s") as answer:
            now = {"If-Match": answer.headers["ETag"]}
        async with http.post("/sessions/s/turn", json={"ids": [1]}, headers=now) as answer:
            assert (answer.status, (await answer.json())["turn"]) == (200, 1)
        async with http.post("/sessions/s/ready") as answer:
            assert answer.status == 200
        # Of routers from before, which name no moment.
        async with http.post("/sessions/s/turn", json={"ids": [1, 2]}) as answer:
            assert (answer.status, (await answer.json())["turn"]) == (200, 2)
        await http.post("/sessions/s/ready")
        async with http.post("/sessions/s/ended", json={"ids": [1, 2, 3]}) as answer:
            assert answer.status == 200
    assert world.records.ids(world.records.read("s")) == (1, 2, 3)
    await world.host.close()


async def test_a_grader_comes_after_a_session_that_ended_before_its_turn_had_a_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its boundary was cancelled for the end's, and every command was cancelled with it."""
    host = world.host
    monkeypatch.setattr(host_module, "HOLD_SECONDS", 0.01)
    await host.create("s")
    world.traffic = HostPressure(serving_burns=True)
    await host.turn_began("s", [1, 2])
    assert (await host.tokens_ready("s")).recoverable_to == 0
    assert (await host.ended("s", BoundTokens((1, 2, 3)))).phase == "suspended"
    assert await world.output_of("s", "echo graded") == "graded"


async def test_a_connection_waits_for_a_save_as_a_command_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that acts by a port and whose saves take longer than a reply is held had none."""
    host, cut = world.host, world.runtime.checkpoint
    await host.create("s")
    monkeypatch.setattr(host_module, "HOLD_SECONDS", 0.02)

    async def slow(handle: Handle, kind: Kind, folder: Path) -> CheckpointParts:
        await asyncio.sleep(0.1)
        return await cut(handle, kind, folder)

    monkeypatch.setattr(world.runtime, "checkpoint", slow)
    await host.turn_began("s", [1])
    await until(lambda: host._box("s").clock.phase is SandboxPhase.SAVING)
    await connects(world)
    assert (await host.state("s")).recoverable_to == 1


@pytest.mark.parametrize("act", [runs, connects, tunnels])
async def test_an_act_says_that_the_reply_has_come_where_nobody_else_does(
    world: World, act: Act
) -> None:
    """Of a session whose router died before it said so, every later turn was refused."""
    host = world.host
    await host.create("s")
    for turn in (1, 2, 3):
        await host.turn_began("s", [turn], if_match=(await host.moment("s"))[0])
        await act(world)
        assert (await host.state("s")).recoverable_to == turn
    assert (await host.ended("s")).phase == "suspended"


def whole(ids: tuple[int, ...], prompt: int) -> BoundTokens:
    """All tokens of a session as a replica of its router knows them."""
    return BoundTokens(ids, prompt=prompt)


@pytest.mark.parametrize("first", ["missed", "knows nothing", "knows all"])
async def test_of_replicas_that_end_a_session_the_one_that_knows_its_last_turn_is_believed(
    world: World, first: str
) -> None:
    """The first one was: a record had tokens of before, and what the agent did on later ones."""
    host = world.host
    await host.create("s")
    await host.turn_began("s", [1, 2])
    await world.output_of("s", "echo 1 > /home/a")  # on the reply, 3
    asked = (await host.moment("s"))[0]
    await world.output_of(
        "s", "echo 2 > /home/a"
    )  # on the reply to the next turn, of which it is late
    with pytest.raises(HeardLate):
        await host.turn_began("s", [1, 2, 3, 4], if_match=asked)
    found = [whole((1, 2, 3), 2), whole((), 0), whole((1, 2, 3, 4, 5), 4)]
    at = ["missed", "knows nothing", "knows all"].index(first)
    result = await host.ended("s", found[at])
    assert result.phase == "suspended"
    bound = (1, 2, 3, 4, 5) if first == "knows all" else ()
    assert world.records.ids(world.records.read("s")) == bound
    for one in found[at + 1 :] + found[:at]:
        await host.ended("s", one)
    newest = world.records.read("s")
    assert (newest.turn, world.records.ids(newest)) == (2, (1, 2, 3, 4, 5))
    assert world.records.ids(world.records.read("s", 1)) == (1, 2)
    back = await host.restore("s")
    assert back.ids == (1, 2, 3, 4, 5)
    assert await world.output_of("s", "cat /home/a") == "2"


async def test_tokens_from_before_a_step_back_are_of_no_record_after_it(world: World) -> None:
    """They begin as the ones of the earlier turn do, and were taken for what came of those."""
    host = world.host
    await host.create("s")
    await host.turn_began("s", [1])
    await world.output_of("s", "echo 1 > /home/a")
    await host.turn_began("s", [1, 2, 3])
    await world.output_of("s", "echo 2 > /home/a")
    await host.restore("s", 1)
    await world.output_of("s", "echo other > /home/a")
    await host.ended("s", whole((1, 2, 3, 4), 3))
    assert world.records.ids(world.records.read("s")) == ()
    await host.restore("s", 1)
    await world.output_of("s", "echo again > /home/a")
    await host.ended("s", whole((1, 2), 1))
    assert world.records.ids(world.records.read("s")) == (1, 2)


async def test_a_session_whose_grader_has_acted_since_it_ended_is_bound_to_nothing_new(
    world: World,
) -> None:
    host = world.host
    await host.create("s")
    await host.turn_began("s", [1])
    await world.output_of("s", "echo 1 > /home/a")
    await host.ended("s")
    await host.resume("s")
    await world.output_of("s", "echo graded > /home/a")
    assert world.records.ids(world.records.read("s", 2)) == ()
    await host.ended("s", whole((1, 2), 1))
    assert world.records.ids(world.records.read("s", 2)) == ()


async def test_a_checkpoint_of_a_harness_is_no_turn_that_a_router_missed(world: World) -> None:
    host = world.host
    await host.create("s")
    await host.turn_began("s", [1])
    await world.output_of("s", "echo 1 > /home/a")
    await host.checkpoint("s", [1, 2])
    await world.output_of("s", "echo 2 > /home/a")
    await host.ended("s", whole((1, 2), 1))
    assert world.records.ids(world.records.read("s")) == (1, 2)


async def test_a_record_that_cannot_be_bound_anew_stands_as_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = world.host
    await host.create("s")
    await host.turn_began("s", [1])
    await world.output_of("s", "echo 1 > /home/a")
    await host.ended("s")

    def fails(*_: object) -> NoReturn:
        raise StoreFailed("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(host._records, "publish", fails)
        with pytest.raises(StoreFailed):
            await host.ended("s", whole((1, 2), 1))
    assert world.records.ids(world.records.read("s")) == ()
    await host.ended("s", whole((1, 2), 1))
    assert world.records.ids(world.records.read("s")) == (1, 2)


@pytest.mark.parametrize("first", ["older", "newer"])
async def test_a_replica_whose_host_was_away_does_not_pass_an_older_turn_off_as_the_newest(
    world: World, first: str
) -> None:
    """It says at the end what it gave the model last. A record was bound anew, to older tokens."""
    host = world.host
    await host.create("s")
    await host.turn_began("s", [1])
    await world.output_of("s", "echo 1 > /home/a")
    # One replica's host was away as the model was given 1, 2. Another one took over from there.
    await host.turn_began("s", [1, 2, 3, 4])
    await world.output_of("s", "echo 2 > /home/a")

    async def older() -> None:
        with pytest.raises(HeardLate):
            await host.turn_began("s", [1, 2], if_match="passed")
        await host.ended("s", whole((1, 2, 3), 2))

    if first == "older":
        await older()
        assert world.records.ids(world.records.read("s")) == ()
    await host.ended("s", whole((1, 2, 3, 4, 5), 4))
    if first == "newer":
        await older()
    assert world.records.ids(world.records.read("s")) == (1, 2, 3, 4, 5)


async def test_an_agent_that_has_a_connection_may_be_acting_until_it_ends(world: World) -> None:
    """It was taken for still, so that a record had what it did on the reply to its tokens."""
    now, host = 0.0, world.host
    host._now = lambda: now
    await host.create("s")
    host._box("s").act(now)
    now = 60.0
    assert (await host.moment("s"))[1] == 60.0
    with host._box("s").tunneled(host.tunnel_limits, host._now):
        now = 120.0
        assert (await host.moment("s"))[1] == 0.0
    now = 125.0
    assert (await host.moment("s"))[1] == 5.0, "since the connection ended"


@pytest.mark.skipif(os.geteuid() != 0, reason="a sandbox's way out is its user's: takes root")
async def test_an_agent_whose_request_is_under_way_may_be_acting_on_its_reply(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that runs in its sandbox asks the model by the proxy, and was taken for still."""
    host, door, now = world.host, tmp_path / "door", 60.0
    host._allowed = ("*",)
    host._now = lambda: now

    async def facts(_handle: Handle) -> Facts:
        return Facts(State.RUNNING, door=door)

    monkeypatch.setattr(world.runtime, "facts", facts)
    monkeypatch.setattr(world.inspector, "watch", facts_of_nobody)
    await host.create("s")
    now = 120.0
    assert (await host.moment("s"))[1] == 60.0
    _, writer = await asyncio.open_unix_connection(door)
    await until(lambda: host._box("s").connections == 1)
    assert (await host.moment("s"))[1] == 0.0
    now = 180.0
    writer.close()
    await until(lambda: host._box("s").connections == 0)
    now = 181.0
    assert (await host.moment("s"))[1] == 1.0
    await host.close()


async def facts_of_nobody(*_: object) -> None:
    """For an inspector that has nothing to look at."""


@pytest.mark.parametrize("prompt", ["-1", "4", "+1", "1.0", "", "9" * 5000])
async def test_a_prompt_that_is_no_part_of_the_tokens_is_refused(world: World, prompt: str) -> None:
    app: web.Application = application(world.host, ServingTraffic(), lambda: "word")
    word = {"Authorization": "Bearer word"}
    async with TestClient(TestServer(app), headers=word) as http:
        await world.host.create("s")
        await world.host.turn_began("s", [1, 2])
        await world.host.tokens_ready("s")
        told = {"Rose-Prompt-Tokens": prompt}
        async with http.post("/sessions/s/ended", json={"ids": [1, 2, 3]}, headers=told) as answer:
            assert (answer.status, (await answer.json())["error"]) == (400, "ValueError")
        assert (await world.host.state("s")).phase == "acting"
    await world.host.close()
