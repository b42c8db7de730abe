"""A fleet: pools, nodes, serving replicas, leases.

At full scale 1,250 nodes with 8 GPUs each: 750 of them carry two replicas of four GPUs, 500 carry
one of eight. Replicas are dealt round to the pools, so a pool's replicas stand on many nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

NAMESPACE = "serving"
SYSTEM = "rose-system"
_GPUS = 8


class Fleet(msgspec.Struct, frozen=True):
    """Its size; travels to the agents' process as JSON."""

    nodes: int = 1250
    replicas: int = 2000
    pools: int = 25
    leases: int = 200
    slots_per_lease: int = 4

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * _GPUS

    def nodes_by_name(self) -> dict[str, list[tuple[str, str, int]]]:
        """Node -> (pool, pod, GPUs) of its replicas."""
        found: dict[str, list[tuple[str, str, int]]] = {}
        number = 0
        for node in range(self.nodes):
            count = 2 if node < self.replicas - self.nodes else 1
            found[f"node-{node}"] = [
                (self.pool((number + one) % self.pools), f"pod-{number + one}", _GPUS // count)
                for one in range(count)
            ]
            number += count
        return found

    def pool(self, number: int) -> str:
        """A pool's key."""
        return f"{NAMESPACE}/chat-{number}"

    def pool_manifests(self) -> Iterator[dict[str, Any]]:
        """Every pool, lending half of its replicas."""
        for number in range(self.pools):
            yield _manifest(
                "ServingPool",
                f"chat-{number}",
                {
                    "mode": "Lend",
                    "selector": {"matchLabels": {"app": f"chat-{number}"}},
                    "slo": {"ttftMilliseconds": 500},
                    "lending": {"maxReplicasPercent": 50, "minUnlentReplicas": 1},
                },
            )

    def lease_manifests(self) -> Iterator[dict[str, Any]]:
        """Every lease of the first hour."""
        for number in range(self.leases):
            yield self.lease(f"grpo-{number}", number % self.pools, self.slots_per_lease)

    def lease(self, name: str, pool: int, slots: int) -> dict[str, Any]:
        """One lease."""
        return _manifest(
            "RolloutLease",
            name,
            {
                "poolRef": {"namespace": NAMESPACE, "name": f"chat-{pool}"},
                "model": {"name": "tiny"},
                "slots": {"min": 1, "max": slots},
                "weights": {"storeName": "main", "run": name},
            },
        )

    def poison(self, number: int) -> dict[str, Any]:
        """One lease that cannot be served, in one of five ways."""
        manifest = self.lease(f"poison-{number}", number % self.pools, 1)
        wrong: tuple[dict[str, Any], ...] = (
            {"poolRef": {"namespace": NAMESPACE, "name": "nobody"}},
            {"engineClass": "other"},
            {"engineArguments": {"model-path": "/etc"}},
            {"weights": {"storeName": "elsewhere", "run": "r"}},
            {"slots": {"min": 2, "max": 1}},
        )
        manifest["spec"] |= wrong[number % len(wrong)]
        return manifest


@dataclass(frozen=True)
class Scale:
    """How long each phase takes."""

    fleet: Fleet
    rest_seconds: float
    probes: int
    churn_seconds: float
    poison: int


FULL = Scale(Fleet(), rest_seconds=60.0, probes=120, churn_seconds=90.0, poison=1000)
QUICK = Scale(
    Fleet(nodes=60, replicas=100, pools=5, leases=20, slots_per_lease=2),
    rest_seconds=10.0,
    probes=12,
    churn_seconds=12.0,
    poison=50,
)


def _manifest(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "rose-gpu.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }
