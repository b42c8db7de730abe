"""Flags of ``rose operator`` and the files they name."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from rose_operator.errors import ConfigurationError


@dataclass(frozen=True)
class Settings:
    """Everything the operator is told at start.

    Attributes:
        namespace: ROSE's own namespace: slots, routers, the leader Lease.
        stores: weight store name -> ``host:port`` that nodes dial.
        engine_classes: engine builds the installation offers.
        grant_seconds: TTL of a grant; ``offline_seconds`` bounds renewal without the API server.
        lock_seconds: duration of the leader Lease; it is renewed every third of it.
        warm_seconds: after start, wait this long for agents before the first plan.
    """

    namespace: str
    router_image: str
    stores: dict[str, str]
    token: str
    identity: str
    sync_address: str = "0.0.0.0:7443"
    http_host: str = "0.0.0.0"  # noqa: S104  # the metrics page is scraped from other pods
    http_port: int = 8080
    engine_classes: frozenset[str] = frozenset({"sglang"})
    token_secret: str = "rose-token"  # noqa: S105  # the Secret's name
    router_service_account: str = "rose-router"
    router_template: dict[str, Any] = field(default_factory=dict)
    plan_seconds: float = 5.0
    sync_seconds: float = 2.0
    grant_seconds: float = 10.0
    offline_seconds: float = 600.0
    lock_seconds: float = 15.0
    warm_seconds: float = 8.0
    settle_seconds: float = 10.0
    cool_seconds: float = 30.0
    log_level: str = "INFO"


def parse(argv: list[str]) -> Settings:
    """Read flags and the files they name.

    Raises:
        ConfigurationError: a file is missing or does not hold what it must.
    """
    found = _parser().parse_args(argv)
    return Settings(
        namespace=found.namespace,
        router_image=found.router_image,
        stores=_stores(found.stores_file),
        token=_token(found.token_file),
        identity=found.identity or _identity(),
        sync_address=found.sync_address,
        http_port=found.http_port,
        engine_classes=frozenset(filter(None, found.engine_classes.split(","))),
        token_secret=found.token_secret,
        router_service_account=found.router_service_account,
        router_template=_mapping(found.router_template) if found.router_template else {},
        plan_seconds=found.plan_seconds,
        sync_seconds=found.sync_seconds,
        grant_seconds=found.grant_seconds,
        offline_seconds=found.offline_seconds,
        lock_seconds=found.lock_seconds,
        warm_seconds=found.warm_seconds,
        settle_seconds=found.settle_seconds,
        cool_seconds=found.cool_seconds,
        log_level=found.log_level,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rose operator", description="Pools and leases to slots")
    add = parser.add_argument
    add("--namespace", default="rose-system", help="ROSE's own namespace")
    add("--sync-address", default="0.0.0.0:7443", help="where agents dial in")
    add("--http-port", type=int, default=8080, help="metrics and health; 0 picks one")
    add("--router-image", required=True, help="image of the routers")
    add("--router-template", type=Path, help="YAML merged into the routers' pod spec")
    add("--router-service-account", default="rose-router")
    add("--stores-file", type=Path, required=True, help="YAML: store name -> host:port")
    add("--engine-classes", default="sglang", help="engine builds, comma separated")
    add("--token-file", type=Path, required=True, help="bearer token of this installation")
    add("--token-secret", default="rose-token", help="Secret that holds it, key 'token'")
    add("--identity", default="", help="holder of the leader Lease; default: the pod's name")
    add("--plan-seconds", type=float, default=5.0, help="longest time between two plans")
    add("--sync-seconds", type=float, default=2.0, help="period of the agents' calls")
    add("--grant-seconds", type=float, default=10.0, help="TTL of a grant")
    add("--offline-seconds", type=float, default=600.0, help="renewal without the API server")
    add("--lock-seconds", type=float, default=15.0, help="duration of the leader Lease")
    add("--warm-seconds", type=float, default=8.0, help="wait for agents before the first plan")
    add("--settle-seconds", type=float, default=10.0, help="a replica must qualify this long")
    add("--cool-seconds", type=float, default=30.0, help="a GPU given back rests this long")
    add("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    return parser


def _identity() -> str:
    """The pod's name in a cluster, where a restarted container is known to replace its own past.

    Anywhere else two operators may share a host name, so the process gets a name of its own.
    """
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return socket.gethostname()
    return f"{socket.gethostname()}-{uuid4().hex[:8]}"


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        message = f"--token-file {path}: {error.strerror}"
        raise ConfigurationError(message) from error
    if not token:
        message = f"--token-file {path} is empty; it must hold the installation's bearer token"
        raise ConfigurationError(message)
    return token


def _stores(path: Path) -> dict[str, str]:
    stores = _mapping(path)
    for name, address in stores.items():
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdigit():
            message = f"--stores-file {path}: store {name!r} is {address!r}; expected host:port"
            raise ConfigurationError(message)
    return {str(name): str(address) for name, address in stores.items()}


def _mapping(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        message = f"{path}: {error}"
        raise ConfigurationError(message) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        message = f"{path}: expected a YAML mapping, found {type(loaded).__name__}"
        raise ConfigurationError(message)
    return loaded
