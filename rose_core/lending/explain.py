"""Step 4 of a plan: what every lease has and why not more, from the same numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from rose_core.api.reasons import Reason
from rose_core.identity import PodUid
from rose_core.lending.answers import LeaseDecision, ReplicaDecision
from rose_core.lending.facts import Lease, PoolTerms, Replica, Traits
from rose_core.lending.gate import not_worth
from rose_core.lending.loan import pool_shares
from rose_core.lending.planning_pass import PlanningPass
from rose_core.lending.radius import Cause, blocked, closed, refusal
from rose_core.lending.room import fits_nowhere, too_small
from rose_core.lending.whole import refused

Members = Mapping[str, tuple[ReplicaDecision, ...]]


def member_verdicts(world: PlanningPass) -> Members:
    """Pool key -> verdict of every replica, loans included; the same whichever lease asks."""
    lent = {slot.replica: slot.lease for slot in world.held()}
    lent |= {lend.replica: lend.lease for lend in world.lends}
    return {pool.key: _of_pool(world, pool, lent) for pool in world.snapshot.pools}


def _of_pool(
    world: PlanningPass, pool: PoolTerms, lent: Mapping[PodUid, str]
) -> tuple[ReplicaDecision, ...]:
    stop = blocked(world, pool)
    return tuple(
        _with_memory(
            ReplicaDecision(replica.name, Reason.LENT, f"to {lent[replica.uid]}")
            if replica.uid in lent
            else _unlent(world, pool, replica, stop),
            replica,
        )
        for replica in world.members.get(pool.key, ())
    )


def _with_memory(found: ReplicaDecision, replica: Replica) -> ReplicaDecision:
    """What may be lent of its GPUs, where that is what the reader will ask next."""
    asked = found.reason in {Reason.LENT, Reason.QUALIFIES, Reason.INSUFFICIENT_MEMORY}
    if not asked or not replica.memory:
        return found
    return replace(found, message=f"{found.message}; memory: {replica.memory}")


def _unlent(
    world: PlanningPass, pool: PoolTerms, replica: Replica, stop: Cause | None
) -> ReplicaDecision:
    found = world.verdicts[replica.uid]
    if world.could_sleep(replica):
        return _left_awake(world, pool, replica, stop)
    if found.reason is not Reason.QUALIFIES:
        return found
    if not world.is_free(replica):
        return ReplicaDecision(replica.name, Reason.GPU_IN_USE, "its GPU is not vacated yet")
    if stop is not None:
        return ReplicaDecision(replica.name, *stop)
    return refusal(world, pool, replica) or world.unrested(replica) or found


def _left_awake(
    world: PlanningPass, pool: PoolTerms, replica: Replica, stop: Cause | None
) -> ReplicaDecision:
    """Why a replica is not put to sleep either."""
    cause = stop or refused(world, pool)
    if cause is not None:
        text = f"{world.verdicts[replica.uid].message}; not lent whole: {cause[1]}"
        return ReplicaDecision(replica.name, cause[0], text)
    return refusal(world, pool, replica) or world.unrested(replica) or world.verdicts[replica.uid]


def outcomes(world: PlanningPass, members: Members) -> dict[str, LeaseDecision]:
    """Lease key -> outcome."""
    counted = {key: _counted(verdicts) for key, verdicts in members.items()}
    shares = _shares(world)
    traits = {key: frozenset(one.traits for one in found) for key, found in world.members.items()}
    found: dict[str, LeaseDecision] = {}
    for lease in world.snapshot.leases:
        decisions: list[ReplicaDecision] = []
        texts: list[str] = []
        for key in lease.pools:
            mine = _for(world, lease, members, key, traits.get(key, frozenset()))
            shared = mine is members.get(key, mine)
            decisions += mine
            texts.append(counted.get(key, _NONE) if shared else _counted(mine))
        found[lease.key] = _outcome(world, lease, tuple(decisions), "; ".join(texts), shares)
    return found


def _for(
    world: PlanningPass, lease: Lease, members: Members, pool: str, traits: frozenset[Traits]
) -> tuple[ReplicaDecision, ...]:
    """A pool's verdicts as this lease should read them; ``traits`` are those of its replicas."""
    found = members.get(pool, ())
    if not lease.needs.nodes and all(lease.takes_traits(one) for one in traits):
        return found
    replicas = {replica.name: replica for replica in world.members.get(pool, ())}
    return tuple(
        (_unsuited(lease, replicas[one.replica]) or one) if one.reason is Reason.QUALIFIES else one
        for one in found
    )


def _unsuited(lease: Lease, replica: Replica) -> ReplicaDecision | None:
    """Why a replica that could be lent is nothing for this lease."""
    if not lease.takes_class(replica.device_class):
        text = f"its GPU is {replica.device_class or 'of an unknown class'}"
        return ReplicaDecision(replica.name, Reason.OTHER_DEVICE_CLASS, text)
    if len(replica.gpus) < lease.gpus_per_slot:
        text = f"it has {len(replica.gpus)} GPUs, gpusPerSlot is {lease.gpus_per_slot}"
        return ReplicaDecision(replica.name, Reason.TOO_FEW_GPUS, text)
    if not lease.takes(replica):
        text = f"model {lease.model!r} is not on its node"
        return ReplicaDecision(replica.name, Reason.NO_MODEL, text)
    found = too_small(lease, replica)
    return None if found is None else _with_memory(found, replica)


def _shares(world: PlanningPass) -> dict[str, int]:
    """What each lease is entitled to of the slots its pool has now and could still make."""
    leases: dict[str, list[Lease]] = defaultdict(list)
    for lease in world.snapshot.leases:
        for key in lease.pools:
            leases[key].append(lease)
    found: Counter[str] = Counter()
    for pool in world.snapshot.pools:
        mine = leases.get(pool.key, [])
        more = max(0, min(world.room(pool), len(world.free(pool.key))))
        found.update(pool_shares(world, pool, mine, world.held_in(pool.key) + more))
    return found


def _outcome(
    world: PlanningPass,
    lease: Lease,
    verdicts: tuple[ReplicaDecision, ...],
    counted: str,
    shares: Mapping[str, int],
) -> LeaseDecision:
    granted = world.coming(lease)
    if lease.refusal is not None:
        return LeaseDecision(0, granted, lease.refusal, "the lease is not accepted")
    reason, message = _summary(world, lease, granted, counted)
    return LeaseDecision(
        lease.max_slots, granted, reason, message, verdicts, shares.get(lease.key, 0)
    )


def _summary(world: PlanningPass, lease: Lease, granted: int, counted: str) -> tuple[Reason, str]:
    head = f"{granted} of {lease.max_slots} slots"
    if lease.reduced is not None:
        head = f"{head}, because {lease.reduced_text}"
    if lease.max_slots == 0:
        return lease.reduced or Reason.NO_SLOTS_WANTED, lease.reduced_text or "slots.max is 0"
    if granted >= lease.max_slots:
        return lease.reduced or Reason.ALL_SLOTS_GRANTED, head
    own = _own_cause(world, lease)
    text = f"{head}; {own[1]}; {counted}" if own else f"{head}; {counted}"
    if granted >= max(1, lease.min_slots):
        return Reason.SOME_SLOTS_GRANTED, text
    return own[0] if own else Reason.NO_REPLICA_QUALIFIES, text


def _own_cause(world: PlanningPass, lease: Lease) -> Cause | None:
    """Why this lease gets no more although another one of its pools might."""
    pools = [world.pools[key] for key in lease.pools if key in world.pools]
    causes = [_cause_in(world, pool, lease) for pool in pools]
    return causes[0] if causes and all(causes) else None


def _cause_in(world: PlanningPass, pool: PoolTerms, lease: Lease) -> Cause | None:
    shut = closed(world, pool)
    if shut is not None:
        return shut
    text = not_worth(lease, pool, world.policy, world.now)
    if text:
        return Reason.NOT_WORTHWHILE, text
    cap = world.lease_cap(pool)
    if world.coming_in(lease, pool.key) >= cap:
        text = f"maxReplicasPerLeasePercent {pool.per_lease_percent} allows {cap}"
        return Reason.LEASE_LIMIT_REACHED, text
    return fits_nowhere(world, pool, lease)


_NONE = "no agent reports a replica of the pool"


def _counted(verdicts: tuple[ReplicaDecision, ...]) -> str:
    """The numbers behind a refusal, the commonest reason first."""
    counts: Mapping[Reason, int] = Counter(found.reason for found in verdicts)
    if not counts:
        return _NONE
    ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return f"{len(verdicts)} replicas: " + ", ".join(f"{count} {label}" for label, count in ranked)
