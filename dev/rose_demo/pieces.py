"""Names in the demo's cluster, and the pieces that its manifests are made of. Pure."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose_core.wire.enrolment import lease_digest

SYSTEM, SERVING, RESEARCH = "rose-system", "serving", "research"
POOL = "chat"
LEASE = RUN = "grpo"
DEDICATED = "dedicated-0"
TRAINER = "trainer"
ROUTERS = "rose-routers"
ROUTER = f"router-{RESEARCH}-{LEASE}"
SANDBOXES = f"rose-sandboxes-{RESEARCH}-{LEASE}-{lease_digest(RESEARCH, LEASE)}"
STORE_PORT, SERVING_PORT = 7446, 30000
TRACES = "rose-demo-traces"
PACKAGES = "/opt/rose/packages"

Object = dict[str, Any]


@dataclass(frozen=True)
class Build:
    """An engine as this machine has it.

    Attributes:
        engine_class: that a lease asks for.
        title: for people, with the version.
        python: of its virtual environment.
        base: the Python installation that environment was made from.
    """

    engine_class: str
    title: str
    python: Path
    base: Path

    def host_paths(self) -> list[dict[str, str]]:
        """What a container needs of this machine to run the engine, besides the models.

        The system's libraries, because the image holds only those that ROSE needs; lscpu, because
        engines ask it for cores and memory.
        """
        libraries = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}"
        folders = [str(self.python.parents[1]), str(self.base), libraries]
        found = [{"path": path, "type": "Directory"} for path in folders]
        return [*found, {"path": "/usr/bin/lscpu", "type": "File"}]


@dataclass(frozen=True)
class Engines:
    """Where the node finds engines and models.

    Attributes:
        serving_build, rollout_build: what serves, and what runs beside it and on the dedicated one.
        models: folder of model folders.
        serving, rollout: names of two of them.
    """

    serving_build: Build
    rollout_build: Build
    models: Path
    serving: str
    rollout: str


def deployment(name: str, namespace: str, pod: Object, replicas: int = 1) -> Object:
    """A Deployment of these pods, found by ``app=NAME``."""
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def variables(values: Mapping[str, str]) -> list[dict[str, str]]:
    """A container's ``env``."""
    return [{"name": name, "value": value} for name, value in values.items()]


def mounts(paths: list[dict[str, str]]) -> list[Object]:
    """Mounts of this machine's paths at their own place, to be read."""
    return [
        {"name": f"path-{i}", "mountPath": path["path"], "readOnly": True}
        for i, path in enumerate(paths)
    ]


def volumes(paths: list[dict[str, str]]) -> list[Object]:
    """The volumes that ``mounts`` names."""
    return [{"name": f"path-{i}", "hostPath": dict(path)} for i, path in enumerate(paths)]


CREDENTIALS = "rose-store-credentials"
"""Secret of the weight store: its file of tenants, and the serving cluster's own credential."""


def credentials_volume(*keys: str) -> Object:
    """These keys of ``CREDENTIALS`` as a volume."""
    items = [{"key": key, "path": key} for key in keys]
    return {"name": "credentials", "secret": {"secretName": CREDENTIALS, "items": items}}
