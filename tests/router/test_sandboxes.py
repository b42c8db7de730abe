"""A router on real sockets beside real sandbox hosts: turns, forks and restores reach them.

The hosts run their fake runtime, which passes the contract tests of runc.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web

from rose_core.rollouts.conversations import saved_turns
from rose_core.rollouts.conversations.message_tree import MessageTree
from rose_core.rollouts.placement.selection import PolicyName
from rose_core.rollouts.terms import LeaseTerms
from rose_core.sandboxes.heartbeats import Heartbeats
from rose_dev.waiting import until
from rose_router.errors import Conflict
from rose_router.flags import parser, settings
from rose_router.http.routes.branches import Branches, _Turns
from rose_router.turns.sandbox_hosts import LONG_SECONDS, SandboxHosts
from rose_router.turns.service import Service
from rose_router.turns.turn_clock import Nobody, TurnClock
from rose_sandbox.client import Sandbox
from rose_sandbox.errors import UnknownTurn
from rose_sandbox.http import ServingTraffic, application
from rose_weights.errors import Fenced
from tests.router.conftest import Stage
from tests.router.scripts import folder
from tests.sandbox.test_host import World

Json = dict[str, Any]
Staging = Callable[..., AbstractAsyncContextManager[Stage]]


@dataclass
class At:
    """A sandbox host and where it listens."""

    world: World
    url: str
    runner: web.AppRunner


@pytest.fixture
async def host_at(tmp_path: Path) -> AsyncIterator[Callable[[str], Any]]:
    """Starts hosts that share a store."""
    async with AsyncExitStack() as stack:

        async def start(name: str) -> At:
            world = World(tmp_path, name)
            runner = web.AppRunner(application(world.host, ServingTraffic(), lambda: "word"))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            stack.push_async_callback(world.host.close)
            stack.push_async_callback(runner.cleanup)
            return At(world, f"http://127.0.0.1:{runner.addresses[0][1]}", runner)

        yield start


SLOWER = 0.03
"""Seconds a token: a reply of nine comes when the sandbox's host has heard of the turn. One that is
sooner there is a late turn, which has no record (``test_late_turns``)."""


def generate(session: str, ids: list[int]) -> Json:
    return {"input_ids": ids, "session_id": session, "sampling_params": {"max_new_tokens": 4}}


def knowing(*urls: str) -> Json:
    """Settings of a router that knows these hosts."""
    return {"sandbox_hosts": {"": urls}, "sandbox_token": "word", "tokenizer": folder()}


def idle(service: Service) -> bool:
    clock = service.sandboxes
    assert isinstance(clock, TurnClock)
    return not clock._lines


async def test_turns_of_the_router_are_boundaries_of_the_sandbox(
    stage: Staging, host_at: Callable[[str], Any]
) -> None:
    one, two = await host_at("one"), await host_at("two")
    hosts = {"": (one.url, two.url)}
    async with stage(sandbox_hosts=hosts, sandbox_token="word") as s:
        await s.engine()
        await two.world.host.create("s")
        await two.world.output_of("s", "echo 1 > /home/a")
        for turn in (1, 2):
            async with s.post("/generate", generate("s", [5, 6, 7, turn])) as reply:
                assert reply.status == 200
            await until(lambda: idle(s.router.service))
            result = await two.world.host.state("s")
            assert (result.turn, result.phase, result.recoverable_to) == (turn, "acting", turn)
        record = two.world.records.read("s", 2)
        assert two.world.records.ids(record) == (5, 6, 7, 2)
        assert record.weight_versions == ("run@1.0",)
        async with s.http.post(f"{s.url}/finish_session?session_id=s") as reply:
            assert reply.status == 200
        await until(lambda: idle(s.router.service))
        assert (await two.world.host.state("s")).phase == "suspended"
        assert await two.world.output_of("s", "cat /home/a") == "1"


async def test_the_history_of_a_session_without_a_sandbox_is_not_exported(
    stage: Staging, host_at: Callable[[str], Any]
) -> None:
    """Every turn of a lease made it, also of sessions that have no sandbox."""
    one = await host_at("one")
    exported: list[str] = []
    async with stage(sandbox_hosts={"": (one.url,)}, sandbox_token="word") as s:

        def history(_job: str, session: str, _ids: Sequence[int]) -> bytes:
            exported.append(session)
            return b"all of it"

        s.router.service.sandboxes.remember(history)
        await s.engine()
        await one.world.host.create("s")
        for session in ("s", "without"):
            async with s.post("/generate", generate(session, [5, 6])) as reply:
                assert reply.status == 200
            await until(lambda: idle(s.router.service))
        assert exported == ["s"]
        record = one.world.records.read("s", 1)
        assert one.world.records.history(record) == b"all of it"


async def test_a_dead_host_and_a_wrong_token_cost_no_turn(
    stage: Staging, host_at: Callable[[str], Any]
) -> None:
    one = await host_at("one")
    await one.world.host.create("s")
    hosts = {"": (one.url, "http://127.0.0.1:1", "http://nowhere.invalid:7600")}
    async with stage(sandbox_hosts=hosts, sandbox_token="guess") as s:
        await s.engine()
        async with s.post("/generate", generate("s", [5, 6])) as reply:
            assert reply.status == 200
        await until(lambda: idle(s.router.service))
        assert (await one.world.host.state("s")).turn == 0


async def test_the_successor_of_a_dead_host_is_found_at_once(
    host_at: Callable[[str], Any],
) -> None:
    """Its address was believed for 10 s: a restore in that time found no host at all."""
    one = await host_at("one")
    await one.world.host.create("s")
    await one.world.host.checkpoint("s", [1, 2])
    asked: list[str] = []

    async def resolve(name: str, _port: int) -> tuple[str, ...]:
        asked.append(name)
        return ("127.0.0.2",) if len(asked) == 1 else ("127.0.0.1",)

    url = f"http://sandboxes:{one.url.rpartition(':')[2]}"
    async with aiohttp.ClientSession() as http:
        hosts = SandboxHosts({"": (url,)}, lambda: "word", http, time.monotonic, resolve)
        at, result = await hosts.go_on("", "s", "restore", {})
    assert at == one.url
    assert result["ids"] == [1, 2]
    assert asked == ["sandboxes", "sandboxes"]


@pytest.mark.parametrize("step", ["restore", "fork"])
async def test_a_host_that_says_nothing_is_left_for_one_that_does(
    host_at: Callable[[str], Any], step: str
) -> None:
    """Its connections stand, so that nothing but silence tells that it is lost."""
    one = await host_at("one")
    await one.world.host.create("s")
    await one.world.host.checkpoint("s", [1, 2])
    came: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, back: came.append(back), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    beats = Heartbeats(every=0.01, within=0.2, most_missed=2)
    async with aiohttp.ClientSession() as http:
        given: Any = ({"": (url, one.url)}, lambda: "word", http, time.monotonic)
        hosts = SandboxHosts(*given, beats=beats)
        hosts.settle("", "s", url)
        async with asyncio.timeout(LONG_SECONDS / 2):  # the call itself would end too
            at, result = await hosts.go_on("", "s", step, {"n": 1} if step == "fork" else {})
    assert (at, result["ids"]) == (one.url, [1, 2])
    for back in came:
        back.close()
    silent.close()


async def test_a_host_that_slept_takes_no_session_from_its_successor(
    host_at: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said its fence, and wakes up when another host has the session."""
    one, two = await host_at("one"), await host_at("two")
    await one.world.host.create("s")
    await one.world.host.checkpoint("s", [1, 2])
    fence_of = one.world.host.fence

    async def sleep_after(session: str) -> int:
        monkeypatch.undo()
        seen: int = await fence_of(session)
        await two.world.host.restore(session)
        return seen

    monkeypatch.setattr(one.world.host, "fence", sleep_after)
    async with aiohttp.ClientSession() as http:
        hosts = SandboxHosts({"": (one.url,)}, lambda: "word", http, time.monotonic)
        with pytest.raises(Conflict, match="was seen under fence"):
            await hosts.go_on("", "s", "restore", {})
    assert (await two.world.host.state("s")).recoverable_to == 1


def test_hosts_are_given_by_job_and_a_bad_one_is_named() -> None:
    def of(*hosts: str) -> dict[str, tuple[str, ...]]:
        flags = [f"--sandbox-host={one}" for one in hosts]
        return dict(settings(parser().parse_args(["--lease=a/b", *flags])).sandbox_hosts)

    assert of("http://one:7600", "http://two:7600", "math=http://three:1/") == {
        "": ("http://one:7600", "http://two:7600"),
        "math": ("http://three:1",),
    }
    assert of("http://sandboxes.{namespace}.svc:7600") == {"": ("http://sandboxes.a.svc:7600",)}
    for wrong in ("nowhere", "=http://a:1", "math=ftp://a", "math=", "http://{x}:1"):
        with pytest.raises(ValueError, match="--sandbox-host"):
            of(wrong)


async def chat(stage: Stage, session: str, talk: list[Json]) -> Json:
    """The next answer to a talk, which is added to it."""
    body = {"messages": talk, "max_tokens": 9, "session_id": session}
    async with stage.post("/v1/chat/completions", body) as reply:
        answer: Json = await reply.json()
        assert reply.status == 200, answer
    talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    await until(lambda: idle(stage.router.service))
    return answer


async def ask(stage: Stage, path: str, body: Json, status: int) -> Json:
    async with stage.post(path, body) as reply:
        answer: Json = await reply.json()
        assert reply.status == status, answer
        return answer


async def play(stage: Stage, at: At, turns: int = 3) -> list[Json]:
    """An agent that writes the number of its turn, and asks for the next one."""
    await at.world.host.create("s")
    talk: list[Json] = []
    for turn in range(1, turns + 1):
        await at.world.output_of("s", f"echo {turn} > /home/a")
        talk.append({"role": "user", "content": f"turn {turn}"})
        await chat(stage, "s", talk)
    assert (await at.world.host.state("s")).recoverable_to == turns
    return talk


@pytest.mark.parametrize("parent", ["runs", "suspended", "gone", "unknown to the router"])
async def test_a_fork_is_sandboxes_and_sessions_where_the_prefix_is(
    stage: Staging, host_at: Callable[[str], Any], parent: str
) -> None:
    one, two = await host_at("one"), await host_at("two")
    hosts = {"": (one.url, two.url)}
    given = {"sandbox_hosts": hosts, "sandbox_token": "word", "tokenizer": folder()}
    # By the speeds that the router measures a busy machine's engine may be worth leaving.
    given["terms"] = LeaseTerms(placement=PolicyName.CACHE_AWARE)
    async with stage(**given) as first, stage(**given) as second:
        for s in (first, second):
            await s.engine("c", token_seconds=SLOWER)
        talk = await play(first, two)
        for s in (first, second):
            for name in ("a", "b"):  # where a child would go that has no home
                await s.engine(name)
        home = first.router.service.home_of("s")
        before = (await first.get("/sessions/s/rows"))["rows"]
        if parent == "suspended":
            await two.world.host.suspend("s")
        elif parent == "gone":
            await two.world.host.end("s")
        s = second if parent == "unknown to the router" else first
        made = await ask(s, "/sessions/s/fork", {"turn": 3, "n": 3}, 201)
        assert (made["turn"], made["known_turns"]) == (3, 2)
        assert len(set(made["sessions"])) == 3
        for child in made["sessions"]:
            at = one if child in one.world.host.sessions() else two
            assert await at.world.output_of(child, "cat /home/a") == "3"
            answer = await chat(s, child, talk[:5])  # the model is asked the third time
            reported = answer["choices"][0]["rose"]["history"]
            assert (reported["known_messages"], reported["messages"]) == (4, 5)
            if s is first:
                went = s.router.service.home_of(child)
                assert home is not None
                assert went is not None
                assert went.engine == home.engine == made["home"]
            (row,) = (await s.get(f"/sessions/{child}/rows"))["rows"]
            assert len(row["turns"]) == 3
            start = row["turns"][-1]["start"]
            assert row["ids"][:start] == before[0]["ids"][:start]
            assert not any(row["mask"][:start]), "what the parent learns from is learnt once"
            assert all(row["mask"][start : row["turns"][-1]["end"]])
            assert (await at.world.host.state(child)).recoverable_to == 4


async def test_a_restore_gives_sandbox_and_session_back_at_another_host_and_router(
    stage: Staging, host_at: Callable[[str], Any]
) -> None:
    one, two = await host_at("one"), await host_at("two")
    given = {"sandbox_token": "word", "tokenizer": folder()}
    async with (
        stage(sandbox_hosts={"": (one.url,)}, **given) as first,
        stage(sandbox_hosts={"": (two.url,)}, **given) as second,
    ):
        await first.engine("a", token_seconds=SLOWER)
        await second.engine("b", token_seconds=SLOWER)
        talk = await play(first, one)
        before = (await first.get("/sessions/s/rows"))["rows"]
        back = await ask(second, "/sessions/s/restore", {"turn": 3}, 200)
        assert (back["told"]["turn"], back["known_turns"], back["host"]) == (3, 2, two.url)
        assert await two.world.output_of("s", "cat /home/a") == "3"
        answer = await chat(second, "s", talk[:5])
        assert answer["choices"][0]["rose"]["history"]["known_messages"] == 4
        (row,) = (await second.get("/sessions/s/rows"))["rows"]
        assert row["ids"] == before[0]["ids"], "the same tokens, as if nothing had happened"
        assert row["mask"] == before[0]["mask"]
        with pytest.raises(Fenced):
            await one.world.host.checkpoint("s")


async def test_a_router_that_missed_a_sessions_last_turns_goes_on_from_the_records(
    stage: Staging, host_at: Callable[[str], Any]
) -> None:
    """It took what it knew itself for all, and rendered the turns since from their messages."""
    one = await host_at("one")
    given = knowing(one.url)
    async with stage(**given) as first, stage(**given) as second:
        await first.engine("a", token_seconds=SLOWER)
        await second.engine("b", token_seconds=SLOWER)
        talk = await play(first, one, 2)
        await ask(second, "/sessions/s/restore", {"turn": 2}, 200)
        del talk[3:]
        for turn in (2, 3, 4):
            if turn > 2:
                await one.world.output_of("s", f"echo {turn} > /home/a")
                talk.append({"role": "user", "content": f"turn {turn}"})
            await chat(second, "s", talk)
        theirs = (await second.get("/sessions/s/rows"))["rows"][-1]
        back = await ask(first, "/sessions/s/restore", {"turn": 5}, 200)
        assert back["known_turns"] == 3
        ours = (await first.get("/sessions/s/rows"))["rows"][-1]
        assert ours["ids"] == theirs["ids"][: len(ours["ids"])]
        answer = await chat(first, "s", talk[:7])
        assert answer["choices"][0]["rose"]["history"]["known_messages"] == 6


async def test_children_that_other_hosts_made_are_told_of_their_turns_there(
    stage: Staging, host_at: Callable[[str], Any]
) -> None:
    """All were looked for where the fork was answered, which has only those that it made."""
    one, two = await host_at("one"), await host_at("two")
    async with stage(**knowing(one.url, two.url)) as s:
        await s.engine("a", token_seconds=SLOWER)
        talk = await play(s, one, 2)
        # Of a router that was lost before it heard so.
        (first,) = (await one.world.host.fork("s", 1, 2, name="group")).sessions
        await two.world.host.restore("s", 2)
        await one.world.host.renew()
        clock = s.router.service.sandboxes
        assert isinstance(clock, TurnClock)
        hosts = clock._hosts
        assert isinstance(hosts, SandboxHosts)
        hosts.settle("", "s", two.url)
        made = await ask(s, "/sessions/s/fork", {"n": 2, "name": "group"}, 201)
        assert made["sessions"][0] == first
        assert [hosts._where.get(("", child)) for child in made["sessions"]] == [None, two.url]
        for child, at in zip(made["sessions"], (one, two), strict=True):
            await chat(s, child, talk[:3])
            assert (await at.world.host.state(child)).recoverable_to == 3


async def test_a_session_that_moved_is_told_of_its_next_turn_where_it_is(
    stage: Staging, host_at: Callable[[str], Any]
) -> None:
    """Whoever restores at a host tells no router of it; that turn was missed."""
    one, two = await host_at("one"), await host_at("two")
    async with stage(**knowing(one.url, two.url)) as s:
        await s.engine("a", token_seconds=SLOWER)
        talk = await play(s, one, 2)
        await two.world.host.restore("s", 2)
        await one.world.host.renew()
        await chat(s, "s", talk[:3])
        assert (await two.world.host.state("s")).recoverable_to == 3


@pytest.mark.parametrize("own", [0, 1])
async def test_a_child_that_comes_back_at_another_router_does_not_learn_its_parents_turns(
    stage: Staging, host_at: Callable[[str], Any], own: int
) -> None:
    one = await host_at("one")
    given = knowing(one.url)
    async with stage(**given) as first, stage(**given) as second:
        await first.engine("a", token_seconds=SLOWER)
        await second.engine("b", token_seconds=SLOWER)
        talk = (await play(first, one))[:5]
        (child,) = (await ask(first, "/sessions/s/fork", {"turn": 3, "n": 1}, 201))["sessions"]
        await chat(first, child, talk)
        talk.append({"role": "user", "content": "and on"})
        await chat(first, child, talk)
        # At the turn that it was forked at the record is its parent's.
        back = await ask(second, f"/sessions/{child}/restore", {"turn": 3 + 2 * own}, 200)
        assert back["known_turns"] == 2 + own
        (row,) = (await second.get(f"/sessions/{child}/rows"))["rows"]
        learnt = [any(row["mask"][one["start"] : one["end"]]) for one in row["turns"]]
        assert learnt == [False, False, True][: 2 + own]


def of_tiny_turns(sessions: int, turns: int, messages: int = 1) -> Json:
    """A body of ``turns`` that is small for what it asks for."""
    path = [b"d"] * messages
    turn = [b"abcd", b"", b"", [], "stop", "", b"d"]
    received = [[f"r{one}", *turn, [] if one else path, None] for one in range(turns)]
    history = base64.b64encode(msgspec.msgpack.encode([saved_turns.FORMAT, [], received])).decode()
    return {"sessions": [f"t{number}" for number in range(sessions)], "history": history}


class Homeless:
    """As much of a router's turns as its branches need."""

    sandboxes = Nobody()

    def home_of(self, _session: str) -> None:
        return None


async def test_others_turns_go_on_while_a_large_group_gets_its_conversation() -> None:
    """The copies were made at once: 300 sessions of 1,000 turns held a router for two seconds."""
    alone = 0

    async def others() -> None:
        nonlocal alone
        while True:
            await asyncio.sleep(0)
            alone += 1

    branches = Branches(MessageTree(), cast("Service", Homeless()))
    given = msgspec.convert(of_tiny_turns(64, 10), _Turns)
    beside = asyncio.create_task(others())
    await asyncio.sleep(0)
    assert await branches._adopt("", given) == 10
    beside.cancel()
    assert alone >= 63
    assert all(branches.tree.rows(("", session)) for session in given.sessions)


async def test_a_fork_that_would_be_too_many_copies_goes_on_without_a_conversation() -> None:
    branches = Branches(MessageTree(), cast("Service", Homeless()))
    body = of_tiny_turns(64, 1025)
    made = {"ids": [int.from_bytes(b"abcd", "little")] * 1025, "history": body["history"]}
    one = branches._given("", "s", ("t",), made, inherited=True)
    assert await branches._adopt("", one) == 1025
    all_ = branches._given("", "s", tuple(body["sessions"]), made, inherited=True)
    assert await branches._adopt("", all_) == 0


async def test_bad_forks_and_restores_are_refused_by_name(
    stage: Staging, host_at: Callable[[str], Any]
) -> None:
    one = await host_at("one")
    async with stage(sandbox_hosts={"": (one.url,)}, sandbox_token="word", tokenizer=folder()) as s:
        await s.engine("a", token_seconds=SLOWER)
        await play(s, one, 1)
        for path, body, status, word in (
            ("/sessions/s/fork", {"turn": 7, "n": 2}, 404, "there are: 0, 1"),
            ("/sessions/nobody/fork", {"n": 2}, 404, "no record"),
            ("/sessions/s/fork", {"n": 0}, 400, "n: expected a whole number >= 1"),
            ("/sessions/s/fork", {"n": 65}, 400, "n: expected a whole number <= 64"),
            ("/sessions/s/fork", {}, 400, "missing required field n"),
            ("/sessions/s/fork", {"n": 1, "m": 2}, 400, "unknown field m"),
            ("/sessions/s/restore", {"turn": "x"}, 400, "turn: expected"),
            ("/sessions/s/restore", {"crossing": "maybe"}, 400, "crossing: invalid"),
            ("/sessions/s/restore", {"tokens": "0" * 64}, 422, "restore the turn whose tokens"),
            ("/sessions/s/turns", {"sessions": ["a"], "history": "aGk="}, 400, "cannot be read"),
            ("/sessions/s/turns", {"sessions": ["a"] * 65}, 400, "length <= 64"),
            ("/sessions/s/turns", of_tiny_turns(64, 1025), 400, "fewer sessions at a time"),
            ("/sessions/s/turns", of_tiny_turns(64, 1, 1025 * 16), 400, "fewer sessions"),
        ):
            result = await ask(s, path, body, status)
            assert word in result["message"], result
    async with stage(sandbox_hosts={"": ("http://127.0.0.1:1",)}) as s:
        assert "does not answer" in (await ask(s, "/sessions/s/fork", {"n": 1}, 503))["message"]
    async with stage() as s:
        assert "--sandbox-host" in (await ask(s, "/sessions/s/fork", {"n": 1}, 501))["message"]


async def test_a_box_with_a_router_forks_sandbox_and_session(
    stage: Staging, host_at: Callable[[str], Any]
) -> None:
    one = await host_at("one")
    async with stage(sandbox_hosts={"": (one.url,)}, sandbox_token="word", tokenizer=folder()) as s:
        await s.engine("a", token_seconds=SLOWER)
        async with Sandbox(session="s", url=one.url, token="word", router=s.url) as box:
            await box.write("/home/a", b"1")
            talk: list[Json] = [{"role": "user", "content": "go"}]
            await chat(s, "s", talk)
            talk.append({"role": "user", "content": "on"})
            await chat(s, "s", talk)
            children = await box.fork(2, name="group")
            again = await box.fork(2, name="group")
            assert [one.session for one in again] == [one.session for one in children]
            for child in children:
                async with child:
                    assert await child.read("/home/a") == b"1"
                    answer = await chat(s, child.session, talk[:3])
                    assert answer["choices"][0]["rose"]["history"]["known_messages"] == 2
            with pytest.raises(UnknownTurn, match="there are"):
                await box.fork(2, 9)
