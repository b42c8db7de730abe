"""Records of sandboxes belong to their run: what another's hosts, or one taken over, can reach.

Two teams keep records in one store over gRPC. Whoever attacks knows everything that is no secret:
names of runs, sessions, records and blocks.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from rose_weights import methods
from rose_weights.call_policy import understanding
from rose_weights.errors import (
    BadManifest,
    Damaged,
    Fenced,
    Forbidden,
    Incomplete,
    StoreFailed,
    UnknownRun,
    WeightsError,
)
from rose_weights.messages import (
    DescribeRequest,
    FetchRequest,
    MissingRequest,
    OpenRequest,
    WatchRequest,
)
from rose_weights.receive.record_client import RemoteRecords
from rose_weights.serve import tenants
from rose_weights.serve.access import Identification, StoreAccess
from rose_weights.serve.records_service import RecordsService
from rose_weights.serve.service import WeightService
from rose_weights.serve.tenants import Tenants
from rose_weights.store.record import SavedPart, TurnRecord
from rose_weights.store.record_store import StoredRecords, place_of
from rose_weights.store.records import OwnedSession, PublishedTurn, Records
from rose_weights.store.store import Store
from rose_wire import rpc
from rose_wire.method import encode

SPEC = {"image": "base"}
SECRET = b"what the agent of team a knows" * 100


@dataclass
class Shop:
    """A store, its teams' credentials, and what team a keeps there."""

    root: Path
    address: str
    words: dict[str, str]
    owned: OwnedSession
    record: TurnRecord
    clients: list[RemoteRecords]

    def client(self, who: str) -> RemoteRecords:
        made = RemoteRecords(self.address, lambda: self.words[who])
        self.clients.append(made)
        return made

    def records(self, who: str, run: str) -> Records:
        return Records(self.client(who), run)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    file = tmp_path / "tenants.json"
    words = {
        "a": tenants.grant(file, "hosts-a", record=("a-grpo",)),
        "b": tenants.grant(file, "hosts-b", record=("b-*",)),
        "trainer of a": tenants.grant(file, "team-a", publish=("a-*",), read=("a-*",)),
        "trainer of b": tenants.grant(file, "team-b", publish=("b-*",), read=("b-*",)),
        "installation": "word",
        "nobody": "",
    }
    access = StoreAccess(tenants=Tenants(file))
    server = rpc.Server(identify=Identification(Tenants(file), "word"))
    store = Store(tmp_path / "store")
    service = WeightService(store, access=access)
    service.bind(server)
    RecordsService(store, access).bind(server)
    port = await server.start("127.0.0.1:0")
    made = Shop(tmp_path, f"127.0.0.1:{port}", words, OwnedSession("", "", 0), None, [])  # type: ignore[arg-type]
    try:
        own = made.records("a", "a-grpo")
        made.owned = await asyncio.to_thread(own.claim, "s", "host-a")
        turn = PublishedTurn(1, (1, 2), SPEC, files=SECRET, processes=b"p")
        made.record = await asyncio.to_thread(own.publish, made.owned, turn)
        yield made
    finally:
        for one in made.clients:
            await asyncio.to_thread(one.close)
        await server.stop()
        await service.close()


def name_of(record: TurnRecord) -> str:
    """What a record that was just published is listed by."""
    return hashlib.sha256(msgspec.json.encode(record)).hexdigest()


def blocks_of(part: SavedPart | None) -> list[bytes]:
    assert part is not None
    return [bytes.fromhex(name) for name in part.packs.values()]


async def test_its_own_host_keeps_and_reads_them_over_the_network(shop: Shop) -> None:
    again = shop.records("a", "a-grpo")

    def back() -> tuple[bytes, tuple[int, ...]]:
        found = again.read("s")
        assert found.files is not None
        return again.part(found.files), again.ids(found)

    assert await asyncio.to_thread(back) == (SECRET, (1, 2))
    child = await asyncio.to_thread(again.claim, "s.1-x", "host-a2")
    await asyncio.to_thread(again.adopt, child, shop.record, ("s", 1))
    assert await asyncio.to_thread(again.turns, "s.1-x") == (1,)
    await asyncio.to_thread(again.claim, "s", "host-a2")
    with pytest.raises(Fenced, match="host-a2"):
        await asyncio.to_thread(shop.records("a", "a-grpo").check, shop.owned)


ATTEMPTS: dict[str, Callable[[RemoteRecords, TurnRecord], object]] = {
    "claim": lambda client, _: client.claim("a-grpo", "s", "thief"),
    "session_state": lambda client, _: client.session_state("a-grpo", "s"),
    "read": lambda client, record: client.read("a-grpo", "s", name_of(record)),
    "block": lambda client, record: client.block("a-grpo", blocks_of(record.files)[0]),
    "put": lambda client, _: client.put("a-grpo", "s", 1, b"mine"),
    "commit": lambda client, record: client.commit("a-grpo", "s", 1, msgspec.json.encode(record)),
    "forget": lambda client, _: client.forget("a-grpo", "s", 1),
}


def test_every_method_is_tried() -> None:
    named = {one for one in vars(RemoteRecords) if not one.startswith("_")} - {"close"}
    assert ATTEMPTS.keys() == named


@pytest.mark.parametrize("attempt", sorted(ATTEMPTS))
@pytest.mark.parametrize("who", ["b", "trainer of a", "trainer of b", "installation", "nobody"])
async def test_nobody_else_reads_overwrites_deletes_or_takes_a_record(
    shop: Shop, who: str, attempt: str
) -> None:
    """Rights to weights, of the same team too, and the installation's token open none of it."""
    client = shop.client(who)
    with pytest.raises(StoreFailed if who == "nobody" else Forbidden):
        await asyncio.to_thread(ATTEMPTS[attempt], client, shop.record)
    own = shop.records("a", "a-grpo")
    await asyncio.to_thread(own.check, shop.owned)
    assert await asyncio.to_thread(own.read, "s") == shop.record


async def test_another_run_cannot_adopt_a_block_by_its_name(shop: Shop) -> None:
    """To know the hash of a block is not to have it: else one would read it by one's own record."""
    client = shop.client("b")
    state = await asyncio.to_thread(client.claim, "b-1", "t", "thief")
    for parent in (None, ("s", 1)):
        record = msgspec.structs.replace(
            shop.record, session="t", owner="thief", fence=state.fence, parent=parent
        )
        with pytest.raises(Incomplete, match="are not among those that hosts of b-1 have sent"):
            await asyncio.to_thread(
                client.commit, "b-1", "t", state.fence, msgspec.json.encode(record)
            )
    assert (await asyncio.to_thread(client.session_state, "b-1", "t")).turns == ()
    own = PublishedTurn(1, (), SPEC, files=b"own")
    await asyncio.to_thread(
        Records(client, "b-1").publish, OwnedSession("t", "thief", state.fence), own
    )
    with pytest.raises(Incomplete, match="is not here"):
        await asyncio.to_thread(client.block, "b-1", blocks_of(shop.record.files)[0])
    with pytest.raises(Damaged):  # by the name of another's record
        await asyncio.to_thread(client.read, "b-1", "t", name_of(shop.record))


@pytest.mark.parametrize("who", ["trainer of a", "trainer of b", "installation"])
async def test_who_may_read_weights_has_no_block_of_a_record_by_its_hash(
    shop: Shop, who: str
) -> None:
    """Blocks of weights are given by name to whoever may read some run."""
    names, word = tuple(blocks_of(shop.record.files)), shop.words[who]
    channel = rpc.connect(shop.address)
    try:
        with pytest.raises(Incomplete, match="is not here"), understanding():
            await anext(rpc.receive(channel, methods.FETCH, FetchRequest(names), token=word))
        if who != "installation":  # which publishes nothing
            asked = MissingRequest(names)
            result = await rpc.call(channel, methods.MISSING, asked, timeout=20, token=word)
            assert result.names == names, "nor is anybody told that it is there"
    finally:
        await channel.close()


@pytest.mark.parametrize("change", ["a field more", "a field fewer"])
async def test_a_record_of_before_or_after_a_field_was_added_is_restored(
    shop: Shop, change: str
) -> None:
    """It is listed by what was stored, which encoded again is something else."""
    client = shop.client("a")
    raw = msgspec.to_builtins(msgspec.structs.replace(shop.record, turn=2))
    if change == "a field more":
        raw |= {"later": 1}
    else:
        del raw["history"], raw["parent"]
    data = msgspec.json.encode(raw)
    await asyncio.to_thread(client.commit, "a-grpo", "s", shop.owned.fence, data)
    records = shop.records("a", "a-grpo")

    def restored() -> bytes:
        taken = records.claim("s", "successor")
        assert taken.last is not None
        assert taken.last.files is not None
        assert records.back(taken, 2).turn == 2
        return records.part(taken.last.files)

    assert await asyncio.to_thread(restored) == SECRET


async def test_a_record_whose_bytes_were_changed_on_the_way_is_refused(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = StoredRecords.stored
    monkeypatch.setattr(
        StoredRecords, "stored", lambda *asked: stored(*asked).replace(b"base", b"evil")
    )
    with pytest.raises(Damaged, match="is not what the state lists"):
        await asyncio.to_thread(shop.records("a", "a-grpo").read, "s")


async def test_a_fenced_host_stages_and_publishes_nothing(shop: Shop) -> None:
    await asyncio.to_thread(shop.records("a", "a-grpo").claim, "s", "successor")
    late = shop.client("a")
    data = msgspec.json.encode(msgspec.structs.replace(shop.record, turn=2))
    for attempt in (
        lambda: late.put("a-grpo", "s", 1, b"late"),
        lambda: late.commit("a-grpo", "s", 1, data),
        lambda: late.forget("a-grpo", "s", 1),
    ):
        with pytest.raises(Fenced, match="successor"):
            await asyncio.to_thread(attempt)


async def test_a_host_that_was_taken_over_has_no_weights_and_no_other_run(shop: Shop) -> None:
    """Its credential is for the records of one run."""
    word, place = shop.words["a"], place_of("a-grpo", "s")
    channel = rpc.connect(shop.address)
    try:
        for run in ("a-grpo", "b-1", place):
            for method, request in (
                (methods.DESCRIBE, DescribeRequest(run)),
                (methods.OPEN, OpenRequest(run, "thief")),
            ):
                with pytest.raises(Forbidden), understanding():
                    await rpc.call(channel, method, request, timeout=20, token=word)  # type: ignore[misc]
            with pytest.raises(Forbidden), understanding():
                async for _ in rpc.receive(channel, methods.WATCH, WatchRequest(run), token=word):
                    pass
        for blocks in (
            rpc.call(
                channel, methods.MISSING, MissingRequest((b"x" * 32,)), timeout=20, token=word
            ),
            anext(rpc.receive(channel, methods.FETCH, FetchRequest((b"x" * 32,)), token=word)),
        ):
            with pytest.raises(Forbidden), understanding():
                await blocks
    finally:
        await channel.close()
    client = shop.client("a")
    for run in ("a-other", "b-1", "a-grpo.box-0123456789abcdef"):
        with pytest.raises(Forbidden):
            await asyncio.to_thread(client.claim, run, "s", "thief")


async def test_no_right_to_weights_opens_a_session(shop: Shop) -> None:
    """A pattern like ``a-*`` has the run that holds the session, by its name."""
    word, place = shop.words["trainer of a"], place_of("a-grpo", "s")
    channel = rpc.connect(shop.address)
    try:
        result = await rpc.call(
            channel, methods.DESCRIBE, DescribeRequest(), timeout=20, token=word
        )
        assert place not in result.runs
        with pytest.raises(Forbidden, match="holds a sandbox's session"), understanding():
            await rpc.call(channel, methods.OPEN, OpenRequest(place, "x"), timeout=20, token=word)
    finally:
        await channel.close()
    await asyncio.to_thread(shop.records("a", "a-grpo").check, shop.owned)


async def test_a_name_with_a_slash_is_no_way_into_anothers_sessions(shop: Shop) -> None:
    """Run ``a`` with session ``b/s`` and run ``a/b`` with session ``s`` would be one place."""
    client = shop.client("b")
    with pytest.raises(WeightsError) as refused:
        await asyncio.to_thread(client.claim, "b-1/x", "s", "thief")
    assert isinstance(refused.value, Forbidden | UnknownRun)


async def test_a_record_of_another_session_is_refused(shop: Shop) -> None:
    client = shop.client("a")
    state = await asyncio.to_thread(client.claim, "a-grpo", "other", "host-a")
    for data in (msgspec.json.encode(shop.record), b"{}", encode(shop.record)):
        with pytest.raises(BadManifest):
            await asyncio.to_thread(client.commit, "a-grpo", "other", state.fence, data)


async def test_a_revoked_host_is_refused_at_once(shop: Shop) -> None:
    client = shop.client("a")
    await asyncio.to_thread(client.session_state, "a-grpo", "s")
    tenants.revoke(shop.root / "tenants.json", "hosts-a")
    async with asyncio.timeout(30):
        while True:
            try:
                await asyncio.to_thread(client.session_state, "a-grpo", "s")
            except StoreFailed as refused:
                assert "no credential, or one that was revoked" in str(refused)  # noqa: PT017
                return
            await asyncio.sleep(0.1)


def test_what_is_staged_is_of_one_run_and_takes_no_memory_of_the_store(tmp_path: Path) -> None:
    """A tenant that stages without an end fills its own blocks, and no other team waits for it."""
    first = Records(Store(tmp_path), "a")
    one = first.claim("one", "h")
    made = first.publish(one, PublishedTurn(1, (), SPEC, files=b"f" * 5000))
    data = msgspec.json.encode(msgspec.structs.replace(made, turn=2))
    # Another process serves the store by now: whatever was remembered of the staging is gone.
    after = StoredRecords(Store(tmp_path))
    block = after.put("a", "one", one.fence, b"more")
    later = StoredRecords(Store(tmp_path))
    assert later.block("a", block) == b"more"
    assert later.commit("a", "one", one.fence, data).turns[-1][0] == 2
    foreign = Records(Store(tmp_path), "b").claim("one", "h")
    record = msgspec.structs.replace(made, fence=foreign.fence)
    with pytest.raises(Incomplete):
        later.commit("b", "one", foreign.fence, msgspec.json.encode(record))
    with pytest.raises(Incomplete):
        later.block("b", block)
