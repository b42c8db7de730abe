"""The kinds of ``rose-gpu.dev/v1alpha1`` as typed models; ``crds/*.yaml`` comes from them.

- ``servingpool``: what a serving owner lends; ``rolloutlease``: what an RL team asks;
  ``rolloutslot``: one borrowed share, written by the operator alone; ``tenantpolicy``: the
  platform's limits, for the whole cluster.
- ``reasons``: conditions and their closed reasons, the same words in Events and metrics.
- ``conditions``: how a condition changes (only when its status does).
- ``arguments``: engine arguments an RL team may set.
- ``schema``, ``crd``: models -> CustomResourceDefinitions.
"""

from rose_core.api.common import (
    EXPLAIN_ANNOTATION,
    GROUP,
    RESUME_ANNOTATION,
    STOP_ANNOTATION,
    VERSION,
    ApiModel,
    Condition,
    Explanation,
    ObjectMeta,
    PoolReference,
)
from rose_core.api.poolstatus import PoolStatus
from rose_core.api.reasons import ConditionType, Reason
from rose_core.api.rolloutlease import LeaseSpec, LeaseStatus, RolloutLease
from rose_core.api.rolloutslot import Desired, Member, RolloutSlot, SlotSpec, SlotStatus
from rose_core.api.servingpool import PoolMode, PoolSpec, ServingPool
from rose_core.api.tenantpolicy import TenantPolicy

__all__ = [
    "EXPLAIN_ANNOTATION",
    "GROUP",
    "RESUME_ANNOTATION",
    "STOP_ANNOTATION",
    "VERSION",
    "ApiModel",
    "Condition",
    "ConditionType",
    "Desired",
    "Explanation",
    "LeaseSpec",
    "LeaseStatus",
    "Member",
    "ObjectMeta",
    "PoolMode",
    "PoolReference",
    "PoolSpec",
    "PoolStatus",
    "Reason",
    "RolloutLease",
    "RolloutSlot",
    "ServingPool",
    "SlotSpec",
    "SlotStatus",
    "TenantPolicy",
]
