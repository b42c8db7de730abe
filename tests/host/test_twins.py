"""Two engines of one slot at two shares: who may compute, where turns go, how both end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from rose_agent.host import main
from rose_core.identity import SlotUid
from rose_core.wire.host import EngineState, EnsureEngine
from rose_core.wire.sync import Sharing
from rose_engines.node.permit import BUSY_LANE, FIRST_LANE, Permit
from rose_engines.node.rundir import RunDir
from tests.host.helpers import (
    BEARER,
    body,
    generated,
    guarding,
    running,
    stands_still,
    status_of,
    stop,
    until,
)
from tests.host.mps_node import Node, node, shared_order

WIDE, BUSY = 50, 20


@pytest.fixture
def gpu_node() -> Iterator[Node]:
    with node() as made:
        made.opt_in()
        yield made


def twin_order() -> EnsureEngine:
    order = shared_order(WIDE)
    engine = msgspec.structs.replace(order.engine, sharing=Sharing("MPS", WIDE, busy_percent=BUSY))
    return msgspec.structs.replace(order, engine=engine)


@asynccontextmanager
async def two_engines(rundir: Path, models: Path, on: Node) -> AsyncIterator[main.RunningHost]:
    """A host whose slot serves with both engines."""
    async with running(rundir, models) as host:
        host.host._site.means = on.ways  # what the flags would have made of it
        await host.host.ensure(twin_order())

        async def both() -> bool:
            return (await status_of(host)).lanes == (FIRST_LANE, BUSY_LANE)

        await until(both, "both engines serve")
        yield host


def choose(rundir: Path, lane: int) -> None:
    permit = Permit.attach(RunDir(rundir).slot("slot-1").permit)
    permit.choose(lane)
    permit.detach()


def share_of(pid: int) -> str:
    return psutil.Process(pid).environ()["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]


async def test_both_engines_load_at_their_own_share_and_memory_and_end_together(
    rundir: Path, models: Path, gpu_node: Node
) -> None:
    with guarding(rundir):
        async with two_engines(rundir, models, gpu_node) as host:
            status = await status_of(host)
            assert gpu_node.clients() == set(status.pids)
            assert {share_of(pid) for pid in status.pids} == {str(WIDE), str(BUSY)}
            assert [one.slot for one in host.host.holdings()] == [
                "name-of-slot-1",
                "name-of-slot-1 (busy share)",
            ]
            assert not status.can_dormant
            assert [slot.uid for slot in RunDir(rundir).lent_slots()] == ["slot-1"]
            assert (await host.host.stop(stop())).state is EngineState.GONE
            assert gpu_node.terminated() == set(status.pids)
            assert gpu_node.clients() == frozenset()
            assert RunDir(rundir).all_slots() == ()


async def test_a_turn_is_cut_when_the_permit_names_the_other_engine_which_takes_the_next(
    rundir: Path, models: Path, gpu_node: Node
) -> None:
    with guarding(rundir):
        async with (
            two_engines(rundir, models, gpu_node) as host,
            aiohttp.ClientSession() as client,
        ):
            slot = host.host._lives[SlotUid("slot-1")]  # its engines' own addresses
            wide, busy = slot.lives
            url = f"{(await status_of(host)).endpoint}/generate"
            async with client.post(url, json=body(50_000, stream=True), headers=BEARER) as turn:
                await turn.content.readany()
                choose(rundir, BUSY_LANE)
                with pytest.raises(aiohttp.ClientError):
                    await turn.content.read()
            await stands_still(lambda: generated(client, wide.url))
            parked = await generated(client, wide.url)
            async with client.post(url, json=body(5), headers=BEARER) as reply:
                assert len((await reply.json())["output_ids"]) == 5
            assert await generated(client, busy.url) >= 5
            assert await generated(client, wide.url) == parked
            assert (await status_of(host)).restarts == 0


async def test_only_the_engine_that_the_permit_names_computes_what_both_were_asked(
    rundir: Path, models: Path, gpu_node: Node
) -> None:
    with guarding(rundir):
        async with (
            two_engines(rundir, models, gpu_node) as host,
            aiohttp.ClientSession() as client,
        ):
            wide, busy = host.host._lives[SlotUid("slot-1")].lives
            turns = [
                asyncio.create_task(client.post(f"{one.url}/generate", json=body(50_000)))
                for one in (wide, busy)
            ]
            for lane, works, rests in (
                (BUSY_LANE, busy, wide),
                (FIRST_LANE, wide, busy),
                (BUSY_LANE, busy, wide),
            ):
                choose(rundir, lane)
                rested = await stands_still(lambda url=rests.url: generated(client, url))  # type: ignore[misc]
                before = await generated(client, works.url)

                async def goes_on(url: str = works.url, before: int = before) -> bool:
                    return await generated(client, url) > before

                await until(goes_on, "the named engine computes")
                assert await generated(client, rests.url) == rested
            for turn in turns:
                turn.cancel()
            assert (await status_of(host)).restarts == 0


def test_the_permit_is_open_for_one_engine_and_closed_for_both(rundir: Path) -> None:
    first = RunDir(rundir).create().slot("s").create()
    permit = Permit.create(first.permit)
    twin = first.twin.create()
    os.link(first.permit, twin.permit)
    wide = Permit.attach(first.permit, writable=False)
    busy = Permit.attach(twin.permit, writable=False)
    permit.extend(100)
    assert (wide.is_open(50), busy.is_open(50)) == (True, False)
    permit.choose(BUSY_LANE)
    assert (wide.is_open(50), busy.is_open(50), wide.is_open_for_any(50)) == (False, True, True)
    permit.close_now()
    assert (wide.is_open(50), busy.is_open(50), busy.is_open_for_any(50)) == (False, False, False)
