"""TenantPolicy: the platform's limits; which namespaces may lease, and how much.

Cluster-scoped, so no role inside a namespace can write one. A namespace that no policy selects
leases nothing. Where several select it, it has the widest cap of each and every right of any.
Decided by ``rose_core.lending.tenancy``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rose_core.api.common import ATOMIC_LIST, ApiModel, LabelName, LabelValue, ObjectMeta, Rule

# A namespace, run, model or pool, with * and ? for any characters.
_PATTERN = r"^[-A-Za-z0-9._/*?]+$"
Pattern = Annotated[str, Field(min_length=1, max_length=253, pattern=_PATTERN)]


class Namespaces(ApiModel):
    """Which namespaces a policy is for."""

    rules = (
        Rule(
            "size(self.names) + size(self.matchLabels) > 0",
            "name namespaces in names, or by labels in matchLabels",
        ),
    )

    names: tuple[Pattern, ...] = Field(
        default=(),
        max_length=64,
        description="Names, * and ? for any characters.",
        json_schema_extra=ATOMIC_LIST,
    )
    match_labels: dict[str, LabelValue] = Field(
        default={},
        max_length=16,
        description="Labels of the Namespace, all of which it has; beside names: either counts.",
    )


class Runs(ApiModel):
    """Runs of one weight store."""

    store_name: LabelName = Field(description="Weight store, from the platform's list.")
    names: tuple[Pattern, ...] = Field(
        min_length=1,
        max_length=64,
        description="Runs that leases may follow, * and ? for any characters.",
        json_schema_extra=ATOMIC_LIST,
    )


class PolicySpec(ApiModel):
    """What the leases of these namespaces may ask for; each field says what holds without it."""

    rules = (
        Rule(
            "self.minPriority <= self.maxPriority",
            "minPriority must not exceed maxPriority",
            ".minPriority",
        ),
    )

    namespaces: Namespaces = Field(description="Which namespaces this policy is for.")
    runs: tuple[Runs, ...] = Field(
        default=(),
        max_length=64,
        description="Whose weights their leases may follow; none, if empty.",
        json_schema_extra=ATOMIC_LIST,
    )
    pools: tuple[Pattern, ...] = Field(
        default=("*",),
        max_length=64,
        description="Pools as NAMESPACE/NAME; each pool says itself who may borrow, too.",
        json_schema_extra=ATOMIC_LIST,
    )
    models: tuple[Pattern, ...] = Field(
        default=("*",),
        max_length=64,
        description="Models on the nodes that their engines may load.",
        json_schema_extra=ATOMIC_LIST,
    )
    max_leases: int = Field(
        default=8, ge=0, le=1000, description="Leases of one namespace that may hold slots."
    )
    max_slots: int = Field(
        default=64, ge=0, le=10_000, description="Sum of slots.max over a namespace's leases."
    )
    max_router_replicas: int = Field(
        default=2, ge=0, le=16, description="Most router.replicas of a lease."
    )
    max_total_router_replicas: int = Field(
        # As many as maxLeases and maxRouterReplicas allow together, by their defaults.
        default=16,
        ge=0,
        le=10_000,
        description="Sum of router.replicas over a namespace's leases, refused ones that still "
        "have a router included.",
    )
    min_priority: int = Field(default=0, ge=-1000, le=1000, description="Least priority.")
    max_priority: int = Field(default=0, ge=-1000, le=1000, description="Most priority.")
    max_weight: int = Field(default=1, ge=1, le=1000, description="Most weight of a lease.")
    may_preempt: bool = Field(
        default=False,
        description="Whether a lease's minimum may take slots of leases with lower priority.",
    )


class TenantPolicy(ApiModel):
    """Which namespaces may lease, and how much; written by the platform alone."""

    metadata: ObjectMeta
    spec: PolicySpec
