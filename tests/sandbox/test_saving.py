"""What is read of a record for a sandbox that comes back, and what a late boundary leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rose_core.sandboxes import policy
from rose_core.sandboxes.policy import HostPressure, ModelWait, SaveCosts
from rose_core.sandboxes.traffic import CheckpointRequest, admit
from rose_core.sandboxes.turns import HOLD_SECONDS
from rose_sandbox import admission
from rose_sandbox import host as host_module
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
    await world.output_of("a", "sleep 100 &")
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
    await world.output_of("s", "true")
    await host.checkpoint("s", [1])
    await world.output_of("s", "echo 1 > /home/a")

    async def slow(key: str, facts: Facts) -> Effects:
        await asyncio.sleep(HOLD_SECONDS + 1)
        return await look(key, facts)

    monkeypatch.setattr(world.inspector, "effects", slow)
    late = {"saved": "failed", "reason": "the look outlasted the reply"}
    before = REGISTRY.get_sample_value("rose_sandbox_turns_total", late) or 0
    await host.turn_began("s", [1, 2])
    result = await host.tokens_ready("s")
    assert (result.phase, result.recoverable_to) == ("acting", 1)
    await world.output_of("s", "echo 2 > /home/b")
    monkeypatch.undo()
    result = await host.checkpoint("s", [1, 2, 3])
    assert (result.action, result.recoverable_to, result.unsaved) == ("files", 3, "")
    assert REGISTRY.get_sample_value("rose_sandbox_turns_total", late) == before + 1


async def test_a_boundary_that_got_no_place_asks_for_one_since_its_first_turn_without_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked anew at each turn, as the youngest of all."""
    asked: list[float] = []

    def seen(
        waiting: Sequence[CheckpointRequest], now: float, free: int, *, serving_burns: bool
    ) -> tuple[CheckpointRequest, ...]:
        asked.extend(one.asked for one in waiting)
        return admit(waiting, now, free, serving_burns=serving_burns)

    monkeypatch.setattr(admission, "admit", seen)
    monkeypatch.setattr(host_module, "HOLD_SECONDS", 0.01)
    world = World(tmp_path)
    await world.host.create("s")
    world.traffic = HostPressure(serving_burns=True)
    for turn in range(3):
        await world.host.turn_began("s", range(turn))
        await world.host.tokens_ready("s")
    assert len(asked) >= 3
    assert len(set(asked)) == 1
    world.traffic = HostPressure()
    await world.host.checkpoint("s", [1, 2, 3])
    await world.host.checkpoint("s", [1, 2, 3, 4])
    assert len(set(asked)) == 2, "all had a record"
    await world.host.close()


async def test_a_host_learns_what_saves_take_and_forgets_slow_resumes(tmp_path: Path) -> None:
    world = World(tmp_path)
    saver = world.host._saver
    await world.host.create("s")
    result = await world.host.checkpoint("s", [1])
    assert result.seconds > 0
    assert saver.costs == SaveCosts().saved(result.seconds)
    saver.costs = replace(saver.costs, resume=50.0)
    for wait, forgets in ((ModelWait(5.0, 1.0), False), (ModelWait(20.0, 1.0), True)):
        before = saver.costs.resume
        await world.host.turn_began("s", [1, 2], wait=wait)
        result = await world.host.tokens_ready("s")
        assert result.action != "suspend"
        assert (saver.costs.resume < before) == forgets
    await world.host.close()


@pytest.mark.parametrize("acts", [True, False], ids=["acts", "only talks"])
async def test_a_turn_is_saved_after_some_that_no_look_was_quick_enough_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, acts: bool
) -> None:
    """Where every look outlasted its reply no turn was ever saved."""
    world = World(tmp_path)
    host, look = world.host, world.inspector.effects
    await host.create("s")
    await host.checkpoint("s", [1])
    monkeypatch.setattr(policy, "STARVED_FACTOR", 2 * HOLD_SECONDS / host._saver.costs.save)

    async def slow(key: str, facts: Facts) -> Effects:
        await asyncio.sleep(HOLD_SECONDS + 0.2)
        return await look(key, facts)

    monkeypatch.setattr(world.inspector, "effects", slow)
    saved = []
    for turn in range(2, 5):
        if acts:
            await world.output_of("s", f"echo {turn} >> /home/a")
        await host.turn_began("s", range(turn))
        result = await host.tokens_ready("s")
        if acts:  # waits for what looks and saves
            await world.output_of("s", "true")
        saved.append((await host.state("s")).recoverable_to)
        assert result.phase in {"acting", "saving"}
    (box,) = host._boxes.values()
    assert box.boundary is not None
    await box.boundary
    saved.append((await host.state("s")).recoverable_to)
    assert (saved[0], saved[-1]) == (1, 4)
    if acts:
        assert saved == [1, 1, 4, 4]
        record = world.records.read("s")
        assert world.records.ids(record) == (0, 1, 2, 3)
        await host.restore("s")
        assert await world.output_of("s", "cat /home/a") == "2\n3\n4"
    await host.close()
