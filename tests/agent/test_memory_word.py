"""What the guard tells the engine host about the memory of a slot's engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rose_agent.devices.nvml import NvmlDriver
from rose_agent.devices.owners import Owner
from rose_agent.devices.watch import DeviceWatch
from rose_agent.guard.devices import gpus
from rose_agent.guard.slots.slot import Totals
from rose_agent.pods.model import NodePods
from rose_core.devices.memory import Budget, Lendable, MemorySum
from rose_core.devices.ownership import Claim, Proof
from rose_core.host_reasons import HostReason
from rose_core.identity import GpuUuid, PodUid, SlotKey, SlotUid
from rose_core.wire.host import EngineState, EngineStatus
from rose_core.wire.sync import PoolPolicy
from rose_dev.gpu.state import GpuProcess, State

GIB, S = 1 << 30, 1_000_000_000
SLOT = SlotKey(SlotUid("slot-1"), 1)
LEAST = 125


def grant(**said: object) -> SimpleNamespace:
    """Of a slot on the one GPU that there is."""
    engine = SimpleNamespace(ranks=1)
    return SimpleNamespace(**{"pod_uid": "pod", "whole": False, "engine": engine} | said)


@dataclass
class Slot:
    """A slot that remembers what it was to tell."""

    status: EngineStatus | None
    uid: str = "slot-1"
    grant: Any = field(default_factory=grant)
    budget: Budget = field(default_factory=Budget)
    room: Lendable | None = None
    reserve: MemorySum | None = None
    orders: list[tuple[int, int | None]] = field(default_factory=list)
    renewed: int = 0

    def limit_memory(self, permille: int, held: int | None) -> None:
        self.orders.append((permille, held))

    def renew_room(self) -> None:
        self.renewed += 1


class Node:
    """One GPU of 80 GiB with serving and an engine on it."""

    def __init__(self, nvml: State, source: str) -> None:
        self.now = 1000.0
        nvml.raw.gpu_count = 1
        (self.gpu,) = nvml.gpus
        self.gpu.raw.memory_total = 80 * GIB
        self.serving(30, 40)
        owners = {11: Owner(pod=PodUid("pod")), 22: Owner(SlotUid("slot-1"), PodUid("host"))}
        self.watch = DeviceWatch(NvmlDriver.open(), lambda: self.now, owners.get)
        pod = SimpleNamespace(claim=Claim((GpuUuid(self.gpu.uuid),), Proof.ALLOCATED), pids=())
        policy = PoolPolicy(
            *("ns/pool", "Lend", {}, 1), memory_source=source, memory_headroom_percent=20
        )
        self.pool = SimpleNamespace(unlent_reserved_ns=0)
        self.replica: Any = SimpleNamespace(
            policy=policy,
            pod=pod,
            view=None,
            looked_ns=0,
            outcomes=SimpleNamespace(pool=self.pool),
        )

    def serving(self, gib: int, used: int, engine: int | None = 10 * GIB) -> None:
        """What serving holds beside the engine, and what the GPU uses in all."""
        self.gpu.set_processes([GpuProcess(11, gib * GIB), GpuProcess(22, engine)])
        self.gpu.raw.memory_used = used * GIB

    def look(self, slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rose_agent.guard.sync.report.kv_permille", lambda *_: None)
        for uuid, reading in self.watch.read().items():
            self.watch.take(uuid, reading)
        gpus.update_views(self.watch, {"pod": self.replica}, {"slot-1": slot}, NodePods())  # type: ignore[dict-item]


def status(state: EngineState = EngineState.SERVING, **more: object) -> EngineStatus:
    return EngineStatus(SLOT, state, **more)  # type: ignore[arg-type]


def test_the_budget_of_elastic_memory_is_told_until_the_host_holds_to_it(
    nvml: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, slot = Node(nvml, "Elastic"), Slot(status(kv_permille=500))
    node.look(slot, monkeypatch)
    assert slot.orders == [(LEAST, 10 * GIB)], "an elastic engine begins with the least"
    slot.status = status(kv_permille=LEAST)
    node.look(slot, monkeypatch)
    assert len(slot.orders) == 1
    for _ in range(40):  # calm for a while: it grows step by step
        node.now += 1.0
        node.look(slot, monkeypatch)
    assert LEAST < slot.budget.permille < 500
    assert slot.orders[-1][0] == slot.budget.permille
    node.gpu.raw.memory_used = 75 * GIB
    before = slot.budget.permille
    node.look(slot, monkeypatch)
    assert slot.orders[-1][0] == max(LEAST, before // 2), "halved at once"
    node.gpu.raw.memory_used = 79 * GIB
    node.look(slot, monkeypatch)
    assert slot.orders[-1][0] == 0


def test_engines_that_are_not_elastic_hear_of_no_budget(
    nvml: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, slot = Node(nvml, "Reserved"), Slot(status())
    node.gpu.raw.memory_used = 75 * GIB
    node.look(slot, monkeypatch)
    assert (slot.orders, slot.budget.permille) == ([], 500)


def test_an_engine_that_holds_more_than_its_size_is_named(
    nvml: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, slot = Node(nvml, "Reserved"), Slot(status(device_bytes=10 * GIB))
    node.look(slot, monkeypatch)
    assert slot.orders == []
    slot.status = status(device_bytes=10 * GIB - 1)
    node.look(slot, monkeypatch)
    assert slot.orders == [(1000, 10 * GIB)]
    node.serving(30, 40, engine=None)
    node.look(slot, monkeypatch)
    assert len(slot.orders) == 1, "a figure that is missing accuses nobody"


def test_a_slot_tells_its_room_again_only_while_its_engine_is_refused_for_it(
    nvml: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, slot = Node(nvml, "Reserved"), Slot(status())
    node.look(slot, monkeypatch)
    assert slot.room is not None
    assert (slot.room.bytes, slot.renewed) == (34 * GIB, 0)
    slot.status = status(EngineState.FAILED, reason=HostReason.INSUFFICIENT_MEMORY)
    node.look(slot, monkeypatch)
    assert slot.renewed == 1


@pytest.mark.parametrize(
    ("source", "whole", "kept"),
    [("Reserved", False, 34), ("Elastic", False, 0), ("Reserved", True, 0)],
)
def test_memory_is_kept_back_from_serving_where_it_neither_gives_way_nor_sleeps(
    nvml: State, monkeypatch: pytest.MonkeyPatch, source: str, whole: bool, kept: int
) -> None:
    node, slot = Node(nvml, source), Slot(status())
    slot.grant.whole = whole
    node.look(slot, monkeypatch)
    found = 0 if slot.reserve is None else slot.reserve.kept_back
    assert found == kept * GIB


class Watched(Node):
    """A node whose guard looks once a second, by a clock that the test turns."""

    def __init__(self, nvml: State, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
        super().__init__(nvml, source)
        self.clock_ns, self.patch = S, monkeypatch
        monkeypatch.setattr(
            "rose_agent.guard.devices.gpus.time.monotonic_ns", lambda: self.clock_ns
        )

    def pass_by(self, seconds: int, slot: Slot, totals: Totals | None = None) -> None:
        for _ in range(seconds):
            self.clock_ns += S
            granted = slot.grant is not None
            if totals is not None:
                totals.account(
                    self.clock_ns, granted=granted, until_ns=0, status=None, reserve=slot.reserve
                )
            self.look(slot, self.patch)


def test_memory_kept_back_is_counted_once_lent_or_not(
    nvml: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, slot = Watched(nvml, monkeypatch, "Reserved"), Slot(None)
    node.look(slot, monkeypatch)
    totals = Totals(last_ns=node.clock_ns)
    slot.grant = None
    node.pass_by(100, slot, totals)
    slot.grant = grant()
    node.look(slot, monkeypatch)
    node.pass_by(300, slot, totals)
    slot.grant = None
    node.pass_by(200, slot, totals)
    alone, lent = node.pool.unlent_reserved_ns / S, totals.reserved_ns / S
    assert alone == pytest.approx(300 * 34 / 80, rel=0.01), "34 of 80 GiB may be lent"
    assert lent == pytest.approx(300 * 34 / 80, rel=0.01)
    assert alone + lent == pytest.approx(600 * 34 / 80, rel=0.01), "all of the time, once"


@pytest.mark.parametrize(
    ("terms", "used", "counted"),
    [
        (("Reserved", "Lend"), 30, True),
        (("Reserved", "Paused"), 30, True),
        (("Reserved", "Observe"), 30, False),
        (("Elastic", "Lend"), 30, False),
        (("Reserved", "Lend"), 61, False),
    ],
)
def test_only_memory_that_an_engine_fits_into_is_kept_back_for_lending(
    nvml: State, monkeypatch: pytest.MonkeyPatch, terms: tuple[str, str], used: int, counted: bool
) -> None:
    source, mode = terms
    node, slot = Watched(nvml, monkeypatch, source), Slot(None, grant=None)
    node.replica.policy = msgspec.structs.replace(node.replica.policy, mode=mode)
    node.serving(used, used, engine=0)
    node.look(slot, monkeypatch)
    node.pass_by(10, slot)
    assert (node.pool.unlent_reserved_ns > 0) is counted


def test_gpus_of_a_replica_that_its_slot_does_not_take_are_not_lent(
    nvml: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, slot = Watched(nvml, monkeypatch, "Reserved"), Slot(None)
    node.look(slot, monkeypatch)
    node.pass_by(10, slot)
    assert node.pool.unlent_reserved_ns == 0
    slot.grant = grant(engine=SimpleNamespace(ranks=0))
    node.pass_by(10, slot)
    assert node.pool.unlent_reserved_ns / S == pytest.approx(10 * 34 / 80, rel=0.01)
    slot.grant = grant(engine=SimpleNamespace(ranks=0), whole=True)
    node.pass_by(10, slot)
    assert node.pool.unlent_reserved_ns / S == pytest.approx(10 * 34 / 80, rel=0.01), "it sleeps"


def test_what_serving_used_hours_ago_counts_for_reserved_memory_alone(
    nvml: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = {}
    for source in ("Reserved", "Elastic"):
        node, slot = Node(nvml, source), Slot(status())
        node.serving(60, 70)
        node.look(slot, monkeypatch)
        node.serving(30, 40)
        node.now += 7200.0
        node.look(slot, monkeypatch)
        assert slot.room is not None
        rooms[source] = slot.room.bytes
    assert rooms == {"Reserved": 4 * GIB, "Elastic": 34 * GIB}


def test_what_an_engine_holds_is_told_while_its_kind_is_measured(
    nvml: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, slot = Node(nvml, "Reserved"), Slot(status(device_bytes=12 * GIB, measuring=True))
    node.look(slot, monkeypatch)
    assert slot.orders == [(1000, 10 * GIB)]
    slot.status = status(device_bytes=12 * GIB)
    node.look(slot, monkeypatch)
    assert len(slot.orders) == 1
