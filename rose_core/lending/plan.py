"""The pool planner: releases first, then loans, each with its reason.

One pass, from a snapshot:

0. bound every lease by what its turns need (``demand``);
1. judge every replica, remember since when it qualifies (``qualify``, ``planning_pass``);
2. release slots whose reason to exist is gone: lease, pool, window, breaker, replica, stop button,
   cordon, a sleeper that the coming load needs, limits, a lease that shrank or has no turns, a
   second slot on a GPU, a stronger lease below its minimum, an equal lease below its share
   (``release``, ``whole``);
3. lend free, settled replicas to the lease that is next by minimum, priority and weight, least used
   replica of the least used place first, within the limits of ``radius`` (``loan``, ``shares``);
4. say for every lease what it has and why not more (``explain``).

A slot that exists is never moved because another replica would be better: moving costs an engine
start and a weight transfer.
"""

from __future__ import annotations

from rose_core.lending.answers import LendingPlan
from rose_core.lending.demand import by_demand
from rose_core.lending.explain import member_verdicts, outcomes
from rose_core.lending.facts import Snapshot
from rose_core.lending.loan import make_loans, unwanted
from rose_core.lending.planning_pass import PlanningPass
from rose_core.lending.release import release_slots
from rose_core.lending.room import misfits
from rose_core.lending.routers import possible_leases


def plan(snapshot: Snapshot, now: float) -> LendingPlan:
    """Decide which slots to make and which to take back.

    Args:
        snapshot: what is known; must be complete (every lease, pool and slot).
        now: seconds since the epoch.
    """
    world = PlanningPass(by_demand(snapshot, now), now)
    release_slots(world)
    make_loans(world)
    members = member_verdicts(world)
    return LendingPlan(
        lends=tuple(world.lends),
        releases=tuple(world.releases.values()),
        verdicts=world.verdicts,
        outcomes=outcomes(world, members),
        memory=world.memory,
        members=members,
        unwanted=unwanted(world),
        misfits=misfits(world),
        possible=possible_leases(world),
    )
