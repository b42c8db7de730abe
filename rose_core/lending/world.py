"""One pass's working state: the snapshot indexed, replicas judged, decisions so far.

``release``, ``loan`` and ``explain`` are the steps that read and extend it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rose_core.api.reasons import Reason
from rose_core.lending.facts import (
    Lease,
    Lend,
    Memory,
    Pool,
    Release,
    Replica,
    Slot,
    Snapshot,
    Verdict,
)
from rose_core.lending.limits import most_lent
from rose_core.lending.qualify import shared_gpus, still_fit, verdict


class World:
    """What one planning pass knows and has decided."""

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
        self.busy_gpus = {gpu for slot in snapshot.slots for gpu in slot.gpus}
        self.releases: dict[str, Release] = {}
        self.lends: list[Lend] = []
        self.verdicts = self._judge()
        self.memory = self._remember()

    def _judge(self) -> dict[str, Verdict]:
        shared = shared_gpus(self.snapshot.replicas)
        return {uid: self._judge_one(replica, shared) for uid, replica in self.replicas.items()}

    def _judge_one(self, replica: Replica, shared: frozenset[str]) -> Verdict:
        pool = self.pools.get(replica.pool)
        if pool is None:
            return Verdict(replica.name, Reason.UNKNOWN_POOL, f"pool {replica.pool}")
        if shared & set(replica.gpus):
            return Verdict(replica.name, Reason.SPANS_REPLICAS, "a GPU serves two replicas")
        return verdict(replica, pool, self.policy)

    def _remember(self) -> Memory:
        old = self.snapshot.memory
        recent = self.now - self.policy.cool_seconds
        return Memory(
            fit_since={
                uid: old.fit_since.get(uid, self.now)
                for uid, found in self.verdicts.items()
                if found.reason is Reason.QUALIFIES
            },
            unfit_since={
                slot.uid: old.unfit_since.get(slot.uid, self.now)
                for slot in self.snapshot.slots
                if slot.replica in self.verdicts and not still_fit(self.verdicts[slot.replica])
            },
            freed_at={gpu: at for gpu, at in old.freed_at.items() if at > recent}
            | dict.fromkeys(self.busy_gpus, self.now),
        )

    # Questions.

    def held(self) -> list[Slot]:
        """Slots that stay so far, oldest first."""
        staying = [
            slot
            for slot in self.snapshot.slots
            if not slot.released and slot.name not in self.releases
        ]
        return sorted(staying, key=lambda slot: (slot.created, slot.name))

    def weakest_first(self, slots: Iterable[Slot]) -> list[Slot]:
        """By the lease's rank, the weakest first; of one lease the youngest slot first."""
        return sorted(
            slots,
            key=lambda slot: (self.leases[slot.lease].rank, slot.created, slot.name),
            reverse=True,
        )

    def coming(self, lease: Lease) -> int:
        """Slots the lease will hold after this pass."""
        held = sum(slot.lease == lease.key for slot in self.held())
        return held + sum(lend.lease == lease.key for lend in self.lends)

    def free(self, pool: str) -> list[Replica]:
        """Replicas of the pool that qualify and carry no slot, not even a leaving one."""
        chosen = {lend.replica for lend in self.lends}
        return [
            replica
            for replica in self.members.get(pool, ())
            if self.verdicts[replica.uid].reason is Reason.QUALIFIES
            and not replica.occupied
            and not self.busy_gpus & set(replica.gpus)
            and replica.uid not in chosen
        ]

    def room(self, pool: Pool) -> int:
        """How many more replicas of the pool may be lent now."""
        members = self.members.get(pool.key, ())
        reporting = sum(replica.age_seconds <= self.policy.stale_seconds for replica in members)
        lent = sum(slot.pool == pool.key for slot in self.snapshot.slots)
        lent += sum(self.replicas[lend.replica].pool == pool.key for lend in self.lends)
        return most_lent(pool, reporting) - lent

    def unrested(self, replica: Replica) -> Verdict | None:
        """Hysteresis: None once a qualifying replica has settled and its GPUs have rested."""
        freed = [at for gpu in replica.gpus if (at := self.memory.freed_at.get(gpu)) is not None]
        if freed:
            left = max(freed) + self.policy.cool_seconds - self.now
            return Verdict(replica.name, Reason.COOLING_DOWN, f"rests for another {left:.0f} s")
        left = self.memory.fit_since[replica.uid] + self.policy.settle_seconds - self.now
        if left > 0:
            return Verdict(replica.name, Reason.SETTLING, f"needs another {left:.0f} s")
        return None

    # Decisions.

    def release(self, slot: Slot, reason: Reason, message: str) -> None:
        """Take the slot back."""
        self.releases[slot.name] = Release(slot.name, reason, message)

    def lend(self, lease: Lease, replica: Replica) -> None:
        """Make a slot."""
        self.lends.append(Lend(lease.key, replica.uid))
