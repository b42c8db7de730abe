"""What an engine holds of its GPU is measured while it serves, remembered, and corrected once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose_agent.errors import BrokenEngine
from rose_agent.host.memory.footprints import Footprints, engine_version
from rose_agent.host.processes.launchers import EngineProgram
from rose_agent.host.sharing.sharing import Sharing, SharingMeans
from rose_core.devices.footprint import MARGIN_BYTES, Footprint, promised
from rose_core.devices.memory import GIB, EngineSize, Lendable
from rose_core.host_reasons import HostReason
from tests.host.helpers import order

KIND = "kind"
ESTIMATE = 5 * GIB
SPAWNED: Any = SimpleNamespace()


def program(footprints: Footprints) -> EngineProgram:
    fixed = promised(footprints.find(KIND), ESTIMATE)
    size = EngineSize(15 * GIB, 1 << 20, 5 << 10, fixed)
    return EngineProgram(("engine",), device_bytes=size.total, size=size, kind=KIND)


async def serving(footprints: Footprints, room: int, folder: Path) -> Sharing:
    """An engine of 20 GiB besides its fixed part, that has just become ready."""
    sharing = Sharing(SharingMeans(), order(), folder / "control", footprints=footprints)
    sharing.room = Lendable(room, "the room")
    await sharing.admit(program(footprints), 0, "slot-1")
    await sharing.verify(SPAWNED)
    return sharing


async def test_the_first_engine_measures_for_those_after_it(tmp_path: Path) -> None:
    footprints = Footprints(tmp_path / "footprints")
    first = await serving(footprints, 40 * GIB, tmp_path)
    assert first.measuring
    assert first.device_bytes == 20 * GIB + ESTIMATE
    first.hold(22 * GIB)
    await first.check()
    second = await serving(Footprints(tmp_path / "footprints"), 40 * GIB, tmp_path)
    assert second.device_bytes == 22 * GIB + MARGIN_BYTES


async def test_one_that_holds_more_than_was_guessed_is_not_ended_where_it_fits(
    tmp_path: Path,
) -> None:
    """It was ended at one byte over a guess, started anew, and ended again, for ever."""
    footprints = Footprints(tmp_path / "footprints")
    sharing = await serving(footprints, 40 * GIB, tmp_path)
    sharing.hold(20 * GIB + ESTIMATE + 1)
    await sharing.check()
    assert sharing.device_bytes == 20 * GIB + ESTIMATE + 1 + MARGIN_BYTES
    sharing.hold(sharing.device_bytes + 1)
    with pytest.raises(BrokenEngine, match="it leaks") as ended:
        await sharing.check()
    assert ended.value.reason is HostReason.MEMORY_OVERRUN


async def test_one_that_does_not_fit_is_ended_once_and_then_waits_for_room(tmp_path: Path) -> None:
    footprints = Footprints(tmp_path / "footprints")
    sharing = await serving(footprints, 26 * GIB, tmp_path)
    sharing.hold(27 * GIB)
    with pytest.raises(BrokenEngine, match=r"28\.0 GiB are asked for from now on"):
        await sharing.check()
    assert sharing.room is not None
    assert sharing.room.refusal(program(footprints).device_bytes), "refused, not killed, from now"


async def test_a_record_that_is_damaged_is_measured_anew(tmp_path: Path) -> None:
    folder = tmp_path / "footprints"
    Footprints(folder).remember(KIND, Footprint(2 * GIB))
    (folder / f"{KIND}.json").write_text("{")
    assert Footprints(folder).find(KIND) is None


async def test_where_nothing_can_be_written_it_is_kept_in_memory(tmp_path: Path) -> None:
    footprints = Footprints(tmp_path / "missing" / "footprints")
    footprints.remember(KIND, Footprint(2 * GIB))
    assert footprints.find(KIND) == Footprint(2 * GIB)


def test_the_version_is_that_of_the_engines_environment(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    assert engine_version(python) == str(python)
    (tmp_path / "lib" / "python3.11" / "site-packages" / "sglang-0.5.23.dist-info").mkdir(
        parents=True
    )
    assert engine_version(python) == "sglang-0.5.23"
