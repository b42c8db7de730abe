"""Step 3 of a plan: lend free, settled replicas, first to minimums, then to maximums."""

from __future__ import annotations

from rose_core.lending.facts import Lease, Replica
from rose_core.lending.limits import is_open
from rose_core.lending.world import World

_UNKNOWN_KV = 1001


def make_loans(world: World) -> None:
    """Two rounds over the leases by priority and age, so that minimums come before maximums."""
    in_order = sorted(world.leases.values(), key=lambda lease: lease.rank)
    for lease in in_order:
        _fill(world, lease, lease.min_slots)
    for lease in in_order:
        _fill(world, lease, lease.max_slots)


def _fill(world: World, lease: Lease, target: int) -> None:
    pool = world.pools.get(lease.pool)
    if pool is None or lease.refusal is not None or not is_open(pool, world.now):
        return
    missing = min(target - world.coming(lease), world.room(pool))
    if missing <= 0:
        return
    settled = [replica for replica in world.free(pool.key) if world.unrested(replica) is None]
    for replica in sorted(settled, key=_preference)[:missing]:
        world.lend(lease, replica)


def _preference(replica: Replica) -> tuple[int, str]:
    """Lowest recent KV use first; unknown last."""
    used = replica.kv_permille
    return (_UNKNOWN_KV if used is None else used, replica.uid)
