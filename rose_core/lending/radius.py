"""How far a fault of lending may reach: limits on loans per node, zone, lease and minute.

``blocked`` speaks of a whole pool, ``refusal`` of one replica. Both are asked before every loan,
in the order in which a person would look for the cause.
"""

from __future__ import annotations

from rose_core.api.reasons import Reason
from rose_core.lending.answers import ReplicaDecision
from rose_core.lending.facts import PoolTerms, Replica
from rose_core.lending.limits import is_open, opens_at
from rose_core.lending.planning_pass import PlanningPass

Cause = tuple[Reason, str]


def closed(world: PlanningPass, pool: PoolTerms) -> Cause | None:
    """Why no loan can be made in the pool for a while, whatever comes back; None otherwise."""
    if not is_open(pool, world.now):
        return Reason.OUTSIDE_TIME_WINDOW, _when_open(pool, world.now)
    left = world.broken(pool)
    if left:
        missed = "live traffic misses its objective" if pool.breaker.missed else "it was missed"
        return Reason.BREAKER_OPEN, f"{missed}; lending rests for another {left:.0f} s"
    return None


def _when_open(pool: PoolTerms, now: float) -> str:
    at = opens_at(pool, now)
    if at is None:
        return "no time window is open, and none will be"
    return f"no time window is open; the next one opens {at:%a %H:%M} UTC"


def blocked(world: PlanningPass, pool: PoolTerms) -> Cause | None:
    """Why no loan is made in the pool in this pass; None otherwise."""
    shut = closed(world, pool)
    if shut is not None:
        return shut
    if world.room(pool) <= 0 and not world.more_of_a_group(pool):
        found = world.limit(pool)
        return found.reason, found.message
    made = world.loans_in_last_minute(pool)
    if pool.per_minute is not None and made >= pool.per_minute:
        text = f"{made} loans in the last minute, limit {pool.per_minute}"
        return Reason.GROWTH_LIMITED, text
    return None


def refusal(world: PlanningPass, pool: PoolTerms, replica: Replica) -> ReplicaDecision | None:
    """Why this replica may not be lent beside those that are; None when it may."""
    if world.is_beyond(pool, replica):
        full = world.limit(pool)
        return ReplicaDecision(replica.name, full.reason, full.message)
    on_node = world.lent_on[pool.key, f"node/{replica.node}"]
    if pool.per_node is not None and on_node >= pool.per_node:
        text = f"{on_node} lent on node {replica.node}, limit {pool.per_node}"
        return ReplicaDecision(replica.name, Reason.NODE_LIMIT_REACHED, text)
    most = most_in_zone(world, pool, replica.zone)
    in_zone = world.lent_on[pool.key, f"zone/{replica.zone}"]
    if in_zone >= most:
        text = f"{in_zone} lent in {zone_name(replica.zone)}, limit {most}"
        return ReplicaDecision(replica.name, Reason.ZONE_LIMIT_REACHED, text)
    return None


def most_in_zone(world: PlanningPass, pool: PoolTerms, zone: str) -> int:
    """Most replicas of the pool that may be lent in the zone."""
    return world.zone_size[pool.key, zone] * pool.per_zone_percent // 100


def zone_name(zone: str) -> str:
    """The zone for a message."""
    return f"zone {zone}" if zone else "nodes whose zone is unknown"
