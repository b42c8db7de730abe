"""Step 4 of a plan: what every lease has and why not more, from the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rose_core.api.reasons import Reason
from rose_core.lending.facts import Lease, Outcome, Pool, Replica, Verdict
from rose_core.lending.limits import is_open
from rose_core.lending.world import World


def outcomes(world: World) -> dict[str, Outcome]:
    """Lease key -> outcome. Verdicts are a pool's, whichever lease asks."""
    by_pool = {pool.key: _pool_verdicts(world, pool) for pool in world.snapshot.pools}
    return {
        lease.key: _outcome(world, lease, by_pool.get(lease.pool, ()))
        for lease in world.snapshot.leases
    }


def _outcome(world: World, lease: Lease, verdicts: tuple[Verdict, ...]) -> Outcome:
    granted = world.coming(lease)
    if lease.refusal is not None:
        return Outcome(0, granted, lease.refusal, "the lease is not accepted")
    reason, message = _summary(lease, granted, verdicts)
    return Outcome(lease.max_slots, granted, reason, message, verdicts)


def _pool_verdicts(world: World, pool: Pool) -> tuple[Verdict, ...]:
    lent = {slot.replica: slot.lease for slot in world.held()}
    lent |= {lend.replica: lend.lease for lend in world.lends}
    free = {replica.uid for replica in world.free(pool.key)}
    return tuple(
        Verdict(replica.name, Reason.LENT, f"to {lent[replica.uid]}")
        if replica.uid in lent
        else _unlent(world, pool, replica, replica.uid in free)
        for replica in world.members.get(pool.key, ())
    )


def _unlent(world: World, pool: Pool, replica: Replica, free: bool) -> Verdict:
    found = world.verdicts[replica.uid]
    if found.reason is not Reason.QUALIFIES:
        return found
    if not free:
        return Verdict(replica.name, Reason.GPU_IN_USE, "its GPU is not vacated yet")
    if not is_open(pool, world.now):
        return Verdict(replica.name, Reason.OUTSIDE_TIME_WINDOW, "no time window is open")
    if world.room(pool) <= 0:
        return Verdict(replica.name, Reason.POOL_LIMIT_REACHED, "the pool lends no more")
    return world.unrested(replica) or found


def _summary(lease: Lease, granted: int, verdicts: tuple[Verdict, ...]) -> tuple[Reason, str]:
    head = f"{granted} of {lease.max_slots} slots"
    if lease.max_slots == 0:
        return Reason.NO_SLOTS_WANTED, "slots.max is 0"
    if granted >= lease.max_slots:
        return Reason.ALL_SLOTS_GRANTED, head
    text = f"{head}; {_counted(verdicts)}"
    if granted >= max(1, lease.min_slots):
        return Reason.SOME_SLOTS_GRANTED, text
    return Reason.NO_REPLICA_QUALIFIES, text


def _counted(verdicts: tuple[Verdict, ...]) -> str:
    """The numbers behind a refusal, the commonest reason first."""
    counts: Mapping[Reason, int] = Counter(found.reason for found in verdicts)
    if not counts:
        return "no agent reports a replica of the pool"
    ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return f"{len(verdicts)} replicas: " + ", ".join(f"{count} {word}" for word, count in ranked)
