"""Routers in a pass: which each lease should have (``RouterNeeds``), and the writes for that.

A router is a Deployment, its Services and, where the platform has a Gateway, an HTTPRoute. Whether
a lease has one is ``rose_core.lending.routers``' decision. That of a lease that cannot be read
stays as it is, because nobody knows what the lease wants. Writes and statuses ask the same
``RouterNeeds``, so a lease's status never contradicts what was written.

Next step: ``routers`` makes the manifests, ``writer`` carries the writes out.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from rose_core.api import ConditionType, RolloutLease
from rose_core.lending import Demand, LendingPlan
from rose_core.lending.routers import RouterDecision, RouterFacts, RouterState, decide
from rose_operator.apply import routers
from rose_operator.kube.api import KINDS_OF_ROUTERS, ObjectKind
from rose_operator.kube.object_cache import ObjectCache, Raw, key_of
from rose_operator.kube.writer import Write, Writer
from rose_operator.plan.cluster_state import ClusterState
from rose_operator.settings import Settings, with_authority

_Made = tuple[tuple[ObjectKind, Raw], ...]


@dataclass(frozen=True)
class RouterNeeds:
    """Gathers the facts about a router for the core's decision."""

    world: ClusterState
    plan: LendingPlan
    demand: Callable[[str], Demand | None]
    stores: Mapping[ObjectKind, ObjectCache]
    settings: Settings

    def live(self, lease: RolloutLease) -> Raw | None:
        """The Deployment of the lease's router."""
        return live_router(lease, self.stores, self.settings)

    def decision(self, lease: RolloutLease) -> RouterDecision:
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
    """How long the lease's status has shown that it is refused; 0 while it does not show it."""
    for one in lease.status.conditions:
        if one.type == ConditionType.ACCEPTED and one.status == "False":
            return (now - datetime.fromisoformat(one.last_transition_time)).total_seconds()
    return 0.0


class RouterWrites:
    """What a pass writes about routers."""

    def __init__(
        self, writer: Writer, stores: dict[ObjectKind, ObjectCache], settings: Settings
    ) -> None:
        self._writer, self._stores, self._settings = writer, stores, settings
        self._manifests: dict[str, tuple[object, _Made]] = {}

    def writes(self, needs: RouterNeeds) -> Iterator[Write]:
        """Routers that are missing or out of date, then those that nothing asks for."""
        self._settings = with_authority(self._settings)
        leases = needs.world.leases
        wanted = {name for bad in leases.bad for name in _names_of(bad.raw)}
        for lease in leases.good.values():
            state = needs.decision(lease).state
            if state is RouterState.NONE:
                continue
            for kind, manifest in self._made(
                lease, needs.live(lease), rests=state is RouterState.RESTS
            ):
                wanted.add(manifest["metadata"]["name"])
                if not routers.is_current(manifest, self._stores[kind].get(key_of(manifest))):
                    yield self._writer.apply(kind, manifest)
        yield from self._delete_all_but(wanted)

    def keep(self, leases: Container[str]) -> None:
        """Forget the manifests of leases that are gone."""
        self._manifests = {key: made for key, made in self._manifests.items() if key in leases}

    def _delete_all_but(self, wanted: set[str]) -> Iterator[Write]:
        for kind in filter(self._stores.__contains__, KINDS_OF_ROUTERS):
            for raw in self._stores[kind].all():
                name = raw["metadata"]["name"]
                ours = routers.LEASE in (raw["metadata"].get("annotations") or {})
                if ours and name not in wanted:
                    yield self._writer.delete(kind, name)

    def _made(self, lease: RolloutLease, live: Raw | None, *, rests: bool) -> _Made:
        """The manifests of a lease's router, made once per generation of the lease."""
        key, metadata = lease.metadata.key, lease.metadata
        trust = self._settings.operator_authority
        made_for = (metadata.uid, metadata.generation, rests, routers.size(lease, live), trust)
        kept = self._manifests.get(key)
        if kept is None or kept[0] != made_for:
            kept = self._manifests[key] = made_for, tuple(self._make(lease, live, rests=rests))
        return kept[1]

    def _make(
        self, lease: RolloutLease, live: Raw | None, *, rests: bool
    ) -> Iterator[tuple[ObjectKind, Raw]]:
        yield (
            ObjectKind.DEPLOYMENT,
            routers.deployment(lease, self._settings, rests=rests, live=live),
        )
        yield ObjectKind.SERVICE, routers.service(lease, self._settings)
        if lease.spec.router.replicas > 1:
            yield ObjectKind.SERVICE, routers.replicas_service(lease, self._settings)
        if self._settings.gateway is not None:
            yield ObjectKind.ROUTE, routers.route(lease, self._settings, self._settings.gateway)


def _names_of(raw: Raw) -> tuple[str, str]:
    name = routers.router_name(raw["metadata"]["namespace"], raw["metadata"]["name"])
    return name, routers.replicas_name(name)
