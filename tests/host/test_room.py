"""What an engine may take: at its start the room that serving leaves, afterwards its own size."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rose_core.devices.memory import Headroom, lendable, overrun
from rose_core.host_reasons import HostReason
from rose_core.wire.host import EngineState, EngineStatus, EnsureEngine, LimitMemory
from rose_core.wire.sync import Sharing
from tests.host.helpers import failed, guarding, order, running, serving, status_of

GIB = 1 << 30
SIZE = 16 << 20


def in_room(room: int | None, source: str = "Reserved") -> EnsureEngine:
    """An engine of 16 MiB that is told this room."""
    plain = order(kv_bytes=str(SIZE))
    engine = msgspec.structs.replace(plain.engine, sharing=Sharing(memory_source=source))
    return msgspec.structs.replace(
        plain, engine=engine, lendable_bytes=room, lendable_text="80.0 GiB in all, serving has 60"
    )


async def test_an_engine_larger_than_what_serving_leaves_waits_until_there_is_room(
    rundir: Path, models: Path, failures: list[EngineStatus]
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(in_room(SIZE - 1))
            refused = await failed(failures, HostReason.INSUFFICIENT_MEMORY)
            assert "more than may be lent: 80.0 GiB in all, serving has 60" in refused.message
            assert (refused.pids, refused.needs_bytes) == ((), SIZE)
            await host.host.ensure(in_room(SIZE))
            served = await serving(host)
            assert (served.device_bytes, served.needs_bytes) == (SIZE, SIZE)


async def test_an_elastic_engine_needs_room_for_the_least_of_its_cache(
    rundir: Path, models: Path, failures: list[EngineStatus]
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(in_room(SIZE // 8 - 1, "Elastic"))
            refused = await failed(failures, HostReason.INSUFFICIENT_MEMORY)
            assert refused.needs_bytes == SIZE // 8
            await host.host.ensure(in_room(SIZE // 8, "Elastic"))
            await serving(host)


async def test_an_engine_that_holds_more_than_it_was_made_for_is_ended(
    rundir: Path, models: Path, failures: list[EngineStatus]
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(in_room(SIZE))
            before = await serving(host)
            await host.host.limit_memory(LimitMemory(before.slot, held_bytes=SIZE))
            await host.host.limit_memory(LimitMemory(before.slot, held_bytes=None))
            assert (await status_of(host)).state is EngineState.SERVING
            await host.host.limit_memory(LimitMemory(before.slot, held_bytes=SIZE + 1))
            ended = await failed(failures, HostReason.MEMORY_OVERRUN)
            assert "was made for" in ended.message
            assert set((await serving(host)).pids).isdisjoint(before.pids)


def test_unknown_is_no_overrun() -> None:
    assert overrun(GIB, None) == overrun(0, 5 * GIB) == overrun(GIB, GIB) == ""
    assert overrun(GIB, 2 * GIB) == "the engine holds 2.0 GiB of its GPU and was made for 1.0 GiB"


def test_a_refusal_names_every_part_of_the_sum() -> None:
    room = lendable(80 * GIB, 40 * GIB, Headroom(percent=20), residues=(2 * GIB,))
    assert room.bytes == (80 - 40 - 16 - 2) * GIB
    reported = room.refusal(24 * GIB)
    for figure in ("24.0 GiB", "2.0 GiB more", "80.0 GiB in all", "40.0 GiB", "16.0 GiB", "22.0"):
        assert figure in reported
