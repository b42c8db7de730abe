"""Which leases have a router: none before a slot is possible, or where the platform says no."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rose_core import lending
from rose_core.api import Reason, RolloutLease
from rose_core.lending import Demand
from rose_core.lending.routers import REFUSED_SECONDS, RouterFacts, RouterState, decide
from tests.api.objects import LEASE, changed
from tests.lending import world

RUNS, RESTS, NONE = RouterState.RUNS, RouterState.RESTS, RouterState.NONE
HEARD = Demand(turns=0)
NEW = RouterFacts(None, 0.0, possible=False, has_slots=False, now=NONE, demand=None)
OLD = replace(NEW, now=RUNS, demand=HEARD)
PAUSED = (Reason.POOL_NOT_LENDING, "pool serving/chat is in mode Paused")


def a_lease(**spec: Any) -> RolloutLease:  # noqa: ANN401  # any field
    return RolloutLease.model_validate(changed(LEASE, {f"spec.{key}": spec[key] for key in spec}))


def found(facts: RouterFacts, **spec: Any) -> RouterState:  # noqa: ANN401  # any field
    return decide(a_lease(**spec), facts).state


def test_a_router_comes_with_the_first_slot_that_is_possible_and_says_so_until_then() -> None:
    waits = decide(a_lease(), NEW)
    assert (waits.state, waits.reason) == (NONE, Reason.NO_SLOT_POSSIBLE)
    assert "no GPU that could be lent" in waits.message
    assert found(replace(NEW, possible=True)) is RUNS
    assert found(OLD) is RUNS, "turns that wait there bring slots"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"suspend": True}, Reason.SUSPENDED),
        ({"slots": {"min": 0, "max": 0}}, Reason.NO_SLOTS_WANTED),
    ],
)
def test_a_lease_that_wants_no_slot_has_no_pod(spec: dict[str, Any], reason: Reason) -> None:
    assert found(replace(NEW, possible=True), **spec) is NONE
    rests = decide(a_lease(**spec), OLD)
    assert (rests.state, rests.reason) == (RESTS, reason)
    assert found(replace(OLD, has_slots=True), **spec) is RUNS, "its turns are still there"
    assert found(replace(OLD, now=RESTS, demand=None), **spec) is RESTS, "it stays so"
    assert found(replace(OLD, now=RESTS, demand=None)) is RUNS, "it is wanted again"


def test_engines_of_ones_own_need_no_slot() -> None:
    for facts in (NEW, OLD):
        assert found(facts, suspend=True, dedicatedEngines=["mine"]) is RUNS
    attached = replace(OLD, demand=Demand(turns=0, dedicated_turns=8))
    assert found(attached, suspend=True) is RUNS
    late = replace(OLD, refusal=PAUSED, refused_seconds=REFUSED_SECONDS)
    assert found(late, dedicatedEngines=["mine"]) is RUNS


def test_unknown_is_not_idle() -> None:
    assert found(replace(OLD, demand=None), suspend=True) is RUNS


def test_a_refused_lease_keeps_its_router_while_somebody_may_correct_it() -> None:
    refused = replace(OLD, refusal=PAUSED)
    assert found(replace(refused, refused_seconds=REFUSED_SECONDS - 1)) is RUNS
    late = decide(a_lease(), replace(refused, refused_seconds=REFUSED_SECONDS))
    assert (late.state, late.reason, late.message) == (RESTS, *PAUSED)
    assert found(replace(refused, now=NONE)) is NONE


@pytest.mark.parametrize(
    "reason",
    [
        Reason.NO_TENANT_POLICY,
        Reason.TENANT_POLICY_FORBIDS,
        Reason.TENANT_CAP_REACHED,
        Reason.RUN_NOT_ALLOWED,
    ],
)
def test_what_the_platform_forbids_has_no_pod_whatever_the_tenant_says(reason: Reason) -> None:
    forbidden = replace(OLD, refusal=(reason, "no"), demand=Demand(turns=9, dedicated_turns=9))
    assert found(forbidden, dedicatedEngines=["mine"]) is RESTS
    assert found(replace(forbidden, has_slots=True)) is RUNS, "until its slots are gone"


def test_an_expired_lease_has_no_router() -> None:
    assert found(replace(OLD, refusal=(Reason.LEASE_EXPIRED, ""))) is NONE


def possible(*replicas: lending.Replica, **lease: Any) -> bool:  # noqa: ANN401  # any field
    one = world.lease("grpo", **lease)
    others = [world.pool(key=pool) for pool in {o.pool for o in replicas} - {"s/chat"}]
    seen = world.world([*replicas], [one], pools=[world.pool(), *others])
    return one.key in lending.plan(seen, world.NOW).possible


def test_pods_without_a_gpu_of_their_own_make_no_slot_possible() -> None:
    assert not possible()
    assert not possible(world.replica("cpu", gpus=()))
    assert not possible(world.replica("cpu", gpus=(), ready=False))
    owner = world.replica("owner", pool="other/pool", proven=True)
    thief = world.replica("thief", node=owner.node, gpus=owner.gpus)
    assert not possible(thief, owner)
    assert possible(world.replica("a"))


def test_a_slot_is_possible_where_a_replica_is_only_busy_now() -> None:
    assert possible(world.replica("a", kv_permille=1000))
    assert possible(world.replica("a", ready=False))
    assert not possible(world.replica("a"), device_classes=frozenset({"h200"}))
    assert possible(world.replica("a", device_class="h200"), device_classes=frozenset({"h200"}))
    assert not possible(world.replica("a"), refusal=Reason.UNKNOWN_POOL)
