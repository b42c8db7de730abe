"""Replicas lent whole: serving sleeps, so those that stay awake must carry the load without it.

Last of all loans: only replicas that have no memory to lend beside serving, only when no other one
of the pool is left, only in a trough that the learned shape of the day foretells for the whole
lead. Counted as if no sleeper ever woke:

    needed = max(minAwakeReplicas, replicas * expected peak / maxBusyPercent)

| decision | when |
|---|---|
| lend one | awake - 1 >= needed with a tenth more load, fewer than ``maxReplicas`` asleep |
| keep | awake + returning >= needed |
| return, before any other loan | else; and at once when the objective is missed |

Between the two lies the dead band; a GPU that was given back rests besides
(``PlanningPass.unrested``).
"""

from __future__ import annotations

from rose_core.api.reasons import Reason
from rose_core.lending.facts import PoolTerms, Slot
from rose_core.lending.planning_pass import PlanningPass

Cause = tuple[Reason, str]
_MARGIN = 1.1  # the dead band between lending one more and calling one back


def refused(world: PlanningPass, pool: PoolTerms) -> Cause | None:
    """Why no replica of the pool may be put to sleep now; None when one may."""
    terms, outlook = pool.whole, pool.outlook
    if terms is None:
        return Reason.INSUFFICIENT_MEMORY, "the pool names no wholeReplica"
    if outlook is None or not outlook.learned:
        return Reason.PEAK_EXPECTED, "the load of the coming minutes has not been learned yet"
    if any(world.unrested(one) for one in world.free(pool.key)):
        return Reason.SETTLING, "a replica that can be shared is about to be lent first"
    asleep = len(world.sleepers(pool.key))
    if asleep >= terms.max_asleep:
        text = f"{asleep} replicas sleep, wholeReplica.maxReplicas {terms.max_asleep}"
        return Reason.POOL_LIMIT_REACHED, text
    awake, needed = world.awake(pool.key), _needed(world, pool, _MARGIN)
    if awake - 1 < needed:
        return Reason.PEAK_EXPECTED, _figures(pool, awake, needed)
    return None


def return_sleepers(world: PlanningPass) -> None:
    """Take whole slots back that the coming load, or the owner's limits, no longer allow."""
    for pool in world.snapshot.pools:
        held = [slot for slot in world.held() if slot.whole and slot.pool == pool.key]
        if not held:
            continue
        cause, many = _excess(world, pool, held)
        for slot in world.weakest_first(held)[: max(0, many)]:
            world.release(slot, *cause)


def _excess(world: PlanningPass, pool: PoolTerms, held: list[Slot]) -> tuple[Cause, int]:
    if pool.whole is None:
        return (Reason.POOL_LIMIT_REACHED, "the pool no longer names wholeReplica"), len(held)
    if world.broken(pool):
        text = "live traffic missed its objective; sleeping replicas come back"
        return (Reason.BREAKER_OPEN, text), len(held)
    above = len(held) - pool.whole.max_asleep
    returning = len(world.sleepers(pool.key)) - len(held)
    # What agents have not reported yet since the operator started is not taken for lost.
    unreported = max(0, pool.remembered_replicas - world.size(pool.key))
    awake, needed = world.awake(pool.key), _needed(world, pool, 1.0)
    missing = needed - awake - returning - unreported
    if missing > above:
        return (Reason.PEAK_EXPECTED, _figures(pool, awake, needed)), missing
    text = f"{len(held)} replicas sleep, wholeReplica.maxReplicas {pool.whole.max_asleep}"
    return (Reason.POOL_LIMIT_REACHED, text), above


def _needed(world: PlanningPass, pool: PoolTerms, margin: float) -> int:
    """Replicas that must be awake; all of them while nobody knows the load."""
    replicas = world.size(pool.key)
    if pool.whole is None or pool.outlook is None:
        return replicas
    busy = min(1000.0, pool.outlook.peak_permille * margin)
    return max(pool.whole.min_awake, int(-(-replicas * busy // pool.whole.max_busy_permille)))


def _figures(pool: PoolTerms, awake: int, needed: int) -> str:
    peak = 1000 if pool.outlook is None else pool.outlook.peak_permille
    return f"{awake} replicas are awake, {needed} must carry a peak of {peak} permille busy"
