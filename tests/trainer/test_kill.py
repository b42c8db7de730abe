"""kill -9 of the real store process while a trainer publishes: nothing is lost or invented."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rose_core.delta import Manifest
from rose_dev.engine_template import ProcessHandle
from rose_dev.process_testing import CLI, start_process
from rose_trainer.publisher import Publisher
from rose_weights.bundle import Bundle
from rose_weights.main import main
from rose_weights.receive.client import WeightsClient
from rose_wire.errors import Unavailable
from tests.weights.models import apply_bundle

DEADLINE = 90.0


class StoreProcess:
    """``rose weights serve`` on a Unix socket, killed and started again at will."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "store"
        self.address = f"unix:{folder}/s"
        self._process = self._start()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(DEADLINE)

    def restart(self) -> None:
        self.kill()
        self._process = self._start()

    def _start(self) -> ProcessHandle:
        arguments = ["weights", "serve", "--root", str(self.root), "--address", self.address]
        more = ["--http-port", "0", "--window", "3", "--log-level", "ERROR"]
        return start_process(CLI, *arguments, *more)


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    folder = Path(tempfile.mkdtemp())  # short: a socket's path may have 107 characters
    process = StoreProcess(folder)
    yield process
    process.kill()
    shutil.rmtree(folder)


async def pull(address: str, folder: Path) -> Manifest:
    deadline = time.monotonic() + DEADLINE
    async with WeightsClient(address) as client:
        while True:
            try:
                return await client.pull("run", folder)
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)


@pytest.mark.slow
def test_a_store_that_is_killed_again_and_again_ends_with_the_trainers_bits(
    store: StoreProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(512, 256).to(torch.bfloat16)
    bits = weight.view(torch.int16)
    with Publisher(store.address, "run", patience_seconds=DEADLINE) as publisher:
        for step in range(10):
            bits[torch.rand(bits.shape) < 0.02] += 1
            version = publisher.publish(step, {"w": weight})
            if step % 5 == 2:
                store.restart()
        last = publisher.wait(version, DEADLINE)
    store.restart()
    manifest = asyncio.run(pull(store.address, tmp_path / "bundle"))
    held = {"w": np.zeros(weight.numel(), np.uint16)}
    apply_bundle(held, Bundle(tmp_path / "bundle"))
    assert np.array_equal(held["w"], bits.reshape(-1).numpy().view(np.uint16))
    assert (manifest.target, manifest.digest) == (version, last.digest)
    assert main(["verify", str(store.root)]) == 0
    assert "damaged" not in capsys.readouterr().out
