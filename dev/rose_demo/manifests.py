"""The objects a user of the demo's cluster would apply, as plain dictionaries. Pure.

ROSE itself comes from the chart; here are the serving replicas, the weight store, the dedicated
rollout engine, the pool and the lease.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rose_core.wire.sync import EngineSpec
from rose_demo.options import Options
from rose_dev.image import IMAGE
from rose_engines.sglang.arguments import Launch, command, environment

SYSTEM, SERVING, RESEARCH = "rose-system", "serving", "research"
POOL = "chat"
LEASE = RUN = "grpo"
DEDICATED = "dedicated-0"
ROUTER = f"router-{RESEARCH}-{LEASE}"
STORE_PORT, SERVING_PORT = 7446, 30000
ENGINE_CLASS = "sglang-cpu"
_PACKAGES = "/opt/rose/packages"
_SHIM = f"{_PACKAGES}/rose_engines/sglang/paths/cpu"

Object = dict[str, Any]


@dataclass(frozen=True)
class Engines:
    """Where the node finds the engine's environment and the models.

    Attributes:
        python: of the engine's virtual environment.
        base: the Python installation that environment was made from.
        models: folder of model folders.
        serving, rollout: names of two of them.
    """

    python: Path
    base: Path
    models: Path
    serving: str
    rollout: str

    def host_paths(self) -> list[dict[str, str]]:
        """What a container needs of this machine to run the engine, besides the models.

        The system's libraries, because the image holds only those that ROSE needs; lscpu, because
        SGLang asks it for the memory's size.
        """
        libraries = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}"
        folders = [str(self.python.parents[1]), str(self.base), libraries]
        found = [{"path": path, "type": "Directory"} for path in folders]
        return [*found, {"path": "/usr/bin/lscpu", "type": "File"}]


def namespaces() -> list[Object]:
    """The serving owner's and the RL team's namespace."""
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        for name in (SERVING, RESEARCH)
    ]


def chart_values(options: Options, engines: Engines) -> Object:
    """Values of ``helm install``: lending on, crossover windows on, engines from this machine."""
    repository, _, tag = IMAGE.rpartition(":")
    return {
        "image": {
            "repository": repository,
            "tag": tag,
            "pullPolicy": "Never",
            "perComponent": False,
        },
        # What is measured is serving; a second operator would only stand by.
        "operator": {"replicas": 1},
        "stores": [{"name": "main", "address": f"rose-weights.{SYSTEM}.svc:{STORE_PORT}"}],
        "lending": {"enabled": True},
        "agent": {
            "devices": "static",
            "staticGpus": [
                {"uuid": f"GPU-stand-in-{i}", "memoryBytes": 16 * 10**9, "usedBytes": 2 * 10**9}
                for i in range(2)
            ],
            "extraArgs": [
                f"--crossover-seconds={options.window_seconds:g}",
                "--settle-seconds=5",
            ],
        },
        "engineHost": {
            "engineClasses": [ENGINE_CLASS],
            "enginePython": str(engines.python),
            "modelsPath": str(engines.models),
            "hostPaths": engines.host_paths(),
            # The engine lies in a cache that perhaps only its owner may read.
            "engines": {"firstUser": 0},
        },
    }


def serving(engines: Engines) -> Object:
    """Two replicas of a real SGLang; ROSE changes nothing in them."""
    spec = EngineSpec(ENGINE_CLASS, engines.serving, context_tokens=4096, max_running=16)
    launch = Launch(
        python=engines.python,
        model=engines.models / engines.serving,
        port=SERVING_PORT,
        host="0.0.0.0",  # noqa: S104  # in its own pod
    )
    variables = environment(launch, {}) | {
        "PYTHONPATH": f"{_SHIM}:{_PACKAGES}",
        "HOME": "/tmp",  # noqa: S108  # the pod's own
    }
    paths = [*engines.host_paths(), {"path": str(engines.models), "type": "Directory"}]
    container = {
        "name": "engine",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": command(spec, launch),
        "env": _variables(variables),
        "ports": [{"containerPort": SERVING_PORT}],
        "resources": {"requests": {"cpu": "200m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": SERVING_PORT},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 5,
        },
        "volumeMounts": _mounts(paths),
    }
    pod = {
        "terminationGracePeriodSeconds": 5,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": _volumes(paths),
    }
    return _deployment("chat", SERVING, pod, replicas=2)


def store() -> list[Object]:
    """The weight store and its Service."""
    container = {
        "name": "store",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["rose", "weights", "serve", "--root=/store", "--token-file=/token/token"],
        "readinessProbe": {
            "httpGet": {"path": "/healthz", "port": 9105},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
        },
        "env": _variables({"NUMBA_CACHE_DIR": "/store/.numba"}),
        "volumeMounts": [
            {"name": "store", "mountPath": "/store"},
            {"name": "token", "mountPath": "/token", "readOnly": True},
        ],
    }
    pod = {
        "terminationGracePeriodSeconds": 2,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "store", "emptyDir": {}}, _token()],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "rose-weights", "namespace": SYSTEM},
        "spec": {"selector": {"app": "rose-weights"}, "ports": [{"port": STORE_PORT}]},
    }
    return [_deployment("rose-weights", SYSTEM, pod), service]


def dedicated(options: Options, engines: Engines) -> list[Object]:
    """A rollout engine that is never taken back: engine host and weight-sync in one pod."""
    settings = {
        "name": DEDICATED,
        "engineClass": ENGINE_CLASS,
        "model": engines.rollout,
        "run": RUN,
        "weightEndpoint": f"rose-weights.{SYSTEM}.svc:{STORE_PORT}",
        "contextTokens": 1024,
        "kvTokens": 16384,
        "maxRunning": 8,
        "maxStaleness": options.max_staleness,
    }
    paths = [*engines.host_paths(), {"path": str(engines.models), "type": "Directory"}]
    shared = [
        {"name": "run", "mountPath": "/run/rose"},
        {"name": "scratch", "mountPath": "/tmp"},  # noqa: S108  # the pod's own
        {"name": "token", "mountPath": "/token", "readOnly": True},
    ]
    host = {
        "name": "engine-host",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["rose", "engine-host"],
        "args": [
            f"--models={engines.models}",
            f"--engine-python={engines.python}",
            "--data-host=$(POD_IP)",
            "--cgroup=signals",
            "--dedicated=/etc/dedicated/engine.yaml",
            f"--router=tls://{ROUTER}.{SYSTEM}.svc:7444",
            f"--lease={RESEARCH}/{LEASE}",
            "--token-file=/token/token",
        ],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "ROSE_TLS_CA", "value": "/tls/ca.crt"},
        ],
        "volumeMounts": [
            *shared,
            *_mounts(paths),
            {"name": "config", "mountPath": "/etc/dedicated", "readOnly": True},
            {"name": "tls", "mountPath": "/tls", "readOnly": True},
        ],
    }
    sync = {
        "name": "weight-sync",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["rose", "weight-sync"],
        "args": ["--token-file=/token/token"],
        "env": _variables({"NUMBA_CACHE_DIR": "/tmp/numba"}),  # noqa: S108  # the pod's own
        "volumeMounts": [
            *shared,
            {"name": f"path-{len(paths) - 1}", "mountPath": str(engines.models), "readOnly": True},
        ],
    }
    pod = {
        "terminationGracePeriodSeconds": 10,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [host, sync],
        "volumes": [
            *_volumes(paths),
            {"name": "run", "emptyDir": {"medium": "Memory"}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "config", "configMap": {"name": DEDICATED}},
            {
                "name": "tls",
                "secret": {
                    "secretName": "rose-tls",
                    "items": [{"key": "ca.crt", "path": "ca.crt"}],
                },
            },
            _token(),
        ],
    }
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": DEDICATED, "namespace": SYSTEM},
        "data": {"engine.yaml": _yaml(settings)},
    }
    return [config, _deployment(DEDICATED, SYSTEM, pod)]


def pool(options: Options) -> Object:
    """The serving owner's word: lend at most one replica, keep the SLO."""
    return {
        "apiVersion": "rose-gpu.dev/v1alpha1",
        "kind": "ServingPool",
        "metadata": {"name": POOL, "namespace": SERVING},
        "spec": {
            "mode": "Lend",
            "selector": {"matchLabels": {"app": "chat"}},
            "engine": {"kind": "SGLang", "port": SERVING_PORT},
            "slo": {
                "ttftMilliseconds": options.ttft_slo_ms,
                "tpotMilliseconds": options.tpot_slo_ms,
                "percentile": options.percentile,
            },
            "lending": {
                "maxReplicasPercent": 50,
                "minUnlentReplicas": 1,
                "borrowerNamespaces": [RESEARCH],
            },
        },
    }


def lease(options: Options, engines: Engines) -> Object:
    """The RL team's word: one slot of the pool, this model, these weights."""
    return {
        "apiVersion": "rose-gpu.dev/v1alpha1",
        "kind": "RolloutLease",
        "metadata": {"name": LEASE, "namespace": RESEARCH},
        "spec": {
            "poolRef": {"namespace": SERVING, "name": POOL},
            "model": {"name": engines.rollout},
            "engineClass": ENGINE_CLASS,
            "slots": {"min": 1, "max": 1},
            "weights": {
                "storeName": "main",
                "run": RUN,
                "maxStalenessVersions": options.max_staleness,
            },
            "maxTrajectoriesPerSlot": 8,
            "contextTokens": 1024,
            "kvTokens": 16384,
            "dedicatedEngines": [DEDICATED],
        },
    }


def _deployment(name: str, namespace: str, pod: Object, replicas: int = 1) -> Object:
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


def _variables(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _mounts(paths: list[dict[str, str]]) -> list[Object]:
    return [
        {"name": f"path-{i}", "mountPath": path["path"], "readOnly": True}
        for i, path in enumerate(paths)
    ]


def _volumes(paths: list[dict[str, str]]) -> list[Object]:
    return [{"name": f"path-{i}", "hostPath": dict(path)} for i, path in enumerate(paths)]


def _token() -> Object:
    return {"name": "token", "secret": {"secretName": "rose-token"}}


def _yaml(value: object) -> str:
    return str(yaml.safe_dump(value))
