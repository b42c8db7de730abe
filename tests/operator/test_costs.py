"""What a fleet costs the API server: nothing at rest, a bounded part per change, no more with size.

On an API server in memory that counts every write; the same on a real one is ``bench.operator``.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from bench.operator.fleet import QUICK, Fleet
from bench.operator.passes import Inside
from rose_operator.kube.api import ObjectKind
from rose_operator.metrics import DECISIONS

ROUNDS = 60


def decisions() -> float:
    """Slots made or taken back so far, by any operator of this process."""
    return sum(
        sample.value
        for metric in DECISIONS.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )


@dataclass
class Bill:
    """Writes of the operator, and transitions of slots that they were made for."""

    writes: int
    transitions: float


async def settled(fleet: Fleet) -> Inside:
    """A fleet that has what it wants."""
    inside = Inside(fleet)
    inside.report()
    await inside.reconciler.run_pass()
    await inside.settle()
    return inside


async def churned(inside: Inside) -> Bill:
    """A lease changes its size every second; everything comes to rest afterwards."""
    fleet, before = inside.fleet, decisions()
    asked = 0
    since = inside.api.writes
    for number in range(ROUNDS):
        turn, lease = divmod(number, fleet.leases)
        slots = 1 + (lease + turn) % fleet.slots_per_lease
        inside.put(ObjectKind.LEASE, fleet.lease(f"grpo-{lease}", lease % fleet.pools, slots))
        asked += 1
        inside.now += 1.0
        inside.report()
        await inside.reconciler.run_pass()
    await inside.settle()
    # A slot is made and runs, or is taken back and goes.
    return Bill(inside.api.writes - since - asked, 2 * (decisions() - before))


async def test_a_fleet_at_rest_costs_no_write() -> None:
    inside = await settled(QUICK.fleet)
    since = inside.api.writes
    for _ in range(ROUNDS):
        inside.now += 5.0
        inside.report()
        await inside.reconciler.run_pass()
    assert inside.api.writes == since


async def test_a_transition_of_a_slot_costs_at_most_two_writes() -> None:
    bill = await churned(await settled(QUICK.fleet))
    assert bill.transitions >= ROUNDS
    assert bill.writes <= 2 * bill.transitions


async def test_more_nodes_cost_no_more_for_the_same_changes() -> None:
    small = await churned(await settled(QUICK.fleet))
    fleet = msgspec.structs.replace(QUICK.fleet, nodes=240, replicas=400)
    large = await churned(await settled(fleet))
    assert large.transitions == small.transitions
    assert large.writes <= 1.1 * small.writes
