"""What leases of a namespace may ask for: deny by default, and what policies add together."""

from __future__ import annotations

from typing import Any

import pytest

from rose_core.api import LeaseStatus, Reason, RolloutLease, TenantPolicy
from rose_core.lending.tenancy import Tenancy, preempts
from tests.api.objects import LEASE, changed

RUNS = [{"storeName": "main", "names": ["run-*"]}]


def policy(name: str = "team", **spec: Any) -> TenantPolicy:  # noqa: ANN401  # any field
    given = {"namespaces": {"names": ["team-a"]}, "runs": RUNS, **spec}
    return TenantPolicy.model_validate({"metadata": {"name": name}, "spec": given})


def lease(name: str = "one", namespace: str = "team-a", **changes: Any) -> RolloutLease:  # noqa: ANN401
    fields = {path.replace("__", "."): value for path, value in changes.items()}
    raw = changed(
        LEASE,
        {
            "metadata.name": name,
            "metadata.namespace": namespace,
            "metadata.creationTimestamp": f"2026-11-23T00:00:{len(name):02}Z",
            "spec.weights": {"storeName": "main", "run": "run-1"},
            "spec.slots": {"min": 1, "max": 2},
            **fields,
        },
    )
    return RolloutLease.model_validate(raw)


def refused(
    leases: list[RolloutLease],
    *policies: TenantPolicy,
    **labels: dict[str, str],
) -> dict[str, Reason]:
    answers = Tenancy(policies, labels).judge(leases)
    return {key.partition("/")[2]: reason for key, (reason, _) in answers.items()}


def test_a_namespace_that_no_policy_selects_leases_nothing() -> None:
    assert refused([lease()]) == {"one": Reason.NO_TENANT_POLICY}
    assert refused([lease(namespace="team-ab")], policy()) == {"one": Reason.NO_TENANT_POLICY}
    assert refused([lease()], policy()) == {}


def test_policies_select_by_name_by_pattern_and_by_labels() -> None:
    for chosen in ({"names": ["team-*"]}, {"matchLabels": {"team": "a"}}):
        made = policy(namespaces=chosen)
        assert refused([lease()], made, **{"team-a": {"team": "a", "x": "y"}}) == {}
    made = policy(namespaces={"matchLabels": {"team": "a", "tier": "1"}})
    assert refused([lease()], made, **{"team-a": {"team": "a"}}) == {"one": Reason.NO_TENANT_POLICY}


def test_a_run_beside_the_first_that_may_not_be_followed_refuses_no_lease() -> None:
    runs = {"adapterRank": 8, "adapterSlots": 2, "adapterRuns": ["other"]}
    weights = {"storeName": "main", "run": "run-1", **runs}
    assert refused([lease(spec__weights=weights)], policy()) == {}
    tenancy = Tenancy([policy()], {})
    assert tenancy.may_follow("team-a", "main", "run-7")
    for asked in (("team-a", "main", "other"), ("team-a", "x", "run-7"), ("b", "main", "run-7")):
        assert not tenancy.may_follow(*asked)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec__weights": {"storeName": "main", "run": "other"}}, Reason.RUN_NOT_ALLOWED),
        ({"spec__weights": {"storeName": "else", "run": "run-1"}}, Reason.RUN_NOT_ALLOWED),
        ({"spec__poolRef": {"namespace": "x", "name": "y"}}, Reason.TENANT_POLICY_FORBIDS),
        ({"spec__poolRefs": [{"namespace": "x", "name": "y"}]}, Reason.TENANT_POLICY_FORBIDS),
        ({"spec__model": {"name": "secret"}}, Reason.TENANT_POLICY_FORBIDS),
        ({"spec__priority": 1}, Reason.TENANT_POLICY_FORBIDS),
        ({"spec__priority": -1}, Reason.TENANT_POLICY_FORBIDS),
        ({"spec__weight": 2}, Reason.TENANT_POLICY_FORBIDS),
        ({"spec__router": {"replicas": 3}}, Reason.TENANT_POLICY_FORBIDS),
        ({"spec__slots": {"min": 1, "max": 65}}, Reason.TENANT_CAP_REACHED),
    ],
)
def test_what_a_policy_leaves_out_is_not_allowed(changes: dict[str, Any], reason: Reason) -> None:
    pool, model = lease().spec.pool_ref.key, lease().spec.model.name
    made = policy(pools=[pool], models=[model])
    assert refused([lease()], made) == {}
    assert refused([lease(**changes)], made) == {"one": reason}


def test_a_refusal_names_the_field_and_the_policies() -> None:
    answers = Tenancy([policy("b"), policy("a")], {}).judge([lease(spec__priority=1000)])
    ((reason, text),) = answers.values()
    assert reason is Reason.TENANT_POLICY_FORBIDS
    assert "priority 1000 (allowed: 0 to 0, 0 to 0) is not allowed by TenantPolicy a, b" in text


def test_of_several_policies_the_widest_cap_and_every_right_counts() -> None:
    narrow = policy("narrow", maxLeases=1, runs=[{"storeName": "main", "names": ["x"]}])
    wide = policy("wide", maxLeases=2, maxPriority=10)
    both = [lease("one"), lease("three", spec__priority=10)]
    assert refused(both, narrow, wide) == {}
    assert refused(both, narrow) == {"one": Reason.RUN_NOT_ALLOWED, "three": Reason.RUN_NOT_ALLOWED}


def test_a_new_lease_never_ends_an_old_one() -> None:
    made = policy(maxLeases=2, maxSlots=5)
    old, second, third = lease("a"), lease("bb"), lease("ccc")
    assert refused([third, second, old], made) == {"ccc": Reason.TENANT_CAP_REACHED}
    assert refused([third, old], made) == {}
    slots = policy(maxSlots=5)
    assert refused([third, second, old], slots) == {"ccc": Reason.TENANT_CAP_REACHED}


def test_caps_are_of_each_namespace() -> None:
    made = policy(namespaces={"names": ["team-*"]}, maxLeases=1)
    assert refused([lease("a"), lease("b", "team-b")], made) == {}


def test_a_lease_that_is_refused_uses_up_no_cap() -> None:
    made = policy(maxLeases=1)
    assert refused([lease("a", spec__priority=9), lease("bb")], made) == {
        "a": Reason.TENANT_POLICY_FORBIDS
    }


def test_who_may_preempt_is_the_platforms_word() -> None:
    asks = lease(spec__preemptionPolicy="PreemptLowerPriority")
    assert not preempts(asks, Tenancy([policy()], {}))
    assert preempts(asks, Tenancy([policy(mayPreempt=True)], {}))
    never = lease(spec__preemptionPolicy="Never")
    assert not preempts(never, Tenancy([policy(mayPreempt=True)], {}))
    assert preempts(asks, None), "where tenancy is switched off"


def has_router(name: str, replicas: int, **changes: Any) -> RolloutLease:  # noqa: ANN401
    made = lease(name, spec__router={"replicas": replicas}, **changes)
    return made.model_copy(update={"status": LeaseStatus(router_url="http://r")})


def test_routers_of_a_namespace_are_counted_together() -> None:
    made = policy(maxTotalRouterReplicas=3)
    old, new = has_router("a", 2), lease("bb", spec__router={"replicas": 2})
    assert refused([new, old], made) == {"bb": Reason.TENANT_CAP_REACHED}
    assert refused([new, old], policy(maxTotalRouterReplicas=4)) == {}


def test_a_refused_leases_router_counts_and_may_not_grow_beyond_what_is_allowed() -> None:
    judge = Tenancy([policy(maxTotalRouterReplicas=3)], {}).judge
    new = lease("bb", spec__router={"replicas": 2})
    assert [*judge([new], [has_router("a", 2)])] == [new.metadata.key]
    assert judge([new], [lease("a", spec__router={"replicas": 2})]) == {}, "it has none"
    grown = has_router("a", 3)
    assert judge([new], [grown])[grown.metadata.key][0] is Reason.TENANT_POLICY_FORBIDS
    many = policy(maxLeases=1, maxSlots=2)
    assert Tenancy([many], {}).judge([new], [has_router("a", 2)]) == {}, "it holds no slot"
