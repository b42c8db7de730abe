"""What is read of a record for a sandbox that comes back, and what a late boundary leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from rose_core.sandboxes.turns import HOLD_SECONDS
from rose_sandbox.inspector.inspector import Effects
from rose_sandbox.metrics import REGISTRY
from rose_sandbox.runtimes.runtime import Facts
from rose_weights.errors import StoreFailed
from rose_weights.store.records import SavedPart
from tests.sandbox.test_host import World


async def test_a_restore_that_fails_for_one_part_reads_the_other_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder goes, and a thread that still wrote there would leave what nobody removes."""
    world = World(tmp_path)
    await world.host.create("a")
    await world.said("a", "sleep 100 &")
    await world.host.checkpoint("a", [1])
    part_into, begun, failed = world.records.part_into, threading.Event(), threading.Event()
    whole = []

    def reading(part: SavedPart, file: Path) -> None:
        if file.name == "files.tar":
            assert begun.wait(20)
            failed.set()
            raise StoreFailed("the disk is away")
        begun.set()
        assert failed.wait(20)
        time.sleep(0.2)  # who waited for the first failure alone would have heard of it
        part_into(part, file)
        whole.append(file)

    monkeypatch.setattr(world.records, "part_into", reading)
    with pytest.raises(StoreFailed, match="the disk is away"):
        await world.host.restore("a")
    assert len(whole) == 1
    assert not whole[0].parent.exists()
    await world.host.close()


async def test_a_look_that_outlasts_a_held_reply_leaves_its_turn_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as a failure, after which all was saved."""
    world = World(tmp_path)
    host, look = world.host, world.inspector.effects
    await host.create("s")
    await world.said("s", "true")
    await host.checkpoint("s", [1])
    await world.said("s", "echo 1 > /home/a")

    async def slow(key: str, facts: Facts) -> Effects:
        await asyncio.sleep(HOLD_SECONDS + 1)
        return await look(key, facts)

    monkeypatch.setattr(world.inspector, "effects", slow)
    late = {"saved": "failed", "reason": "the look outlasted the reply"}
    before = REGISTRY.get_sample_value("rose_sandbox_turns_total", late) or 0
    await host.turn_began("s", [1, 2])
    told = await host.tokens_ready("s")
    assert (told.phase, told.recoverable_to) == ("acting", 1)
    await world.said("s", "echo 2 > /home/b")
    monkeypatch.undo()
    told = await host.checkpoint("s", [1, 2, 3])
    assert (told.action, told.recoverable_to, told.unsaved) == ("files", 3, "")
    assert REGISTRY.get_sample_value("rose_sandbox_turns_total", late) == before + 1
