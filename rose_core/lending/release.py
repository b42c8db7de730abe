"""Step 2 of a plan: slots whose reason to exist is gone.

Order matters: what is released by an earlier rule no longer counts for a later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeVar

from rose_core.api.reasons import Reason
from rose_core.lending.facts import Lease, PoolTerms, Slot
from rose_core.lending.limits import is_open, limit
from rose_core.lending.loan import pool_shares, worth
from rose_core.lending.planning_pass import PlanningPass
from rose_core.lending.qualify import SLEEP_ENDED
from rose_core.lending.radius import closed, most_in_zone, zone_name
from rose_core.lending.room import found_too_small
from rose_core.lending.whole import return_sleepers

ThingT = TypeVar("ThingT")
KeyT = TypeVar("KeyT")


def release_slots(world: PlanningPass) -> None:
    """Apply every rule, each to the slots that the rules before have left."""
    for slot in world.held():
        cause = _lost_cause(world, slot) or _unfit(world, slot) or found_too_small(world, slot)
        if cause is not None:
            world.release(slot, *cause)
    _duplicates(world)
    return_sleepers(world)
    _above_pool_limits(world)
    _above_lease_maximum(world)
    leaving = _leaving(world)
    _preempt(world, leaving)
    _rebalance(world, leaving)


def _lost_cause(world: PlanningPass, slot: Slot) -> tuple[Reason, str] | None:
    lease = world.leases.get(slot.lease)
    if lease is None or lease.uid != slot.lease_uid:
        return Reason.LEASE_DELETED, f"lease {slot.lease} is gone"
    if lease.refusal is not None:
        return lease.refusal, f"lease {slot.lease} is not accepted"
    pool = world.pools.get(slot.pool)
    if pool is None:
        return Reason.UNKNOWN_POOL, f"pool {slot.pool} is gone"
    return _shut_out(world, slot, lease, pool)


def _shut_out(
    world: PlanningPass, slot: Slot, lease: Lease, pool: PoolTerms
) -> tuple[Reason, str] | None:
    """The pool does not lend to the lease, or to nobody just now."""
    if slot.pool not in lease.pools:
        return Reason.POOL_NOT_LENDING, f"pool {slot.pool} does not lend to lease {slot.lease}"
    if not is_open(pool, world.now):
        return Reason.OUTSIDE_TIME_WINDOW, "no time window of the pool is open"
    if pool.breaker.returns and world.broken(pool):
        return Reason.BREAKER_OPEN, "live traffic missed its objective; everything goes back"
    return None


def _unfit(world: PlanningPass, slot: Slot) -> tuple[Reason, str] | None:
    """The replica is gone, stopped, or has been unfit for longer than the planner's patience."""
    if world.snapshot.silence.get(slot.node, 0.0) > world.policy.forget_seconds:
        return Reason.TELEMETRY_STALE, f"node {slot.node} is silent"
    replica = world.replicas.get(slot.replica)
    if replica is None:
        # Only a node that reports can say that a replica is gone.
        gone = Reason.REPLICA_GONE, f"node {slot.node} no longer has the serving pod"
        return gone if slot.node in world.snapshot.reporting else None
    if replica.stopped:
        return Reason.STOP_REQUESTED, "the stop button is pressed"
    if replica.cordoned:
        return Reason.NODE_CORDONED, f"node {replica.node} is cordoned: the GPU is free first"
    found = world.verdicts[slot.replica]
    unfit_for = world.now - world.memory.unfit_since.get(slot.uid, world.now)
    ended = slot.whole and found.reason in SLEEP_ENDED
    if world.keeps(slot) or (not ended and unfit_for < world.policy.patience_seconds):
        return None
    return found.reason, found.message


def _duplicates(world: PlanningPass) -> None:
    taken: set[str] = set()
    for slot in world.held():
        if taken.isdisjoint(slot.devices):
            taken |= slot.devices
        else:
            world.release(slot, Reason.DUPLICATE_SLOT, "an older slot holds the GPU")


def _above_pool_limits(world: PlanningPass) -> None:
    by_pool = _by(world.held(), lambda slot: slot.pool)
    for pool in world.snapshot.pools:
        held = by_pool.get(pool.key, [])
        # A replica that is not known just now may be a silent node, not a smaller pool.
        unseen = sum(slot.replica not in world.replicas for slot in held)
        known = world.size(pool.key) + unseen
        found = limit(pool, max(known, pool.remembered_replicas), growing=False)
        units = list(dict.fromkeys(map(world.unit, world.weakest_first(held))))
        text = f"{len(units)} lent, limit {found.count}"
        if found.reason is not Reason.POOL_LIMIT_REACHED:
            text = f"{text}: {found.message}"
        # All slots of a replica over several pods go together: one that stays would keep it lent.
        leaving = set(units[: max(0, len(units) - found.count)])
        going = [slot for slot in held if world.unit(slot) in leaving]
        _shrink(world, going, 0, found.reason, text)
        _above_radius(world, pool, [slot for slot in held if slot.name not in world.releases])


def _above_radius(world: PlanningPass, pool: PoolTerms, held: list[Slot]) -> None:
    """Limits per node and zone that were lowered after the loans."""
    if pool.per_node is not None:
        for node, slots in _by(held, lambda slot: slot.node).items():
            text = f"{len(slots)} lent on node {node}, limit {pool.per_node}"
            _shrink(world, slots, pool.per_node, Reason.NODE_LIMIT_REACHED, text)
    if pool.per_zone_percent < 100:
        seen = [slot for slot in held if slot.replica in world.replicas]
        staying = [slot for slot in seen if slot.name not in world.releases]
        for zone, slots in _by(staying, lambda slot: world.replicas[slot.replica].zone).items():
            most = most_in_zone(world, pool, zone)
            text = f"{len(slots)} lent in {zone_name(zone)}, limit {most}"
            _shrink(world, slots, most, Reason.ZONE_LIMIT_REACHED, text)


def _shrink(world: PlanningPass, slots: list[Slot], most: int, reason: Reason, text: str) -> None:
    for slot in world.weakest_first(slots)[: max(0, len(slots) - most)]:
        world.release(slot, reason, text)


def _above_lease_maximum(world: PlanningPass) -> None:
    by_lease = _by(world.held(), lambda slot: slot.lease)
    for lease in world.snapshot.leases:
        mine = by_lease.get(lease.key, [])
        text = lease.reduced_text or f"slots.max is {lease.max_slots}"
        _shrink(world, mine, lease.max_slots, lease.reduced or Reason.LEASE_SHRUNK, text)
        kept = [slot for slot in mine if slot.name not in world.releases]
        for key, slots in _by(kept, lambda slot: slot.pool).items():
            pool = world.pools.get(key)
            if pool is not None and pool.per_lease_percent < 100:
                cap = world.lease_cap(pool)
                text = f"maxReplicasPerLeasePercent {pool.per_lease_percent} allows {cap}"
                _shrink(world, slots, cap, Reason.LEASE_LIMIT_REACHED, text)


def _preempt(world: PlanningPass, leaving: set[str]) -> None:
    """A lease below its minimum takes one slot at a time from a weaker lease of its pools."""
    held = _by(world.held(), lambda slot: slot.pool)
    weakest = {key: world.weakest_first(slots) for key, slots in held.items()}
    for lease in sorted(world.leases.values(), key=lambda lease: lease.rank):
        pools = [world.pools[key] for key in lease.pools if key in world.pools]
        if not pools or not lease.preempts or not leaving.isdisjoint(lease.pools):
            continue
        lacks = world.coming(lease) < lease.min_slots
        if not lacks or not all(_waits(world, pool, lease) for pool in pools):
            continue
        for slot in (slot for pool in pools for slot in weakest.get(pool.key, ())):
            weaker = world.leases[slot.lease].priority < lease.priority
            settled = world.now - slot.created >= world.policy.preempt_after_seconds
            if weaker and settled and _takes(world, lease, slot):
                world.release(slot, Reason.PREEMPTED, f"lease {lease.key} lacks its minimum")
                leaving.add(slot.pool)
                break


def _waits(world: PlanningPass, pool: PoolTerms, lease: Lease) -> bool:
    """Whether only another lease could give this one a slot of the pool."""
    if lease.refusal is not None:
        return False
    if closed(world, pool) is not None or not worth(world, pool, lease):
        return False
    return world.room(pool) <= 0 or not any(
        lease.takes(one) and lease.fits(one) for one in world.free(pool.key)
    )


def _takes(world: PlanningPass, lease: Lease, slot: Slot) -> bool:
    """Whether the lease could use what the slot gives up."""
    replica = world.replicas.get(slot.replica)
    if replica is None:  # a silent node's: of which class, with how much memory?
        return not lease.device_classes
    return lease.takes(replica) and lease.fits(replica)


def _rebalance(world: PlanningPass, leaving: set[str]) -> None:
    """In a full pool, a lease below its share takes one slot at a time from one above its own."""
    leases: dict[str, list[Lease]] = defaultdict(list)
    for lease in world.snapshot.leases:
        for key in lease.pools:
            leases[key].append(lease)
    slots = _by(world.held(), lambda slot: (slot.pool, slot.lease))
    for pool in world.snapshot.pools:
        asking = [one for one in leases.get(pool.key, []) if worth(world, pool, one)]
        if pool.key in leaving or len(asking) < 2:
            continue
        share = pool_shares(world, pool, asking, world.held_in(pool.key))
        for lease in sorted(asking, key=lambda one: one.rank):
            lacks = world.coming_in(lease, pool.key) < share.get(lease.key, 0)
            if lacks and _waits(world, pool, lease):
                mine = {one.key: slots.get((pool.key, one.key), []) for one in asking}
                victim = _most_above(world, lease, asking, share, mine)
                if victim is not None:
                    text = f"lease {lease.key} has fewer slots than its weight entitles it to"
                    world.release(victim, Reason.REBALANCED, text)
                    break


def _most_above(
    world: PlanningPass,
    lease: Lease,
    asking: list[Lease],
    share: dict[str, int],
    slots: dict[str, list[Slot]],
) -> Slot | None:
    """The slot of the pool that an equal lease can spare most easily."""
    above = [
        (len(slots[one.key]) - share.get(one.key, 0), one.rank, one)
        for one in asking
        if one.priority == lease.priority and one.refusal is None
    ]
    for excess, _, one in sorted(above, key=lambda entry: (-entry[0], entry[1])):
        if excess <= 0:
            return None
        old = world.now - world.policy.rebalance_seconds
        for slot in world.weakest_first(slots[one.key]):
            if slot.created <= old and _takes(world, lease, slot):
                return slot
    return None


def _leaving(world: PlanningPass) -> set[str]:
    """Pools in which a slot is on its way back."""
    return {
        slot.pool for slot in world.snapshot.slots if slot.released or slot.name in world.releases
    }


def _by(things: Iterable[ThingT], key: Callable[[ThingT], KeyT]) -> dict[KeyT, list[ThingT]]:
    found: dict[KeyT, list[ThingT]] = defaultdict(list)
    for thing in things:
        found[key(thing)].append(thing)
    return found
