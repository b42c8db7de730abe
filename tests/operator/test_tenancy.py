"""Tenants at the operator: what a policy does to leases, routers and slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rose_core.api import Reason
from rose_operator.kube.api import ObjectKind
from tests.operator.bench import SETTINGS, Bench

ENFORCED = replace(SETTINGS, tenancy=True)


def a_policy(bench: Bench, **spec: object) -> None:
    bench.api.add(
        ObjectKind.POLICY,
        {
            "apiVersion": "rose-gpu.dev/v1alpha1",
            "kind": "TenantPolicy",
            "metadata": {"name": "team"},
            "spec": {
                "namespaces": {"matchLabels": {"team": "a"}},
                "runs": [{"storeName": "main", "names": ["*"]}],
                **spec,
            },
        },
    )


def a_namespace(bench: Bench, **labels: str) -> None:
    bench.api.add(ObjectKind.NAMESPACE, {"metadata": {"name": "default", "labels": labels}})


async def test_without_a_policy_a_lease_gets_neither_slot_nor_router() -> None:
    bench = Bench(settings=ENFORCED)
    bench.pool()
    bench.lease()
    bench.report()
    await bench.turn(2)
    assert bench.reason() == Reason.NO_TENANT_POLICY
    assert bench.slots() == []
    assert bench.api.all(ObjectKind.DEPLOYMENT) == []


async def test_a_policy_lets_it_lease_and_one_that_is_withdrawn_takes_all_back() -> None:
    bench = Bench(settings=ENFORCED)
    a_namespace(bench, team="a")
    a_policy(bench)
    bench.pool()
    bench.lease()
    bench.report()
    await bench.turn(2)
    assert len(bench.slots()) == 1
    a_namespace(bench, team="b")
    for _ in range(2):
        bench.report()
        await bench.turn()
    assert bench.reason() == Reason.NO_TENANT_POLICY
    assert bench.slots() == []


async def test_a_pool_lends_to_namespaces_of_a_label_for_as_long_as_they_have_it() -> None:
    bench = Bench(settings=ENFORCED)
    a_namespace(bench, team="a", rl="yes")
    a_policy(bench)
    selector = {"matchLabels": {"rl": "yes"}}
    names = {"borrowerNamespaces": ["elsewhere"], "borrowerNamespaceSelector": selector}
    bench.pool(**{"spec.lending": {"maxReplicasPercent": 100, "minUnlentReplicas": 0} | names})
    bench.lease()
    bench.report()
    await bench.turn(2)
    assert len(bench.slots()) == 1
    a_namespace(bench, team="a")
    for _ in range(2):
        bench.report()
        await bench.turn()
    reported = bench.condition(kind="Accepted")
    assert reported["reason"] == Reason.NAMESPACE_NOT_ALLOWED
    assert "lends to elsewhere and namespaces with rl=yes" in reported["message"]
    assert bench.slots() == []


async def test_a_selector_lets_nobody_in_where_labels_are_not_read() -> None:
    bench = Bench()
    selector = {"spec.lending.borrowerNamespaceSelector": {"matchLabels": {"rl": "yes"}}}
    bench.pool(**selector)
    bench.lease()
    bench.report()
    await bench.turn(2)
    assert "tenancy is off" in bench.condition(kind="Accepted")["message"]
    assert bench.slots() == []


@pytest.mark.parametrize("asked", [{"spec__priority": 1000}, {"spec__router": {"replicas": 6}}])
async def test_nobody_ranks_himself_first(asked: dict[str, Any]) -> None:
    bench = Bench(settings=ENFORCED)
    a_namespace(bench, team="a")
    a_policy(bench)
    bench.pool()
    bench.lease(**asked)
    bench.report()
    await bench.turn(2)
    assert bench.reason() == Reason.TENANT_POLICY_FORBIDS
    assert bench.api.all(ObjectKind.DEPLOYMENT) == []
