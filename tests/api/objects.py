"""Valid objects that tests change in one place."""

from copy import deepcopy
from typing import Any

POOL: dict[str, Any] = {
    "apiVersion": "rose-gpu.dev/v1alpha1",
    "kind": "ServingPool",
    "metadata": {"name": "chat", "namespace": "default"},
    "spec": {"selector": {"matchLabels": {"app": "chat"}}},
}
LEASE: dict[str, Any] = {
    "apiVersion": "rose-gpu.dev/v1alpha1",
    "kind": "RolloutLease",
    "metadata": {"name": "grpo", "namespace": "default"},
    "spec": {
        "poolRef": {"namespace": "default", "name": "chat"},
        "model": {"name": "tiny"},
        "weights": {"storeName": "main", "run": "grpo"},
    },
}
SLOT: dict[str, Any] = {
    "apiVersion": "rose-gpu.dev/v1alpha1",
    "kind": "RolloutSlot",
    "metadata": {"name": "default-grpo-1", "namespace": "default"},
    "spec": {
        "leaseRef": {"namespace": "default", "name": "grpo", "uid": "u-1"},
        "poolRef": {"namespace": "default", "name": "chat"},
        "members": [{"node": "n0", "podName": "p0", "podUid": "p-1", "gpuUUIDs": ["GPU-0"]}],
        "engine": {
            "engineClass": "sglang",
            "model": "tiny",
            "contextTokens": 4096,
            "kvTokens": 16384,
            "maxRunning": 8,
        },
        "weights": {"storeName": "main", "run": "grpo", "maxStalenessVersions": 1},
    },
}
TENANT = {
    "apiVersion": "rose-gpu.dev/v1alpha1",
    "kind": "TenantPolicy",
    "metadata": {"name": "research"},
    "spec": {"namespaces": {"names": ["research"]}},
}
KINDS = {"ServingPool": POOL, "RolloutLease": LEASE, "RolloutSlot": SLOT, "TenantPolicy": TENANT}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The object with dotted paths set; a value of ``...`` removes the field."""
    made = deepcopy(base)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node = made
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is ...:
            node.pop(last, None)
        else:
            node[last] = deepcopy(value)
    return made
