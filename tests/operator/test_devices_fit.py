"""``DevicesFit`` of a pool: can its GPUs hold what leases ask, said with the figures of both."""

from __future__ import annotations

from typing import Any

import pytest

from rose_core.api.crd import KINDS
from rose_core.api.reasons import MEANING, Reason
from rose_core.wire.sync import ReplicaReport, SlotState, SyncRequest
from tests.operator.bench import Bench
from tests.operator.stub_agent import replica
from tests.operator.test_capabilities import conditions

GIB = 1 << 30
POOL = "default/chat"
TWO_DRIVERS = (
    "two drivers on this node: the library is 550.163.01, the kernel module 535.288.01; "
    "load the module anew, or restart the node"
)
OLD = "CUDA 13.0 needs driver 580 or later; it is 470.82.01, which is older"
NOWHERE = "GPU GPU-a is not among the 3 that the driver lists"


def one(name: str, **changes: Any) -> ReplicaReport:  # noqa: ANN401  # any field of a report
    values = {"lendable_bytes": 43 * GIB, "device_class": "h100-80gb-hbm3", **changes}
    return replica(POOL, name, **values)


def report_replicas(bench: Bench, *replicas: ReplicaReport, access: str = "") -> None:
    found = {"DeviceAccess": access}
    bench.telemetry.record(SyncRequest("n1", "t", 0, replicas, (), found), bench.now)


async def fit(bench: Bench) -> dict[str, Any]:
    await bench.turn(2)
    return conditions(bench)["DevicesFit"]


async def fit_of(*replicas: ReplicaReport, access: str = "", **spec: object) -> dict[str, Any]:
    bench = Bench()
    bench.pool(**{f"spec.{name}": value for name, value in spec.items()})
    report_replicas(bench, *replicas, access=access)
    return await fit(bench)


async def test_gpus_that_fit_are_counted_with_what_may_be_lent() -> None:
    found = await fit_of(one("a"), one("b", lendable_bytes=20 * GIB))
    assert (found["status"], found["reason"]) == ("True", "AsExpected")
    assert found["message"] == "of 2 replicas 20 to 43 GiB per GPU may be lent"


async def test_less_than_a_gib_writes_nothing_and_more_is_said() -> None:
    bench = Bench()
    bench.pool()
    report_replicas(bench, one("a", lendable_bytes=43 * GIB + 1))
    before = await fit(bench)
    report_replicas(bench, one("a", lendable_bytes=44 * GIB - 1))
    assert await fit(bench) == before
    report_replicas(bench, one("a", lendable_bytes=30 * GIB))
    await bench.turn()
    bench.now += 120.0  # a text alone may wait for other changes
    report_replicas(bench, one("a", lendable_bytes=30 * GIB))
    assert (await fit(bench))["message"] == "of 1 replicas 30 GiB per GPU may be lent"


async def test_nobody_says_so_and_nobody_reports_are_unknown() -> None:
    assert (await fit_of(one("a", lendable_bytes=None)))["reason"] == "NotObservedYet"
    found = await fit_of()
    assert (found["status"], found["reason"]) == ("Unknown", "NoReplicas")


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        ("DeviceUnknown", NOWHERE),
        ("MigEnabled", "GPU GPU-a is cut into slices (MIG)"),
        ("VirtualGpu", "the GPU is a vGPU"),
        ("NoGPU", ""),
        ("SharedGpu", "GPU GPU-a is allocated in 4 shares"),
        ("XidError", "the driver reported Xid 48; reset the GPU"),
        ("EccErrors", "3 uncorrected memory errors since the driver was loaded"),
        ("InsufficientMemory", ""),
    ],
)
async def test_a_gpu_that_cannot_be_lent_is_said_with_its_node_and_its_figures(
    refusal: str, text: str
) -> None:
    found = await fit_of(one("a", refusal=refusal, refusal_text=text), one("b"))
    assert (found["status"], found["reason"]) == ("False", refusal)
    why = text or MEANING[Reason(refusal)]
    assert found["message"] == f"1 of 2 replicas cannot be lent; 1 {refusal} (n1: {why})"


@pytest.mark.parametrize(("word", "text"), [("DeviceAccess", TWO_DRIVERS), ("DriverTooOld", OLD)])
async def test_a_driver_that_runs_no_engine_is_said_with_both_versions(
    word: str, text: str
) -> None:
    found = await fit_of(one("a"), one("b"), access=f"{word}: {text}")
    assert (found["status"], found["reason"]) == ("False", word)
    assert found["message"] == f"2 of 2 replicas cannot be lent; 2 {word} (n1: {text})"


@pytest.mark.parametrize("refusal", ["ThermalThrottling", "PowerLimit", "SignalMissing"])
async def test_what_ends_by_itself_is_no_misfit(refusal: str) -> None:
    found = await fit_of(one("a", refusal=refusal))
    assert found["status"] == "True"


async def test_a_replica_that_could_be_put_to_sleep_needs_no_free_memory_while_it_serves() -> None:
    full = one("a", refusal="InsufficientMemory", lendable_bytes=0)
    assert (await fit_of(full))["status"] == "False"
    whole = {"minReleasedMebibytes": 1024}
    assert (await fit_of(full, wholeReplica=whole))["status"] == "True"


async def test_many_causes_are_counted_the_commonest_first_and_stay_readable() -> None:
    words = ["MigEnabled", "MigEnabled", "VirtualGpu", "XidError", "EccErrors", "SharedGpu"]
    replicas = [
        one(f"r{at}", refusal=word, refusal_text=f"{word} " + "x" * 500)
        for at, word in enumerate(words)
    ]
    found = await fit_of(*replicas)
    assert found["reason"] == "MigEnabled"
    assert found["message"].startswith("6 of 6 replicas cannot be lent; 2 MigEnabled (n1: Mig")
    assert len(found["message"]) < 1024
    assert "; 1 EccErrors (n1: " in found["message"]


async def lease_asking(**changes: Any) -> Bench:  # noqa: ANN401  # any field
    bench = Bench()
    bench.pool()
    bench.lease(**changes)
    report_replicas(bench, one("a"), one("b", lendable_bytes=20 * GIB))
    await bench.turn(2)
    return bench


async def test_a_model_that_fits_nowhere_is_said_to_the_owner_with_both_figures() -> None:
    bench = await lease_asking()
    for _ in range(3):
        bench.report(
            SlotState.FAILED,
            reason="InsufficientMemory",
            needs_bytes=764 * GIB,
            lendable_bytes=43 * GIB,
        )
        await bench.turn(2)
    found = conditions(bench)["DevicesFit"]
    assert (found["status"], found["reason"]) == ("False", "InsufficientMemory")
    assert found["message"] == (
        "lease default/grpo: the engine needs 764.0 GiB per GPU with tp=1, the most lendable is "
        "43.0 GiB on n1"
    )
    assert "764.0 GiB" in bench.condition(kind="Granted")["message"], "its team reads the same"


async def test_a_gpu_that_no_node_has_is_said_with_those_that_there_are() -> None:
    bench = await lease_asking(spec__deviceClasses=["b200-180gb", "h200-141gb"])
    found = conditions(bench)["DevicesFit"]
    assert (found["status"], found["reason"]) == ("False", "OtherDeviceClass")
    assert found["message"] == (
        "lease default/grpo: it takes b200-180gb, h200-141gb, the pool's replicas have "
        "2 h100-80gb-hbm3"
    )


async def test_a_class_that_an_agent_does_not_know_yet_is_no_misfit() -> None:
    bench = Bench()
    bench.pool()
    bench.lease(spec__deviceClasses=["h200-141gb"])
    report_replicas(bench, one("a"), one("b", device_class=""))
    assert (await fit(bench))["status"] == "True"


async def test_a_lease_that_is_not_accepted_asks_for_nothing() -> None:
    bench = await lease_asking(spec__deviceClasses=["h200-141gb"], spec__engineClass="none")
    assert bench.reason(kind="Accepted") == "UnknownEngineClass"
    assert conditions(bench)["DevicesFit"]["status"] == "True"


def test_the_condition_is_a_column_of_kubectl_get() -> None:
    (pools,) = (kind for kind in KINDS if kind.short == "servpool")
    shown = {column.name: column for column in pools.columns}
    assert 'type=="DevicesFit"' in shown["Fit"].path
