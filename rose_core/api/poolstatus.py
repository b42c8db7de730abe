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
    load: LoadShape | None = Field(
        default=None, description="Daily shape of the load, learned where forecast is asked for."
    )
    explanation: Explanation | None = Field(
        default=None, description="Answer to the last question asked by annotation."
    )
