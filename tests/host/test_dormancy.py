"""Rung 4: an engine lets go of its memory, stays stopped, and takes it back under its permit."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from rose_agent.host import main
from rose_agent.host.enforcement.tree import TreeState
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.host import (
    EngineState,
    EngineStatus,
    EnsureEngine,
    HoldEngine,
    Holder,
    SetDormant,
)
from rose_engines.node.rundir import EngineFile, RunDir, WeightsFile, read_json, write_json
from rose_wire.errors import Refused
from rose_wire.rpc import call, connect
from rose_wire.services import DORMANT
from tests.host.helpers import (
    BEARER,
    TOKEN,
    body,
    guarding,
    order,
    running,
    serving,
    status_of,
    until,
)

SLOT = SlotKey(SlotUid("slot-1"), 1)
KV_BYTES = 96 << 20


def holding(**more: str) -> EnsureEngine:
    return order("slot-1", 1, kv_bytes=str(KV_BYTES), token_seconds="0.005", token=TOKEN, **more)


async def _reaches(host: main.RunningHost, state: EngineState) -> EngineStatus:
    async def there() -> bool:
        return (await status_of(host)).state is state

    await until(there, f"the engine is {state}")
    return await status_of(host)


async def _hold(host: main.RunningHost, *, hold: bool) -> None:
    await host.host.hold(HoldEngine(SLOT, Holder.GUARD, hold=hold))


def _started_ns(rundir: Path) -> int:
    record = read_json(RunDir(rundir).slot("slot-1").engine, EngineFile)
    assert record is not None
    return record.started_ns


async def test_a_held_engine_releases_its_memory_and_stands_still_again(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir) as guard:
            await host.host.ensure(holding())
            assert (await serving(host)).can_dormant
            life = host.host._lives[SlotUid("slot-1")].current  # the meter's view of it
            before = life.held_bytes(life.dormancy.site.meter)
            guard.close()
            await _hold(host, hold=True)
            channel = connect(f"local:{rundir}/host.sock")
            await call(channel, DORMANT, SetDormant(SLOT, dormant=True), timeout=10)
            status = await _reaches(host, EngineState.DORMANT)
            assert before is not None
            assert status.residue_bytes is not None
            assert status.residue_bytes < before - KV_BYTES // 2
            assert (status.endpoint, status.version) == ("", "")
            assert status.holders == (Holder.GUARD,)

            async def still() -> bool:
                return life.watched.state is TreeState.STOPPED

            await until(still, "the tree stands still after its errand")
            await channel.close()


async def test_a_dormant_engine_serves_again_without_a_version(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host, aiohttp.ClientSession() as client:
        with guarding(rundir) as guard:
            await host.host.ensure(holding())
            await serving(host)
            folder = RunDir(rundir).slot("slot-1")
            attested = WeightsFile("run@1.1", "d", True, engine_started_ns=_started_ns(rundir))
            write_json(folder.weights, attested)
            assert (await status_of(host)).version == "run@1.1"
            guard.close()
            await host.host.set_dormant(SetDormant(SLOT, dormant=True))
            await _reaches(host, EngineState.DORMANT)
            dormant_ns = _started_ns(rundir)
            assert not folder.weights.exists()
            await host.host.set_dormant(SetDormant(SLOT, dormant=False))
            assert (await status_of(host)).state is EngineState.DORMANT, "its permit is closed"
            guard.open()

            async def activated() -> bool:
                await host.host.set_dormant(SetDormant(SLOT, dormant=False))
                return (await status_of(host)).state is EngineState.SERVING

            await until(activated, "the engine serves again")
            status = await status_of(host)
            assert (status.version, status.residue_bytes, status.restarts) == ("", None, 0)
            assert _started_ns(rundir) > dormant_ns > attested.engine_started_ns
            url = f"{status.endpoint}/generate"
            async with client.post(url, json=body(5), headers=BEARER) as reply:
                assert len((await reply.json())["output_ids"]) == 5


async def test_turns_are_cut_so_that_callers_continue_elsewhere(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host, aiohttp.ClientSession() as client:
        with guarding(rundir):
            await host.host.ensure(holding())
            url = f"{(await serving(host)).endpoint}/generate"
            turn = body(100_000, stream=True)
            async with client.post(url, json=turn, headers=BEARER) as reply:
                await reply.content.readany()
                await host.host.set_dormant(SetDormant(SLOT, dormant=True))
                with pytest.raises(aiohttp.ClientError):
                    await reply.content.read()
            await _reaches(host, EngineState.DORMANT)


@pytest.mark.parametrize(
    ("release", "reason", "text"),
    [
        ("pretend", "NothingReleased", str(KV_BYTES)),
        ("hang", "DormancyFailed", "no answer in 4 s"),
    ],
    ids=["says so and frees nothing", "does not answer"],
)
async def test_an_engine_that_does_not_carry_the_order_out_is_ended(
    rundir: Path, models: Path, release: str, reason: str, text: str
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(holding(release=release))
            before = await serving(host)
            await host.host.set_dormant(SetDormant(SLOT, dormant=True))
            failed = await _reaches(host, EngineState.FAILED)
            assert failed.reason == reason
            assert text in failed.message
            after = await serving(host)
            assert not set(before.pids) & set(after.pids)


async def test_an_engine_that_cannot_release_says_so_and_stays_stopped(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host:
        with guarding(rundir):
            await host.host.ensure(holding(release="refuse"))
            before = await serving(host)
            await _hold(host, hold=True)
            await host.host.set_dormant(SetDormant(SLOT, dormant=True))

            async def refused() -> bool:
                return not (await status_of(host)).can_dormant

            await until(refused, "the engine refuses")
            status = await status_of(host)
            assert status.state is EngineState.SERVING
            assert status.message.startswith("Unsupported")
            assert status.pids == before.pids
            assert status.reason == "HeldByGuard"


async def test_an_engine_that_does_not_serve_cannot_be_dormant(rundir: Path, models: Path) -> None:
    async with running(rundir, models) as host:
        with pytest.raises(Refused, match="no engine"):
            await host.host.set_dormant(SetDormant(SLOT, dormant=True))
        await host.host.ensure(holding())
        status = await host.host.set_dormant(SetDormant(SLOT, dormant=True))
        assert (status.state, status.can_dormant) == (EngineState.STARTING, False)
