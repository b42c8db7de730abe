"""Step 3 of a plan: lend free, settled replicas, slot by slot to the lease that is next.

Replicas that have to sleep for it come last, when no other one is left (``whole``).

``shares`` says which lease is next, ``_Shelf`` which replica: the least used one of the place that
has lent the least, where a place is the whole pool, a node or a zone (``PoolTerms.spread``).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from rose_core.api.poollending import Spread
from rose_core.identity import PodUid
from rose_core.lending.facts import Lease, PoolTerms, Replica, Traits
from rose_core.lending.gate import not_worth
from rose_core.lending.planning_pass import PlanningPass
from rose_core.lending.radius import blocked, refusal
from rose_core.lending.shares import place, targets
from rose_core.lending.whole import refused

_UNKNOWN_KV = 1001


class LendingGroup(NamedTuple):
    """Replicas that the same leases take.

    Attributes:
        traits: of each of them.
        too_small_for: keys of leases whose engines need more memory than may be lent there.
    """

    traits: Traits
    too_small_for: frozenset[str]

    def suits(self, lease: Lease) -> bool:
        """Whether the lease takes such a replica."""
        return lease.key not in self.too_small_for and lease.takes_traits(self.traits)


Place = tuple[LendingGroup, str]
Entry = tuple[int, tuple[int, PodUid], Place]


def make_loans(world: PlanningPass) -> None:
    """Lend in every pool that is open."""
    asking: dict[str, list[Lease]] = defaultdict(list)
    for lease in world.snapshot.leases:
        if lease.refusal is None:
            for key in lease.pools:
                if key in world.pools:
                    asking[key].append(lease)
    for key, leases in asking.items():
        pool = world.pools[key]
        if blocked(world, pool) is None:
            worthy = [one for one in leases if worth(world, pool, one)]
            _lend_in(world, pool, worthy, whole=False)
            if pool.whole is not None:
                _lend_in(world, pool, worthy, whole=True)


def unwanted(world: PlanningPass) -> dict[str, int]:
    """Pool key -> GPUs that could be lent now and that no lease wants, after all loans."""
    return {pool.key: _unwanted_in(world, pool) for pool in world.snapshot.pools}


def _unwanted_in(world: PlanningPass, pool: PoolTerms) -> int:
    if blocked(world, pool) is not None:
        return 0
    left = sorted(
        len(replica.gpus)
        for replica in world.free(pool.key)
        if world.unrested(replica) is None and refusal(world, pool, replica) is None
    )
    return sum(left[: max(0, world.room(pool))])


def worth(world: PlanningPass, pool: PoolTerms, lease: Lease) -> bool:
    """The borrow gate."""
    return not not_worth(lease, pool, world.policy, world.now)


def most_slots(world: PlanningPass, pool: PoolTerms, lease: Lease) -> int:
    """Most slots of this pool that the lease may hold beside those it has of others."""
    mine = max(0, lease.max_slots - world.elsewhere(lease, pool.key))
    return min(mine, world.lease_cap(pool))


def pool_shares(
    world: PlanningPass, pool: PoolTerms, leases: Iterable[Lease], slots: int
) -> dict[str, int]:
    """Lease key -> slots of this pool that it is entitled to when the pool lends so many."""
    here = [
        replace(one, min_slots=max(0, one.min_slots - world.elsewhere(one, pool.key)))
        for one in leases
    ]
    caps = {one.key: most_slots(world, pool, one) for one in here}
    return targets(here, slots, caps, world.policy)


def _lend_in(world: PlanningPass, pool: PoolTerms, leases: list[Lease], *, whole: bool) -> None:
    queue = [
        place(one, world.coming(one), world.policy)
        for one in leases
        if world.coming_in(one, pool.key) < most_slots(world, pool, one)
    ]
    heapq.heapify(queue)
    if not queue:
        return
    if whole:
        shelf = _Shelf(world, pool, world.full(pool.key), leases, Lease.fits_asleep)
    else:
        shelf = _Shelf(world, pool, world.free(pool.key), leases, Lease.fits)
    while queue and blocked(world, pool) is None:
        if whole and refused(world, pool) is not None:
            return
        lease = world.leases[heapq.heappop(queue)[-1]]
        replica = shelf.take(lease)
        if replica is None:
            continue  # another one may take other classes of devices
        world.lend(lease, replica, whole=whole)
        if world.coming_in(lease, pool.key) < most_slots(world, pool, lease):
            heapq.heappush(queue, place(lease, world.coming(lease), world.policy))


class _Shelf:
    """Replicas that may be lent now, best first; those of each group on their own.

    Args:
        asking: leases whose engines must fit.
        fits: whether one does.
    """

    def __init__(
        self,
        world: PlanningPass,
        pool: PoolTerms,
        replicas: Iterable[Replica],
        asking: Iterable[Lease],
        fits: Callable[[Lease, Replica], bool],
    ) -> None:
        self._world, self._pool = world, pool
        self._places: dict[Place, list[tuple[int, PodUid]]] = defaultdict(list)
        sized = [one for one in asking if one.needs.nodes]
        for replica in replicas:
            if world.unrested(replica) is None:
                small = frozenset(one.key for one in sized if not fits(one, replica))
                group = LendingGroup(replica.traits, small)
                self._places[group, _place(replica, pool.spread)].append(_preference(replica))
        for found in self._places.values():
            heapq.heapify(found)
        self._queues: dict[LendingGroup, list[Entry]] = defaultdict(list)
        for where in self._places:
            self._queues[where[0]].append(self._entry(where))
        for queue in self._queues.values():
            heapq.heapify(queue)

    def take(self, lease: Lease) -> Replica | None:
        """The next replica that the lease takes, None when there is none."""
        while True:
            able = [queue for group, queue in self._queues.items() if queue and group.suits(lease)]
            if not able:
                return None
            found = self._next(min(able, key=lambda queue: queue[0]))
            if found is not None:
                return found

    def _next(self, queue: list[Entry]) -> Replica | None:
        """The first replica of the queue; None when the pool's limits forbid it."""
        _, _, place = heapq.heappop(queue)
        _, uid = heapq.heappop(self._places[place])
        replica = self._world.replicas[uid]
        allowed = refusal(self._world, self._pool, replica) is None
        if self._places[place]:
            heapq.heappush(queue, self._entry(place, coming=allowed))
        return replica if allowed else None

    def _entry(self, place: Place, *, coming: bool = False) -> Entry:
        lent = self._world.lent_on[self._pool.key, place[1]] + coming if place[1] else 0
        return lent, self._places[place][0], place


def _place(replica: Replica, spread: Spread) -> str:
    if spread is Spread.LEAST_USED:
        return ""
    return f"node/{replica.node}" if spread is Spread.NODES else f"zone/{replica.zone}"


def _preference(replica: Replica) -> tuple[int, PodUid]:
    """Lowest recent KV use first; unknown last."""
    used = replica.kv_permille
    return (_UNKNOWN_KV if used is None else used, replica.uid)
