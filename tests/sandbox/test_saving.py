"""What is read of a record for a sandbox that comes back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

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
