"""Every field of a slot: written by the operator, granted to a node; a row each.

The table stands beside that of the kinds that people write (``test_every_field``), whose walk reads
it: a new field without a row fails there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rose_core.adapters import TARGETS
from rose_core.api import Reason, RolloutSlot
from rose_core.identity import SlotKey
from rose_core.wire.routing import AdapterVersion
from rose_core.wire.sync import AdapterSpec, Grant, SlotReport, SlotState, SyncRequest
from rose_operator.kube.api import ObjectKind
from rose_operator.sync.grants import grants_of
from tests.api.objects import SLOT, changed
from tests.operator.bench import SETTINGS, Bench
from tests.operator.refused import Refused, part
from tests.operator.stub_agent import replica

Spec = dict[str, Any]
ALL = tuple(sorted(TARGETS))


@dataclass(frozen=True)
class Granted:
    """A field of a slot, and what its node is granted; ``look`` gets None without a grant."""

    set: Spec
    look: Callable[[Grant | None], object]
    before: object
    after: object
    beside: Spec = field(default_factory=dict)


def of(path: str) -> Callable[[Grant | None], object]:
    return lambda found: part(found, path)


def exists(found: Grant | None) -> object:
    return found is not None


MEMBER = SLOT["spec"]["members"][0]
MPS = {"sharing": {"compute": "MPS"}}
SHARES = Refused("computePercent and busyComputePercent need compute MPS")


def member(**changes: object) -> Spec:
    return {"members": [MEMBER | changes]}


SLOTS: list[tuple[str, Granted | Refused]] = [
    (
        "leaseRef.namespace",
        Granted({"leaseRef.namespace": "x"}, of("lease"), "default/grpo", "x/grpo"),
    ),
    (
        "leaseRef.uid",
        Granted({"leaseRef.uid": "x"}, of("lease_uid"), SLOT["spec"]["leaseRef"]["uid"], "x"),
    ),
    ("leaseRef.name", Granted({"leaseRef.name": "x"}, of("lease"), "default/grpo", "default/x")),
    (
        "poolRef.namespace",
        Granted({"poolRef.namespace": "x"}, of("pool"), "default/chat", "x/chat"),
    ),
    ("poolRef.name", Granted({"poolRef.name": "x"}, of("pool"), "default/chat", "default/x")),
    ("members[].node", Granted(member(node="x"), exists, True, False)),
    ("members[].podName", Granted(member(podName="x"), of("pod_name"), "p0", "x")),
    ("members[].podUid", Granted(member(podUid="x"), of("pod_uid"), "p-1", "x")),
    ("members[].gpuUUIDs", Granted(member(gpuUUIDs=["x"]), of("gpu_uuids"), ("GPU-0",), ("x",))),
    ("members[].gpuUUIDs", Refused("MultiNodeReplica")),  # a second member
    ("tier", Granted({"tier": "Whole"}, of("whole"), False, True)),
    (
        "desired",
        Granted({"desired": "Released", "releaseReason": "Preempted"}, exists, True, False),
    ),
    ("releaseReason", Refused("releaseReason is given exactly when desired is Released")),
    (
        "engine.engineClass",
        Granted({"engine.engineClass": "x"}, of("engine.engine_class"), "sglang", "x"),
    ),
    ("engine.model", Granted({"engine.model": "x"}, of("engine.model"), "tiny", "x")),
    (
        "engine.arguments",
        Granted({"engine.arguments": {"a": "b"}}, of("engine.arguments"), {}, {"a": "b"}),
    ),
    (
        "engine.contextTokens",
        Granted({"engine.contextTokens": 64}, of("engine.context_tokens"), 4096, 64),
    ),
    ("engine.kvTokens", Granted({"engine.kvTokens": 64}, of("engine.kv_tokens"), 16384, 64)),
    ("engine.drafts", Granted({"engine.drafts": True}, of("engine.drafts"), False, True)),
    (
        "engine.kvStoreGiB",
        Granted({"engine.kvStoreGiB": 2}, of("engine.kv_store_bytes"), 0, 2 << 30),
    ),
    ("engine.ranks", Granted({"engine.ranks": 2}, of("engine.ranks"), 1, 2)),
    ("engine.maxRunning", Granted({"engine.maxRunning": 3}, of("max_concurrent_turns"), 8, 3)),
    ("sharing.compute", Granted(MPS, of("engine.sharing.compute"), "TimeSlice", "MPS")),
    (
        "sharing.computePercent",
        Granted({"sharing.computePercent": 40}, of("engine.sharing.percent"), 30, 40, MPS),
    ),
    ("sharing.computePercent", SHARES),
    (
        "sharing.busyComputePercent",
        Granted({"sharing.busyComputePercent": 9}, of("engine.sharing.busy_percent"), 0, 9, MPS),
    ),
    ("sharing.busyComputePercent", SHARES),
    (
        "sharing.memorySource",
        Granted(
            {"sharing.memorySource": "Elastic"},
            of("engine.sharing.memory_source"),
            "Reserved",
            "Elastic",
        ),
    ),
    (
        "sharing.memoryLimit",
        Granted(
            {"sharing.memoryLimit": "Driver"}, of("engine.sharing.memory_limit"), "None", "Driver"
        ),
    ),
    ("weights.storeName", Granted({"weights.storeName": "x"}, exists, True, False)),
    ("weights.frozen", Granted({"weights.frozen": True}, of("weights.endpoint"), "store:7446", "")),
    (
        "weights.adapterRank",
        Granted({"weights.adapterRank": 8}, of("engine.adapter"), None, AdapterSpec(8, ALL)),
    ),
    (
        "weights.adapterTargets",
        Granted(
            {"weights.adapterTargets": ["q_proj"]},
            of("engine.adapter"),
            AdapterSpec(8, ALL),
            AdapterSpec(8, ("q_proj",)),
            beside={"weights.adapterRank": 8},
        ),
    ),
    (
        "weights.adapterSlots",
        Granted(
            {"weights.adapterSlots": 2},
            of("engine.adapter"),
            AdapterSpec(8, ALL),
            AdapterSpec(8, ALL, 2),
            beside={"weights.adapterRank": 8},
        ),
    ),
    ("weights.run", Granted({"weights.run": "x"}, of("weights.run"), "grpo", "x")),
    (  # a node only knows it: which engines are too old for a turn is decided by the router
        "weights.maxStalenessVersions",
        Granted({"weights.maxStalenessVersions": 3}, of("weights.max_staleness"), 1, 3),
    ),
    (
        "weights.kvPolicy",
        Granted({"weights.kvPolicy": "Reuse"}, of("engine.kv_policy"), "Keep", "Reuse"),
    ),
]
# Not of one slot alone: what the operator does about it is below.
OPERATORS = ("releaseReason",)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=path) for path, row in SLOTS if isinstance(row, Granted)],
)
def test_a_field_of_a_slot_reaches_its_node(row: Granted) -> None:
    def granted(change: Spec) -> Grant | None:
        spec = {f"spec.{path}": value for path, value in (row.beside | change).items()}
        slot = RolloutSlot.model_validate(changed(SLOT, spec))
        return next(iter(grants_of("n0", [slot], 1, SETTINGS)), None)

    assert row.look(granted({})) == row.before
    assert row.look(granted(row.set)) == row.after


async def test_a_slot_of_a_lease_that_was_made_anew_is_taken_back_and_says_why() -> None:
    for uid, reason in (
        ("uid-of-grpo", Reason.NOT_RECLAIMING),
        ("of-an-older-one", Reason.LEASE_DELETED),
    ):
        bench = Bench()
        home = {"metadata.namespace": "rose-system", "spec.leaseRef.uid": uid}
        made = bench.api.add(ObjectKind.SLOT, changed(SLOT, home))
        bench.lease()
        bench.api.objects[ObjectKind.LEASE, "default/grpo"]["metadata"]["uid"] = "uid-of-grpo"
        bench.pool()
        one = replica("default/chat", "p0", pod_uid="p-1", gpu_uuids=("GPU-0",))
        key = SlotKey(made["metadata"]["uid"], made["metadata"]["generation"])
        runs = SlotReport(key, SlotState.RUNNING)
        for bench.now in (0.0, 60.0):  # not every status is written at once
            request = SyncRequest("n0", "t", 0, (one,), (runs,))
            bench.telemetry.record(request, bench.now)
            await bench.turn(2)
        (slot,) = (raw for raw in bench.slots() if raw["spec"]["members"] == [MEMBER])
        found = {one["type"]: one["reason"] for one in slot["status"]["conditions"]}
        assert found["Reclaiming"] == reason


async def test_a_slots_status_says_what_is_attested_of_each_run() -> None:
    bench = Bench()
    bench.pool()
    bench.lease()
    held = (AdapterVersion("grpo", "grpo@1.0", "d"), AdapterVersion("ppo"))
    for bench.now in (0.0, 60.0, 120.0):
        bench.report(adapters=held)
        await bench.turn(2)
    slot = bench.slots()[0]
    assert slot["status"]["adapters"] == [
        {"run": "grpo", "weightVersion": "grpo@1.0"},
        {"run": "ppo", "weightVersion": ""},
    ]
