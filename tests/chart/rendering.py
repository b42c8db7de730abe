"""Renders the chart with the real helm, and finds objects in the result."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rose_dev.cluster import parts
from rose_dev.shell import run

CHART = Path(__file__).resolve().parents[2] / "helm" / "rose"
HELM = next((parts.find(part) for part in parts.NODE if part.name == "helm"), None)
Object = dict[str, Any]


class Rendered:
    """The objects of one `helm template`.

    Args:
        values: beside the chart's own.
        capabilities: further API versions that the cluster is said to have.
        kubernetes: its version.
        chart: its folder.
    """

    def __init__(
        self,
        values: Object,
        *capabilities: str,
        kubernetes: str = "1.36.3",
        chart: Path = CHART,
    ) -> None:
        command = [
            *(str(HELM), "template", "rose", str(chart), "--namespace=rose-system"),
            *(f"--kube-version={kubernetes}", "--values=-"),
            *(f"--api-versions={version}" for version in capabilities),
        ]
        done = run(command, seconds=60, stdin=json.dumps(values).encode())
        # libyaml's parser: PyYAML's own takes ten times as long, and tests have hundreds of these.
        found = yaml.load_all(done.stdout, Loader=yaml.CSafeLoader)
        self.objects: list[Object] = [item for item in found if item is not None]

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


LENDING: Object = {"lending": {"enabled": True}}
RELAY: Object = {"enabled": True, "upstream": "tls://weights.example:7446"}
MONITORING: Object = {
    name: {"enabled": True} for name in ("podMonitor", "prometheusRule", "dashboards")
}
SANDBOXES: Object = {
    "enabled": True,
    "store": "tls://weights.example:7446",
    "partsPath": "/var/lib/rose/cache/sandbox",
    "leases": [{"namespace": "research", "name": "grpo", "egress": ["*.example.org"]}],
}
REWARDS: Object = {"enabled": True, "functions": {"exact": {"rule": "exact"}}}
BATCHES: Object = {"leases": [{"namespace": "research", "name": "nightly"}]}
EVERYTHING: Object = {
    **LENDING,
    "relay": RELAY,
    "monitoring": {**MONITORING, "serviceMonitor": {"enabled": True}},
    "networkPolicy": {"enabled": True},
}


@cache
def _render(values: str, *capabilities: str) -> Rendered:
    return Rendered(json.loads(values), *capabilities)


def render(values: Object | None = None, *capabilities: str) -> Rendered:
    """The chart with these values; rendered once per session."""
    return _render(json.dumps(values or {}, sort_keys=True), *capabilities)
