"""Flags of ``rose operator`` and the files they name."""

from __future__ import annotations

import argparse
import os
import re
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from rose_core.api.names import DNS_NAME
from rose_core.lending import PlannerPolicy
from rose_core.rollouts.placement.views import Policy
from rose_operator import own_secrets, weight_stores
from rose_operator.errors import ConfigurationError
from rose_operator.kube.leader import RENEWALS
from rose_operator.weight_stores import Runs
from rose_wire import certificates, flags, problems, tls
from rose_wire.flags import VerbParser

# A host has 253 characters, of which a router's name takes 63 and a dot.
_LONGEST_DOMAIN = 189
AUTHORITY = "ca.crt"
"""Beside the operator's certificate, as cert-manager lays it out."""


@dataclass(frozen=True)
class GatewaySettings:
    """The platform's Gateway (Gateway API), through which callers outside reach routers.

    Attributes:
        section: name of its listener; empty = any that takes the routes.
        domain: a router's host is its name below this one.
        scheme: ``https`` where the listener ends TLS.
    """

    namespace: str
    name: str
    section: str
    domain: str
    scheme: str = "https"


@dataclass(frozen=True)
class Settings:
    """Everything that the operator is given at start.

    Attributes:
        namespace: ROSE's own namespace: slots, the leader Lease.
        stores: weight store name -> ``host:port`` that nodes dial.
        runs: of stores that keep teams apart, which namespace may follow which runs.
        router_authentication: nobody calls a router without a token; those of service accounts of
            the lease's namespace are good.
        router_namespace: where routers are; empty = ROSE's own.
        gateway: through which callers outside reach routers; None = each platform's own way.
        router_authority: what signs routers' certificates, with ``router_certificate_hours``.
        operator_authority: PEM of what signed ``tls_dir``, which routers believe; empty = none.
        turn_secrets: each router takes its callers' tokens from a Secret of its own.
        lent_weight: what routers' placement counts per second for which a lent GPU computes more.
        router_user: whom routers run as; None where the cluster chooses (OpenShift).
        tenancy: leases get only what a TenantPolicy allows their namespace.
        engine_classes: engine builds the installation offers.
        grant_seconds: TTL of a grant; ``offline_seconds`` bounds renewal without the API server.
        lock_seconds: duration of the leader Lease; it is renewed every third of it.
        warm_seconds: after start, wait this long for agents before the first plan.
        by_gain: inside a priority slots go where they bring most.
        tls_dir: certificate of Sync; routers are then dialled with TLS too.
        tls_client_ca: authority of the agents' certificates; each must name its node.
        enrol_address: where agents without a certificate and routers ask; empty = nowhere.
        node_authority: what signs those, with ``certificate_hours`` of life.
        own_secrets: Secrets that the operator makes and renews itself.
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
    tls_dir: Path | None = None
    tls_client_ca: Path | None = None
    enrol_address: str = ""
    node_authority: Path | None = None
    certificate_hours: float = 24.0
    agent_service_account: str = "rose-agent"
    router_namespace: str = ""
    gateway: GatewaySettings | None = None
    router_authority: Path | None = None
    router_certificate_hours: float = 24.0
    operator_authority: str = ""
    own_secrets: own_secrets.SecretOptions | None = None
    tenancy: bool = True
    runs: dict[str, Runs] = field(default_factory=dict)
    turn_secrets: bool = False
    router_authentication: bool = True
    router_service_account: str = "rose-router"
    lent_weight: float = Policy().lent_weight
    router_user: int | None = 65532
    router_template: dict[str, Any] = field(default_factory=dict)
    plan_seconds: float = 5.0
    sync_seconds: float = 2.0
    grant_seconds: float = 40.0
    offline_seconds: float = 600.0
    lock_seconds: float = 15.0
    warm_seconds: float = 8.0
    settle_seconds: float = 10.0
    cool_seconds: float = 30.0
    rebalance_seconds: float = 600.0
    toggle_seconds: float = 60.0
    borrow_gain: float = 2.0
    by_gain: bool = False
    log_level: str = "INFO"

    @property
    def routers(self) -> str:
        """The routers' namespace."""
        return self.router_namespace or self.namespace

    @property
    def lending(self) -> PlannerPolicy:
        """The planner's figures, with those that the platform has set."""
        return PlannerPolicy(
            settle_seconds=self.settle_seconds,
            cool_seconds=self.cool_seconds,
            rebalance_seconds=self.rebalance_seconds,
            toggle_seconds=self.toggle_seconds,
            borrow_gain=self.borrow_gain,
            by_gain=self.by_gain,
        )


def parse(argv: list[str]) -> Settings:
    """Read flags and the files they name.

    Raises:
        ConfigurationError: a file is missing or does not hold what it must, or grants would lapse
            before a new leader can renew them.
    """
    found = _parser().parse_args(argv)
    _check_periods(found)
    addresses, runs = weight_stores.read(found.stores_file, _mapping(found.stores_file))
    return Settings(
        namespace=found.namespace,
        router_image=found.router_image,
        stores=addresses,
        runs=runs,
        tenancy=found.tenancy == "enforced",
        turn_secrets=found.turn_secrets,
        router_authentication=found.router_authentication == "enforced",
        token=_token(found.token_file),
        identity=found.identity or _identity(),
        sync_address=found.sync_address,
        http_port=found.http_port,
        engine_classes=_classes(found.engine_classes),
        tls_dir=_certificate(found.tls_dir, found.tls_client_ca),
        tls_client_ca=found.tls_client_ca,
        enrol_address=_enrolment(found),
        node_authority=found.node_authority,
        certificate_hours=found.certificate_hours,
        agent_service_account=found.agent_service_account,
        router_namespace=found.router_namespace,
        gateway=_gateway(found),
        router_authority=found.router_authority,
        router_certificate_hours=found.router_certificate_hours,
        operator_authority=_authority_of(found.tls_dir),
        own_secrets=own_secrets.options(argv),
        router_service_account=found.router_service_account,
        lent_weight=found.lent_weight,
        router_user=None if found.router_user == "any" else int(found.router_user),
        router_template=_template(found.router_template) if found.router_template else {},
        plan_seconds=found.plan_seconds,
        sync_seconds=found.sync_seconds,
        grant_seconds=found.grant_seconds,
        offline_seconds=found.offline_seconds,
        lock_seconds=found.lock_seconds,
        warm_seconds=found.warm_seconds,
        settle_seconds=found.settle_seconds,
        cool_seconds=found.cool_seconds,
        rebalance_seconds=found.rebalance_seconds,
        toggle_seconds=found.toggle_seconds,
        borrow_gain=found.borrow_gain,
        by_gain=found.lend_by_gain,
        log_level=found.log_level,
    )


def _parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog="rose operator", description="Pools and leases to slots")
    add = parser.add_argument
    add("--namespace", default="rose-system", help="ROSE's own namespace")
    add(
        "--tenancy",
        choices=["enforced", "off"],
        default="enforced",
        help="leases get only what a TenantPolicy allows their namespace; off: whatever they ask",
    )
    add("--sync-address", type=flags.listener, default="0.0.0.0:7443", help="where agents dial in")
    add("--http-port", type=flags.port, default=8080, help="metrics and health; 0 picks one")
    add("--router-image", required=True, help="image of the routers")
    add("--router-template", type=Path, help="YAML merged into the routers' pod spec")
    add("--turn-secrets", action="store_true",
        help="each router asks callers for a token of the Secret ROUTER-turns")  # fmt: skip
    add(
        "--router-authentication",
        choices=["enforced", "off"],
        default="enforced",
        help="routers take tokens of service accounts of the lease's namespace, and nobody without "
        "a token; off: anybody, where no other tokens are given",
    )
    add("--lent-weight", type=flags.amount, default=Policy().lent_weight,
        help="of routers: seconds of cost per second for which a lent GPU computes more, where "
        "serving is twice as slow beside it; 0 = its time has no price")  # fmt: skip
    add(
        "--router-service-account", default="rose-router", help="whom routers run as in the cluster"
    )
    add(
        "--router-user",
        type=_user,
        default="65532",
        help="whom routers run as; any: the cluster chooses, as OpenShift does",
    )
    add("--stores-file", type=Path, required=True, help="YAML: store name -> host:port")
    add("--engine-classes", default="sglang", help="engine builds, comma separated")
    add("--token-file", type=Path, required=True, help="bearer token of this installation")
    add("--identity", default="", help="holder of the leader Lease; default: the pod's name")
    add("--plan-seconds", type=flags.above_zero, default=5.0, help="longest time between two plans")
    add(
        "--sync-seconds",
        type=flags.above_zero,
        default=2.0,
        help="least period of the agents' calls",
    )
    add("--grant-seconds", type=flags.above_zero, default=40.0, help="TTL of a grant")
    add(
        "--offline-seconds", type=flags.amount, default=600.0, help="renewal without the API server"
    )
    add("--lock-seconds", type=flags.above_zero, default=15.0, help="duration of the leader Lease")
    add(
        "--warm-seconds",
        type=flags.amount,
        default=8.0,
        help="wait for agents before the first plan",
    )
    add(
        "--settle-seconds", type=flags.amount, default=10.0, help="a replica must qualify this long"
    )
    add("--cool-seconds", type=flags.amount, default=30.0, help="a GPU given back rests this long")
    add(
        "--rebalance-seconds",
        type=flags.amount,
        default=600.0,
        help="a slot stays this long with a lease above its share",
    )
    add(
        "--toggle-seconds",
        type=flags.amount,
        default=60.0,
        help="cost of a loan until one was measured",
    )
    add(
        "--borrow-gain",
        type=flags.amount,
        default=2.0,
        help="a loan must last this many times its cost",
    )
    add(
        "--lend-by-gain",
        action="store_true",
        help="inside a priority a slot goes where it brings most, not by weight alone",
    )
    add(
        "--log-level",
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="least level of what is logged",
    )
    tls.add_flag(parser)
    tls.add_clients_flag(parser)
    add("--enrol-address", default="", help="where agents and routers ask who they are")
    add("--node-authority", type=Path, help="folder with tls.crt and tls.key that sign those")
    add("--certificate-hours", type=flags.above_zero, default=24.0, help="life of those")
    add("--agent-service-account", default="rose-agent", help="whose tokens are taken for it")
    add("--router-namespace", default="", help="where routers are; default: --namespace")
    add(
        "--gateway",
        default="",
        metavar="NAMESPACE/NAME[/LISTENER]",
        help="Gateway (Gateway API) to which every router gets an HTTPRoute",
    )
    add("--gateway-domain", default="", help="a router's host there is its name below this domain")
    add("--gateway-scheme", choices=["https", "http"], default="https", help="of those URLs")
    add("--router-authority", type=Path, help="folder with tls.crt and tls.key that sign routers'")
    add("--router-certificate-hours", type=flags.above_zero, default=24.0, help="life of those")
    own_secrets.add_flags(parser)
    return parser


def _user(text: str) -> str:
    if text != "any" and (not text.isdecimal() or int(text) == 0):
        message = f"{text!r} is neither a user's number above 0 nor any"
        raise argparse.ArgumentTypeError(message)
    return text


def _classes(text: str) -> frozenset[str]:
    found = frozenset(filter(None, (name.strip() for name in text.split(","))))
    if not found:
        message = f"--engine-classes {text!r} names none; leases could get no engine"
        raise ConfigurationError(message)
    return found


def _check_periods(found: argparse.Namespace) -> None:
    """Grants outlive a takeover: the successor waits for the Lease first, agents then ask it."""
    least = found.lock_seconds * (1 + 1 / RENEWALS) + 2 * found.sync_seconds
    if found.grant_seconds <= least:
        message = (
            f"--grant-seconds {found.grant_seconds:g} is too short: with --lock-seconds "
            f"{found.lock_seconds:g} and --sync-seconds {found.sync_seconds:g} a new leader renews "
            f"grants after up to {least:g} s, when they have lapsed; give more than that"
        )
        raise ConfigurationError(message)


def _enrolment(found: argparse.Namespace) -> str:
    """The address; what is signed there is handed out over TLS, by authorities that can sign."""
    address: str = found.enrol_address
    for flag, folder in (
        ("--node-authority", found.node_authority),
        ("--router-authority", found.router_authority),
    ):
        if folder is None:
            continue
        if found.tls_dir is None or not address:
            raise ConfigurationError(f"{flag} needs --tls-dir and --enrol-address")
        try:
            key, certificate = (folder / name for name in (tls.KEY, tls.CERTIFICATE))
            certificates.check_authority(key.read_bytes(), certificate.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{flag} {folder}: {error}") from error
    if address and found.tls_dir is not None and found.router_authority is None:
        raise ConfigurationError("--enrol-address with --tls-dir needs --router-authority")
    return address


def _gateway(found: argparse.Namespace) -> GatewaySettings | None:
    """Where routes go.

    Raises:
        ConfigurationError: half of it is missing, or it is no name.
    """
    if not found.gateway and not found.gateway_domain:
        return None
    namespace, name, section = (*found.gateway.split("/"), "", "")[:3]
    parts = (namespace, name, *([section] if found.gateway.count("/") > 1 else []))
    if found.gateway.count("/") not in {1, 2} or not all(re.fullmatch(DNS_NAME, w) for w in parts):
        message = f"--gateway {found.gateway!r}: expected NAMESPACE/NAME or NAMESPACE/NAME/LISTENER"
        raise ConfigurationError(message)
    if len(found.gateway_domain) > _LONGEST_DOMAIN or not re.fullmatch(
        DNS_NAME, found.gateway_domain
    ):
        message = f"--gateway needs --gateway-domain, a domain; {found.gateway_domain!r} is none"
        raise ConfigurationError(message)
    return GatewaySettings(namespace, name, section, found.gateway_domain, found.gateway_scheme)


def with_authority(settings: Settings) -> Settings:
    """The same, with what routers must believe now: it is renewed while the operator runs.

    What cannot be read stays as it was.
    """
    try:
        now = _authority_of(settings.tls_dir)
    except ConfigurationError:
        return settings
    known = not now or now == settings.operator_authority
    return settings if known else replace(settings, operator_authority=now)


def _authority_of(folder: Path | None) -> str:
    """What routers must believe to believe the operator; empty: the system's authorities."""
    try:
        return (folder / AUTHORITY).read_text() if folder is not None else ""
    except FileNotFoundError:
        return ""
    except problems.FILE_ERRORS as error:
        message = f"--tls-dir {folder}: {AUTHORITY}: {problems.of_file(error)}"
        raise ConfigurationError(message) from error


def _identity() -> str:
    """The pod's name in a cluster, where a restarted container is known to replace its own past.

    Anywhere else two operators may share a host name, so the process gets a name of its own.
    """
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return socket.gethostname()
    return f"{socket.gethostname()}-{uuid4().hex[:8]}"


def _certificate(folder: Path | None, clients: Path | None) -> Path | None:
    try:
        tls.server_credentials(folder, clients)
    except (OSError, ValueError) as error:
        message = f"--tls-dir, --tls-client-ca: {error}"
        raise ConfigurationError(message) from error
    return folder


def _token(path: Path) -> str:
    try:
        return flags.token(path)
    except OSError as error:
        message = f"--token-file {path}: {error.strerror}"
        raise ConfigurationError(message) from error


def _template(path: Path) -> dict[str, Any]:
    """What is merged into routers.

    Raises:
        ConfigurationError: it cannot be read, or a Secret's name is that of several leases.
    """
    made = _mapping(path)
    for volume in (made.get("podSpec") or {}).get("volumes") or ():
        name = (volume.get("secret") or {}).get("secretName", "")
        if "{" in name and "{digest}" not in name:
            message = (
                f"{path}: Secret {name!r} of volume {volume.get('name')!r} may be another lease's: "
                "a-b/c and a/b-c are one where they are joined; add {digest}"
            )
            raise ConfigurationError(message)
    return made


def _mapping(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text())
    except problems.FILE_ERRORS as error:
        message = f"{path}: {problems.of_file(error)}"
        raise ConfigurationError(message) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        message = f"{path}: expected a YAML mapping, found {type(loaded).__name__}"
        raise ConfigurationError(message)
    return loaded
