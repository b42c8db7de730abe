"""RolloutSlot: one borrowed share of one serving replica's GPUs, written by the operator alone.

The slot's *generation* is ``metadata.generation``: it moves with every change of the spec, so an
engine started from an older spec never acts for a newer one. ``desired`` goes one way:

    Lent --(planner releases)--> Released --(agent reports it gone, or its grant lapsed)--> deleted
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rose_core.adapters import MOST_ADAPTERS
from rose_core.api.common import (
    ATOMIC_LIST,
    SET_LIST,
    AdapterTarget,
    ApiModel,
    Count,
    LabelName,
    NamespaceName,
    NoLabelName,
    NoRunName,
    ObjectMeta,
    ObjectName,
    PoolReference,
    Rule,
    RunName,
    StatusBase,
)
from rose_core.api.names import MODEL_NAME
from rose_core.api.rolloutlease import ArgumentValue, KVPolicy
from rose_core.api.servingpool import Compute, MemoryLimit, MemorySource
from rose_core.identity import GpuUuid, LeaseUid, PodUid


class Desired(StrEnum):
    """What the planner wants of the slot."""

    LENT = "Lent"
    RELEASED = "Released"


class Tier(StrEnum):
    """How the share is taken."""

    SHARED = "Shared"
    WHOLE = "Whole"


class LeaseReference(ApiModel):
    """The lease a slot belongs to; a lease deleted and made anew has another uid."""

    namespace: NamespaceName = Field(description="Namespace of the RolloutLease.")
    name: ObjectName = Field(description="Name of the RolloutLease.")
    uid: LeaseUid = Field(min_length=1, max_length=36, description="Uid of the RolloutLease.")

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


class Member(ApiModel):
    """The GPUs of one serving replica on one node."""

    node: ObjectName = Field(description="Node of the serving pod.")
    pod_name: ObjectName = Field(description="Name of the serving pod.")
    pod_uid: PodUid = Field(min_length=1, max_length=64, description="Uid of the serving pod.")
    gpu_uuids: tuple[Annotated[GpuUuid, Field(min_length=1, max_length=64)], ...] = Field(
        alias="gpuUUIDs",
        min_length=1,
        max_length=8,
        description="GPUs of the replica that the slot shares.",
        json_schema_extra=ATOMIC_LIST,
    )


class SlotEngine(ApiModel):
    """The engine the slot runs, copied from the lease when it was checked."""

    engine_class: LabelName = Field(description="Engine build.")
    model: str = Field(
        min_length=1, max_length=128, pattern=MODEL_NAME, description="Name of the model."
    )
    arguments: dict[str, ArgumentValue] = Field(
        default={}, max_length=32, description="Engine arguments, checked."
    )
    context_tokens: int = Field(ge=16, le=4_194_304, description="Longest prompt plus output.")
    kv_tokens: int = Field(ge=16, le=67_108_864, description="KV pool in tokens.")
    max_running: int = Field(ge=1, le=1024, description="Turns in flight.")
    ranks: int = Field(default=1, ge=1, le=8, description="GPUs that the engine is spread over.")
    drafts: bool = Field(default=False, description="It verifies drafts that the router makes.")
    kv_store_gib: int = Field(
        default=0,
        alias="kvStoreGiB",
        ge=0,
        le=4096,
        description="Memory of the node for keys that the lease's engines share, GiB.",
    )


class SlotWeights(ApiModel):
    """The weights the slot follows, copied from the lease."""

    store_name: NoLabelName = Field(
        default="", description="Weight store, by the platform's name; empty where frozen."
    )
    run: NoRunName = Field(default="", description="Training run; empty where frozen.")
    frozen: bool = Field(default=False, description="It keeps the checkpoint it started from.")
    adapter_rank: int = Field(
        default=0, ge=0, le=512, description="Rank of the run's LoRA adapters; 0 = whole models."
    )
    adapter_targets: tuple[AdapterTarget, ...] = Field(
        default=(),
        max_length=16,
        description="Modules that the adapter changes; empty = all that can be.",
        json_schema_extra=SET_LIST,
    )
    adapter_slots: int = Field(
        default=1, ge=1, le=MOST_ADAPTERS, description="Adapters that the engine holds at a time."
    )
    max_staleness_versions: int = Field(ge=0, le=1000, description="Versions it may lag behind.")
    kv_policy: KVPolicy = Field(
        default=KVPolicy.KEEP, description="What becomes of cached KV at a commit."
    )


class SlotSharing(ApiModel):
    """How the engine shares its GPU, copied from the pool."""

    rules = (
        Rule(
            "self.compute == 'MPS' || (self.computePercent == 30 && !has(self.busyComputePercent))",
            "computePercent and busyComputePercent need compute MPS: otherwise there are no shares",
            ".computePercent",
        ),
    )

    compute: Compute = Field(
        default=Compute.TIME_SLICE, description="How the GPU's time is shared."
    )
    compute_percent: int = Field(
        default=30, ge=1, le=90, description="Share of the GPU's compute with MPS, percent."
    )
    busy_compute_percent: int | None = Field(
        default=None, ge=1, le=89, description="Share of a second engine, for busy serving."
    )
    memory_source: MemorySource = Field(
        default=MemorySource.RESERVED, description="Where the memory comes from."
    )
    memory_limit: MemoryLimit = Field(
        default=MemoryLimit.NONE, description="Backstop for the memory."
    )


class SlotSpec(ApiModel):
    """What the node's agent realises."""

    rules = (
        Rule("self.leaseRef == oldSelf.leaseRef", "leaseRef cannot change", ".leaseRef"),
        Rule("self.members == oldSelf.members", "members cannot change", ".members"),
        Rule("self.tier == oldSelf.tier", "tier cannot change", ".tier"),
        Rule(
            "size(self.members) == 1",
            "MultiNodeReplica: a slot has exactly one member in this version",
            ".members",
        ),
        Rule(
            "oldSelf.desired != 'Released' || self.desired == 'Released'",
            "a released slot is never lent again; the planner makes a new one",
            ".desired",
        ),
        Rule(
            "(self.desired == 'Released') == (self.releaseReason != '')",
            "releaseReason is given exactly when desired is Released",
            ".releaseReason",
        ),
    )

    lease_ref: LeaseReference = Field(description="The lease it belongs to.")
    pool_ref: PoolReference = Field(description="The pool it is borrowed from.")
    members: tuple[Member, ...] = Field(
        min_length=1,
        max_length=8,
        description="Whose GPUs; one member in this version.",
        json_schema_extra=ATOMIC_LIST,
    )
    tier: Tier = Field(
        default=Tier.SHARED,
        description="Shared: beside serving that is awake. Whole: while serving sleeps.",
    )
    desired: Desired = Field(default=Desired.LENT, description="What the planner wants.")
    release_reason: str = Field(
        default="",
        max_length=63,
        pattern=r"^[A-Za-z]*$",
        description="Why it is taken back, one word of the closed list.",
    )
    engine: SlotEngine = Field(description="The engine it runs.")
    sharing: SlotSharing = Field(
        default=SlotSharing(), description="How the engine shares its GPU with serving."
    )
    weights: SlotWeights = Field(description="The weights it follows.")

    @property
    def member(self) -> Member:
        """The one member of this version."""
        return self.members[0]


class AdapterStatus(ApiModel):
    """The adapter of one run."""

    run: RunName = Field(description="Whose it is.")
    weight_version: str = Field(
        default="", max_length=128, description="Version attested in the engine; empty = none yet."
    )


class SlotStatus(StatusBase):
    """What the node's agent last reported, written on transitions only."""

    state: str = Field(
        default="", max_length=16, pattern=r"^[A-Za-z]*$", description="Life of the slot."
    )
    endpoint: str = Field(
        default="", max_length=512, description="Data route of the engine, for routers."
    )
    weight_version: str = Field(
        default="", max_length=128, description="Version attested on the live weights."
    )
    weight_digest: str = Field(
        default="", max_length=128, description="Digest attested on the live weights."
    )
    adapters: tuple[AdapterStatus, ...] = Field(
        default=(),
        max_length=MOST_ADAPTERS,
        description="Adapters of the runs that the engine serves, where there are several.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["run"],
        },
    )
    reclaims: Count = Field(
        default=0,
        description="Times the guard took the GPU back, at this write.",
    )


class RolloutSlot(ApiModel):
    """One borrowed share of one serving replica's GPUs."""

    metadata: ObjectMeta
    spec: SlotSpec
    status: SlotStatus = SlotStatus()
