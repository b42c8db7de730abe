"""Trainer side to receiver side over a real gRPC connection, bit for bit."""

import asyncio
from pathlib import Path

import numpy as np

from rose_core.identity import WeightVersion
from rose_weights.bundle import Bundle
from rose_weights.receive.client import WeightsClient
from rose_weights.send.publishing import WeightsWriter
from rose_weights.serve.service import WeightService
from rose_weights.store.store import Store
from rose_wire.rpc import Server
from tests.weights.models import Model, apply_bundle


async def test_a_receiver_follows_a_publisher_bit_for_bit(tmp_path: Path) -> None:
    server = Server(token="t")
    service = WeightService(Store(tmp_path / "store"))
    service.bind(server)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    model = Model(seed=1)
    held = model.copy()
    async with (
        WeightsWriter(address, token="t") as writer,
        WeightsClient(address, token="t", holder="engine") as client,
    ):
        opened = await writer.open("grpo", "test")
        assert opened.fence == 1
        manifest, blocks = model.full("grpo", 1)
        await writer.publish(manifest, blocks, None)
        at = manifest
        for number in range(1, 4):
            model.change(seed=number)
            manifest, blocks = model.delta(WeightVersion("grpo", 1, number))
            await writer.publish(manifest, blocks, WeightVersion("grpo", 1, number - 1))
        got = await client.pull(
            "grpo", tmp_path / "b", have=WeightVersion("grpo", 1, 0), digest=at.digest
        )
        assert got.base == at.target
        apply_bundle(held, Bundle(tmp_path / "b"))
        assert all(np.array_equal(held[name], model.state[name]) for name in held)
        full = await client.pull("grpo", tmp_path / "full")
        assert full.base is None
        fresh = {name: np.zeros_like(bits) for name, bits in held.items()}
        apply_bundle(fresh, Bundle(tmp_path / "full"))
        assert all(np.array_equal(fresh[name], model.state[name]) for name in held)
    await server.stop()
    await service.close()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
