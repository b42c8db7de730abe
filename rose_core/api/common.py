"""What the three kinds share: the model base, metadata, references, conditions, CEL rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rose_core.adapters import TARGETS
from rose_core.api.names import DNS_LABEL, DNS_NAME

GROUP = "rose-gpu.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
STOP_ANNOTATION = f"{GROUP}/stop"
# A person asks for an explanation of a lease or pool; any new value is a new question.
EXPLAIN_ANNOTATION = f"{GROUP}/explain"
# The mode a pool had before somebody paused it.
RESUME_ANNOTATION = f"{GROUP}/resume-mode"

LabelValue = Annotated[str, Field(max_length=63)]
NamespaceName = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_NAME)]
LabelName = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
# A store and a run, or nothing where weights are frozen. A run is whatever a publisher may call its
# own (``rose_core.identity.run_name``).
NoLabelName = Annotated[str, Field(max_length=63, pattern=f"^$|{DNS_LABEL}")]
RunName = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_NAME)]
NoRunName = Annotated[str, Field(max_length=63, pattern=f"^$|{DNS_NAME}")]

Count = Annotated[int, Field(ge=0, le=2**53)]
"""Up to what a double, and so JSON's numbers, tells apart."""
AdapterTarget = Annotated[str, Field(pattern=f"^({'|'.join(TARGETS)})$", max_length=16)]

# Lists that server-side apply merges by item; the API server refuses duplicates.
SET_LIST: dict[str, Any] = {"x-kubernetes-list-type": "set"}
ATOMIC_LIST: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}


@dataclass(frozen=True)
class Rule:
    """One CEL rule; ``self`` is the object the rule stands on.

    Attributes:
        expression: true when the object is valid.
        message: what is wrong and what to do.
        path: field to blame, relative to ``self``.
    """

    expression: str
    message: str
    path: str = ""

    def as_schema(self) -> dict[str, str]:
        """The rule as ``x-kubernetes-validations`` wants it."""
        entry = {"rule": self.expression, "message": self.message}
        return entry | ({"fieldPath": self.path} if self.path else {})


class ApiModel(BaseModel):
    """Base of every API type: camelCase outside, unknown fields ignored, immutable."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore"
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        if cls.rules:
            schema["x-kubernetes-validations"] = [rule.as_schema() for rule in cls.rules]
        return schema

    def as_dict(self) -> dict[str, Any]:
        """JSON form for the API server: aliases, nothing that is absent."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class PoolReference(ApiModel):
    """A ServingPool in any namespace; the pool says which namespaces may borrow."""

    namespace: NamespaceName = Field(description="Namespace of the ServingPool.")
    name: ObjectName = Field(description="Name of the ServingPool.")

    @property
    def key(self) -> str:
        """``namespace/name``, as agents and metrics write it."""
        return f"{self.namespace}/{self.name}"


class ObjectMeta(ApiModel):
    """The part of Kubernetes' metadata that ROSE reads."""

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


class Condition(ApiModel):
    """One condition, as Kubernetes' API conventions ask for it."""

    type: str = Field(description="Which statement this is.", max_length=63, pattern=r"^[A-Za-z]+$")
    status: str = Field(
        description="True, False, or Unknown while nobody can tell.",
        max_length=7,
        json_schema_extra={"enum": ["True", "False", "Unknown"]},
    )
    reason: str = Field(
        description="Why, one word of a closed list (docs/api.md).",
        min_length=1,
        max_length=63,
        pattern=r"^[A-Za-z]+$",
    )
    message: str = Field(default="", description="Why, for people, with numbers.", max_length=1024)
    last_transition_time: str = Field(
        description="When the status last changed, RFC 3339.",
        max_length=40,
        json_schema_extra={"format": "date-time"},
    )
    observed_generation: Count = Field(
        default=0,
        description="Generation of the spec that this condition speaks of.",
    )


CONDITIONS: dict[str, Any] = {
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
}


class StatusBase(ApiModel):
    """What every status has."""

    observed_generation: Count = Field(
        default=0, description="Generation of the spec this status speaks of."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=16,
        description="What holds now; all types are present from the first visit.",
        json_schema_extra=CONDITIONS,
    )


class ReplicaMemory(ApiModel):
    """Device memory of a replica's tightest GPU, in mebibytes."""

    total: int = Field(ge=0, le=2**31, description="Of the GPU.")
    serving: int = Field(ge=0, le=2**31, description="The most that serving was seen to use.")
    headroom: int = Field(ge=0, le=2**31, description="Kept free now.")
    settled_headroom: int = Field(
        ge=0, le=2**31, description="Kept free once serving was watched for a day."
    )
    dormant: int = Field(
        default=0, ge=0, le=2**31, description="Held by dormant engines of other slots."
    )


class ReplicaVerdict(ApiModel):
    """Why one serving replica is, or is not, lent."""

    replica: str = Field(max_length=317, description="Namespace and name of the serving pod.")
    reason: str = Field(max_length=63, pattern=r"^[A-Za-z]+$", description="One closed word.")
    message: str = Field(default="", max_length=256, description="The numbers behind it.")
    memory: ReplicaMemory | None = Field(
        default=None, description="What its GPUs have and lend; absent = not known."
    )


class Explanation(ApiModel):
    """The answer to a question that was asked by annotation (``rose explain``)."""

    request: str = Field(
        max_length=63, description="Value of the annotation rose-gpu.dev/explain that it answers."
    )
    time: str = Field(
        max_length=40,
        description="When the answer was given, RFC 3339.",
        json_schema_extra={"format": "date-time"},
    )
    summary: str = Field(max_length=1024, description="What holds, with its numbers.")
    verdicts: tuple[ReplicaVerdict, ...] = Field(
        default=(),
        max_length=512,
        description="Every replica of the pool that was considered.",
        json_schema_extra=ATOMIC_LIST,
    )
    omitted: int = Field(
        default=0, ge=0, le=100_000, description="Replicas that did not fit into the list."
    )
