"""The demo's rollout engine that is never taken back: engine host and weight-sync in a pod. Pure.

``manifests`` has the other objects; ``docs/engine-host.md`` says how to run such an engine
elsewhere.
"""

from __future__ import annotations

import yaml

from rose_demo.options import Options
from rose_demo.pieces import (
    DEDICATED,
    LEASE,
    RESEARCH,
    ROUTER,
    ROUTERS,
    RUN,
    STORE_PORT,
    SYSTEM,
    Engines,
    Object,
    credentials_volume,
    deployment,
    mounts,
    variables,
    volumes,
)
from rose_dev.image import IMAGE

_PAGES_PORT = 9103
# Both containers see the engine through these.
_SHARED: list[Object] = [
    {"name": "run", "mountPath": "/run/rose"},
    {"name": "scratch", "mountPath": "/tmp"},  # noqa: S108  # the pod's own
    {"name": "token", "mountPath": "/token", "readOnly": True},
    {"name": "credentials", "mountPath": "/credentials", "readOnly": True},
]


def dedicated(options: Options, engines: Engines) -> list[Object]:
    """A rollout engine that is never taken back: engine host and weight-sync in one pod."""
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
