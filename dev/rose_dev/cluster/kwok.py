"""Nodes without machines (KWOK): as many as wanted, whose pods run and end by word alone.

KWOK plays the kubelet of every node that carries its annotation, and of no other, so that such
nodes may stand beside a real one. They are tainted; pods that are meant for them name their node.

    with Kwok(plane):
        plane.kubectl("apply", "--filename=-", stdin=nodes(["n1", "n2"]))
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rose_dev.cluster.build import build
from rose_dev.cluster.control_plane import Child, ControlPlane
from rose_dev.cluster.parts import SCALE

ANNOTATION = "kwok.x-k8s.io/node"
ZONES = 4


_NOW = "{{ Now | Quote }}"
_NODE_READY = f"""
conditions:
- {{type: Ready, status: "True", reason: KubeletReady, message: kwok, lastHeartbeatTime: {_NOW},
   lastTransitionTime: {_NOW}}}
"""
_POD_READY = f"""
phase: Running
startTime: {_NOW}
conditions:
- {{type: Initialized, status: "True", lastTransitionTime: {_NOW}}}
- {{type: ContainersReady, status: "True", lastTransitionTime: {_NOW}}}
- {{type: Ready, status: "True", lastTransitionTime: {_NOW}}}
containerStatuses:
{{{{ range .spec.containers }}}}
- {{name: {{{{ .name | Quote }}}}, image: {{{{ .image | Quote }}}}, ready: true, restartCount: 0,
   state: {{running: {{startedAt: {_NOW}}}}}}}
{{{{ end }}}}
"""


def stages(status_seconds: int = 0) -> str:
    """What becomes of objects: nodes and pods are ready at once, deleted pods gone at once.

    Args:
        status_seconds: how often a node's status is written though nothing changed, as kubelets do;
            0 for never.
    """
    not_ready = {
        "key": '.status.conditions.[] | select( .type == "Ready" ) | .status',
        "operator": "NotIn",
        "values": ["True"],
    }
    leaving = ".metadata.deletionTimestamp"
    staying = {"key": leaving, "operator": "DoesNotExist"}
    ready = not_ready | {"operator": "In"}
    found = [
        _stage("node-ready", "Node", [not_ready], {"statusTemplate": _NODE_READY}),
        _stage("pod-ready", "Pod", [staying, not_ready], {"statusTemplate": _POD_READY}),
        _stage("pod-gone", "Pod", [{"key": leaving, "operator": "Exists"}], {"delete": True}),
    ]
    if status_seconds:
        again = _stage("node-status", "Node", [ready], {"statusTemplate": _NODE_READY})
        again["spec"]["delay"] = {"durationMilliseconds": status_seconds * 1000}
        found.append(again)
    return "---\n".join(json.dumps(stage) + "\n" for stage in found)


def _stage(
    name: str, kind: str, matches: list[dict[str, Any]], following: dict[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": matches},
            "next": following,
        },
    }


def command(binary: Path, kubeconfig: Path, rules: Path, lease_seconds: int = 40) -> list[str]:
    """KWOK's command line for the annotated nodes of a cluster; ``rules`` holds the stages.

    ``lease_seconds`` is how long a node's lease lasts; it is renewed every quarter of that.
    """
    return [
        str(binary),
        f"--config={rules}",
        f"--kubeconfig={kubeconfig}",
        f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
        f"--node-lease-duration-seconds={lease_seconds}",
    ]


def nodes(names: Iterable[str], *, gpus: int = 8) -> str:
    """Nodes that KWOK keeps, as one List."""
    items = node_manifests(names, gpus=gpus)
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def node_manifests(names: Iterable[str], *, gpus: int = 8) -> list[dict[str, Any]]:
    """Manifests of nodes that KWOK keeps, spread over four zones."""
    return [_node(name, f"zone-{number % ZONES}", gpus) for number, name in enumerate(names)]


def _node(name: str, zone: str, gpus: int) -> dict[str, Any]:
    room = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {ANNOTATION: "fake"},
            "labels": {
                "kubernetes.io/hostname": name,
                "topology.kubernetes.io/zone": zone,
                "type": "kwok",
            },
        },
        "spec": {"taints": [{"key": ANNOTATION, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    }


class Kwok:
    """KWOK beside a control plane, a context manager; arguments as of ``stages`` and ``command``.

    Raises:
        BuildFailed: its binary is missing and cannot be built.
    """

    def __init__(
        self, plane: ControlPlane, *, status_seconds: int = 0, lease_seconds: int = 40
    ) -> None:
        self._plane = plane
        self._status_seconds, self._lease_seconds = status_seconds, lease_seconds
        self._child: Child | None = None

    def __enter__(self) -> Self:
        """Start it."""
        binary = build(SCALE)["kwok"]
        rules = self._plane.folder / "kwok.yaml"
        rules.write_text(stages(self._status_seconds))
        argv = command(binary, self._plane.kubeconfig, rules, self._lease_seconds)
        self._child = Child(argv, self._plane.folder / "kwok.log")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it; its nodes lapse."""
        if self._child is not None:
            self._child.kill()
