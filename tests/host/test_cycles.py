"""Two hundred loans and returns leave nothing behind: counted, not timed."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rose_agent.host import main
from rose_agent.host.processes.launchers import EngineOrder, EngineProgram
from rose_agent.host.slots import engine_process
from rose_agent.host.slots.engine_host import GONE_KEPT
from rose_agent.host.users.accounts import Accounts
from rose_agent.os import freezers
from rose_core.wire.host import EngineState, HostStatusRequest
from rose_engines.fake.__main__ import load_weights
from rose_engines.fake.memory import FakeMemory
from rose_engines.node.rundir import RunDir
from rose_engines.weights.memory import PAGE
from tests.host.helpers import guarding, order, running, serving, stop
from tests.host.test_own_user import PYTHON

CYCLES = 200
AT_ONCE = 4
KV_BYTES = 64 * PAGE
# The least that an engine is for the host: a process that answers on its port.
ENGINE = """
import socket, sys
door = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    call, _ = door.accept()
    call.recv(4096)
    call.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
    call.close()
"""


def mappings() -> int:
    """Pieces of our address space: fragmentation shows as more of them."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_memory_that_is_released_and_restored_again_and_again_stays_in_one_piece(
    tmp_path: Path,
) -> None:
    save_file({"layer.weight": np.ones((64, 64), np.float32)}, tmp_path / "model.safetensors")
    live = load_weights(tmp_path)
    memory = FakeMemory(KV_BYTES, tmp_path)
    released, pieces = set(), []
    for _ in range(CYCLES):
        released.add(memory.release())
        memory.restore(live)
        pieces.append(mappings())
    assert released == {KV_BYTES}
    assert len(set(pieces[CYCLES // 2 :])) == 1, "the second hundred leave no trace"


def minimal(order: EngineOrder) -> EngineProgram:
    argv = (str(PYTHON), "-I", "-S", "-c", ENGINE, str(order.port))
    return EngineProgram(argv=argv)


def held(rundir: Path, freezer: freezers.Freezer) -> dict[str, int]:
    """What a host could forget to give back."""
    return {
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  # that is the place
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
        "cgroups": len(freezer.strays()),
        "slots": len(RunDir(rundir).all_slots()),
        "homes": len(list(Path("/tmp").glob("rose-engine-*"))),
    }


async def loan(host: main.RunningHost, rundir: Path, uid: str) -> None:
    with guarding(rundir, uid):
        await host.host.ensure(order(uid))
        await serving(host, uid)
        assert (await host.host.stop(stop(uid))).state is EngineState.GONE


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not PYTHON.exists(), reason="needs root and python3")
async def test_two_hundred_loans_leave_nothing_with_the_host(
    rundir: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_POLL_SECONDS", 0.01)
    freezer = freezers.detect("auto", scope=str(rundir))
    async with running(rundir, models, freezer) as host:
        site = host.host._site  # what the flags would have made of it
        site.launchers, site.accounts = {"fake": minimal}, Accounts(42_300)
        site.accounts.open(RunDir(rundir))
        seen = []
        for first in range(0, CYCLES, AT_ONCE):
            slots = [f"slot-{first + number}" for number in range(AT_ONCE)]
            await asyncio.gather(*(loan(host, rundir, uid) for uid in slots))
            seen.append(held(rundir, freezer))
        assert site.accounts._taken == {}
        assert len((await host.host.status(HostStatusRequest())).engines) == GONE_KEPT
    settled = seen[len(seen) // 2]
    assert {name: seen[-1][name] - settled[name] for name in settled} == dict.fromkeys(settled, 0)
