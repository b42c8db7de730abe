"""One pass's working state: the snapshot indexed, replicas judged, decisions so far.

``release``, ``loan`` and ``explain`` are the steps that read and extend it. Counts are kept as
decisions are made, because a pass over thousands of replicas asks for them all the time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from rose_core.api.reasons import Reason
from rose_core.identity import PodUid, SlotUid
from rose_core.lending.answers import Lend, ReplicaDecision, SlotRelease
from rose_core.lending.facts import Lease, PlannerMemory, PoolTerms, Replica, Slot, Snapshot
from rose_core.lending.limits import Limit, limit, most_lent
from rose_core.lending.qualify import contests, still_asleep, still_fit, verdict

_MINUTE = 60.0


class PlanningPass:
    """What one planning pass knows and has decided.

    Attributes:
        lent_on: (pool, "node/N") and (pool, "zone/Z") -> replicas lent, leaving ones included.
        zone_size: (pool, zone) -> replicas of the pool there.
    """

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        self.snapshot = snapshot
        self.policy = snapshot.policy
        self.now = now
        self.pools = {pool.key: pool for pool in snapshot.pools}
        self.leases = {lease.key: lease for lease in snapshot.leases}
        self.replicas = {replica.uid: replica for replica in snapshot.replicas}
        self.members: dict[str, list[Replica]] = defaultdict(list)
        for replica in snapshot.replicas:
            self.members[replica.pool].append(replica)
        self.busy_gpus = {gpu for slot in snapshot.slots for gpu in slot.devices}
        self.releases: dict[str, SlotRelease] = {}
        self.lends: list[Lend] = []
        self.verdicts = self._judge()
        self._index_slots()
        self._index_replicas()
        self._index_candidates()
        self.memory = self._remember()

    def _judge(self) -> dict[PodUid, ReplicaDecision]:
        contested = contests(self.snapshot.replicas)
        return {
            uid: self._judge_one(replica, contested.get(uid))
            for uid, replica in self.replicas.items()
        }

    def _judge_one(self, replica: Replica, contested: ReplicaDecision | None) -> ReplicaDecision:
        pool = self.pools.get(replica.pool)
        if pool is None:
            return ReplicaDecision(replica.name, Reason.UNKNOWN_POOL, f"pool {replica.pool}")
        if contested is not None and not still_fit(contested):
            return contested
        own = verdict(replica, pool, self.policy)
        return contested if contested is not None and still_fit(own) else own

    def _index_slots(self) -> None:
        """Who holds what, of slots that stay; where anything is lent, of those that leave too."""
        slots = self.snapshot.slots
        staying = [slot for slot in slots if not slot.released]
        self._held = {
            slot.name: slot for slot in sorted(staying, key=lambda slot: (slot.created, slot.name))
        }
        self._held_by_lease = Counter(slot.lease for slot in staying)
        self._held_by_pool = Counter(slot.pool for slot in staying)
        self._held_there = Counter((slot.lease, slot.pool) for slot in staying)
        self._lent_units = {(slot.pool, self.unit(slot)) for slot in slots}
        self._lent_by_pool = Counter(pool for pool, _ in self._lent_units)
        self.lent_on: Counter[tuple[str, str]] = Counter()
        for slot in slots:
            self._count(slot.pool, slot.node, self.replicas.get(slot.replica), 1)
        self._sleepers: dict[str, set[PodUid]] = defaultdict(set)
        for slot in slots:
            if slot.whole:
                self._sleepers[slot.pool].add(slot.replica)

    def _index_replicas(self) -> None:
        """How large pools are and what of them is reported."""
        replicas = self.snapshot.replicas
        self.zone_size = Counter((replica.pool, replica.zone) for replica in replicas)
        fresh = {(replica.pool, replica.unit) for replica in replicas if not replica.stale}
        self._reporting = Counter(pool for pool, _ in fresh)
        self._pods = Counter((one.pool, one.unit) for one in replicas if one.group)
        self._grouped = {pool for pool, _ in self._pods}

    def _index_candidates(self) -> None:
        """Replicas that could be lent beside serving, or by putting them to sleep."""
        self._free: dict[str, dict[PodUid, Replica]] = defaultdict(dict)
        self._full: dict[str, dict[PodUid, Replica]] = defaultdict(dict)
        for replica in self.snapshot.replicas:
            if replica.occupied or not self.busy_gpus.isdisjoint(replica.devices):
                continue
            if self.verdicts[replica.uid].reason is Reason.QUALIFIES:
                self._free[replica.pool][replica.uid] = replica
            elif self.could_sleep(replica):
                self._full[replica.pool][replica.uid] = replica

    def _count(self, pool: str, node: str, replica: Replica | None, change: int) -> None:
        self.lent_on[pool, f"node/{node}"] += change
        if replica is not None:
            self.lent_on[pool, f"zone/{replica.zone}"] += change

    def _remember(self) -> PlannerMemory:
        old = self.snapshot.memory
        recent = self.now - self.policy.cool_seconds
        missed = {pool.key: self.now for pool in self.snapshot.pools if pool.breaker.missed}
        self._loans_at = {
            key: kept
            for key, times in old.loans_at.items()
            if (kept := tuple(at for at in times if self.now - at < _MINUTE))
        }
        return PlannerMemory(
            fit_since=self._fit_since(old),
            unfit_since=self._unfit_since(old),
            freed_at={gpu: at for gpu, at in old.freed_at.items() if at > recent}
            | dict.fromkeys(self.busy_gpus, self.now),
            missed_at={key: at for key, at in old.missed_at.items() if key in self.pools} | missed,
            loans_at=self._loans_at,
        )

    def _fit_since(self, old: PlannerMemory) -> dict[PodUid, float]:
        return {
            uid: old.fit_since.get(uid, self.now)
            for uid, found in self.verdicts.items()
            if found.reason is Reason.QUALIFIES or self.could_sleep(self.replicas[uid])
        }

    def _unfit_since(self, old: PlannerMemory) -> dict[SlotUid, float]:
        return {
            slot.uid: old.unfit_since.get(slot.uid, self.now)
            for slot in self.snapshot.slots
            if slot.replica in self.verdicts and not self.keeps(slot)
        }

    # Questions.

    def held(self) -> list[Slot]:
        """Slots that stay so far, oldest first."""
        return list(self._held.values())

    def held_in(self, pool: str) -> int:
        """How many slots of the pool stay so far."""
        return self._held_by_pool[pool]

    def weakest_first(self, slots: Iterable[Slot]) -> list[Slot]:
        """By the lease's rank, the weakest first; of one lease those that cost least to end.

        An engine that does not run yet has cost the least, then the youngest slot.
        """
        return sorted(
            slots,
            key=lambda slot: (
                self.leases[slot.lease].rank,
                not slot.running,
                slot.created,
                slot.name,
            ),
            reverse=True,
        )

    def coming(self, lease: Lease) -> int:
        """Slots the lease will hold after this pass."""
        return self._held_by_lease[lease.key]

    def free(self, pool: str) -> list[Replica]:
        """Replicas of the pool that qualify and carry no slot, not even a leaving one."""
        return list(self._free[pool].values())

    def keeps(self, slot: Slot) -> bool:
        """Whether its replica, which reports, lets the slot stay."""
        found = self.verdicts[slot.replica]
        return still_asleep(found) if slot.whole else still_fit(found)

    def full(self, pool: str) -> list[Replica]:
        """Replicas of the pool that may be lent by putting them to sleep, and only so."""
        return list(self._full[pool].values())

    def coming_in(self, lease: Lease, pool: str) -> int:
        """Slots of this pool that the lease has after this pass so far."""
        return self._held_there[lease.key, pool]

    def elsewhere(self, lease: Lease, pool: str) -> int:
        """Slots of other pools that the lease has after this pass so far."""
        return self.coming(lease) - self.coming_in(lease, pool)

    def sleepers(self, pool: str) -> frozenset[PodUid]:
        """Replicas of the pool that are lent whole, leaving ones included."""
        return frozenset(self._sleepers[pool])

    def could_sleep(self, replica: Replica) -> bool:
        """Only its memory speaks against lending it, and its owner lets it sleep for that."""
        pool = self.pools.get(replica.pool)
        full = self.verdicts[replica.uid].reason is Reason.INSUFFICIENT_MEMORY
        return full and not replica.group and pool is not None and pool.whole is not None

    def awake(self, pool: str) -> int:
        """Replicas of the pool that serve, and go on serving after this pass."""
        sleepers = self._sleepers[pool]
        return len(
            {
                one.unit
                for one in self.members.get(pool, ())
                if one.ready and not one.stale and one.uid not in sleepers
            }
        )

    def size(self, pool: str) -> int:
        """How many replicas the pool has; pods of one group are one."""
        return len({one.unit for one in self.members.get(pool, ())})

    def unit(self, slot: Slot) -> str:
        """The replica that a slot is lent of."""
        replica = self.replicas.get(slot.replica)
        return slot.replica if replica is None else replica.unit

    def lends_unit(self, replica: Replica) -> bool:
        """Whether a slot is on this replica already, on another of its pods."""
        return (replica.pool, replica.unit) in self._lent_units

    def is_beyond(self, pool: PoolTerms, replica: Replica) -> bool:
        """Whether only more pods of what is lent already may be lent, and this is none of them."""
        grouped = pool.key in self._grouped
        return grouped and self.room(pool) <= 0 and not self.lends_unit(replica)

    def more_of_a_group(self, pool: PoolTerms) -> bool:
        """Whether a replica that is lent has another free pod, which no limit counts again."""
        if pool.key not in self._grouped:
            return False
        free = self._free[pool.key].values()
        return any(one.group and self.lends_unit(one) for one in free)

    def is_free(self, replica: Replica) -> bool:
        """Whether ``free`` has it."""
        return replica.uid in self._free[replica.pool]

    def limit(self, pool: PoolTerms) -> Limit:
        """Most replicas of the pool that may be lent now, for a loan that would be made."""
        return limit(pool, self._reporting[pool.key], growing=True)

    def room(self, pool: PoolTerms) -> int:
        """How many more replicas of the pool may be lent now."""
        return self.limit(pool).count - self._lent_by_pool[pool.key]

    def lease_cap(self, pool: PoolTerms) -> int:
        """Most slots of the pool that one lease may hold; at least one where any may be lent."""
        most = most_lent(pool, max(self._reporting[pool.key], pool.remembered_replicas))
        pods = max((n for (key, _), n in self._pods.items() if key == pool.key), default=1)
        return max(1, most * pool.per_lease_percent // 100) * pods

    def broken(self, pool: PoolTerms) -> float:
        """Seconds for which the pool's breaker stays open; 0 when it is closed."""
        at = self.memory.missed_at.get(pool.key)
        return 0.0 if at is None else max(0.0, at + pool.breaker.cooldown_seconds - self.now)

    def loans_in_last_minute(self, pool: PoolTerms) -> int:
        """Loans of this and earlier passes."""
        return len(self._loans_at.get(pool.key, ()))

    def unrested(self, replica: Replica) -> ReplicaDecision | None:
        """Hysteresis: None once a qualifying replica has settled and its GPUs have rested."""
        freed = [at for gpu in replica.devices if (at := self.memory.freed_at.get(gpu)) is not None]
        if freed:
            left = max(freed) + self.policy.cool_seconds - self.now
            return ReplicaDecision(
                replica.name, Reason.COOLING_DOWN, f"its GPU rests for another {left:.0f} s"
            )
        needed = self.policy.settle_seconds
        left = self.memory.fit_since[replica.uid] + needed - self.now
        if left > 0:
            text = f"must qualify for {needed:.0f} s without a break; another {left:.0f} s to go"
            return ReplicaDecision(replica.name, Reason.SETTLING, text)
        return None

    # Decisions.

    def release(self, slot: Slot, reason: Reason, message: str) -> None:
        """Take the slot back; until its object is gone its replica still counts as lent."""
        self.releases[slot.name] = SlotRelease(slot.name, reason, message)
        del self._held[slot.name]
        self._held_by_lease[slot.lease] -= 1
        self._held_by_pool[slot.pool] -= 1
        self._held_there[slot.lease, slot.pool] -= 1

    def lend(self, lease: Lease, replica: Replica, *, whole: bool = False) -> None:
        """Make a slot."""
        pool = replica.pool
        self.lends.append(Lend(lease.key, replica.uid, whole))
        if whole:
            self._sleepers[pool].add(replica.uid)
        self._held_by_lease[lease.key] += 1
        self._held_by_pool[pool] += 1
        self._held_there[lease.key, pool] += 1
        if not self.lends_unit(replica):
            self._lent_units.add((pool, replica.unit))
            self._lent_by_pool[pool] += 1
        self._count(pool, replica.node, replica, 1)
        del (self._full if whole else self._free)[pool][replica.uid]
        self._loans_at[pool] = (*self._loans_at.get(pool, ()), self.now)
