"""One contract of what a slot runs, for both siblings: one engine, and two at different shares."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from rose_agent.host import main
from rose_agent.host.slots.dual_share import DualShareEngine
from rose_agent.host.slots.slot_engine import RolloutEngine, SingleEngine
from rose_core.identity import SlotUid
from rose_core.wire.host import (
    EngineState,
    EnsureEngine,
    HoldEngine,
    Holder,
    LimitMemory,
    SetDormant,
)
from rose_core.wire.sync import Sharing, WeightSource
from rose_engines.node.rundir import RunDir
from tests.host import mps_node
from tests.host.helpers import (
    guarding,
    order,
    running,
    serving,
    status_of,
    stop,
    until,
)


@dataclass(frozen=True)
class Kind:
    """One of the siblings, and what makes the host take it."""

    sibling: type[SingleEngine | DualShareEngine]
    order: EnsureEngine
    ways: mps_node.Node | None

    @property
    def engines(self) -> int:
        return 2 if self.sibling is DualShareEngine else 1

    @asynccontextmanager
    async def served(self, rundir: Path, models: Path) -> AsyncIterator[main.RunningHost]:
        """A host whose slot serves, with every engine that it has, under an open permit."""
        with guarding(rundir):
            async with self.started(rundir, models) as host:
                yield host

    @asynccontextmanager
    async def started(self, rundir: Path, models: Path) -> AsyncIterator[main.RunningHost]:
        """The same; somebody else keeps the permit open."""
        async with running(rundir, models) as host:
            if self.ways is not None:
                host.host._site.means = self.ways.ways
            await host.host.ensure(self.order)

            async def all_serve() -> bool:
                states = [life.state for life in engine_of(host).lives]
                return states == [EngineState.SERVING] * self.engines

            await until(all_serve, "every engine of the slot serves")
            yield host


@pytest.fixture(params=[SingleEngine, DualShareEngine])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    dual = request.param is DualShareEngine
    with mps_node.node() if dual else nullcontext() as made:
        if made is None:
            yield Kind(SingleEngine, order(), None)
            return
        made.opt_in()
        shared = mps_node.shared_order(50)
        engine = msgspec.structs.replace(shared.engine, sharing=Sharing("MPS", 50, busy_percent=20))
        yield Kind(DualShareEngine, msgspec.structs.replace(shared, engine=engine), made)


def engine_of(host: main.RunningHost) -> RolloutEngine:
    return host.host._lives[SlotUid("slot-1")]


async def test_the_order_decides_which_sibling_a_slot_has_and_each_engine_has_a_folder(
    rundir: Path, models: Path, kind: Kind
) -> None:
    async with kind.served(rundir, models) as host:
        engine = engine_of(host)
        assert type(engine) is kind.sibling
        assert engine.current in engine.lives
        assert [folder.uid for folder in engine.folders] == [one.folder.uid for one in engine.lives]
        assert engine.folders[0] == engine.folder
        assert len(host.host.holdings()) == kind.engines


async def test_the_same_order_again_changes_nothing_and_other_weights_are_taken_over_in_place(
    rundir: Path, models: Path, kind: Kind
) -> None:
    async with kind.served(rundir, models) as host:
        before = await host.host.ensure(kind.order)
        other = msgspec.structs.replace(kind.order, weights=WeightSource("127.0.0.1:2", "other"))
        after = await host.host.ensure(other)
        assert after.pids == before.pids
        assert [life.order.weights for life in engine_of(host).lives] == [
            other.weights
        ] * kind.engines


async def test_a_hold_is_answered_once_every_tree_stands_still_and_a_release_lets_all_go_on(
    rundir: Path, models: Path, kind: Kind
) -> None:
    # As the guard does: an MPS client rests at its closed permit and is ended where it does not.
    with guarding(rundir) as guard:
        async with kind.started(rundir, models) as host:
            engine, slot = engine_of(host), kind.order.slot
            guard.close()
            await host.host.hold(HoldEngine(slot, Holder.GUARD, hold=True))

            async def still() -> bool:
                return engine.stands_still_for(Holder.GUARD)

            await until(still, "every tree stands still")
            assert (await status_of(host)).holders == (Holder.GUARD,)
            await host.host.hold(HoldEngine(slot, Holder.GUARD, hold=False))
            guard.open()
            assert not (await status_of(host)).holders
            status = await serving(host)  # a tree that is late on a busy machine is ended first
            assert status.endpoint


async def test_the_status_counts_every_engine_and_dormancy_is_ordered_where_it_is_possible(
    rundir: Path, models: Path, kind: Kind
) -> None:
    async with kind.served(rundir, models) as host:
        engine = engine_of(host)
        each = [life.status("") for life in engine.lives]
        status = await status_of(host)
        assert set(status.pids) == {pid for one in each for pid in one.pids}
        assert len(status.pids) >= kind.engines
        assert status.state is EngineState.SERVING
        assert status.endpoint
        assert status.restarts == 0
        assert (status.lanes is None) is (kind.engines == 1)
        if not status.can_dormant:
            result = await host.host.set_dormant(SetDormant(kind.order.slot, dormant=True))
            assert result.state is EngineState.SERVING
        limited = await host.host.limit_memory(LimitMemory(kind.order.slot, None, None))
        assert limited.state is EngineState.SERVING


async def test_a_stop_ends_every_process_and_leaves_no_folder(
    rundir: Path, models: Path, kind: Kind
) -> None:
    async with kind.served(rundir, models) as host:
        pids = (await status_of(host)).pids
        assert (await host.host.stop(stop())).state is EngineState.GONE
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert host.host.holdings() == ()
        assert RunDir(rundir).all_slots() == ()
