"""Serving pods on the GPU node: which GPUs they were given, and memory that they hold there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose_dev.cluster.node import Node
from rose_dev.gpu.state import State

GIB = 1 << 30


@dataclass(frozen=True)
class ServingPod:
    """A pod as the node knows it.

    Attributes:
        gpus: indices of those it was given, as its device files say.
        pid: of its engine, in the node's pid namespace.
    """

    name: str
    gpus: tuple[int, ...]
    pid: int


def serving_pods(node: Node, namespace: str, selector: str = "") -> list[ServingPod]:
    """The namespace's pods whose containers run."""
    words = ["get", "pods", f"--namespace={namespace}", "--output=json"]
    words += [f"--selector={selector}"] if selector else []
    listed = json.loads(node.kubectl(*words))["items"]
    return [_pod(node, namespace, item["metadata"]) for item in listed if _runs(item)]


def _runs(item: dict[str, Any]) -> bool:
    containers = item["status"].get("containerStatuses", [])
    alive = "deletionTimestamp" not in item["metadata"]
    return alive and bool(containers) and all("running" in one["state"] for one in containers)


def _pod(node: Node, namespace: str, metadata: dict[str, str]) -> ServingPod:
    inside = node.kubectl("exec", metadata["name"], f"--namespace={namespace}", "--", "ls", "/dev")
    numbers = (name.removeprefix("nvidia") for name in inside.split() if name.startswith("nvidia"))
    gpus = tuple(sorted(int(number) for number in numbers if number.isdigit()))
    return ServingPod(metadata["name"], gpus, _engine(node, metadata["uid"]))


def _engine(node: Node, uid: str) -> int:
    """The pod's process that serves; pause is the other."""
    for entry in sorted((node.root() / "proc").iterdir()):
        serves = "rose_engines.fake" in _text(entry / "cmdline")
        if entry.name.isdigit() and serves and uid in _text(entry / "cgroup"):
            return int(entry.name)
    message = f"pod {uid} has no engine"
    raise AssertionError(message)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def hold(state: State, pod: ServingPod, gibibytes: int) -> None:
    """The pod's engine holds this much on each of its GPUs, as a static pool does."""
    for index in pod.gpus:
        state.gpus[index].start(pod.pid, gibibytes * GIB)
