"""Every CEL rule and bound against the real API server: what it accepts and what it refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose_core.api.crd import KINDS as DEFINITIONS
from rose_core.api.schema import structural
from rose_dev.api_client import ApiClient
from rose_dev.generate import rules
from rose_wire.api_server import Resource
from rose_wire.errors import StatusError
from tests.api.objects import KINDS, SLOT, changed

RESOURCES = {
    kind.name: Resource("rose-gpu.dev", "v1alpha1", kind.name, kind.plural, kind.namespaced)
    for kind in DEFINITIONS
}

SAMPLES = sorted((Path(__file__).parents[2] / "crds" / "samples").glob("*.yaml"))

NIGHT = {"startTime": "20:00", "endTime": "06:00"}
MEMBER = SLOT["spec"]["members"][0]

TROUGH = {"minReleasedMebibytes": 1024}
BY_DAY = {"forecast": {"maxBusyPercent": 30}}

# (kind, part of the rule's message) -> (accepted changes, refused changes), on creation.
CREATION: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("ServingPool", "mode Lend needs slo or maxLatencyIncreasePercent"): (
        {"spec.mode": "Lend", "spec.maxLatencyIncreasePercent": 5},
        {"spec.mode": "Lend"},
    ),
    ("ServingPool", "ttftAloneMilliseconds must be below ttftMilliseconds"): (
        {"spec.slo": {"ttftMilliseconds": 500, "ttftAloneMilliseconds": 400}},
        {"spec.slo": {"ttftMilliseconds": 500, "ttftAloneMilliseconds": 500}},
    ),
    ("ServingPool", "name at least one of ttftMilliseconds and tpotMilliseconds"): (
        {"spec.slo": {"tpotMilliseconds": 50}},
        {"spec.slo": {"percentile": 95}},
    ),
    ("ServingPool", "name at least one of perMillionInputTokensMicros"): (
        {"spec.revenue": {"perMillionOutputTokensMicros": 1_000_000}},
        {"spec.revenue": {}},
    ),
    ("ServingPool", "busyComputePercent needs compute MPS"): (
        {"spec.compute": "MPS", "spec.maxComputePercent": 50, "spec.busyComputePercent": 20},
        {"spec.maxComputePercent": 50, "spec.busyComputePercent": 20},
    ),
    ("ServingPool", "busyComputePercent must be smaller than maxComputePercent"): (
        {"spec.compute": "MPS", "spec.maxComputePercent": 50, "spec.busyComputePercent": 49},
        {"spec.compute": "MPS", "spec.maxComputePercent": 50, "spec.busyComputePercent": 50},
    ),
    ("ServingPool", "maxComputePercent must not exceed 90 with compute MPS"): (
        {"spec.maxComputePercent": 91},
        {"spec.compute": "MPS", "spec.maxComputePercent": 91},
    ),
    ("RolloutLease", "engineArguments has a name that is not on the allow-list"): (
        {"spec.engineArguments": {"dtype": "bfloat16", "disable-radix-cache": ""}},
        {"spec.engineArguments": {"dtype": "bfloat16", "model-path": "/etc"}},
    ),
    ("TenantPolicy", "name namespaces in names, or by labels in matchLabels"): (
        {"spec.namespaces": {"matchLabels": {"team": "a"}}},
        {"spec.namespaces": {}},
    ),
    ("TenantPolicy", "minPriority must not exceed maxPriority"): (
        {"spec.minPriority": -1},
        {"spec.minPriority": 1},
    ),
    ("RolloutLease", "weights needs storeName and run, or frozen: true"): (
        {"spec.weights": {"frozen": True}},
        {"spec.weights": {"maxStalenessVersions": 1}},
    ),
    ("RolloutLease", "frozen weights follow nothing"): (
        {"spec.weights": {"frozen": True, "maxStalenessVersions": 0}},
        {"spec.weights.frozen": True},
    ),
    ("RolloutLease", "an adapter is trained, frozen weights are not"): (
        {"spec.weights.adapterRank": 8},
        {"spec.weights": {"frozen": True, "adapterRank": 8}},
    ),
    ("RolloutLease", "adapterSlots needs adapterRank"): (
        {"spec.weights.adapterRank": 8, "spec.weights.adapterSlots": 2},
        {"spec.weights.adapterSlots": 2},
    ),
    ("RolloutLease", "are more adapters than adapterSlots"): (
        {
            "spec.weights.adapterRank": 8,
            "spec.weights.adapterSlots": 2,
            "spec.weights.adapterRuns": ["ppo"],
        },
        {
            "spec.weights.adapterRank": 8,
            "spec.weights.adapterSlots": 2,
            "spec.weights.adapterRuns": ["ppo", "dpo"],
        },
    ),
    ("RolloutLease", "adapterRuns are runs beside weights.run"): (
        {
            "spec.weights.adapterRank": 8,
            "spec.weights.adapterSlots": 2,
            "spec.weights.adapterRuns": ["ppo"],
        },
        {
            "spec.weights.adapterRank": 8,
            "spec.weights.adapterSlots": 2,
            "spec.weights.adapterRuns": ["grpo"],
        },
    ),
    ("RolloutLease", "with several adapterSlots it must be Keep or Reuse"): (
        {"spec.weights.adapterRank": 8, "spec.weights.adapterSlots": 2},
        {
            "spec.weights.adapterRank": 8,
            "spec.weights.adapterSlots": 2,
            "spec.weights.kvPolicy": "Recompute",
        },
    ),
    ("RolloutLease", "adapterTargets needs adapterRank"): (
        {"spec.weights.adapterRank": 8, "spec.weights.adapterTargets": ["q_proj"]},
        {"spec.weights.adapterTargets": ["q_proj"]},
    ),
    ("RolloutLease", "drafts needs engines of one GPU"): (
        {"spec.drafts": "Router"},
        {"spec.drafts": "Router", "spec.gpusPerSlot": 2},
    ),
    ("RolloutLease", "drafts cannot be combined"): (
        {"spec.drafts": "Router", "spec.engineArguments": {"disable-cuda-graph": ""}},
        {
            "spec.drafts": "Router",
            "spec.engineArguments": {"enable-return-routed-experts": ""},
        },
    ),
    ("RolloutLease", "drafts needs kvPolicy Keep"): (
        {"spec.drafts": "Router", "spec.weights.kvPolicy": "Keep"},
        {"spec.drafts": "Router", "spec.weights.kvPolicy": "Reuse"},
    ),
    ("RolloutLease", "kvStoreGiB needs engines of one GPU"): (
        {"spec.kvStoreGiB": 2},
        {"spec.kvStoreGiB": 2, "spec.gpusPerSlot": 2},
    ),
    ("RolloutLease", "kvStoreGiB cannot be combined"): (
        {"spec.kvStoreGiB": 2, "spec.engineArguments": {"disable-cuda-graph": ""}},
        {"spec.kvStoreGiB": 2, "spec.engineArguments": {"enable-return-routed-experts": ""}},
    ),
    ("RolloutLease", "gpusPerSlot must be 1 with adapterRank"): (
        {"spec.weights.adapterRank": 8, "spec.gpusPerSlot": 1},
        {"spec.weights.adapterRank": 8, "spec.gpusPerSlot": 2},
    ),
    ("RolloutLease", "gpusPerSlot must be 1, 2, 4 or 8"): (
        {"spec.gpusPerSlot": 4},
        {"spec.gpusPerSlot": 3},
    ),
    ("ServingPool", "startTime and endTime must differ"): (
        {"spec.lending": {"timeWindows": [NIGHT]}},
        {"spec.lending": {"timeWindows": [{"startTime": "06:00", "endTime": "06:00"}]}},
    ),
    ("ServingPool", "maxReplicasPerNode says nothing while maxReplicasPercent is 0"): (
        {"spec.lending": {"maxReplicasPerNode": 1}},
        {"spec.lending": {"maxReplicasPerNode": 1, "maxReplicasPercent": 0}},
    ),
    ("ServingPool", "lending.breaker needs slo"): (
        {"spec.slo": {"ttftMilliseconds": 500}, "spec.lending.breaker.whenOpen": "Return"},
        {"spec.maxLatencyIncreasePercent": 5, "spec.lending.breaker.whenOpen": "Return"},
    ),
    ("ServingPool", "wholeReplica needs lending.forecast"): (
        {"spec.wholeReplica": TROUGH, "spec.lending": BY_DAY},
        {"spec.wholeReplica": TROUGH},
    ),
    ("ServingPool", "wholeReplica.maxBusyPercent must not exceed lending.forecast"): (
        {"spec.wholeReplica": TROUGH | {"maxBusyPercent": 30}, "spec.lending": BY_DAY},
        {"spec.wholeReplica": TROUGH | {"maxBusyPercent": 31}, "spec.lending": BY_DAY},
    ),
    ("ServingPool", "wholeReplica needs compute TimeSlice"): (
        {"spec.wholeReplica": TROUGH, "spec.lending": BY_DAY, "spec.compute": "TimeSlice"},
        {"spec.wholeReplica": TROUGH, "spec.lending": BY_DAY, "spec.compute": "MPS"},
    ),
    ("ServingPool", "wholeReplica needs memorySource Reserved"): (
        {"spec.wholeReplica": TROUGH, "spec.lending": BY_DAY, "spec.memorySource": "Reserved"},
        {"spec.wholeReplica": TROUGH, "spec.lending": BY_DAY, "spec.memorySource": "Elastic"},
    ),
    ("ServingPool", "give memoryHeadroomGiB or memoryHeadroomPercent, not both"): (
        {"spec.lending": {"memoryHeadroomGiB": 4}},
        {"spec.lending": {"memoryHeadroomGiB": 4, "memoryHeadroomPercent": 20}},
    ),
    ("RolloutLease", "slots.min must not exceed slots.max"): (
        {"spec.slots": {"min": 2, "max": 2}},
        {"spec.slots": {"min": 3, "max": 2}},
    ),
    ("RolloutLease", "preemptionPolicy Never says nothing while slots.min is 0"): (
        {"spec.preemptionPolicy": "Never", "spec.slots": {"min": 1, "max": 2}},
        {"spec.preemptionPolicy": "Never", "spec.slots": {"min": 0, "max": 2}},
    ),
    ("RolloutLease", "contextTokens must not exceed kvTokens"): (
        {"spec.contextTokens": 1024, "spec.kvTokens": 1024},
        {"spec.contextTokens": 1025, "spec.kvTokens": 1024},
    ),
    ("RolloutSlot", "MultiNodeReplica"): (
        {"spec.members": [MEMBER]},
        {"spec.members": [MEMBER, MEMBER | {"node": "n1"}]},
    ),
    ("RolloutSlot", "computePercent and busyComputePercent need compute MPS"): (
        {"spec.sharing": {"compute": "MPS", "computePercent": 50, "busyComputePercent": 20}},
        {"spec.sharing": {"busyComputePercent": 20}},
    ),
    ("RolloutSlot", "releaseReason is given exactly when desired is Released"): (
        {"spec.desired": "Released", "spec.releaseReason": "Preempted"},
        {"spec.desired": "Released"},
    ),
}

# The same for changes of an object that exists.
TRANSITION: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("RolloutLease", "poolRef cannot change"): (
        {"spec": {"priority": 7}},
        {"spec": {"poolRef": {"name": "other"}}},
    ),
    ("RolloutLease", "poolRefs cannot change"): (
        {"spec": {"priority": 8}},
        {"spec": {"poolRefs": [{"namespace": "default", "name": "other"}]}},
    ),
    ("RolloutLease", "model cannot change"): (
        {"spec": {"slots": {"max": 3}}},
        {"spec": {"model": {"name": "other"}}},
    ),
    ("RolloutLease", "engineClass cannot change"): (
        {"spec": {"engineArguments": {"dtype": "bfloat16"}}},
        {"spec": {"engineClass": "other"}},
    ),
    ("RolloutLease", "gpusPerSlot cannot change"): (
        {"spec": {"engineArguments": {"dtype": "bfloat16"}}},
        {"spec": {"gpusPerSlot": 2}},
    ),
    ("RolloutLease", "storeName cannot change"): (
        {"spec": {"weights": {"maxStalenessVersions": 3}}},
        {"spec": {"weights": {"storeName": "other"}}},
    ),
    ("RolloutLease", "run cannot change"): (
        {"spec": {"weights": {"maxStalenessVersions": 2}}},
        {"spec": {"weights": {"run": "other"}}},
    ),
    ("RolloutLease", "frozen cannot change"): (
        {"spec": {"weights": {"frozen": False}}},
        {"spec": {"weights": {"frozen": True}}},
    ),
    ("RolloutLease", "adapterRank cannot change"): (
        {"spec": {"weights": {"adapterRank": 0}}},
        {"spec": {"weights": {"adapterRank": 8}}},
    ),
    ("RolloutLease", "adapterSlots cannot change"): (
        {"spec": {"weights": {"adapterSlots": 1}}},
        {"spec": {"weights": {"adapterSlots": 2, "adapterRank": 8}}},
    ),
    ("RolloutLease", "adapterTargets cannot change"): (
        {"spec": {"weights": {"adapterTargets": []}}},
        {"spec": {"weights": {"adapterTargets": ["q_proj"]}}},
    ),
    ("RolloutSlot", "leaseRef cannot change"): (
        {"spec": {"engine": {"maxRunning": 4}}},
        {"spec": {"leaseRef": {"uid": "u-2"}}},
    ),
    ("RolloutSlot", "members cannot change"): (
        {"spec": {"engine": {"maxRunning": 5}}},
        {"spec": {"members": [MEMBER | {"podUid": "p-2"}]}},
    ),
    ("RolloutSlot", "tier cannot change"): (
        {"spec": {"tier": "Shared"}},
        {"spec": {"tier": "Whole"}},
    ),
    ("RolloutSlot", "a released slot is never lent again"): (
        {"spec": {"releaseReason": "LeaseDeleted"}},
        {"spec": {"desired": "Lent", "releaseReason": ""}},
    ),
}

BOUNDS: list[tuple[str, dict[str, Any], str]] = [
    ("ServingPool", {"spec.selector": {"matchLabels": {}}}, "matchLabels"),
    ("ServingPool", {"spec.mode": "Borrow"}, "Unsupported value"),
    ("ServingPool", {"spec.allowedSignals": ["WireTap", "WireTap"]}, "Duplicate value"),
    ("ServingPool", {"spec.lending": {"maxReplicasPercent": 101}}, "maxReplicasPercent"),
    ("ServingPool", {"spec.lending": {"timeWindows": [NIGHT | {"endTime": "24:00"}]}}, "endTime"),
    ("ServingPool", {"spec.lending": {"maxReplicasPerNode": 0}}, "maxReplicasPerNode"),
    ("ServingPool", {"spec.lending": {"maxReplicasPerZonePercent": 0}}, "PerZonePercent"),
    ("ServingPool", {"spec.lending": {"maxReplicasPerLeasePercent": 101}}, "PerLeasePercent"),
    ("ServingPool", {"spec.lending": {"maxLoansPerMinute": 0}}, "maxLoansPerMinute"),
    ("ServingPool", {"spec.lending": {"spread": "Racks"}}, "Unsupported value"),
    ("ServingPool", {"spec.lending": {"forecast": {"leadMinutes": 4}}}, "leadMinutes"),
    ("ServingPool", {"spec.lending": {"forecast": {"maxBusyPercent": 96}}}, "maxBusyPercent"),
    ("ServingPool", {"spec.lending": {"breaker": {"whenOpen": "Panic"}}}, "Unsupported value"),
    ("ServingPool", {"spec.lending": {"autoscalerCheck": "Maybe"}}, "Unsupported value"),
    ("ServingPool", {"spec.wholeReplica": {}}, "minReleasedMebibytes"),
    ("ServingPool", {"spec.wholeReplica": TROUGH | {"minAwakeReplicas": 0}}, "minAwakeReplicas"),
    ("ServingPool", {"spec.wholeReplica": TROUGH | {"maxReplicas": 0}}, "maxReplicas"),
    ("ServingPool", {"spec.wholeReplica": TROUGH | {"maxBusyPercent": 81}}, "maxBusyPercent"),
    ("RolloutSlot", {"spec.tier": "Half"}, "Unsupported value"),
    ("RolloutLease", {"spec.weight": 0}, "spec.weight"),
    ("RolloutLease", {"spec.preemptionPolicy": "Always"}, "Unsupported value"),
    ("RolloutLease", {"spec.model.name": "../etc"}, "spec.model.name"),
    ("RolloutLease", {"spec.weights.storeName": "evil.example:80"}, "storeName"),
    ("RolloutLease", {"spec.weights.run": "Grpo"}, "spec.weights.run"),
    ("RolloutLease", {"spec.weights.run": "grpo."}, "spec.weights.run"),
    ("RolloutLease", {"spec.lifetimeSeconds": 1}, "lifetimeSeconds"),
    ("RolloutLease", {"spec.weights": ...}, "weights"),
]


def created(client: ApiClient, kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Ask the API server to validate and default, without keeping anything."""
    body = changed(KINDS[kind], {"metadata.name": "never-kept"} | changes)
    return client.create(RESOURCES[kind], body, dry_run=True)


@pytest.mark.cluster
@pytest.mark.parametrize(("kind", "text"), CREATION, ids=str)
def test_a_rule_on_creation(client: ApiClient, kind: str, text: str) -> None:
    good, bad = CREATION[kind, text]
    created(client, kind, good)
    with pytest.raises(StatusError) as refused:
        created(client, kind, bad)
    assert refused.value.code == 422
    assert text in str(refused.value)


@pytest.fixture(scope="module")
def existing(client: ApiClient) -> Iterator[ApiClient]:
    """One lease and one released slot that rules about changes are tried on."""
    released = {"spec.desired": "Released", "spec.releaseReason": "Preempted"}
    things = {
        "RolloutLease": changed(KINDS["RolloutLease"], {}),
        "RolloutSlot": changed(SLOT, released),
    }
    for kind, body in things.items():
        client.create(RESOURCES[kind], body)
    yield client
    for kind, body in things.items():
        client.delete(RESOURCES[kind], body["metadata"]["name"], "default")


@pytest.mark.cluster
@pytest.mark.parametrize(("kind", "text"), TRANSITION, ids=str)
def test_a_rule_on_change(existing: ApiClient, kind: str, text: str) -> None:
    good, bad = TRANSITION[kind, text]
    name = KINDS[kind]["metadata"]["name"]

    def change(patch: dict[str, Any]) -> None:
        existing.merge(RESOURCES[kind], name, patch, "default")

    change(good)
    with pytest.raises(StatusError) as refused:
        change(bad)
    assert refused.value.code == 422
    assert text in str(refused.value)


@pytest.mark.cluster
@pytest.mark.parametrize(("kind", "changes", "text"), BOUNDS, ids=str)
def test_a_bound(client: ApiClient, kind: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(StatusError) as refused:
        created(client, kind, changes)
    assert refused.value.code == 422
    assert text in str(refused.value)


@pytest.mark.cluster
def test_defaults_come_from_the_schema(client: ApiClient) -> None:
    pool = created(client, "ServingPool", {})["spec"]
    assert pool["mode"] == "Observe"
    assert not {"memoryHeadroomGiB", "memoryHeadroomPercent"} & set(pool["lending"])
    assert "maxComputePercent" not in pool, "its default hangs on how the GPU is shared"
    assert pool["lending"]["spread"] == "LeastUsed"
    assert pool["lending"]["breaker"] == {"cooldownSeconds": 600, "whenOpen": "Hold"}
    assert "forecast" not in pool["lending"]
    lease = created(client, "RolloutLease", {})["spec"]
    assert lease["slots"] == {"min": 1, "max": 1, "idleSeconds": 90}
    assert lease["weights"]["kvPolicy"] == "Keep"
    assert (lease["weight"], lease["preemptionPolicy"]) == (1, "PreemptLowerPriority")


@pytest.mark.cluster
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_the_api_server_takes_every_sample(client: ApiClient, sample: Path) -> None:
    written = yaml.safe_load(sample.read_text())
    assert created(client, written["kind"], {"spec": written["spec"]})["spec"]


@pytest.mark.cluster
def test_a_lease_follows_a_run_by_any_name_that_a_publisher_may_give_it(client: ApiClient) -> None:
    lease = created(client, "RolloutLease", {"spec.weights.run": "grpo-v2.1"})["spec"]
    assert lease["weights"]["run"] == "grpo-v2.1"


@pytest.mark.cluster
def test_leases_are_selected_by_their_pool(existing: ApiClient) -> None:
    leases = RESOURCES["RolloutLease"]
    found = existing.list(leases, "default", fields="spec.poolRef.name=chat")
    assert [lease["metadata"]["name"] for lease in found] == ["grpo"]
    assert existing.list(leases, "default", fields="spec.poolRef.name=x") == []


@pytest.mark.cluster
def test_a_lease_is_scaled_between_its_bounds_and_no_further(existing: ApiClient) -> None:
    lease = RESOURCES["RolloutLease"]

    def scale(slots: int) -> None:
        wanted = {"spec": {"replicas": slots}}
        existing.merge(lease, "grpo", wanted, "default", "scale")

    scale(4)
    assert existing.get(lease, "grpo", "default")["spec"]["slots"]["max"] == 4
    with pytest.raises(StatusError, match="less than or equal to 1024"):
        scale(1025)
    # Autoscalers ask for the pods that they watch by this selector, and refuse a scale without one.
    listed = {"status": {"slotsGranted": 2, "selector": "app.kubernetes.io/name=rose-router"}}
    existing.merge(lease, "grpo", listed, "default", "status")
    found = existing.get(lease, "grpo", "default", "scale")["status"]
    assert found == {"replicas": 2, "selector": "app.kubernetes.io/name=rose-router"}


def test_every_rule_has_an_accept_and_a_reject_case() -> None:
    tried = [*CREATION, *TRANSITION]
    for kind in DEFINITIONS:
        for _, rule in rules(structural(kind.spec), "spec"):
            matching = [
                text for name, text in tried if name == kind.name and text in rule["message"]
            ]
            assert len(matching) == 1, (kind.name, rule["message"])
    total = sum(len(list(rules(structural(kind.spec), "spec"))) for kind in DEFINITIONS)
    assert len(tried) == total
