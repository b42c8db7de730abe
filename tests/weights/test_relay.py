"""A relay between a store and many receivers: one copy of each block crosses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from rose_core.delta import Manifest
from rose_weights.bundle import Bundle
from rose_weights.errors import Forbidden, UnknownRun
from rose_weights.messages import FetchRequest
from rose_weights.receive.client import WeightsClient
from rose_weights.send.publishing import WeightsWriter
from rose_weights.serve.relay import KEEP_BYTES, RelayHandlers
from rose_weights.serve.service import WeightService
from rose_weights.store.blocks import Blocks
from rose_wire import rpc
from rose_wire.errors import Refused, Unavailable
from rose_wire.rpc import Server
from tests.weights.models import Model, apply_bundle
from tests.weights.test_service import Running, publish, start, version

DEADLINE = 60.0


class Counting:
    """Counts what a store's service sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[bytes] = []
        self.plans = 0
        fetch, plan = WeightService.fetch, WeightService.plan

        async def counted_fetch(
            service: WeightService, request: FetchRequest
        ) -> AsyncIterator[bytes]:
            self.blocks += request.names
            async for piece in fetch(service, request):
                yield piece

        async def counted_plan(service: WeightService, request: object) -> object:
            self.plans += 1
            return await plan(service, request)  # type: ignore[arg-type]

        monkeypatch.setattr(WeightService, "fetch", counted_fetch)
        monkeypatch.setattr(WeightService, "plan", counted_plan)


@asynccontextmanager
async def relayed(
    tmp_path: Path, *, keep_bytes: int = KEEP_BYTES
) -> AsyncIterator[tuple[Running, str, Blocks]]:
    upstream = await start(tmp_path / "store")
    channel = rpc.connect(upstream.address)
    blocks = Blocks(tmp_path / "relay")
    server = Server(token="inner")
    RelayHandlers(channel, blocks, token="t", keep_bytes=keep_bytes).bind(server)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    yield upstream, address, blocks
    await server.stop(0)
    await channel.close()
    await upstream.stop()


@asynccontextmanager
async def behind(upstream: str, folder: Path) -> AsyncIterator[str]:
    """A relay whose store is another relay."""
    channel = rpc.connect(upstream)
    server = Server(token="inner")
    RelayHandlers(channel, Blocks(folder), token="inner").bind(server)
    yield f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    await server.stop(0)
    await channel.close()


async def pull(address: str, folder: Path, model: Model) -> None:
    async with WeightsClient(address, token="inner") as client:
        await client.pull("run", folder)
    held = {name: np.zeros_like(bits) for name, bits in model.state.items()}
    apply_bundle(held, Bundle(folder))
    assert all(np.array_equal(held[name], bits) for name, bits in model.state.items())


async def test_eight_receivers_cost_the_store_one_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(seed=1)
    counting = Counting(monkeypatch)
    async with relayed(tmp_path) as (upstream, address, _):
        async with WeightsWriter(upstream.address, token="t") as writer:
            await publish(writer, model, 3)
        await asyncio.gather(
            *(pull(address, tmp_path / f"b{number}", model) for number in range(8))
        )
        assert len(counting.blocks) == len(set(counting.blocks)) > 0
        assert 1 <= counting.plans <= 8


async def test_a_relay_serves_what_it_holds_to_relays_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(seed=1)
    counting = Counting(monkeypatch)
    async with relayed(tmp_path) as (upstream, near, _), behind(near, tmp_path / "far") as far:
        async with WeightsWriter(upstream.address, token="t") as writer:
            found = await publish(writer, model, 3)
        for number in range(2):
            await pull(far, tmp_path / f"b{number}", model)
        await pull(near, tmp_path / "b2", model)
        assert len(counting.blocks) == len(set(counting.blocks)) > 0
        async with WeightsClient(far, token="inner", holder="engine") as client:
            assert await client.report_attested(found[-1].version, found[-1].digest)
            head = await asyncio.wait_for(anext(client.watch("run")), DEADLINE)
        assert head.version == found[-1].version


async def test_what_is_kept_outlives_the_store_and_damage_is_healed(tmp_path: Path) -> None:
    model = Model(seed=1)
    async with relayed(tmp_path) as (upstream, address, blocks):
        async with WeightsWriter(upstream.address, token="t") as writer:
            await publish(writer, model, 1)
        async with WeightsClient(address, token="inner") as client:
            manifest, _ = await client.plan("run")
            await client.fetch(manifest, Bundle(tmp_path / "one"))
            victim = blocks.path(manifest.blocks[2].sha256)
            victim.write_bytes(victim.read_bytes()[:-1] + b"?")
            await client.fetch(manifest, Bundle(tmp_path / "two"))
            await upstream.server.stop(0)
            await client.fetch(manifest, Bundle(tmp_path / "three"))
            with pytest.raises(Unavailable):
                await client.plan("run")


async def held_at(
    client: WeightsClient, folder: Path, model: Model, number: int
) -> tuple[dict[str, np.ndarray], Manifest]:
    """What a receiver holds that stopped following at a version."""
    manifest = await client.pull("run", folder, want=version(number))
    held = {name: np.zeros_like(bits) for name, bits in model.state.items()}
    apply_bundle(held, Bundle(folder))
    return held, manifest


async def test_a_receiver_three_behind_gets_one_delta_that_the_relay_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(seed=1)
    counting = Counting(monkeypatch)
    async with (
        relayed(tmp_path) as (upstream, address, _),
        WeightsWriter(upstream.address, token="t") as writer,
        WeightsClient(address, token="inner", holder="late") as client,
    ):
        found = await publish(writer, model, 4)
        held, _ = await held_at(client, tmp_path / "old", model, 0)
        for number in range(1, 4):  # somebody in the cluster followed along
            await client.pull(
                "run",
                tmp_path / f"f{number}",
                have=version(number - 1),
                digest=found[number - 1].digest,
                want=version(number),
            )
        crossed = list(counting.blocks)
        manifest, merged = await client.plan("run", have=version(0), digest=found[0].digest)
        assert (manifest.base, manifest.target, merged) == (version(0), version(3), 3)
        await client.pull("run", tmp_path / "b", have=version(0), digest=found[0].digest)
        assert counting.blocks == crossed
        apply_bundle(held, Bundle(tmp_path / "b"))
        assert all(np.array_equal(held[name], bits) for name, bits in model.state.items())
        await upstream.server.stop(0)  # what it knows it still serves
        again, _ = await client.plan("run", have=version(0), digest=found[0].digest)
        assert again == manifest
        single, _ = await client.plan("run", have=version(2), digest=found[2].digest)
        assert (single.base, single.target) == (version(2), version(3))


async def test_a_relay_without_the_single_deltas_has_their_sum_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(seed=1)
    counting = Counting(monkeypatch)
    async with (
        relayed(tmp_path) as (upstream, address, _),
        WeightsWriter(upstream.address, token="t") as writer,
        WeightsClient(address, token="inner") as client,
    ):
        found = await publish(writer, model, 4)
        manifest, merged = await client.plan("run", have=version(0), digest=found[0].digest)
        assert merged == 3
        await client.fetch(manifest, Bundle(tmp_path / "b"))
        assert set(counting.blocks) == {block.sha256 for block in manifest.blocks}


async def test_who_serves_what_is_passed_on(tmp_path: Path) -> None:
    async with (
        relayed(tmp_path) as (upstream, address, _),
        WeightsWriter(upstream.address, token="t") as writer,
        WeightsClient(address, token="inner", holder="engine") as client,
        WeightsClient(upstream.address, token="t") as trainer,
    ):
        (found,) = await publish(writer, Model(seed=1), 1)
        assert not (await trainer.wait_reached(found.version, 1, 0.0)).met
        assert not await client.report_attested(found.version, "0" * 32)
        assert await client.report_attested(found.version, found.digest)
        assert (await trainer.wait_reached(found.version, 1, 0.0)).serving == ("engine",)


async def test_nobody_behind_a_relay_speaks_as_the_trainer(tmp_path: Path) -> None:
    async with (
        relayed(tmp_path) as (upstream, address, _),
        WeightsWriter(upstream.address, token="t") as writer,
        WeightsClient(address, token="inner", holder="engine") as client,
    ):
        (found,) = await publish(writer, Model(seed=1), 1)
        with pytest.raises(Forbidden, match="tells the store itself"):
            await client.compare(found.version, found.digest, (-1.0,), trainer=True)
        result = await client.compare(found.version, found.digest, (-1.0,))
        assert (result.known, result.trainer) == (True, ())


async def test_errors_of_the_store_pass_through(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (_, address, _):
        async with WeightsClient(address, token="inner") as client:
            with pytest.raises(UnknownRun, match="known: none"):
                await client.describe("run")
        async with WeightsWriter(address, token="inner") as writer:
            with pytest.raises(Refused):
                await writer.open("run", "nobody publishes through a relay")


async def test_heads_pass_through(tmp_path: Path) -> None:
    async with (
        relayed(tmp_path) as (upstream, address, _),
        WeightsWriter(upstream.address, token="t") as writer,
        WeightsClient(address, token="inner") as client,
    ):
        await publish(writer, Model(seed=1), 2)
        head = await asyncio.wait_for(anext(client.watch("run")), DEADLINE)
        assert head.version == version(1)


async def test_the_longest_unused_blocks_go(tmp_path: Path) -> None:
    model = Model(seed=1)
    async with relayed(tmp_path, keep_bytes=100_000) as (upstream, address, blocks):
        async with WeightsWriter(upstream.address, token="t") as writer:
            await publish(writer, model, 1)
        for number in range(2):
            await pull(address, tmp_path / f"b{number}", model)
        kept = sum(path.stat().st_size for path in blocks.folder.glob("??/*"))
        assert 0 < kept <= 100_000
