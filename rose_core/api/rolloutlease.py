"""RolloutLease: what an RL team asks for; applying one gives one URL for turns.

It names no image and no host: the model, the weight store and the engine class are names that the
platform resolves, engine arguments come from an allow-list.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rose_core.adapters import MOST_ADAPTERS
from rose_core.api.arguments import ALLOWED, ROUTED_EXPERTS
from rose_core.api.common import (
    ATOMIC_LIST,
    SET_LIST,
    AdapterTarget,
    ApiModel,
    Count,
    Explanation,
    LabelName,
    NoLabelName,
    NoRunName,
    ObjectMeta,
    PoolReference,
    Rule,
    RunName,
    StatusBase,
)
from rose_core.api.names import MODEL_NAME

ArgumentValue = Annotated[str, Field(max_length=64)]


def _immutable(field: str) -> Rule:
    return Rule(
        f"self.{field} == oldSelf.{field}",
        f"{field} cannot change; delete the lease and apply a new one",
        f".{field}",
    )


class KVPolicy(StrEnum):
    """What happens to cached KV when weights change."""

    KEEP = "Keep"
    RECOMPUTE = "Recompute"
    REUSE = "Reuse"


class PreemptionPolicy(StrEnum):
    """Whether the lease's minimum may take slots of weaker leases."""

    PREEMPT_LOWER_PRIORITY = "PreemptLowerPriority"
    NEVER = "Never"


class Drafts(StrEnum):
    """Where the guesses come from that an engine verifies."""

    OFF = "Off"
    ROUTER = "Router"


class Model(ApiModel):
    """Which model the rollout engines run."""

    name: str = Field(
        min_length=1,
        max_length=128,
        pattern=MODEL_NAME,
        description="Name of a model the platform offers on its nodes.",
    )


class Slots(ApiModel):
    """How many slots."""

    rules = (Rule("self.min <= self.max", "slots.min must not exceed slots.max", ".min"),)

    min: int = Field(default=1, ge=0, le=1024, description="Below this the lease is not Ready.")
    max: int = Field(default=1, ge=0, le=1024, description="Most slots the lease holds.")
    idle_seconds: int = Field(
        default=90,
        ge=10,
        le=604_800,
        description="Without a turn for so long all slots go back, until turns or the next step "
        "come. About what a slot takes to start.",
    )


class Weights(ApiModel):
    """Which weights to follow."""

    rules = (
        _immutable("storeName"),
        _immutable("run"),
        _immutable("frozen"),
        _immutable("adapterRank"),
        _immutable("adapterTargets"),
        _immutable("adapterSlots"),
        Rule(
            "self.frozen || (self.storeName != '' && self.run != '')",
            "weights needs storeName and run, or frozen: true for a model that is never trained",
            ".storeName",
        ),
        Rule(
            "!self.frozen || (self.storeName == '' && self.run == '')",
            "frozen weights follow nothing: leave storeName and run out",
            ".frozen",
        ),
        Rule(
            "!self.frozen || self.adapterRank == 0",
            "an adapter is trained, frozen weights are not: leave adapterRank out",
            ".adapterRank",
        ),
        Rule(
            "self.adapterRank > 0 || size(self.adapterTargets) == 0",
            "adapterTargets needs adapterRank: without it versions are whole models",
            ".adapterTargets",
        ),
        Rule(
            "self.adapterRank > 0 || self.adapterSlots == 1",
            "adapterSlots needs adapterRank: engines hold several runs only as LoRA adapters",
            ".adapterSlots",
        ),
        Rule(
            "size(self.adapterRuns) < self.adapterSlots",
            "run and adapterRuns are more adapters than adapterSlots: name fewer, or apply another "
            "lease, whose engines hold more",
            ".adapterRuns",
        ),
        Rule(
            "!(self.run in self.adapterRuns)",
            "adapterRuns are runs beside weights.run, which they repeat",
            ".adapterRuns",
        ),
        Rule(
            "self.adapterSlots == 1 || self.kvPolicy != 'Recompute'",
            "kvPolicy Recompute takes the KV of every turn at each commit, also of the other runs: "
            "with several adapterSlots it must be Keep or Reuse",
            ".kvPolicy",
        ),
    )

    store_name: NoLabelName = Field(
        default="", description="Weight store, from the platform's list."
    )
    run: NoRunName = Field(default="", description="Training run whose versions are followed.")
    frozen: bool = Field(
        default=False,
        description="The model as it lies on the nodes, attested by its digest, for as long as the "
        "lease lives: a judge, a reward model, batch inference. No store is asked.",
    )
    adapter_rank: int = Field(
        default=0,
        ge=0,
        le=512,
        description="Versions of the run are LoRA adapters of this rank over the model; 0 = whole "
        "models. Experimental.",
    )
    adapter_targets: tuple[AdapterTarget, ...] = Field(
        default=(),
        max_length=16,
        description="Modules that the adapter changes; empty = all that can be.",
        json_schema_extra=SET_LIST,
    )
    adapter_slots: int = Field(
        default=1,
        ge=1,
        le=MOST_ADAPTERS,
        description="Adapters that each engine holds at a time, every one of another run; its "
        "memory is set aside when the engine starts.",
    )
    adapter_runs: tuple[RunName, ...] = Field(
        default=(),
        max_length=MOST_ADAPTERS - 1,
        description="Runs beside run whose adapters the same engines hold: same base, rank and "
        "modules. They may come and go while engines run. Turns name theirs (docs/adapters.md).",
        json_schema_extra=SET_LIST,
    )
    max_staleness_versions: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="Versions an engine may lag behind the head and still take turns.",
    )
    kv_policy: KVPolicy = Field(
        default=KVPolicy.KEEP,
        description="At a commit running turns keep their KV (Keep), prefill again (Recompute), or "
        "keep it and later turns of a trajectory reuse it for some commits (Reuse).",
    )


class RouterPolicy(StrEnum):
    """How an engine is chosen: the rules of ``rollouts.placement.selection`` that do not bias."""

    JOINT = "joint"
    ROSE_PAPER = "rose-paper"
    ROSE_PAPER_DEDICATED = "rose-paper-dedicated"
    CACHE_AWARE = "cache-aware"
    LEAST_LOADED = "least-loaded"
    FIXED = "fixed"


class Caller(ApiModel):
    """Somebody outside the cluster who may call the router; ``rose caller grant`` makes one."""

    name: LabelName = Field(description="Who it is, for the router's log.")
    sha256: str = Field(
        min_length=64,
        max_length=64,
        pattern="^[0-9a-f]{64}$",
        description="Hash of the credential, hexadecimal; the credential itself is nowhere.",
    )
    turns_only: bool = Field(
        default=False, description="It opens turns, and no route that concerns those of others."
    )
    expires: str | None = Field(
        default=None,
        max_length=40,
        description="From when on it is not heard, RFC 3339; unset = while it is listed.",
        json_schema_extra={"format": "date-time"},
    )


class RouterSettings(ApiModel):
    """Settings of the lease's router."""

    queue_limit: int = Field(
        default=1024, ge=1, le=100_000, description="Turns that may wait; more get Retry-After."
    )
    queue_timeout_seconds: int = Field(
        default=240,
        ge=1,
        le=86_400,
        description="Longest wait of a turn for an engine; below the shortest time-out of callers.",
    )
    policy: RouterPolicy = Field(
        default=RouterPolicy.JOINT,
        description="How an engine is chosen for a turn (docs/placement.md).",
    )
    max_age_versions: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Publishes after which a trajectory is too old to train on; unset = as many as "
        "weights.maxStalenessVersions.",
    )
    replicas: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Router processes that share the lease's turns and every engine's cap.",
    )
    callers: tuple[Caller, ...] = Field(
        default=(),
        max_length=32,
        description="Callers that have no service account in the lease's namespace.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    )


class LeaseSpec(ApiModel):
    """What the RL team asks for."""

    rules = (
        _immutable("poolRef"),
        _immutable("poolRefs"),
        _immutable("model"),
        _immutable("engineClass"),
        _immutable("gpusPerSlot"),
        Rule(
            f"self.engineArguments.all(name, name in {sorted(ALLOWED)})",
            "engineArguments has a name that is not on the allow-list (docs/api.md)",
            ".engineArguments",
        ),
        Rule(
            "self.contextTokens <= self.kvTokens",
            "contextTokens must not exceed kvTokens: one turn must fit into the KV pool",
            ".contextTokens",
        ),
        Rule(
            "self.gpusPerSlot in [1, 2, 4, 8]",
            "gpusPerSlot must be 1, 2, 4 or 8: heads of a model are split evenly over its GPUs",
            ".gpusPerSlot",
        ),
        Rule(
            "self.gpusPerSlot == 1 || self.weights.adapterRank == 0",
            "an adapter runs on engines of one GPU: gpusPerSlot must be 1 with adapterRank",
            ".gpusPerSlot",
        ),
        Rule(
            "self.drafts == 'Off' || (self.gpusPerSlot == 1 && self.weights.adapterRank == 0)",
            "drafts needs engines of one GPU and versions that are whole models",
            ".drafts",
        ),
        Rule(
            f"self.drafts == 'Off' || !('{ROUTED_EXPERTS}' in self.engineArguments)",
            f"drafts cannot be combined with the engine argument {ROUTED_EXPERTS}",
            ".drafts",
        ),
        Rule(
            "self.drafts == 'Off' || self.weights.kvPolicy == 'Keep'",
            "drafts needs kvPolicy Keep: the others have not been tried with them",
            ".drafts",
        ),
        Rule(
            "self.kvStoreGiB == 0 || (self.gpusPerSlot == 1 && self.weights.adapterRank == 0 && "
            "self.weights.kvPolicy == 'Keep' && self.drafts == 'Off')",
            "kvStoreGiB needs engines of one GPU, versions that are whole models, kvPolicy Keep "
            "and drafts Off: it has not been tried with anything else",
            ".kvStoreGiB",
        ),
        Rule(
            f"self.kvStoreGiB == 0 || !('{ROUTED_EXPERTS}' in self.engineArguments || "
            "'disable-radix-cache' in self.engineArguments)",
            f"kvStoreGiB cannot be combined with the engine arguments {ROUTED_EXPERTS} and "
            "disable-radix-cache: no experts are kept with keys, and there must be a cache",
            ".kvStoreGiB",
        ),
        Rule(
            "self.preemptionPolicy != 'Never' || self.slots.min > 0",
            "preemptionPolicy Never says nothing while slots.min is 0: only a minimum preempts",
            ".preemptionPolicy",
        ),
    )

    pool_ref: PoolReference = Field(description="The pool to borrow from.")
    pool_refs: tuple[PoolReference, ...] = Field(
        default=(),
        max_length=8,
        description="More pools to borrow from, say of other GPUs; slots are those of all.",
        json_schema_extra=ATOMIC_LIST,
    )
    device_classes: tuple[LabelName, ...] = Field(
        default=(),
        max_length=16,
        description="Kinds of GPU to take, as status.deviceClasses of pools names them; empty = "
        "any.",
        json_schema_extra=SET_LIST,
    )
    model: Model = Field(description="Which model the rollout engines run.")
    engine_class: LabelName = Field(
        default="sglang", description="Engine build, by the name the platform gave it."
    )
    engine_arguments: dict[str, ArgumentValue] = Field(
        default={},
        max_length=32,
        description="Engine arguments without dashes, from the allow-list (docs/api.md).",
    )
    slots: Slots = Field(default=Slots(), description="How many slots.")
    gpus_per_slot: int = Field(
        default=1,
        ge=1,
        le=8,
        description="GPUs of one slot, all of one replica: its engine is spread over them. "
        "Experimental above 1.",
    )
    priority: int = Field(
        default=0, ge=-1000, le=1000, description="Higher is served first; then the older lease."
    )
    weight: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Share of the pool beside leases of the same priority, above all minimums.",
    )
    preemption_policy: PreemptionPolicy = Field(
        default=PreemptionPolicy.PREEMPT_LOWER_PRIORITY,
        description="Whether slots.min may be taken from leases of lower priority.",
    )
    suspend: bool = Field(
        default=False,
        description="Give every slot back and take none while it is true; the URL stays, and "
        "without dedicated engines nobody answers there.",
    )
    lifetime_seconds: int | None = Field(
        default=None,
        ge=60,
        le=31_536_000,
        description="The lease ends by itself this long after it was made.",
    )
    weights: Weights = Field(description="Which weights to follow.")
    max_trajectories_per_slot: int = Field(
        default=8, ge=1, le=1024, description="Turns in flight on one slot."
    )
    context_tokens: int = Field(
        default=4096, ge=16, le=4_194_304, description="Longest prompt plus output of a turn."
    )
    kv_tokens: int = Field(
        default=16_384, ge=16, le=67_108_864, description="KV pool of one slot's engine, tokens."
    )
    drafts: Drafts = Field(
        default=Drafts.OFF,
        description="Router: engines verify guesses made of the lease's own answers. Sampling "
        "stays exact; min_p, penalties, seeds and top_k with top_p are refused. Experimental.",
    )
    kv_store_gib: int = Field(
        default=0,
        alias="kvStoreGiB",
        ge=0,
        le=4096,
        description="Memory of a node, GiB, in which the lease's engines there keep keys and "
        "values for each other, so that a cut turn is not prefilled anew; 0 = none. Experimental.",
    )
    dedicated_engines: tuple[LabelName, ...] = Field(
        default=(),
        max_length=256,
        description="Dedicated engines that may attach to the router; empty = any may.",
        json_schema_extra=SET_LIST,
    )
    router: RouterSettings = Field(
        default=RouterSettings(), description="Settings of the lease's router."
    )

    @property
    def pools(self) -> tuple[PoolReference, ...]:
        """Every pool to borrow from, once."""
        return tuple({ref.key: ref for ref in (self.pool_ref, *self.pool_refs)}.values())


class SlotTotals(ApiModel):
    """Counters of one slot as last added to the lease's totals."""

    uid: str = Field(max_length=36, description="The slot's uid.")
    lent_milliseconds: Count = Field(default=0, description="GPU time under a grant.")
    open_milliseconds: Count = Field(default=0, description="GPU time with an open gate.")
    reserved_milliseconds: Count = Field(
        default=0, description="GPU time by the share of memory kept back from serving."
    )
    harvested_tokens: Count = Field(default=0, description="Output tokens made.")
    weight_bytes: Count = Field(default=0, description="Weights pulled.")
    serving_requests: Count = Field(default=0, description="Live requests that ended beside it.")
    slo_violations: Count = Field(
        default=0, description="Those that missed the SLO beside rollouts."
    )
    serving_input_tokens: Count = Field(default=0, description="Tokens that serving read.")
    serving_output_tokens: Count = Field(default=0, description="Tokens that serving wrote.")
    serving_requests_with_tokens: Count = Field(
        default=0, description="Live requests that ended while these were counted."
    )


MOST_ROUTERS = 64
"""Processes whose counts are told apart: replicas, and those that they took the place of."""


class RouterTotals(ApiModel):
    """Counters of one process of the lease's router, as last added to the lease's totals."""

    instance: str = Field(max_length=64, description="The process's own name for itself.")
    accepted_trajectories: Count = Field(default=0, description="Trained on.")
    correct_answers: Count = Field(default=0, description="Correct among them.")
    dedicated_tokens: Count = Field(default=0, description="Output tokens of dedicated engines.")
    trained_tokens: Count = Field(default=0, description="Output tokens that were trained on.")
    reasoning_tokens: Count = Field(default=0, description="Of these, before the answers.")


class Totals(ApiModel):
    """What the lease has used since it was made; written at most once a minute."""

    lent_milliseconds: Count = Field(
        default=0, description="GPU time under a grant, over all slots."
    )
    open_milliseconds: Count = Field(
        default=0,
        description="Part of it in which rollouts could compute; what is charged.",
    )
    reserved_milliseconds: Count = Field(
        default=0,
        description=(
            "GPU time under a grant, by the share of the GPU's memory that serving did without "
            "for it: an hour with a quarter kept back is a quarter of an hour."
        ),
    )
    harvested_tokens: Count = Field(
        default=0, description="Output tokens made by borrowed engines."
    )
    weight_bytes: Count = Field(default=0, description="Weights pulled for borrowed engines.")
    serving_requests: Count = Field(
        default=0, description="Live requests that ended beside a granted slot."
    )
    slo_violations: Count = Field(
        default=0,
        description=(
            "Live requests that missed the pool's SLO and had met an open gate; at most what "
            "lending has added."
        ),
    )
    serving_input_tokens: Count = Field(
        default=0, description="Tokens of prompts that serving read beside a granted slot."
    )
    serving_output_tokens: Count = Field(
        default=0, description="Tokens of answers that serving wrote beside a granted slot."
    )
    serving_requests_with_tokens: Count = Field(
        default=0,
        description=(
            "Those of the live requests that ended while these tokens were counted; fewer where "
            "an engine does not say them, and where requests are from before they were counted."
        ),
    )
    accepted_trajectories: Count = Field(
        default=0, description="Trajectories that the trainer said it trained on."
    )
    correct_answers: Count = Field(default=0, description="Correct answers among them, as it said.")
    dedicated_tokens: Count = Field(
        default=0, description="Output tokens made by dedicated engines."
    )
    trained_tokens: Count = Field(
        default=0, description="Output tokens of the trajectories trained on."
    )
    reasoning_tokens: Count = Field(
        default=0, description="Of these, before the answers, as the trainer said."
    )
    routers: tuple[RouterTotals, ...] = Field(
        default=(),
        max_length=MOST_ROUTERS,
        description="How much of them each process of the lease's router has contributed.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["instance"],
        },
    )
    slots: tuple[SlotTotals, ...] = Field(
        default=(),
        max_length=1024,
        description="How much of the totals each living slot has contributed.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["uid"],
        },
    )


class LeaseStatus(StatusBase):
    """What the lease has."""

    router_url: str = Field(
        default="",
        max_length=512,
        alias="routerURL",
        description="The one URL that turns are sent to.",
    )
    slots_wanted: int = Field(
        default=0, ge=0, le=1024, description="Slots that its turns can use now, at most slots.max."
    )
    slots_granted: int = Field(default=0, ge=0, le=1024, description="Slots it holds.")
    selector: str = Field(
        default="",
        max_length=256,
        description="Selects the lease's router pods; autoscalers ask for one beside the size.",
    )
    slots_ready: int = Field(
        default=0, ge=0, le=1024, description="Slots whose engine runs attested weights."
    )
    weight_version: str = Field(
        default="", max_length=128, description="Lowest version that ready slots carry."
    )
    expiration_time: str | None = Field(
        default=None,
        max_length=40,
        description="When the lease ends by itself, RFC 3339.",
        json_schema_extra={"format": "date-time"},
    )
    totals: Totals = Field(default=Totals(), description="What the lease has used.")
    explanation: Explanation | None = Field(
        default=None, description="Answer to the last question asked by annotation."
    )


class RolloutLease(ApiModel):
    """A loan of idle serving GPUs for rollouts, with one URL for turns."""

    metadata: ObjectMeta
    spec: LeaseSpec
    status: LeaseStatus = LeaseStatus()
