"""The objects a user of the demo's cluster would apply, as plain dictionaries. Pure.

ROSE itself comes from the chart; here are the chart's values, the serving replicas, the weight
store, the pool and the lease, and the rollout engine that is never taken back.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from rose_core.wire.sync import EngineSpec
from rose_demo.calibrate import Objective
from rose_demo.options import Options
from rose_demo.pieces import (
    CREDENTIALS,
    DEDICATED,
    LEASE,
    PACKAGES,
    POOL,
    RESEARCH,
    ROUTER,
    ROUTERS,
    RUN,
    SERVING,
    SERVING_PORT,
    STORE_PORT,
    SYSTEM,
    TRACES,
    TRAINER,
    Engines,
    Object,
    credentials_volume,
    deployment,
    mounts,
    variables,
    volumes,
)
from rose_demo.span_receiver import GRPC_PORT, HTTP_PORT
from rose_dev.image import IMAGE
from rose_engines.process.launch import Launch
from rose_engines.sglang.arguments import command, environment

_TRACES = {
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://{TRACES}.{SYSTEM}.svc:{GRPC_PORT}",
    "OTEL_BSP_SCHEDULE_DELAY": "1000",
}
_SHIM = f"{PACKAGES}/rose_engines/sglang/paths/cpu"
_PAGES_PORT = 9103
# Both containers see the engine through these.
_SHARED: list[Object] = [
    {"name": "run", "mountPath": "/run/rose"},
    {"name": "scratch", "mountPath": "/tmp"},  # noqa: S108  # the pod's own
    {"name": "token", "mountPath": "/token", "readOnly": True},
    {"name": "credentials", "mountPath": "/credentials", "readOnly": True},
]


def namespaces() -> list[Object]:
    """ROSE's namespace, the serving owner's and the RL team's."""
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        for name in (SYSTEM, SERVING, RESEARCH)
    ]


def sandboxes(parts: Path | None) -> Object:
    """Values of agents' sandboxes, with programs and images of this machine; None: it has none."""
    if parts is None:
        return {}
    return {
        "enabled": True,
        "store": f"rose://rose-weights.{SYSTEM}.svc:{STORE_PORT}",
        "leases": [{"namespace": RESEARCH, "name": LEASE, "run": RUN}],
        "partsPath": str(parts),
        "gibibytes": 4,
        # Least of all: what is measured is serving.
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}},
    }


def chart_values(options: Options, engines: Engines, parts: Path | None = None) -> Object:
    """Values of ``helm install``: lending on, crossover windows on, engines from this machine."""
    repository, _, tag = IMAGE.rpartition(":")
    return {
        "sandboxes": sandboxes(parts),
        "image": {
            "repository": repository,
            "tag": tag,
            "pullPolicy": "Never",
            "perComponent": False,
        },
        # What is measured is serving; a second operator would only stand by.
        "operator": {"replicas": 1},
        # What a user who has a collector sets.
        "router": {"template": {"container": {"env": variables(_TRACES)}}},
        "networkPolicy": {
            "collectors": [
                {
                    "podSelector": {"matchLabels": {"app": TRACES}},
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": SYSTEM}},
                }
            ]
        },
        "storeCredentialSecret": CREDENTIALS,
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
            "engineClasses": [engines.rollout_build.engine_class],
            "enginePython": str(engines.rollout_build.python),
            "modelsPath": str(engines.models),
            "hostPaths": engines.rollout_build.host_paths(),
            # The engine lies in a cache that perhaps only its owner may read.
            "engines": {"firstUser": 0},
        },
    }


def serving(engines: Engines) -> Object:
    """Two replicas of a real SGLang; ROSE changes nothing in them."""
    build = engines.serving_build
    spec = EngineSpec(build.engine_class, engines.serving, context_tokens=4096, max_running=16)
    launch = Launch(
        python=build.python,
        model=engines.models / engines.serving,
        port=SERVING_PORT,
        host="0.0.0.0",  # noqa: S104  # in its own pod
    )
    given = environment(launch, {}) | {
        "PYTHONPATH": f"{_SHIM}:{PACKAGES}",
        "HOME": "/tmp",  # noqa: S108  # the pod's own
    }
    paths = [*build.host_paths(), {"path": str(engines.models), "type": "Directory"}]
    container = {
        "name": "engine",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": command(spec, launch),
        "env": variables(given),
        "ports": [{"containerPort": SERVING_PORT}],
        # Of two cores that the whole cluster shares: serving has twice what any part of ROSE has.
        "resources": {"requests": {"cpu": "400m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": SERVING_PORT},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 5,
        },
        "volumeMounts": mounts(paths),
    }
    pod = {
        "terminationGracePeriodSeconds": 5,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes(paths),
    }
    return deployment("chat", SERVING, pod, replicas=2)


def credentials(tenants: bytes, cluster: str) -> Object:
    """What the store and its readers mount: the file of tenants, the cluster's own credential."""
    return secret(CREDENTIALS, SYSTEM, {"tenants": tenants.decode(), "token": cluster})


def secret(name: str, namespace: str, data: dict[str, str]) -> Object:
    """A Secret with these keys."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": data,
    }


def store() -> list[Object]:
    """The weight store and its Service."""
    container = {
        "name": "store",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["rose", "weights", "serve", "--root=/store", "--tenants=/credentials/tenants"],
        "readinessProbe": {
            "httpGet": {"path": "/healthz", "port": 9105},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
        },
        "env": variables({"NUMBA_CACHE_DIR": "/store/.numba"}),
        "volumeMounts": [
            {"name": "store", "mountPath": "/store"},
            {"name": "credentials", "mountPath": "/credentials", "readOnly": True},
        ],
    }
    pod = {
        "terminationGracePeriodSeconds": 2,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "store", "emptyDir": {}}, credentials_volume("tenants")],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "rose-weights", "namespace": SYSTEM},
        "spec": {"selector": {"app": "rose-weights"}, "ports": [{"port": STORE_PORT}]},
    }
    return [deployment("rose-weights", SYSTEM, pod), service]


def receiver() -> list[Object]:
    """Takes the spans that the router exports, and its Service."""
    container = {
        "name": "receiver",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["python", "-m", "rose_demo.span_receiver", "--host=0.0.0.0"],
        "readinessProbe": {
            "httpGet": {"path": "/healthz", "port": HTTP_PORT},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
        },
    }
    pod = {
        "terminationGracePeriodSeconds": 2,
        "automountServiceAccountToken": False,
        "containers": [container],
    }
    ports = [{"name": "otlp", "port": GRPC_PORT}, {"name": "spans", "port": HTTP_PORT}]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": TRACES, "namespace": SYSTEM},
        "spec": {"selector": {"app": TRACES}, "ports": ports},
    }
    return [deployment(TRACES, SYSTEM, pod), service]


def trainer_account() -> Object:
    """Who the trainer is: the router hears service accounts of the lease's namespace."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": TRAINER, "namespace": RESEARCH},
    }


def policy() -> Object:
    """The platform's word: what the RL team may lease."""
    return {
        "apiVersion": "rose-gpu.dev/v1alpha1",
        "kind": "TenantPolicy",
        "metadata": {"name": RESEARCH},
        "spec": {
            "namespaces": {"names": [RESEARCH]},
            "runs": [{"storeName": "main", "names": [RUN]}],
            "pools": [f"{SERVING}/{POOL}"],
        },
    }


def pool(options: Options, promised: Objective) -> Object:
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
                "ttftMilliseconds": promised.ttft_ms,
                "tpotMilliseconds": promised.tpot_ms,
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
            "engineClass": engines.rollout_build.engine_class,
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


def dedicated(options: Options, engines: Engines) -> list[Object]:
    """A rollout engine that is never taken back: engine host and weight-sync in one pod.

    ``docs/engine-host.md`` says how to run such an engine elsewhere.
    """
    paths = [
        *engines.rollout_build.host_paths(),
        {"path": str(engines.models), "type": "Directory"},
    ]
    pod = {
        "terminationGracePeriodSeconds": 10,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [_host(engines, paths), _sync(engines, paths)],
        "volumes": [*volumes(paths), *_own_volumes()],
    }
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": DEDICATED, "namespace": SYSTEM},
        "data": {"engine.yaml": str(yaml.safe_dump(_settings(options, engines)))},
    }
    return [config, deployment(DEDICATED, SYSTEM, pod)]


def _settings(options: Options, engines: Engines) -> Object:
    return {
        "name": DEDICATED,
        "engineClass": engines.rollout_build.engine_class,
        "model": engines.rollout,
        "run": RUN,
        "weightEndpoint": f"rose-weights.{SYSTEM}.svc:{STORE_PORT}",
        "contextTokens": 1024,
        "kvTokens": 16384,
        "maxRunning": 8,
        "maxStaleness": options.max_staleness,
    }


def _host(engines: Engines, paths: list[dict[str, str]]) -> Object:
    return {
        "name": "engine-host",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["rose", "engine-host"],
        "args": [
            f"--models={engines.models}",
            f"--engine-python={engines.rollout_build.python}",
            "--data-host=$(POD_IP)",
            "--cgroup=signals",
            "--dedicated=/etc/dedicated/engine.yaml",
            f"--router=tls://{ROUTER}.{ROUTERS}.svc:7444",
            f"--lease={RESEARCH}/{LEASE}",
            "--token-file=/token/token",
        ],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "ROSE_TLS_CA", "value": "/tls/ca.crt"},
        ],
        # Ready once the engine runs: its start takes a core for a minute, which live traffic that
        # has begun would be short of.
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": _PAGES_PORT},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
        },
        "volumeMounts": [
            *_SHARED,
            *mounts(paths),
            {"name": "config", "mountPath": "/etc/dedicated", "readOnly": True},
            {"name": "tls", "mountPath": "/tls", "readOnly": True},
        ],
    }


def _sync(engines: Engines, paths: list[dict[str, str]]) -> Object:
    models = f"path-{len(paths) - 1}"
    return {
        "name": "weight-sync",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["rose", "weight-sync"],
        "args": ["--store-token-file=/credentials/token"],
        "env": variables({"NUMBA_CACHE_DIR": "/tmp/numba"}),  # noqa: S108  # the pod's own
        "volumeMounts": [
            *_SHARED,
            {"name": models, "mountPath": str(engines.models), "readOnly": True},
        ],
    }


def _own_volumes() -> list[Object]:
    authority = [{"key": "tls.crt", "path": "ca.crt"}]
    return [
        {"name": "run", "emptyDir": {"medium": "Memory"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "config", "configMap": {"name": DEDICATED}},
        {"name": "tls", "secret": {"secretName": "rose-router-authority", "items": authority}},
        {"name": "token", "secret": {"secretName": DEDICATED}},
        credentials_volume("token"),
    ]
