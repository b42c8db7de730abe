"""Two routers of one lease: one view of the engines, one home for every trajectory."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from rose_core.rollouts.capacity.replicas import home_of, part_of_cap
from rose_core.wire.routing import AdapterVersion, EngineKind, EngineUpdate, RouterNote
from rose_dev.waiting import until
from rose_engines.fake.model import continuation
from rose_router.engines import attach
from rose_router.engines.fleet import Fleet
from rose_router.errors import BadRequest
from rose_router.http import forward
from rose_router.http.admission import bodies
from rose_router.http.forward import FORWARDED
from rose_router.replicas import peers, relay
from rose_router.replicas.peers import Peer
from rose_sandbox.http import ServingTraffic, application
from tests.router.conftest import LEASE, VERSION, Stage
from tests.router.scripts import folder
from tests.router.test_http import PROMPT, ask, events
from tests.sandbox.test_host import World

Make = Callable[..., AbstractAsyncContextManager[Stage]]
NAMES = ("one", "two")


# --- who owns what


@given(st.integers(0, 200), st.integers(1, 9))
def test_the_parts_of_a_cap_add_up_to_it(cap: int, count: int) -> None:
    names = [f"r{number}" for number in range(count)]
    assert sum(part_of_cap(cap, name, names) for name in names) == cap


def test_a_replica_that_leaves_moves_only_its_own_trajectories() -> None:
    names = ["a", "b", "c"]
    keys = [f"t{number}" for number in range(600)]
    before = {key: home_of(key, names) for key in keys}
    after = {key: home_of(key, ["a", "b"]) for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "c")
    counts = [list(before.values()).count(name) for name in names]
    assert min(counts) > 150


# --- two of them


@pytest.fixture
def pair(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AbstractAsyncContextManager[list[Stage]]]:
    monkeypatch.setattr(peers, "LOOK_SECONDS", 0.05)
    found: list[Peer] = []

    async def resolve() -> list[Peer]:
        return list(found)

    @asynccontextmanager
    async def both(**settings: Any) -> AsyncIterator[list[Stage]]:  # noqa: ANN401  # of Settings
        async with (
            stage(replica="one", replicas=resolve, **settings) as one,
            stage(replica="two", replicas=resolve, **settings) as two,
        ):
            for name, s in zip(NAMES, (one, two), strict=True):
                attach = f"127.0.0.1:{s.router.attach_port}"
                found.append(Peer(name, s.url, attach))
            yield [one, two]

    return both


def key_of(name: str) -> str:
    """A session key whose home is that replica."""
    return next(key for key in map(str, range(1000)) if home_of(key, NAMES) == name)


async def known(s: Stage, engine: str, cap: int) -> None:
    await until(lambda: getattr(s.router.service.fleet.get(engine), "cap", 0) == cap)


async def generate(s: Stage, **fields: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    async with s.post("/generate", ask(**fields)) as reply:
        assert reply.status == 200, await reply.text()
        answer: dict[str, Any] = await reply.json()
        return answer


async def test_an_engine_that_attached_to_one_replica_serves_both_and_closes_for_both(
    pair: Callable[[], AbstractAsyncContextManager[list[Stage]]],
) -> None:
    async with pair() as (one, two):
        engine = await one.engine("e", cap=5)
        await known(one, "e", 3)
        await known(two, "e", 2)
        answer = await generate(two, session_id=key_of("two"))
        assert answer["output_ids"] == continuation(PROMPT, 12, VERSION)
        engine.owner.send(gate_open=False)
        relayed = two.router.service.fleet.get("e")
        assert relayed is not None
        await until(lambda: not relayed.gate_open)


async def test_a_trajectory_has_one_home_wherever_its_turns_arrive(
    pair: Callable[[], AbstractAsyncContextManager[list[Stage]]],
) -> None:
    async with pair() as (one, two):
        await one.engine("e", cap=8)
        await known(two, "e", 4)
        for s in (one, two):
            await generate(s, session_id=key_of("two"))
        async with one.post("/generate", ask(session_id=key_of("two"), stream=True)) as reply:
            seen = await events(reply)
        assert seen[-1]["output_ids"] == continuation(PROMPT, 12, VERSION)
        assert two.router.service.ledger.totals.turns == 3
        assert one.router.service.ledger.totals.turns == 0
        async with one.post("/trajectories", {"trained": [key_of("two"), "?"]}) as reply:
            assert await reply.json() == {"unknown": ["?"]}


async def test_a_session_in_a_url_has_one_home_wherever_its_turns_arrive(
    pair: Callable[..., AbstractAsyncContextManager[list[Stage]]],
) -> None:
    async with pair(tokenizer=folder()) as (one, two):
        await one.engine("e", cap=8)
        await known(two, "e", 4)
        key = key_of("two")
        for s in (one, two):
            body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 4}
            async with s.post(f"/s/{key}/v1/messages", body) as reply:
                assert (await reply.json())["rose"]["session_by"] == "X-Rose-Session"
        assert two.router.service.ledger.totals.turns == 2
        rows = [(await s.get(f"/sessions/{key}/rows"))["rows"] for s in (one, two)]
        lists = [await s.get("/sessions") for s in (one, two)]
        async with one.http.head(one.url + "/sessions") as reply:
            assert reply.status == 200
    assert [one["session"] for one in lists[0]["sessions"]] == [key]
    assert lists[0] == lists[1]
    assert rows[0] == rows[1]
    assert sum(len(row["turns"]) for row in rows[0]) == 2


async def test_a_long_prompt_is_decoded_by_its_home_alone(
    pair: Callable[[], AbstractAsyncContextManager[list[Stage]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, in_slices = list[int](), bodies._in_slices

    async def noted(*given: Any) -> Any:  # noqa: ANN401  # its own
        body = await in_slices(*given)
        assert body is not None
        read.append(len(body["input_ids"]))
        return body

    monkeypatch.setattr(bodies, "_in_slices", noted)
    ids = list(range(100_000, 180_000))
    async with pair() as (one, two):
        engine = await one.engine("e", cap=5)
        await known(two, "e", 2)
        for name in NAMES:
            answer = await generate(one, input_ids=ids, session_id=key_of(name))
            assert answer["meta_info"]["prompt_tokens"] == len(ids)
        assert two.router.service.ledger.totals.turns == 1
        assert engine.scheduler.counters.prompt_tokens == 2 * len(ids)
    assert read == [len(ids)] * 2


async def test_a_long_report_is_read_by_every_replica(
    pair: Callable[[], AbstractAsyncContextManager[list[Stage]]],
) -> None:
    trained = [f"{'t' * 60}{number}" for number in range(6000)]
    async with pair() as (one, two):
        await one.engine("e", cap=8)
        await known(two, "e", 4)
        await generate(two, session_id=key_of("two"))
        async with one.post("/trajectories", {"trained": [*trained, key_of("two")]}) as reply:
            assert reply.status == 200, await reply.text()
            assert set((await reply.json())["unknown"]) == set(trained)


async def test_a_caller_that_hangs_up_at_one_replica_ends_its_turn_at_the_other(
    pair: Callable[[], AbstractAsyncContextManager[list[Stage]]],
) -> None:
    async with pair() as (one, two):
        await one.engine("e", cap=8, token_seconds=0.01)
        await known(two, "e", 4)
        body = ask(5000, session_id=key_of("two"), stream=True)
        async with one.post("/generate", body) as reply:
            await reply.content.readline()
            assert len(two.router.service.ledger) == 1
        await until(lambda: not len(two.router.service.ledger))


async def test_aborts_and_pauses_reach_every_replica(
    pair: Callable[[], AbstractAsyncContextManager[list[Stage]]],
) -> None:
    async with pair() as (one, two):
        await one.engine("e", cap=8, token_seconds=0.01)
        await known(two, "e", 4)
        running = asyncio.create_task(generate(two, most=5000, session_id=key_of("two")))
        await until(lambda: len(two.router.service.ledger) == 1)
        async with one.post("/abort_request", {"abort_all": True}) as reply:
            assert reply.status == 200
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        async with one.post("/pause_generation", {"mode": "keep"}) as reply:
            assert reply.status == 200
        assert two.router.service.queue.held
        async with two.post("/continue_generation", {}) as reply:
            assert reply.status == 200
        assert not one.router.service.queue.held


async def test_what_is_refused_here_is_answered_when_the_others_have_been_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused, received = asyncio.Event(), list[str]()

    async def post_to(peer: Peer, *_: object, **__: object) -> bytes:
        await refused.wait()
        await asyncio.sleep(0)
        received.append(peer.name)
        return b""

    async def refuse(_: web.Request) -> web.StreamResponse:
        refused.set()
        raise BadRequest("Malformed", "no")

    async def resolve() -> list[Peer]:
        return [Peer(name, "", "") for name in NAMES]

    monkeypatch.setattr(forward, "_post_to_peer", post_to)
    replicas = peers.Peers("one", Fleet(time.monotonic, 2.0), resolve, "")
    await replicas.start()
    async with ClientSession() as session:
        passing = forward.middleware(replicas, session)
        asked = make_mocked_request("POST", "/pause_generation", payload=EMPTY_PAYLOAD)
        with pytest.raises(BadRequest):
            await passing(asked, refuse)
    assert received == ["two"]
    await replicas.close()


async def test_a_replica_that_is_leaving_passes_everything_on_and_gets_nothing(
    pair: Callable[[], AbstractAsyncContextManager[list[Stage]]],
) -> None:
    async with pair() as (one, two):
        await one.engine("e", cap=8)
        await known(two, "e", 4)
        two.router.service.leaving = True
        for s in (one, two):
            await generate(s, session_id=key_of("two"))
            await generate(s)
        assert one.router.service.ledger.totals.turns == 4
        assert two.router.service.ledger.totals.turns == 0


@pytest.mark.timeout(40)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_ends_does_not_wait_for_turns_of_others_without_end(
    stage: Make, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    monkeypatch.setattr(peers, "LOOK_SECONDS", 0.05)
    found: list[Peer] = []
    begun = asyncio.Event()

    async def resolve() -> list[Peer]:
        return list(found)

    async def caller(s: Stage) -> tuple[int, bytes]:
        body = ask(1000, session_id=key_of("one"), stream=stream)
        async with s.post("/generate", body) as reply:
            result = b""
            with suppress(ClientError):  # a stream without its end
                async for piece in reply.content.iter_any():
                    begun.set()
                    result += piece
            return reply.status, result

    async with stage(replica="one", replicas=resolve) as one:
        async with stage(replica="two", replicas=resolve) as two:
            for name, s in zip(NAMES, (one, two), strict=True):
                found.append(Peer(name, s.url, f"127.0.0.1:{s.router.attach_port}"))
            await one.engine("e", cap=8, token_seconds=0.2)
            await known(two, "e", 4)
            asking = asyncio.create_task(caller(two))
            await until(lambda: len(one.router.service.ledger) == 1)
            if stream:
                await begun.wait()
        status, result = await asking
    assert (status, b'"Draining"' in result) == (200 if stream else 503, True), result


async def test_an_end_waits_for_what_was_passed_on_too(stage: Make) -> None:
    answered: list[str] = []

    async def passed_on() -> None:
        await asyncio.sleep(0)
        answered.append("by another")

    async with stage() as s:
        await s.router.service.drain(passed_on)
        assert answered == ["by another"]


@contextmanager
def refusing() -> Iterator[int]:
    """A port on which nobody listens."""
    yield 9


@contextmanager
def silent() -> Iterator[int]:
    """A port at which connections get no answer at all, as at the address of a pod that is gone."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        port: int = full.getsockname()[1]
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        yield port


@pytest.mark.parametrize("gone", [refusing, silent])
async def test_a_replica_that_does_not_answer_is_stood_in_for(
    stage: Make, monkeypatch: pytest.MonkeyPatch, gone: Callable[[], AbstractContextManager[int]]
) -> None:
    monkeypatch.setattr(relay, "CONNECT_SECONDS", 0.2)
    with gone() as port:

        async def resolve() -> list[Peer]:
            there = f"127.0.0.1:{port}"
            return [Peer("one", "", ""), Peer("two", f"http://{there}", there)]

        async with stage(replica="one", replicas=resolve) as s:
            await s.engine("e")
            answer = await generate(s, session_id=key_of("two"))
    assert answer["output_ids"] == continuation(PROMPT, 12, VERSION)


# --- agents' conversations


async def test_a_conversation_without_a_key_stays_exact_wherever_its_turns_arrive(
    pair: Callable[..., AbstractAsyncContextManager[list[Stage]]],
) -> None:
    async with pair(tokenizer=folder()) as (one, two):
        await one.engine("a")
        await known(two, "a", 4)
        received: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for number in range(4):
            body = {"messages": received, "max_tokens": 4}
            async with (one, two)[number % 2].post("/v1/messages", body) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
            content = answer["content"] or "nothing"
            received += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": "on"},
            ]
        key = answer["rose"]["session"]
        rows = [(await s.get(f"/sessions/{key}/rows"))["rows"] for s in (one, two)]
        missing = await two.get("/sessions/nobody/rows")
    assert rows[0] == rows[1]
    assert [len(row["turns"]) for row in rows[0]] == [4]
    assert missing["type"] == "UnknownSession"


async def test_a_response_is_gone_on_from_wherever_it_was_given(
    pair: Callable[..., AbstractAsyncContextManager[list[Stage]]],
) -> None:
    async with pair(tokenizer=folder()) as (one, two):
        await one.engine("a")
        await known(two, "a", 4)
        async with one.post("/v1/responses", {"input": "go", "max_output_tokens": 3}) as reply:
            first = await reply.json()
        for s in (one, two):
            body = {"input": "on", "max_output_tokens": 3, "previous_response_id": first["id"]}
            async with s.post("/v1/responses", body) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
            assert answer["rose"]["history"]["known_messages"] == 2


async def test_all_replicas_know_the_sessions_that_one_has_forked(
    pair: Callable[..., AbstractAsyncContextManager[list[Stage]]], tmp_path: Path
) -> None:
    host = World(tmp_path)
    runner = web.AppRunner(application(host.host, ServingTraffic(), lambda: "word"))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    given = {"sandbox_hosts": {"": (url,)}, "sandbox_token": "word", "tokenizer": folder()}
    async with pair(**given) as (one, two):
        await one.engine("e", cap=8, token_seconds=0.05)  # the host hears of a turn first
        await known(two, "e", 4)
        parent, talk = key_of("two"), [{"role": "user", "content": "go"}]
        await host.host.create(parent)

        def saved(turn: int) -> bool:
            return host.host._box(parent).clock.saved == turn

        for turn in (1, 2):
            body = {"messages": talk, "max_tokens": 5, "session_id": parent}
            async with one.post("/v1/chat/completions", body) as reply:
                answer = (await reply.json())["choices"][0]["message"]["content"]
            talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "on"}]
            await until(partial(saved, turn))
            await until(lambda: host.host._box(parent).clock.phase == "acting")
        async with one.post(f"/sessions/{parent}/fork", {"n": 8}) as reply:
            assert reply.status == 201, await reply.text()
            made = await reply.json()
        assert {home_of(child, NAMES) for child in made["sessions"]} == set(NAMES)
        for child in made["sessions"]:
            body = {"messages": talk[:3], "max_tokens": 5, "session_id": child}
            async with two.post("/v1/chat/completions", body) as reply:
                document = (await reply.json())["choices"][0]["rose"]["history"]
            assert document["known_messages"] == 2, "its home knows what the other replica forked"
    await host.host.close()
    await runner.cleanup()


def is_saved(host: World, turn: int) -> bool:
    return host.host._box("s").clock.saved == turn


@pytest.mark.parametrize("asked", [0, 1], ids=["that missed it", "that had it"])
async def test_a_session_ends_with_the_tokens_of_its_last_turn_whichever_replica_had_it(
    pair: Callable[..., AbstractAsyncContextManager[list[Stage]]], tmp_path: Path, asked: int
) -> None:
    """The first replica to say that it was over was believed, with older tokens or none."""
    host = World(tmp_path)
    runner = web.AppRunner(application(host.host, ServingTraffic(), lambda: "word"))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with pair(sandbox_hosts={"": (url,)}, sandbox_token="word") as both:
        await both[0].engine("e", cap=8, token_seconds=0.05)
        await known(both[1], "e", 4)
        await host.host.create("s")
        ids = [5]
        for turn, s in enumerate(both, 1):
            body = {"input_ids": ids, "session_id": "s", "sampling_params": {"max_new_tokens": 9}}
            mine = {FORWARDED: "a replica that holds the other one for lost"}
            async with s.http.post(f"{s.url}/generate", json=body, headers=mine) as reply:
                ids = [*ids, *(await reply.json())["output_ids"], 7]
            await until(partial(is_saved, host, turn))
            await host.output_of("s", f"echo {turn} > /home/a")
        at = both[asked]
        async with at.http.post(f"{at.url}/finish_session?session_id=s") as reply:
            assert reply.status == 200
        await until(lambda: list(host.records.ids(host.records.read("s"))) == ids[:-1])
        assert host.records.turns("s") == (0, 1, 2, 3)
        back = await host.host.restore("s")
        assert list(back.ids) == ids[:-1]
        assert await host.output_of("s", "cat /home/a") == "2"
    await host.host.close()
    await runner.cleanup()


async def test_an_adapter_is_passed_on_only_to_replicas_that_know_adapters(
    pair: Callable[[], AbstractAsyncContextManager[list[Stage]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of before the update would place any turn on any of them."""
    monkeypatch.setattr(attach, "RouterNote", lambda **_: RouterNote())
    monkeypatch.setattr(attach, "NOTE_SECONDS", 0.05)
    async with pair() as (one, two):
        held = tuple(AdapterVersion(run, f"{run}@1.0", "d") for run in ("a", "b"))
        update = EngineUpdate("e", EngineKind.BORROWED, LEASE, "http://127.0.0.1:9", cap=8)
        here, there = one.router.service.fleet, two.router.service.fleet
        here.apply(msgspec.structs.replace(update, adapters=held, gate_open=True), 99)
        await one.engine("plain", cap=8)
        await known(two, "plain", 4)
        await asyncio.sleep(0.3)
        assert [engine.name for engine in there] == ["plain"]
        monkeypatch.setattr(attach, "RouterNote", RouterNote)
        await known(two, "e/b", 4)
        relayed = there.get("e/b")
        assert relayed is not None
        assert relayed.update.named
