"""Status of a ServingPool: what the operator has learned and what agents report."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rose_core.api.common import ATOMIC_LIST, ApiModel, Count, Explanation, StatusBase


class LoadShape(ApiModel):
    """What the operator has learned about the pool's day; written at most once an hour."""

    busy_permille: tuple[Annotated[int, Field(ge=-1, le=1000)], ...] = Field(
        default=(),
        max_length=48,
        description="Usual busy share by half hour of the day, UTC; -1 where nothing was seen.",
        json_schema_extra=ATOMIC_LIST,
    )


class PoolModel(ApiModel):
    """A model on nodes of the pool's replicas."""

    name: str = Field(min_length=1, max_length=128, description="As leases name it.")
    digest: str = Field(
        default="", max_length=64, description="Tells two contents of one name apart."
    )
    size_bytes: Count = Field(default=0, description="Of all its files.")
    nodes: tuple[Annotated[str, Field(max_length=253)], ...] = Field(
        default=(),
        max_length=32,
        description="Nodes that have it, the first by name.",
        json_schema_extra=ATOMIC_LIST,
    )
    more_nodes: int = Field(default=0, ge=0, le=100_000, description="Nodes beyond those.")
    missing_nodes: int = Field(
        default=0, ge=0, le=100_000, description="Nodes of the pool that lack the name."
    )


MOST_NODES = 1000
"""Nodes of a pool whose counters are told apart; those beyond are not counted."""


class NodeReserve(ApiModel):
    """A node's counter as last added to the pool's totals."""

    node: str = Field(max_length=253, description="The node's name.")
    unlent_reserved_milliseconds: Count = Field(
        default=0, description="What its guard had counted."
    )


class PoolTotals(ApiModel):
    """What lending has taken from the pool beside its leases; written at most once a minute."""

    unlent_reserved_milliseconds: Count = Field(
        default=0,
        description=(
            "GPU time in which nobody borrowed, by the share of the GPU's memory that serving did "
            "without so that somebody could. That of borrowed GPUs is in their leases."
        ),
    )
    nodes: tuple[NodeReserve, ...] = Field(
        default=(),
        max_length=MOST_NODES,
        description="What each node has counted, so that no restart counts twice.",
        json_schema_extra=ATOMIC_LIST,
    )


class PoolStatus(StatusBase):
    """What is known about the pool."""

    replicas: int = Field(
        default=0, ge=0, le=100_000, description="Serving replicas that agents report."
    )
    qualified_replicas: int = Field(
        default=0, ge=0, le=100_000, description="Replicas that may be lent or are."
    )
    lent_replicas: int = Field(default=0, ge=0, le=100_000, description="Replicas lent now.")
    unwanted_gpus: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="GPUs that could be lent now and that no lease wants.",
    )
    device_classes: tuple[Annotated[str, Field(max_length=63)], ...] = Field(
        default=(),
        max_length=64,
        description="Kinds of GPU that its replicas have, as leases may name them.",
        json_schema_extra=ATOMIC_LIST,
    )
    models: tuple[PoolModel, ...] = Field(
        default=(),
        max_length=64,
        description="What the engine hosts of its nodes have found; leases name one of them.",
        json_schema_extra=ATOMIC_LIST,
    )
    asleep_replicas: int = Field(
        default=0, ge=0, le=100_000, description="Replicas that drain, sleep or wake for a loan."
    )
    totals: PoolTotals = Field(
        default=PoolTotals(), description="What lending has taken beside the leases."
    )
    load: LoadShape | None = Field(
        default=None, description="Daily shape of the load, learned where forecast is asked for."
    )
    explanation: Explanation | None = Field(
        default=None, description="Answer to the last question asked by annotation."
    )
