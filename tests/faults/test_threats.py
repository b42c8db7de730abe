"""What a lease owner could try against other teams: an operator's inside, an API in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from rose_core.api import Desired, RolloutLease, RolloutSlot
from rose_core.api.rolloutlease import LeaseSpec
from rose_core.wire.sync import Grant, SyncRequest
from rose_operator.kube.api import ObjectKind
from rose_operator.settings import Settings
from rose_operator.sync.grants import adapter_runs, grants_of
from tests.api.objects import LEASE
from tests.operator.bench import SETTINGS, Bench
from tests.operator.stub_agent import replica

RUN: str = LEASE["spec"]["weights"]["run"]
NAMESPACE: str = LEASE["metadata"]["namespace"]


def keeping_apart(namespace: str) -> Settings:
    """The lease's run belongs to a namespace."""
    return replace(SETTINGS, runs={"main": {namespace: (RUN,)}})


async def borrowing(settings: Settings) -> Bench:
    bench = Bench(settings=settings)
    bench.pool()
    bench.lease()
    for _ in range(3):
        bench.report()
        await bench.turn(2)
    return bench


def slots(bench: Bench) -> list[RolloutSlot]:
    return [RolloutSlot.model_validate(raw) for raw in bench.api.all(ObjectKind.SLOT)]


def granted(found: Iterable[RolloutSlot], settings: Settings) -> list[Grant]:
    return [
        grant for slot in found for grant in grants_of(slot.spec.member.node, [slot], 1, settings)
    ]


def accepted(bench: Bench) -> dict[str, Any]:
    (lease,) = bench.api.all(ObjectKind.LEASE)
    (found,) = (one for one in lease["status"]["conditions"] if one["type"] == "Accepted")
    return dict(found)


async def test_the_run_of_another_team_is_refused_by_name_and_gets_no_slot() -> None:
    bench = await borrowing(keeping_apart("another-team"))
    found = accepted(bench)
    assert (found["status"], found["reason"]) == ("False", "RunNotAllowed")
    assert f"namespace {NAMESPACE} may not follow run {RUN!r}" in found["message"]
    assert slots(bench) == []


async def test_a_run_of_another_team_is_left_out_beside_ones_own() -> None:
    settings = replace(SETTINGS, runs={"main": {NAMESPACE: (RUN,), "another-team": ("theirs",)}})
    bench = Bench(settings=settings)
    bench.pool()
    more: dict[str, Any] = {"spec__weights__adapterRank": 8, "spec__weights__adapterSlots": 3}
    bench.lease(**more, spec__weights__adapterRuns=["theirs"])
    bench.report()
    await bench.turn(2)
    assert (
        "left out of adapterRuns: theirs; this namespace may not follow"
        in accepted(bench)["message"]
    )
    (raw,) = bench.api.all(ObjectKind.LEASE)
    lease = RolloutLease.model_validate(raw)
    assert adapter_runs([lease], settings, None) == {}  # no node hears of it
    theirs_too = replace(SETTINGS, runs={"main": {NAMESPACE: (RUN, "theirs")}})
    assert adapter_runs([lease], theirs_too, None) == {lease.metadata.uid: ("theirs",)}


async def test_a_teams_own_run_is_followed() -> None:
    settings = keeping_apart(NAMESPACE)
    bench = await borrowing(settings)
    assert accepted(bench)["status"] == "True"
    assert granted(slots(bench), settings)


async def test_a_slot_of_a_run_or_a_store_no_longer_allowed_gets_no_grant() -> None:
    held = slots(await borrowing(SETTINGS))
    assert granted(held, SETTINGS)
    assert granted(held, keeping_apart("another-team")) == []
    assert granted(held, replace(SETTINGS, stores={"other": "store:7446"})) == []


async def test_nodes_dial_only_addresses_of_the_platform() -> None:
    for grant in granted(slots(await borrowing(SETTINGS)), SETTINGS):
        assert grant.weights.endpoint in SETTINGS.stores.values()
        assert grant.router.rpartition(":")[0].endswith(f".{SETTINGS.namespace}.svc")


@pytest.mark.parametrize("word", ["image", "host", "url", "address", "path", "command", "env"])
def test_a_lease_has_no_field_for(word: str) -> None:
    def names(schema: dict[str, Any]) -> Iterable[str]:
        for key, value in schema.get("properties", {}).items():
            yield key
            yield from names(value)

    schema = LeaseSpec.model_json_schema()
    every = [*names(schema), *(n for one in schema["$defs"].values() for n in names(one))]
    assert "storeName" in every
    assert not [name for name in every if word in name.lower()]


async def test_two_operators_that_both_believe_to_lead_lend_no_gpu_twice() -> None:
    first = Bench()
    first.pool()
    first.lease()
    both = [first, Bench(first.api)]
    for _ in range(5):
        for bench in both:
            bench.report()
            bench.read()
        for bench in both:  # each plans on what it knew before the other wrote
            await bench.reconciler.run_pass()
    gpus = [gpu for slot in slots(first) for gpu in slot.spec.member.gpu_uuids]
    alone = await borrowing(SETTINGS)
    assert gpus
    assert len(gpus) == len(set(gpus)) == len(slots(alone))


async def test_two_operators_that_know_different_things_pass_a_limit_for_one_pass_at_most() -> None:
    first = Bench()
    first.pool(**{"spec.lending": {"maxReplicasPercent": 50, "minUnlentReplicas": 0}})
    first.lease(spec__slots={"min": 1, "max": 2})
    second = Bench(first.api)
    for bench, emptiest in ((first, "a"), (second, "b")):
        received = tuple(
            replica("default/chat", name, kv=500 * (name != emptiest)) for name in "ab"
        )
        bench.telemetry.record(SyncRequest("n1", "t", 0, received, ()), bench.now)
        bench.read()
    for bench in (first, second):  # each on what it knew before the other wrote
        await bench.reconciler.run_pass()
    assert len(lent(first)) == 2, "the one that no longer leads has lent besides"
    await first.turn()
    assert len(lent(first)) == 1
    await second.turn(2)
    assert len(lent(first)) == 1


def lent(bench: Bench) -> list[RolloutSlot]:
    return [slot for slot in slots(bench) if slot.spec.desired is Desired.LENT]
