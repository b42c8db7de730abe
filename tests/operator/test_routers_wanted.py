"""Routers on the API server: which leases have one, what it may take, and what the lease says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rose_core.api import Reason
from rose_core.lending import Demand
from rose_core.lending.routers import REFUSED_SECONDS
from rose_core.rollouts.capacity.router_size import LEAST_MEMORY, MOST_MEMORY
from rose_operator.kube.api import ObjectKind
from rose_router.flags import parser, settings
from rose_router.turns.service import leaves_at
from tests.operator.bench import SETTINGS, Bench, running
from tests.operator.test_tenancy import a_namespace, a_policy

ENFORCED = replace(SETTINGS, tenancy=True)


def pods(bench: Bench) -> list[int]:
    """Replicas of each router."""
    return [raw["spec"]["replicas"] for raw in bench.api.all(ObjectKind.DEPLOYMENT)]


def names(bench: Bench, kind: ObjectKind) -> list[str]:
    return [raw["metadata"]["name"] for raw in bench.api.all(kind)]


def condition_of(bench: Bench) -> tuple[str, str]:
    found = bench.condition(kind="RouterReady")
    return found["status"], found["reason"]


def url(bench: Bench) -> str:
    return str(bench.api.objects[ObjectKind.LEASE, "default/grpo"]["status"]["routerURL"])


async def test_a_lease_on_an_empty_pool_has_no_router_until_a_replica_is_reported() -> None:
    bench = Bench()
    bench.pool()
    bench.lease(spec__router={"replicas": 6})
    await bench.turn(2)
    assert (pods(bench), names(bench, ObjectKind.SERVICE)) == ([], [])
    assert condition_of(bench) == ("False", Reason.NO_SLOT_POSSIBLE)
    bench.report()
    await bench.turn(2)
    assert pods(bench) == [6]
    assert condition_of(bench) == ("False", Reason.ROUTER_NOT_READY)
    await bench.ready_routers()
    bench.now += 5
    bench.report()
    await bench.turn(2)
    assert condition_of(bench) == ("True", Reason.ROUTER_ANSWERS)


async def test_a_suspended_lease_has_no_pod_keeps_its_url_and_gets_its_pods_back() -> None:
    bench = await running()
    before = url(bench)
    bench.demand["default/grpo"] = Demand(turns=0)
    bench.lease(spec__suspend=True)
    for _ in range(3):
        bench.now += 5
        bench.report()
        await bench.turn()
    assert (bench.slots(), pods(bench)) == ([], [0])
    assert condition_of(bench) == ("False", Reason.SUSPENDED)
    assert url(bench) == before
    bench.demand.clear()  # nobody hears a router without pods
    await bench.turn(2)
    assert pods(bench) == [0]
    bench.lease(spec__suspend=False)
    bench.report()
    await bench.turn(2)
    assert pods(bench) == [1]


async def test_a_paused_pool_ends_routers_only_after_a_while() -> None:
    bench = await running()
    bench.demand["default/grpo"] = Demand(turns=0)
    bench.pool(**{"spec.mode": "Paused"})
    for _ in range(3):
        bench.report()
        await bench.turn()
    assert (bench.slots(), pods(bench)) == ([], [1])
    bench.now += REFUSED_SECONDS
    bench.report()
    await bench.turn()
    assert pods(bench) == [0]
    assert condition_of(bench) == ("False", Reason.POOL_NOT_LENDING)


async def test_a_policy_that_is_withdrawn_ends_the_routers_pods_with_its_slots() -> None:
    bench = Bench(settings=ENFORCED)
    a_namespace(bench, team="a")
    a_policy(bench)
    bench.pool()
    bench.lease(spec__dedicatedEngines=["mine"])
    bench.report()
    await bench.turn(2)
    assert pods(bench) == [1]
    a_namespace(bench, team="b")
    for _ in range(3):
        bench.now += 5  # reasons alone are not written at once
        bench.report()
        await bench.turn()
    assert pods(bench) == [0]
    assert condition_of(bench) == ("False", Reason.NO_TENANT_POLICY)


async def test_a_namespaces_routers_are_counted_together_also_those_of_refused_leases() -> None:
    bench = Bench(settings=ENFORCED)
    a_namespace(bench, team="a")
    a_policy(bench, maxTotalRouterReplicas=3)
    bench.pool()
    bench.lease("first", spec__router={"replicas": 2})
    bench.report()
    await bench.turn(2)
    assert pods(bench) == [2]
    bench.pool(**{"spec.mode": "Paused"})
    bench.report()
    await bench.turn(2)
    assert bench.reason("first", "Accepted") == Reason.POOL_NOT_LENDING
    bench.api.add(ObjectKind.POOL, second_pool(bench))
    elsewhere = {"namespace": "default", "name": "chat-2"}
    bench.lease("second", spec__router={"replicas": 2}, spec__poolRef=elsewhere)
    bench.report()
    await bench.turn(2)
    assert bench.reason("second", "Accepted") == Reason.TENANT_CAP_REACHED
    assert "router.replicas 2 and the 2" in bench.condition("second", "Accepted")["message"]
    assert pods(bench) == [2]


def second_pool(bench: Bench) -> dict[str, Any]:
    (pool,) = bench.api.all(ObjectKind.POOL)
    metadata = {"name": "chat-2", "namespace": "default"}
    return {**pool, "metadata": metadata, "spec": {**pool["spec"], "mode": "Lend"}}


def memory(bench: Bench) -> int:
    (raw,) = bench.api.all(ObjectKind.DEPLOYMENT)
    (container,) = raw["spec"]["template"]["spec"]["containers"]
    return int(container["resources"]["limits"]["memory"].removesuffix("Mi")) << 20


async def test_a_router_is_as_large_as_its_lease_and_does_not_shrink_while_it_runs() -> None:
    bench = await running()
    assert memory(bench) == LEAST_MEMORY
    (raw,) = bench.api.all(ObjectKind.DEPLOYMENT)
    arguments = raw["spec"]["template"]["spec"]["containers"][0]["args"]
    small = settings(parser().parse_args(arguments)).limits.connections
    for slots in (512, 1):
        bench.lease(spec__slots={"min": 0, "max": slots}, spec__contextTokens=16_384)
        bench.report()
        await bench.turn(2)
        assert memory(bench) == MOST_MEMORY
    bench.boot()
    await bench.turn(2)
    assert memory(bench) == MOST_MEMORY
    (raw,) = bench.api.all(ObjectKind.DEPLOYMENT)
    arguments = raw["spec"]["template"]["spec"]["containers"][0]["args"]
    assert settings(parser().parse_args(arguments)).limits.connections > small


async def test_a_router_has_the_time_to_send_callers_elsewhere_and_to_drain() -> None:
    bench = await running()
    (raw,) = bench.api.all(ObjectKind.DEPLOYMENT)
    pod = raw["spec"]["template"]["spec"]
    given = settings(parser().parse_args(pod["containers"][0]["args"]))
    assert given.lame_duck_seconds > 0
    longest = leaves_at(0.0, math.inf, given.lame_duck_seconds) + given.drain_seconds
    assert pod["terminationGracePeriodSeconds"] > longest


def trusted(bench: Bench) -> str:
    """Whom the router's pods believe as the operator."""
    (found,) = bench.api.all(ObjectKind.DEPLOYMENT)
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return str(next(one["value"] for one in container["env"] if one["name"] == "ROSE_TLS_CA_PEM"))


async def test_a_new_authority_of_the_operator_reaches_routers_while_it_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "ca.crt").write_text("old")
    bench = Bench(settings=replace(SETTINGS, tls_dir=tmp_path, operator_authority="old"))
    bench.pool()
    bench.lease()
    bench.report()
    await bench.turn(2)
    assert trusted(bench) == "old"
    (tmp_path / "ca.crt").write_text("old and new")
    await bench.turn()
    assert trusted(bench) == "old and new"
    (tmp_path / "ca.crt").unlink()  # being replaced
    await bench.turn()
    assert trusted(bench) == "old and new"
