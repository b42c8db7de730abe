"""The kinds of ``rose-gpu.dev/v1alpha1`` as typed models; ``crds/*.yaml`` comes from them.

- ``servingpool``: what a serving owner lends; ``rolloutlease``: what an RL team asks;
  ``rolloutslot``: one borrowed share, written by the operator alone; ``tenantpolicy``: the
  platform's limits, for the whole cluster.
- ``reasons``: conditions and their closed reasons, the same words in Events and metrics.
- ``conditions``: how a condition changes (only when its status does).
- ``arguments``: engine arguments an RL team may set.
- ``names``: patterns of names and modes, without a model.
- ``schema``, ``crd``: models -> CustomResourceDefinitions.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from rose_core.api.names import PoolMode
    from rose_core.api.poolstatus import PoolStatus
    from rose_core.api.reasons import ConditionType, Reason
    from rose_core.api.rolloutlease import LeaseSpec, LeaseStatus, RolloutLease
    from rose_core.api.rolloutslot import Desired, Member, RolloutSlot, SlotSpec, SlotStatus
    from rose_core.api.servingpool import PoolSpec, ServingPool
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

# Whoever asks for a reason or a pattern builds no models: they take a guard and an engine host a
# fifth of the CPU time of their start. First what is there without them.
_MODULES = (
    "reasons",
    "names",
    "common",
    "poolstatus",
    "rolloutlease",
    "rolloutslot",
    "servingpool",
    "tenantpolicy",
)

if not TYPE_CHECKING:  # else any name would be one of ours

    def __getattr__(name: str) -> object:
        """A name of ``__all__``, from the module that has it."""
        if name in __all__:
            for module in _MODULES:
                found = vars(import_module(f"{__name__}.{module}"))
                if name in found:
                    globals()[name] = found[name]
                    return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
