"""Step 3 of a plan: lend free, settled replicas, slot by slot to the lease that is next.

Replicas that have to sleep for it come last, when no other one is left (``whole``).

``shares`` says which lease is next, ``_Shelf`` which replica: the least used one of the place that
has lent the least, where a place is the whole pool, a node or a zone (``Pool.spread``).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

from rose_core.api.poollending import Spread
from rose_core.lending.facts import Lease, Pool, Replica
from rose_core.lending.gate import not_worth
from rose_core.lending.radius import blocked, refusal
from rose_core.lending.shares import place
from rose_core.lending.whole import refused
from rose_core.lending.world import World

_UNKNOWN_KV = 1001


def make_loans(world: World) -> None:
    """Lend in every pool that is open."""
    asking: dict[str, list[Lease]] = defaultdict(list)
    for lease in world.snapshot.leases:
        if lease.refusal is None and lease.pool in world.pools:
            asking[lease.pool].append(lease)
    for key, leases in asking.items():
        pool = world.pools[key]
        if blocked(world, pool) is None:
            worthy = [one for one in leases if worth(world, pool, one)]
            _lend_in(world, pool, worthy, whole=False)
            if pool.whole is not None:
                _lend_in(world, pool, worthy, whole=True)


def unwanted(world: World) -> dict[str, int]:
    """Pool key -> GPUs that could be lent now and that no lease wants, after all loans."""
    return {pool.key: _unwanted_in(world, pool) for pool in world.snapshot.pools}


def _unwanted_in(world: World, pool: Pool) -> int:
    if blocked(world, pool) is not None:
        return 0
    left = sorted(
        len(replica.gpus)
        for replica in world.free(pool.key)
        if world.unrested(replica) is None and refusal(world, pool, replica) is None
    )
    return sum(left[: max(0, world.room(pool))])


def worth(world: World, pool: Pool, lease: Lease) -> bool:
    """The borrow gate."""
    return not not_worth(lease, pool, world.policy, world.now)


def most_slots(world: World, pool: Pool, lease: Lease) -> int:
    """Most slots the lease may hold."""
    return min(lease.max_slots, world.lease_cap(pool))


def _lend_in(world: World, pool: Pool, leases: list[Lease], *, whole: bool) -> None:
    queue = [
        place(one, world.coming(one))
        for one in leases
        if world.coming(one) < most_slots(world, pool, one)
    ]
    heapq.heapify(queue)
    if not queue:
        return
    shelf = _Shelf(world, pool, world.full(pool.key) if whole else world.free(pool.key))
    while queue and blocked(world, pool) is None:
        if whole and refused(world, pool) is not None:
            return
        replica = shelf.take()
        if replica is None:
            return
        lease = world.leases[heapq.heappop(queue)[-1]]
        world.lend(lease, replica, whole=whole)
        if world.coming(lease) < most_slots(world, pool, lease):
            heapq.heappush(queue, place(lease, world.coming(lease)))


class _Shelf:
    """Replicas that may be lent now, best first."""

    def __init__(self, world: World, pool: Pool, replicas: Iterable[Replica]) -> None:
        self._world, self._pool = world, pool
        self._places: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for replica in replicas:
            if world.unrested(replica) is None:
                self._places[_place(replica, pool.spread)].append(_preference(replica))
        for found in self._places.values():
            heapq.heapify(found)
        self._queue = [self._entry(name) for name in self._places]
        heapq.heapify(self._queue)

    def take(self) -> Replica | None:
        """The next replica, None when there is none."""
        while self._queue:
            _, _, name = heapq.heappop(self._queue)
            _, uid = heapq.heappop(self._places[name])
            replica = self._world.replicas[uid]
            allowed = refusal(self._world, self._pool, replica) is None
            if self._places[name]:
                heapq.heappush(self._queue, self._entry(name, coming=allowed))
            if allowed:
                return replica
        return None

    def _entry(self, name: str, *, coming: bool = False) -> tuple[int, tuple[int, str], str]:
        lent = self._world.lent_on[self._pool.key, name] + coming if name else 0
        return lent, self._places[name][0], name


def _place(replica: Replica, spread: Spread) -> str:
    if spread is Spread.LEAST_USED:
        return ""
    return f"node/{replica.node}" if spread is Spread.NODES else f"zone/{replica.zone}"


def _preference(replica: Replica) -> tuple[int, str]:
    """Lowest recent KV use first; unknown last."""
    used = replica.kv_permille
    return (_UNKNOWN_KV if used is None else used, replica.uid)
