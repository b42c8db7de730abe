"""Renders the chart with the real helm, and finds objects in the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from rose_dev import parts
from rose_dev.shell import run

CHART = Path(__file__).resolve().parents[2] / "helm" / "rose"
HELM = next((parts.find(part) for part in parts.NODE if part.name == "helm"), None)
Object = dict[str, Any]


class Rendered:
    """The objects of one `helm template`."""

    def __init__(self, values: Object) -> None:
        command = [
            *(str(HELM), "template", "rose", str(CHART), "--namespace=rose-system"),
            *("--kube-version=1.36.3", "--values=-"),
        ]
        done = run(command, seconds=60, stdin=json.dumps(values).encode())
        self.objects: list[Object] = [
            item for item in yaml.safe_load_all(done.stdout) if item is not None
        ]

    def all(self, kind: str) -> list[Object]:
        """Every object of a kind."""
        return [item for item in self.objects if item["kind"] == kind]

    def one(self, kind: str, name: str) -> Object:
        """The object of that kind and name."""
        found = [item for item in self.all(kind) if item["metadata"]["name"] == name]
        assert len(found) == 1, f"{kind} {name}: {len(found)} objects"
        return found[0]

    def container(self, kind: str, workload: str, name: str) -> Object:
        """A container of a workload's pods."""
        spec = self.one(kind, workload)["spec"]["template"]["spec"]
        found: list[Object] = [item for item in spec["containers"] if item["name"] == name]
        assert len(found) == 1, f"{workload}: {len(found)} containers {name}"
        return found[0]
