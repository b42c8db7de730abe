"""Helpers of the tests on the GPU node: pods that hold GPUs, and what can be asked of them."""

from __future__ import annotations

import json
from typing import Any

from rose_dev.cluster.node import Node

IMAGE = "localhost/rose:dev"
COUNT = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"


def sleeper(name: str, namespace: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401  # YAML
    """A pod with one container that does nothing; ``annotations``, ``container`` and ``spec``."""
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sleep", "100000"],
        "securityContext": {"readOnlyRootFilesystem": True},
        **fields.get("container", {}),
    }
    metadata = {"name": name, "namespace": namespace, "annotations": fields.get("annotations", {})}
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container], **fields.get("spec", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def apply(node: Node, *objects: dict[str, Any]) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    node.kubectl("apply", "--filename=-", stdin=json.dumps(listed))


def ready(node: Node, *pods: dict[str, Any]) -> None:
    """Make pods and wait until they run."""
    apply(node, *pods)
    for pod in pods:
        where = (f"pod/{pod['metadata']['name']}", f"--namespace={pod['metadata']['namespace']}")
        node.kubectl("wait", "--for=condition=Ready", *where, "--timeout=300s", seconds=310)


def inside(node: Node, pod: dict[str, Any], *command: str) -> str:
    """What a command in the pod prints."""
    where = (pod["metadata"]["name"], f"--namespace={pod['metadata']['namespace']}")
    return node.kubectl("exec", *where, "--", *command)


def device_files(node: Node, pod: dict[str, Any]) -> set[str]:
    """NVIDIA's device files in the pod."""
    return {name for name in inside(node, pod, "ls", "/dev").split() if name.startswith("nvidia")}


def allocatable(node: Node) -> str:
    path = "{.status.allocatable.nvidia\\.com/gpu}"
    return node.kubectl("get", "node", "rose-dev", f"--output=jsonpath={path}").strip()
