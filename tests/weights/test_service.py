"""The service over real gRPC: following, resuming, refusing, recovering."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rose_core.delta import name_of
from rose_core.identity import WeightVersion
from rose_weights.bundle import Bundle
from rose_weights.errors import (
    BadManifest,
    Damaged,
    Fenced,
    Incomplete,
    StoreFailed,
    UnknownRun,
)
from rose_weights.messages import FetchRequest, MissingRequest, VersionInfo
from rose_weights.methods import FETCH, MISSING, SERVICE
from rose_weights.receive import client as receiver
from rose_weights.receive.client import WeightsClient
from rose_weights.send import publishing
from rose_weights.send.publishing import WeightsWriter
from rose_weights.serve.service import WeightService
from rose_weights.store.blocks import Blocks
from rose_weights.store.store import Store
from rose_wire import rpc
from rose_wire.errors import Refused, Unavailable
from rose_wire.rpc import Server
from tests.weights.breaking import breaking
from tests.weights.faulty import FaultyDisk
from tests.weights.models import Model, apply_bundle

PATIENCE = 60.0
BAD_PLAN = rpc.Method(SERVICE, "Plan", bytes, bytes)


@dataclass
class Running:
    server: Server
    service: WeightService
    store: Store
    address: str

    async def stop(self) -> None:
        await self.server.stop(0)
        await self.service.close()


async def start(root: Path | Store, *, window: int = 32, address: str = "127.0.0.1:0") -> Running:
    server = Server(token="t")
    store = Store(root) if isinstance(root, Path) else root
    service = WeightService(store, window=window, grace_seconds=0)
    service.bind(server)
    port = await server.start(address)
    return Running(server, service, store, address.replace(":0", f":{port}"))


@asynccontextmanager
async def connected(
    root: Path | Store, *, window: int = 32
) -> AsyncIterator[tuple[Running, WeightsWriter, WeightsClient]]:
    running = await start(root, window=window)
    async with (
        WeightsWriter(running.address, token="t") as writer,
        WeightsClient(running.address, token="t", holder="engine") as client,
    ):
        yield running, writer, client
    await running.stop()


def version(sequence: int, incarnation: int = 1) -> WeightVersion:
    return WeightVersion("run", incarnation, sequence)


async def publish(writer: WeightsWriter, model: Model, count: int) -> list[VersionInfo]:
    """A run of ``count`` versions; every one is what the service answered."""
    opened = await writer.open("run", "test")
    manifest, blocks = model.full("run", opened.fence)
    head = opened.head.version if opened.head else None
    found = [await writer.publish(manifest, blocks, head)]
    for number in range(1, count):
        model.change(seed=number)
        manifest, blocks = model.delta(version(number, opened.fence))
        found.append(await writer.publish(manifest, blocks, found[-1].version))
    return found


async def test_who_watches_sees_every_head_even_before_the_run_exists(tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, writer, client):
        seen: list[WeightVersion] = []

        async def watch() -> None:
            async for head in client.watch("run"):
                seen.append(head.version)
                if head.version.sequence == 2:
                    return

        watching = asyncio.create_task(watch())
        found = await publish(writer, Model(seed=1), 3)
        await asyncio.wait_for(watching, PATIENCE)
        assert seen[-1] == found[-1].version
        assert seen == sorted(seen)


async def test_a_run_describes_itself(tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, writer, client):
        with pytest.raises(UnknownRun, match="known: none"):
            await client.describe("run")
        found = await publish(writer, Model(seed=1), 3)
        assert (await client.describe()).runs == ("run",)
        described = await client.describe("run")
        assert described.head == found[-1]
        assert [kept.version for kept in described.versions] == [version(n) for n in range(3)]
        assert (described.fence, described.publisher) == (1, "test")
        assert found[-1].step == 20


async def test_a_broken_fetch_goes_on_at_the_block(tmp_path: Path) -> None:
    model = Model(seed=1)
    async with connected(tmp_path / "s") as (running, writer, client):
        await publish(writer, model, 1)
        bundle = Bundle(tmp_path / "b")
        manifest, _ = await client.plan("run")
        for block in manifest.blocks[:3]:
            bundle.put(block.sha256, running.store.blocks.get(block.sha256))
        (tmp_path / "b" / "blocks" / manifest.blocks[0].sha256.hex()).write_bytes(b"torn")
        assert bundle.absent(manifest) == [manifest.blocks[0], *manifest.blocks[3:]]
        assert not bundle.complete
        with pytest.raises(Damaged, match="no complete bundle"):
            bundle.manifest()
        await client.pull("run", tmp_path / "b")
        held = {name: np.zeros_like(bits) for name, bits in model.state.items()}
        apply_bundle(held, bundle)
        assert all(np.array_equal(held[name], bits) for name, bits in model.state.items())


async def test_a_lost_connection_costs_its_own_blocks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "BATCH_BYTES", 60_000)
    asked: list[tuple[bytes, ...]] = []
    fetch = WeightService.fetch

    async def noted(service: WeightService, request: FetchRequest) -> AsyncIterator[bytes]:
        asked.append(request.names)
        async for piece in fetch(service, request):
            yield piece
            await asyncio.sleep(0)  # the connections take turns

    monkeypatch.setattr(WeightService, "fetch", noted)
    async with connected(tmp_path / "s") as (running, writer, planner):
        model = Model(seed=1)
        await publish(writer, model, 1)
        manifest, _ = await planner.plan("run")
        bundle = Bundle(tmp_path / "b")
        async with (
            breaking(running.address, bytes_until=20_000) as proxy,
            WeightsClient(proxy.address, token="t", connections=3) as client,
        ):
            await client.fetch(manifest, bundle)
        assert proxy.connections >= 3
        assert proxy.broken == 1
        bundle.finish(manifest)
        assert bundle.absent(manifest) == []
        wanted = {block.sha256 for block in manifest.blocks}
        twice = sum(map(len, asked)) - len(wanted)
        assert 0 < twice <= max(map(len, asked))
        held = {name: np.zeros_like(bits) for name, bits in model.state.items()}
        apply_bundle(held, bundle)
        assert all(np.array_equal(held[name], bits) for name, bits in model.state.items())


async def test_a_store_that_restarts_mid_way_is_survived(tmp_path: Path) -> None:
    model = Model(seed=1)
    # A Unix socket: nobody else can take the address while the store is away.
    folder = tempfile.mkdtemp()
    running = await start(tmp_path / "s", address=f"unix:{folder}/s")
    async with (
        WeightsWriter(running.address, token="t") as writer,
        WeightsClient(running.address, token="t") as client,
    ):
        await publish(writer, model, 1)
        await running.stop()
        with pytest.raises(Unavailable):
            await client.plan("run")
        model.change(seed=5)
        manifest, blocks = model.delta(version(1))
        going_on = asyncio.create_task(
            writer.publish(manifest, blocks, version(0), patience_seconds=PATIENCE)
        )
        await asyncio.sleep(0.3)
        assert not going_on.done()
        running = await start(tmp_path / "s", address=running.address)
        assert (await asyncio.wait_for(going_on, PATIENCE)).version == version(1)
        got = await client.pull("run", tmp_path / "b")
        assert got.target == version(1)
    await running.stop()
    shutil.rmtree(folder)


async def test_a_damaged_block_at_the_store_is_refused_and_healed_by_a_publish(
    tmp_path: Path,
) -> None:
    model = Model(seed=1)
    async with connected(tmp_path / "s") as (_, writer, client):
        await publish(writer, model, 1)
        victim = (await client.plan("run"))[0].blocks[0].sha256
        Blocks(tmp_path / "s" / "blocks").path(victim).write_bytes(b"flipped")
        with pytest.raises((Damaged, Incomplete)):
            await client.pull("run", tmp_path / "b")
        assert not Bundle(tmp_path / "b").complete
        await publish(writer, Model(seed=1), 1)  # the trainer starts anew from its checkpoint
        got = await client.pull("run", tmp_path / "b")
        assert got.target == version(0, 2)


async def test_a_full_disk_is_waited_out(tmp_path: Path) -> None:
    model = Model(seed=1)
    async with connected(tmp_path / "s") as (running, writer, client):
        await publish(writer, model, 1)
        model.change(seed=5)
        manifest, blocks = model.delta(version(1))
        blocks_here = running.store.blocks
        assert isinstance(blocks_here, Blocks)
        whole = blocks_here._disk
        blocks_here._disk = FaultyDisk(0, full=True)
        with pytest.raises(StoreFailed, match="No space left"):
            await writer.publish(manifest, blocks, version(0), patience_seconds=0.3)
        assert (await client.describe("run")).head == (await client.describe("run")).versions[0]
        going_on = asyncio.create_task(
            writer.publish(manifest, blocks, version(0), patience_seconds=PATIENCE)
        )
        await asyncio.sleep(0.2)
        blocks_here._disk = whole
        assert (await asyncio.wait_for(going_on, PATIENCE)).version == version(1)


async def test_a_disk_that_hangs_under_a_block_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store answers pings all the while, so the connection does not break by itself."""
    monkeypatch.setattr(publishing, "BLOCK_SECONDS", 0.3)
    hanging, released, put = threading.Event(), threading.Event(), Store.put_block

    def slow(store: Store, data: bytes) -> bytes:
        if not hanging.is_set():
            hanging.set()
            released.wait(PATIENCE)
        return put(store, data)

    monkeypatch.setattr(Store, "put_block", slow)
    async with connected(tmp_path / "s") as (_, writer, client):
        try:
            await asyncio.wait_for(publish(writer, Model(seed=1), 1), PATIENCE)
            assert not released.is_set()
        finally:
            released.set()
        assert (await client.pull("run", tmp_path / "b")).target == version(0)


async def test_a_stream_of_blocks_that_breaks_ends_its_answers(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"a block"
        raise ConnectionResetError

    service = WeightService(Store(tmp_path / "s"))
    answers = service.put(broken())
    assert (await anext(answers)).name == name_of(b"a block")
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(anext(answers), PATIENCE)


async def test_two_publishers_the_older_is_told_at_once(tmp_path: Path) -> None:
    model = Model(seed=1)
    async with connected(tmp_path) as (running, writer, _):
        await publish(writer, model, 1)
        async with WeightsWriter(running.address, token="t") as second:
            await second.open("run", "second")
        model.change(seed=2)
        manifest, blocks = model.delta(version(1))
        with pytest.raises(Fenced, match="second"):
            await writer.publish(manifest, blocks, version(0))


async def test_old_versions_go_and_who_held_one_is_served_by_its_lease(tmp_path: Path) -> None:
    model = Model(seed=1)
    async with connected(tmp_path / "s", window=2) as (running, writer, client):
        found = await publish(writer, model, 2)
        await client.plan("run", have=found[0].version, digest=found[0].digest)  # takes a lease
        for number in range(2, 8):
            model.change(seed=number)
            manifest, blocks = model.delta(version(number))
            await writer.publish(manifest, blocks, version(number - 1))
            await running.service.close()
        kept = [one.version.sequence for one in (await client.describe("run")).versions]
        assert kept == [0, 1, 5, 6, 7]
        plan, merged = await client.plan("run", have=version(1), digest=found[1].digest)
        assert plan.base == version(1)
        assert merged == 3
        for block in plan.blocks:
            running.store.blocks.get(block.sha256)


async def test_nothing_is_said_without_the_token(tmp_path: Path) -> None:
    running = await start(tmp_path)
    async with WeightsClient(running.address, token="wrong") as client:
        with pytest.raises(Refused, match="bearer token"):
            await client.describe()
        with pytest.raises(Refused, match="bearer token"):
            await anext(client.watch("run"))
    await running.stop()


async def test_garbage_is_refused_by_name(tmp_path: Path) -> None:
    async with connected(tmp_path) as (running, writer, client):
        await publish(writer, Model(seed=1), 1)
        manifest, blocks = Model(seed=2).full("run", 1)
        with pytest.raises(BadManifest, match="out of order"):
            await writer.publish(manifest, blocks, version(0))
        channel = rpc.connect(running.address)
        with pytest.raises(Refused, match="is not here"):
            await anext(rpc.receive(channel, FETCH, FetchRequest((bytes(32),)), token="t"))
        for name in (b"", b"../../etc/passwd"):
            with pytest.raises(Refused, match="is no name of a block"):
                await anext(rpc.receive(channel, FETCH, FetchRequest((name,)), token="t"))
            with pytest.raises(Refused, match="is no name of a block"):
                await rpc.call(
                    channel, MISSING, MissingRequest((name,)), timeout=PATIENCE, token="t"
                )
        with pytest.raises(Refused, match="not a PlanRequest"):
            await rpc.call(channel, BAD_PLAN, b"garbage", timeout=PATIENCE, token="t")
        await channel.close()
        assert (await client.describe("run")).head is not None
