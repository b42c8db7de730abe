"""What the verbs for people say, from objects as they stand."""

import json
from typing import Any

from rose_cli.ops.status import lease_rows, pool_rows, slot_summary
from rose_cli.ops.tables import shown, table
from rose_cli.ops.top import node_rows
from rose_cli.ops.usage import summed, usage_rows, usages
from rose_core.api import RolloutLease, RolloutSlot, ServingPool
from tests.api.objects import LEASE, POOL, SLOT, changed

READY = [
    {
        "type": "Ready",
        "status": "False",
        "reason": "NoReplicas",
        "lastTransitionTime": "2027-01-15T08:00:00Z",
    }
]


def lease(name: str, hours: float, tokens: int, **changes: Any) -> RolloutLease:  # noqa: ANN401  # any field
    lent = round(hours * 3_600_000)
    totals = {"lentMilliseconds": lent, "openMilliseconds": lent // 2, "harvestedTokens": tokens}
    status = {"status": {"totals": totals, "slotsGranted": 2}}
    return RolloutLease.model_validate(changed(LEASE, {"metadata.name": name} | status | changes))


def pool(price: int = 2_000_000) -> ServingPool:
    return ServingPool.model_validate(
        changed(POOL, {"spec.lending": {"pricePerGPUHourMicros": price}, "status": {}})
    )


def test_pools_and_leases_say_whether_they_are_ready_and_why_not() -> None:
    unready = ServingPool.model_validate(changed(POOL, {"status": {"conditions": READY}}))
    (row,) = pool_rows([unready])
    assert (row["pool"], row["mode"], row["ready"], row["reason"]) == (
        "default/chat",
        "Observe",
        "False",
        "NoReplicas",
    )
    (row,) = lease_rows([RolloutLease.model_validate(LEASE)])
    assert (row["wanted"], row["granted"], row["ready"]) == (1, 0, "")


def test_open_time_is_charged_at_the_pools_price_and_unknown_is_not_zero() -> None:
    pools = {"default/chat": pool()}
    rows = usage_rows(usages([lease("small", 1, 0), lease("large", 4, 8000)], pools))
    assert [row["lease"] for row in rows] == ["default/large", "default/small"]
    assert (rows[0]["charge"], rows[0]["tokens_per_gpu_hour"]) == (4.0, 2000)
    (unpriced,) = usage_rows(usages([lease("x", 0, 0)], {}))
    assert unpriced["charge"] is None
    assert unpriced["tokens_per_gpu_hour"] is None


def test_totals_by_pool_and_namespace_add_up() -> None:
    leases = [lease("a", 1, 100), lease("b", 3, 300, **{"metadata.namespace": "rl"})]
    found = usages(leases, {"default/chat": pool()})
    (by_pool,) = summed(found, "pool")
    assert (by_pool["leases"], by_pool["gpu_hours"], by_pool["open_gpu_hours"]) == (2, 4.0, 2.0)
    assert by_pool["charge"] == 4.0
    assert [row["namespace"] for row in summed(found, "namespace")] == ["default", "rl"]
    (unknown,) = summed(usages(leases, {}), "pool")
    assert unknown["charge"] is None


def test_nodes_are_listed_by_their_slots() -> None:
    def slot(node: str, state: str) -> RolloutSlot:
        member = SLOT["spec"]["members"][0] | {"node": node}
        return RolloutSlot.model_validate(
            changed(SLOT, {"spec.members": [member], "status": {"state": state}})
        )

    slots = [slot("n1", "Running"), slot("n2", "Running"), slot("n2", "")]
    assert [(row["node"], row["slots"], row["running"]) for row in node_rows(slots)] == [
        ("n2", 2, 1),
        ("n1", 1, 1),
    ]
    assert slot_summary(slots) == "3 slots: 2 Running, 1 Starting"
    assert slot_summary([]) == "no slots"


def test_rows_become_a_table_json_or_csv() -> None:
    rows = [{"name": "a", "count": 10, "note": ""}, {"name": "long", "count": 9, "note": None}]
    assert table(rows) == "NAME  COUNT  NOTE\na        10  -\nlong      9  -\n"
    assert table([], "no pools in namespace default (-A: in all)").startswith("no pools in")
    assert json.loads(shown(rows, "json"))[1]["count"] == 9
    assert table([{"price": 0.0012}, {"price": 12.0}]) == " PRICE\n0.0012\n 12.00\n"
    assert shown(rows, "csv").splitlines()[1] == "a,10,"
