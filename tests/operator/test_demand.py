"""What routers say of their turns reaches slots and statuses: steps in virtual time, real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from rose_core.api import RolloutLease
from rose_core.identity import SlotKey
from rose_core.lending import Demand
from rose_core.lending.demand import ReceivedNote, together
from rose_core.rollouts.training.rhythm import Rhythm, observe
from rose_core.wire.routing import DemandNote
from rose_core.wire.sync import SlotReport, SlotState, SyncRequest
from rose_dev.waiting import until
from rose_operator.kube.api import ObjectKind
from rose_operator.sync.demand import Demands
from rose_router.config import Settings as RouterSettings
from rose_router.main import RunningRouter
from rose_router.main import running as router_running
from rose_router.turns.request import TurnRequest
from rose_wire.bearer import lease_token
from tests.api.objects import LEASE, changed
from tests.operator.bench import SETTINGS, Bench
from tests.operator.stub_agent import replica

BUSY = Demand(16, usual_turns=16, idle_seconds=0.0)
IDLE = Demand(0, usual_turns=16, idle_seconds=300.0)
KEY = "default/grpo"
_RUNNING = SlotState.RUNNING


async def lending(slots: int = 2) -> Bench:
    """Two replicas, a lease with turns that wants and has both."""
    bench = Bench()
    bench.pool()
    bench.demand[KEY] = BUSY
    bench.lease(spec__slots={"min": 1, "max": slots})
    for _ in range(3):
        bench.report()
        await bench.turn(2)
    return bench


def status(bench: Bench) -> dict[str, object]:
    found: dict[str, object] = bench.api.objects[ObjectKind.LEASE, KEY]["status"]
    return found


async def test_a_lease_that_has_no_turns_gives_all_slots_back_and_stays_ready_to_take_some() -> (
    None
):
    bench = await lending()
    assert (status(bench)["slotsWanted"], status(bench)["slotsGranted"]) == (2, 2)
    bench.demand[KEY] = IDLE
    await bench.turn()
    assert {raw["spec"]["releaseReason"] for raw in bench.slots()} == {"Idle"}
    bench.report()
    await bench.turn(2)
    assert bench.slots() == []
    bench.now += 60
    await bench.turn(2)
    assert (status(bench)["slotsWanted"], status(bench)["slotsGranted"]) == (0, 0)
    assert bench.reason(kind="Granted") == "Idle"
    bench.demand[KEY] = BUSY
    bench.report()
    await bench.turn(2)
    assert len(bench.slots()) == 2


async def test_an_idle_lease_costs_no_write_although_its_ages_grow() -> None:
    bench = await lending()
    bench.demand[KEY] = IDLE
    for _ in range(60):
        bench.now += 5
        bench.report()
        await bench.turn()
    before = list(bench.api.writes)
    for _ in range(20):
        bench.now += 5
        reported = bench.demand[KEY]
        bench.demand[KEY] = replace(reported, idle_seconds=(reported.idle_seconds or 0) + 5)
        bench.report()
        await bench.turn()
    assert bench.api.writes == before


async def test_a_count_of_turns_that_moves_costs_no_write_either() -> None:
    bench = await lending()
    for _ in range(60):
        bench.now += 5
        bench.report()
        await bench.turn()
    before = list(bench.api.writes)
    for turns in (16, 12, 15, 11, 9, 14) * 3:
        bench.now += 5
        bench.demand[KEY] = replace(BUSY, turns=turns)
        bench.report()
        await bench.turn()
    assert bench.api.writes == before


async def test_a_trainer_with_a_rhythm_finds_its_slots_running_when_a_step_begins() -> None:
    """Steps of 120 s and 480 s of training; an engine takes 40 s to start."""
    bench, began = Bench(), dict[str, int]()
    bench.pool()
    bench.lease(spec__slots={"min": 1, "max": 2})
    bench.reconciler.policy = replace(bench.reconciler.policy, toggle_seconds=60.0)
    rhythm, found, free, made = Rhythm(), list[int](), 0, 0
    for second in range(6 * 600):
        bench.now = float(second)
        turns = 16 if second % 600 < 120 else 0
        rhythm = observe(rhythm, turns, "v", second)
        names = {raw["metadata"]["name"] for raw in bench.slots()}
        made += len(names - began.keys())
        began = {name: began.get(name, second) for name in names}
        running = [name for name, since in began.items() if second - since >= 40]
        if second % 600 == 0:
            found.append(len(running))
        free += not bench.slots()
        if second % 5:
            continue
        bench.demand[KEY] = Demand(
            turns=rhythm.most(second),
            usual_turns=rhythm.usual,
            idle_seconds=rhythm.idle_seconds(second),
            expected_seconds=rhythm.expected_seconds(second),
            up_seconds=float(second),
        )
        # Nothing is to be learned of what a start takes: the API of the bench dates no object.
        reports = [
            SlotReport(SlotKey(raw["metadata"]["uid"], raw["metadata"]["generation"]), _RUNNING)
            for raw in bench.slots()
            if raw["spec"]["desired"] == "Lent"
        ]
        pods = (replica("default/chat", "a"), replica("default/chat", "b"))
        bench.telemetry.record(SyncRequest("n1", "t", 0, pods, tuple(reports)), bench.now)
        await bench.turn()
    assert found[2:] == [2, 2, 2, 2], "from the third step on, both engines run at its first turn"
    assert made == 7 * 2, "each slot once for a step; those of the seventh stand already"
    assert free > 4 * 250, "for more than half of each pause nobody held a GPU"


# --- several replicas of a router


def test_replicas_are_added_up_and_their_words_grow_older() -> None:
    one = DemandNote(peak_turns=3, usual_turns=5, idle_seconds=None, up_seconds=50.0)
    other = DemandNote(peak_turns=0, usual_turns=4, idle_seconds=20.0, expected_seconds=12.0)
    found = together([ReceivedNote(one, 100.0), ReceivedNote(other, 90.0)], 100.0)
    assert found == Demand(
        turns=3,
        usual_turns=9,
        idle_seconds=30.0,
        expected_seconds=2.0,
        up_seconds=50.0,
        age_seconds=10.0,
    )
    assert together([], 100.0) is None


# --- a real router


def lease(name: str = "grpo") -> RolloutLease:
    metadata = {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1}
    made = changed(LEASE, {"metadata.name": name})
    return RolloutLease.model_validate(made | {"metadata": made["metadata"] | metadata})


@contextlib.asynccontextmanager
async def asking(
    router: RunningRouter, leases: list[RolloutLease], woken: list[float]
) -> AsyncIterator[Demands]:
    """An operator's side that follows this router for every lease."""
    demands = Demands(
        SETTINGS,
        lambda: leases,
        clock=time.monotonic,
        wake=lambda: woken.append(time.monotonic()),
        dial=lambda _: f"127.0.0.1:{router.attach_port}",
    )
    task = asyncio.create_task(demands.run())
    try:
        yield demands
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def router() -> AsyncIterator[RunningRouter]:
    token = lease_token(SETTINGS.token, KEY)
    async with router_running(RouterSettings(KEY, attach_token=token)) as made:
        yield made


async def test_a_turn_that_waits_without_any_engine_reaches_the_operator(
    router: RunningRouter,
) -> None:
    woken: list[float] = []
    async with asking(router, [lease()], woken) as demands:
        await until(lambda: demands.total(KEY) is not None)
        first = demands.total(KEY)
        assert first is not None
        assert (first.turns, first.idle_seconds) == (0, None)
        before = len(woken)
        turn = router.service.submit(TurnRequest("r", (1, 2, 3), {"max_new_tokens": 4}))
        await until(lambda: (seen := demands.total(KEY)) is not None and seen.turns == 1)
        assert len(woken) > before, "it starts a pass"
        router.service.leave(turn)


async def test_a_router_speaks_for_no_lease_but_its_own(router: RunningRouter) -> None:
    async with asking(router, [lease("other"), lease()], []) as demands:
        await until(lambda: demands.total(KEY) is not None)
        assert demands.total("default/other") is None


async def test_a_lease_that_is_gone_is_forgotten(router: RunningRouter) -> None:
    leases = [lease()]
    async with asking(router, leases, []) as demands:
        await until(lambda: demands.total(KEY) is not None)
        leases.clear()
        await demands.refresh()
        assert demands.total(KEY) is None
