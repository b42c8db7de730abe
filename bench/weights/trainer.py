"""A real optimizer's deltas and the Publisher's stall, on a small model trained here and now."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rose_trainer.lineage import Published
from rose_trainer.publisher import Publisher
from rose_weights.receive.client import WeightsClient
from rose_weights.serve.service import WeightService
from rose_weights.store.store import Store
from rose_wire.rpc import Server


@dataclass(frozen=True)
class Trained:
    """What training and publishing cost.

    Attributes:
        versions: every version after the first.
        step_seconds: mean time of an optimizer step.
        stream_bytes_per_second: fetch of the full state over loopback gRPC, hash-checked.
    """

    versions: list[Published]
    step_seconds: float
    stream_bytes_per_second: float


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """A store service on a free port, in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[Server, WeightService, str]:
        server, service = Server(), WeightService(Store(root))
        service.bind(server)
        return server, service, f"127.0.0.1:{await server.start('127.0.0.1:0')}"

    async def stop(server: Server, service: WeightService) -> None:
        await server.stop()
        await service.close()

    server, service, address = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield address
    finally:
        asyncio.run_coroutine_threadsafe(stop(server, service), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def train(rate: float, warm: int = 20, published: int = 6) -> Trained:
    """Train a small network with AdamW and publish BF16 casts of its FP32 masters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(4096, 512),
        torch.nn.Linear(512, 2048),
        torch.nn.GELU(),
        torch.nn.Linear(2048, 512),
        torch.nn.Linear(512, 4096),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    seconds: list[float] = []

    def step() -> None:
        tokens = torch.randint(4096, (64, 9))
        began = time.perf_counter()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ((tokens[:, :-1] * 7 + 1) % 4096).flatten()
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        seconds.append(time.perf_counter() - began)

    for _ in range(warm):
        step()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "store") as address:
        with Publisher(address, "bench", source=model.state_dict, dtype=torch.bfloat16) as out:
            versions = [out.wait(out.publish(0))]
            for number in range(1, published + 1):
                step()
                versions.append(out.wait(out.publish(number)))
        rate_of_stream = asyncio.run(_stream(address, Path(folder)))
    return Trained(versions[1:], sum(seconds) / len(seconds), rate_of_stream)


async def _stream(address: str, folder: Path) -> float:
    async with WeightsClient(address) as client:
        await client.plan("bench")  # the store merges outside the measured time
        began = time.perf_counter()
        manifest = await client.pull("bench", folder / "bundle")
        return manifest.block_bytes / (time.perf_counter() - began)
