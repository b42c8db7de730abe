"""Kinds -> CustomResourceDefinitions: names, printer columns, selectable fields, schema.

Printer columns are chosen so that ``kubectl get`` of each kind fits 80 characters and tells who
has what, and why not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rose_core.api.common import GROUP, VERSION, ApiModel
from rose_core.api.poolstatus import PoolStatus
from rose_core.api.rolloutlease import LeaseSpec, LeaseStatus, RolloutLease
from rose_core.api.rolloutslot import RolloutSlot, SlotSpec, SlotStatus
from rose_core.api.schema import structural
from rose_core.api.servingpool import PoolSpec, ServingPool
from rose_core.api.tenantpolicy import PolicySpec, TenantPolicy


@dataclass(frozen=True)
class Column:
    """One printer column."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The column as the API server wants it."""
        column: dict[str, Any] = {"name": self.name, "type": self.type, "jsonPath": self.path}
        return column | ({"priority": 1} if self.wide else {})


@dataclass(frozen=True)
class Kind:
    """Everything a CustomResourceDefinition says.

    Attributes:
        status: None for a kind that nobody reports on.
        namespaced: else one object is for the whole cluster.
        scale: what ``kubectl scale`` and autoscalers set, what they read, and the selector that
            they ask for; of a kind with one integer that says how much is wanted.
    """

    model: type[ApiModel]
    spec: type[ApiModel]
    status: type[ApiModel] | None
    plural: str
    short: str
    columns: tuple[Column, ...]
    selectable: tuple[str, ...]
    scale: tuple[str, str, str] | None = None
    namespaced: bool = True

    @property
    def name(self) -> str:
        """The kind's name."""
        return self.model.__name__

    @property
    def full_name(self) -> str:
        """Name of the CustomResourceDefinition."""
        return f"{self.plural}.{GROUP}"


def _condition(kind: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


_READY = Column("Ready", _condition("Ready", "status"))
_REASON = Column("Reason", _condition("Ready", "reason"))
_AGE = Column("Age", ".metadata.creationTimestamp", "date")

KINDS: tuple[Kind, ...] = (
    Kind(
        model=ServingPool,
        spec=PoolSpec,
        status=PoolStatus,
        plural="servingpools",
        short="servpool",
        columns=(
            Column("Mode", ".spec.mode"),
            Column("Lent", ".status.lentReplicas", "integer"),
            Column("Protected", _condition("ServingProtected", "status")),
            Column("Certified", _condition("LendingCertified", "status")),
            _READY,
            _REASON,
            Column("Pods", ".status.replicas", "integer", wide=True),
            Column("Qualified", ".status.qualifiedReplicas", "integer", wide=True),
            Column("Fresh", _condition("TelemetryFresh", "status"), wide=True),
            Column("Fit", _condition("DevicesFit", "status"), wide=True),
            replace(_AGE, wide=True),
        ),
        selectable=(".spec.mode", ".spec.engine.kind"),
    ),
    Kind(
        model=RolloutLease,
        spec=LeaseSpec,
        status=LeaseStatus,
        plural="rolloutleases",
        short="rlease",
        columns=(
            Column("Wanted", ".status.slotsWanted", "integer"),
            Column("Granted", ".status.slotsGranted", "integer"),
            Column("Running", ".status.slotsReady", "integer"),
            _READY,
            _REASON,
            _AGE,
            Column("Version", ".status.weightVersion", wide=True),
            Column("Pool", ".spec.poolRef.name", wide=True),
            Column("Tokens", ".status.totals.harvestedTokens", "integer", wide=True),
            Column("URL", ".status.routerURL", wide=True),
        ),
        selectable=(".spec.poolRef.namespace", ".spec.poolRef.name", ".spec.engineClass"),
        scale=(".spec.slots.max", ".status.slotsGranted", ".status.selector"),
    ),
    Kind(
        model=RolloutSlot,
        spec=SlotSpec,
        status=SlotStatus,
        plural="rolloutslots",
        short="rslot",
        columns=(
            Column("Lease", ".spec.leaseRef.name"),
            Column("State", ".status.state"),
            Column("Version", ".status.weightVersion"),
            _READY,
            _AGE,
            Column("Reason", _condition("Ready", "reason"), wide=True),
            Column("Pod", ".spec.members[0].podName", wide=True),
            Column("Node", ".spec.members[0].node", wide=True),
        ),
        selectable=(".spec.leaseRef.namespace", ".spec.leaseRef.name", ".spec.desired"),
    ),
    Kind(
        model=TenantPolicy,
        spec=PolicySpec,
        status=None,
        plural="tenantpolicies",
        short="tpolicy",
        columns=(
            Column("Leases", ".spec.maxLeases", "integer"),
            Column("Slots", ".spec.maxSlots", "integer"),
            Column("Priority", ".spec.maxPriority", "integer"),
            Column("Preempts", ".spec.mayPreempt", "boolean"),
            _AGE,
            Column("Namespaces", ".spec.namespaces.names", wide=True),
        ),
        selectable=(),
        namespaced=False,
    ),
)


def definition(kind: Kind) -> dict[str, Any]:
    """The CustomResourceDefinition of one kind."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": kind.full_name,
            "labels": {"app.kubernetes.io/part-of": "rose"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short],
                "categories": ["rose"],
            },
            "versions": [_version(kind)],
        },
    }


def _version(kind: Kind) -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {**({} if kind.status is None else {"status": {}}), **_scale(kind)},
        "additionalPrinterColumns": [column.as_dict() for column in kind.columns],
        "selectableFields": [{"jsonPath": path} for path in kind.selectable],
        "schema": {"openAPIV3Schema": _root(kind)},
    }


def _scale(kind: Kind) -> dict[str, Any]:
    if kind.scale is None:
        return {}
    wanted, found, selector = kind.scale
    paths = {"specReplicasPath": wanted, "statusReplicasPath": found, "labelSelectorPath": selector}
    return {"scale": paths}


def _root(kind: Kind) -> dict[str, Any]:
    first_line = (kind.model.__doc__ or "").strip().splitlines()[0]
    return {
        "type": "object",
        "description": first_line,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(kind.spec),
            **({} if kind.status is None else {"status": structural(kind.status)}),
        },
    }
