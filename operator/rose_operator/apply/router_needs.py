"""What each lease's router should be in this pass: facts gathered for the core's decision.

Writes and statuses ask the same question, so that a lease never says something else of its router
than what was written. Next step: ``rose_core.lending.routers`` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from rose_core.api import ConditionType, RolloutLease
from rose_core.lending import Demand, LendingPlan
from rose_core.lending.routers import RouterDecision, RouterFacts, decide
from rose_operator.apply import routers
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import ObjectCache, Raw
from rose_operator.plan.cluster_state import ClusterState
from rose_operator.settings import Settings


@dataclass(frozen=True)
class RouterNeeds:
    """The world and its plan, asked for routers."""

    world: ClusterState
    plan: LendingPlan
    demand: Callable[[str], Demand | None]
    stores: Mapping[ObjectKind, ObjectCache]
    settings: Settings

    def live(self, lease: RolloutLease) -> Raw | None:
        """The Deployment of the lease's router."""
        return live_router(lease, self.stores, self.settings)

    def of(self, lease: RolloutLease) -> RouterDecision:
        """What there should be of the lease's router."""
        key, refusal = lease.metadata.key, self.world.refusals.get(lease.metadata.key)
        return decide(
            lease,
            RouterFacts(
                refusal=None if refusal is None else (refusal.reason, refusal.message),
                refused_seconds=refused_seconds(lease, self.world.now),
                possible=key in self.plan.possible,
                has_slots=bool(self.world.slots_of(lease)),
                now=routers.state_of(self.live(lease)),
                demand=self.demand(key),
            ),
        )


def live_router(
    lease: RolloutLease, stores: Mapping[ObjectKind, ObjectCache], settings: Settings
) -> Raw | None:
    """The Deployment of the lease's router, as the API server has it."""
    name = routers.router_name(lease.metadata.namespace, lease.metadata.name)
    return stores[ObjectKind.DEPLOYMENT].get(f"{settings.routers}/{name}")


def refused_seconds(lease: RolloutLease, now: datetime) -> float:
    """How long the lease's own status has said that it is refused; 0 while it does not say so."""
    for one in lease.status.conditions:
        if one.type == ConditionType.ACCEPTED and one.status == "False":
            return (now - datetime.fromisoformat(one.last_transition_time)).total_seconds()
    return 0.0
