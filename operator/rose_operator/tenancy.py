"""What the platform's policies allow, as the API server's objects say it now."""

from __future__ import annotations

from collections.abc import Mapping

from rose_core.api import TenantPolicy
from rose_core.lending.tenancy import Tenancy
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import ObjectCache
from rose_operator.plan.typed_objects import TypedReader


def tenancy_of(
    policies: TypedReader[TenantPolicy] | None, stores: Mapping[ObjectKind, ObjectCache]
) -> Tenancy | None:
    """What the policies allow the namespaces that are known.

    Args:
        policies: None where the platform has switched them off.
        stores: without those of tenancy where it is off.
    """
    if policies is None:
        return None
    labels = {
        raw["metadata"]["name"]: raw["metadata"].get("labels") or {}
        for raw in stores[ObjectKind.NAMESPACE].all()
    }
    return Tenancy(policies.read().good.values(), labels)
