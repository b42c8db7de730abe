"""Whether a lease has a router: a pod costs the platform something, so not before it is of use.

| lease | its router |
|---|---|
| expired | none |
| accepted, and a slot is possible, or it has one | runs |
| names dedicated engines, or some are attached | runs: they need no slot |
| accepted, and had a router | runs: turns that wait there bring slots |
| accepted, wants slots, none is possible | none yet |
| suspended, or wants no slot | rests once its slots are gone |
| refused by the platform's policies | rests once its slots are gone |
| refused otherwise, and had a router | rests ten minutes after it was refused |
| refused from the start | none |

A router that *rests* keeps its name, so its URL stays, and has no pod. Unknown is not idle: one
whose turns nobody has heard of rests only where the platform has forbidden the lease. Pure. Next
step: the operator's ``router_writes`` carries it out, ``lease_status`` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rose_core.api.reasons import Reason
from rose_core.api.rolloutlease import RolloutLease
from rose_core.lending.facts import Demand, Lease, Replica
from rose_core.lending.planning_pass import PlanningPass

REFUSED_SECONDS = 600.0
"""How long a refused lease keeps its router. Owners pause a pool, or write it anew, for minutes;
turns that wait are answered by then (``router.queueTimeoutSeconds`` is 240 by default)."""

# The platform's own word: nobody corrects such a lease without it, so its router need not wait.
_FORBIDDEN = frozenset(
    {
        Reason.NO_TENANT_POLICY,
        Reason.TENANT_POLICY_FORBIDS,
        Reason.TENANT_CAP_REACHED,
        Reason.RUN_NOT_ALLOWED,
    }
)
# Such a replica lends nothing for as long as it is what it is; any other may qualify in a moment.
_NEVER = frozenset(
    {
        Reason.NO_GPU,
        Reason.GPU_NOT_OWNED,
        Reason.GPU_CONTESTED,
        Reason.MULTI_NODE_REPLICA,
        Reason.SPANS_REPLICAS,
        Reason.MIG_ENABLED,
        Reason.VIRTUAL_GPU,
    }
)


class RouterState(StrEnum):
    """What there is of a lease's router."""

    RUNS = "Runs"
    RESTS = "Rests"
    NONE = "None"


@dataclass(frozen=True)
class RouterDecision:
    """What there should be, and where that is no pod, why."""

    state: RouterState
    reason: Reason = Reason.AS_EXPECTED
    message: str = ""


@dataclass(frozen=True)
class RouterFacts:
    """What is known of one lease and its router.

    Attributes:
        refusal: why the lease is not accepted, and in words; None = it is.
        refused_seconds: for how long it has not been.
        possible: some replica could be lent to it, now or in a while.
        has_slots: it has some, leaving ones included.
        now: what there is of its router.
        demand: the router's report of its turns; None = there is none.
    """

    refusal: tuple[Reason, str] | None
    refused_seconds: float
    possible: bool
    has_slots: bool
    now: RouterState
    demand: Demand | None


_RUNS = RouterDecision(RouterState.RUNS)


def decide(lease: RolloutLease, facts: RouterFacts) -> RouterDecision:
    """What there should be of the lease's router."""
    if facts.refusal is not None:
        return _of_refused(lease, facts, facts.refusal)
    if lease.spec.dedicated_engines:
        return _RUNS
    idle = _wants_nothing(lease)
    if idle is not None:
        return _at_rest(facts, *idle)
    if facts.now is not RouterState.NONE or facts.possible or facts.has_slots:
        return _RUNS
    text = "no GPU that could be lent is reported in its pools; the router comes with the first"
    return RouterDecision(RouterState.NONE, Reason.NO_SLOT_POSSIBLE, text)


def _wants_nothing(lease: RolloutLease) -> tuple[Reason, str] | None:
    if lease.spec.suspend:
        return Reason.SUSPENDED, "spec.suspend is true"
    if lease.spec.slots.max == 0:
        return Reason.NO_SLOTS_WANTED, "slots.max is 0"
    return None


def _of_refused(
    lease: RolloutLease, facts: RouterFacts, refusal: tuple[Reason, str]
) -> RouterDecision:
    reason, message = refusal
    if reason is Reason.LEASE_EXPIRED:
        return RouterDecision(RouterState.NONE, reason, message)
    if facts.now is not RouterState.RUNS or (reason in _FORBIDDEN and not facts.has_slots):
        return _without_pods(facts, reason, message)
    if lease.spec.dedicated_engines or facts.refused_seconds < REFUSED_SECONDS:
        return _RUNS
    return _at_rest(facts, reason, message)


def _at_rest(facts: RouterFacts, reason: Reason, message: str) -> RouterDecision:
    """No pod, unless turns may still run there."""
    runs = facts.now is RouterState.RUNS
    if runs and (facts.has_slots or facts.demand is None or facts.demand.dedicated_turns > 0):
        return _RUNS
    return _without_pods(facts, reason, message)


def _without_pods(facts: RouterFacts, reason: Reason, message: str) -> RouterDecision:
    """Its name stays where there is one already."""
    none = facts.now is RouterState.NONE
    return RouterDecision(RouterState.NONE if none else RouterState.RESTS, reason, message)


def possible_leases(world: PlanningPass) -> frozenset[str]:
    """Keys of the leases to which some replica could be lent, if not now then in a while."""
    may = {
        pool: tuple(one for one in members if _may_lend(world, one))
        for pool, members in world.members.items()
    }
    return frozenset(lease.key for lease in world.snapshot.leases if _finds(lease, may))


def _may_lend(world: PlanningPass, replica: Replica) -> bool:
    return bool(replica.gpus) and world.verdicts[replica.uid].reason not in _NEVER


def _finds(lease: Lease, may: Mapping[str, tuple[Replica, ...]]) -> bool:
    if lease.refusal is not None:
        return False
    return any(lease.takes(one) for pool in lease.pools for one in may.get(pool, ()))
