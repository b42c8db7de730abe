"""Step 2 of a plan: slots whose reason to exist is gone.

Order matters: what is released by an earlier rule no longer counts for a later one.
"""

from __future__ import annotations

from rose_core.api.reasons import Reason
from rose_core.lending.facts import Slot
from rose_core.lending.limits import is_open, most_lent
from rose_core.lending.qualify import still_fit
from rose_core.lending.world import World


def release_slots(world: World) -> None:
    """Apply every rule, each to the slots that the rules before have left."""
    for slot in world.held():
        cause = _lost_cause(world, slot) or _unfit(world, slot)
        if cause is not None:
            world.release(slot, *cause)
    _duplicates(world)
    _above_pool_limits(world)
    _above_lease_maximum(world)
    _preempt(world)


def _lost_cause(world: World, slot: Slot) -> tuple[Reason, str] | None:
    lease = world.leases.get(slot.lease)
    pool = world.pools.get(slot.pool)
    if lease is None or lease.uid != slot.lease_uid:
        return Reason.LEASE_DELETED, f"lease {slot.lease} is gone"
    if lease.refusal is not None:
        return lease.refusal, f"lease {slot.lease} is not accepted"
    if pool is None:
        return Reason.UNKNOWN_POOL, f"pool {slot.pool} is gone"
    if not is_open(pool, world.now):
        return Reason.OUTSIDE_TIME_WINDOW, "no time window of the pool is open"
    return None


def _unfit(world: World, slot: Slot) -> tuple[Reason, str] | None:
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
    found = world.verdicts[slot.replica]
    unfit_for = world.now - world.memory.unfit_since.get(slot.uid, world.now)
    if still_fit(found) or unfit_for < world.policy.patience_seconds:
        return None
    return found.reason, found.message


def _duplicates(world: World) -> None:
    taken: set[str] = set()
    for slot in world.held():
        if taken & set(slot.gpus):
            world.release(slot, Reason.DUPLICATE_SLOT, "an older slot holds the GPU")
        else:
            taken |= set(slot.gpus)


def _above_pool_limits(world: World) -> None:
    for pool in world.snapshot.pools:
        held = [slot for slot in world.held() if slot.pool == pool.key]
        # A replica that is not known just now may be a silent node, not a smaller pool.
        unseen = sum(slot.replica not in world.replicas for slot in held)
        known = len(world.members.get(pool.key, ())) + unseen
        limit = most_lent(pool, max(known, pool.remembered_replicas))
        for slot in world.weakest_first(held)[: max(0, len(held) - limit)]:
            world.release(slot, Reason.POOL_LIMIT_REACHED, f"{len(held)} lent, limit {limit}")


def _above_lease_maximum(world: World) -> None:
    for lease in world.snapshot.leases:
        mine = [slot for slot in world.held() if slot.lease == lease.key]
        for slot in world.weakest_first(mine)[: max(0, len(mine) - lease.max_slots)]:
            world.release(slot, Reason.LEASE_SHRUNK, f"slots.max is {lease.max_slots}")


def _preempt(world: World) -> None:
    """A lease below its minimum takes one slot at a time from a weaker lease of its pool."""
    for lease in sorted(world.leases.values(), key=lambda lease: lease.rank):
        satisfied = lease.refusal is not None or world.coming(lease) >= lease.min_slots
        if satisfied or world.free(lease.pool) or _leaving(world, lease.pool):
            continue
        for slot in world.weakest_first(world.held()):
            weaker = world.leases[slot.lease].priority < lease.priority
            settled = world.now - slot.created >= world.policy.preempt_after_seconds
            if slot.pool == lease.pool and weaker and settled:
                world.release(slot, Reason.PREEMPTED, f"lease {lease.key} lacks its minimum")
                break


def _leaving(world: World, pool: str) -> bool:
    return any(
        slot.pool == pool and (slot.released or slot.name in world.releases)
        for slot in world.snapshot.slots
    )
