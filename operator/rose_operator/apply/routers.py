"""Router of a lease: one Deployment and one Service in the routers' namespace, as pure functions.

Routers parse what tenants send, so they have a namespace of their own, in which nothing else is and
nothing privileged may be. Their pods mount no Secret of the installation: who they are, and the
token of their lease, they ask of the operator (``rose_operator.sync.enrolment``).

A lease's namespace must not own objects there, so there is no owner reference: the operator deletes
the routers of leases that are gone. The annotation with the manifest's hash tells whether anything
must be written, whatever defaults the API server has filled in.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rose_core.api import GROUP, RolloutLease
from rose_core.api.arguments import ROUTED_EXPERTS
from rose_core.lending.routers import RouterState
from rose_core.rollouts.capacity.router_size import MIB, RouterSize, kept, size_of
from rose_core.wire.enrolment import lease_digest, named_for, router_audience
from rose_operator.kube.api import MANAGED
from rose_operator.kube.object_cache import Raw
from rose_operator.settings import GatewaySettings, Settings
from rose_wire import tls

HASH = f"{GROUP}/manifest-hash"
LEASE = f"{GROUP}/lease"
SIZE = f"{GROUP}/router-size"
_LONGEST_SIZE = 40  # two numbers of a machine
HTTP_PORT = 8000
ATTACH_PORT = 7444
PEER_PORT = 7445
ENROL_PORT = 7442
_PROOF_FOLDER = "/var/run/rose/proof"
_IDENTITY_FOLDER = "/run/rose"
# The kubelet renews it at four fifths of this; ten minutes is the least that it makes.
_PROOF_SECONDS = 3600
_LAME_DUCK_SECONDS = 2
"""Without a caller, until a router that ends takes nobody more: kube-proxy learns of it in one."""
_GRACE_SECONDS = 40
"""A router goes on for 10 s at most, drains for 20, and then says what became of its turns."""
_TURNS_FOLDER = "/var/run/rose/turns"
_NAME_LIMIT = 63
_POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def router_name(lease_namespace: str, lease_name: str) -> str:
    """Name of the Deployment and the Service; shortened with a hash where it would be too long."""
    name = f"router-{lease_namespace}-{lease_name}".replace(".", "-")
    ambiguous = "." in lease_name or "-" in lease_namespace
    if len(name) <= _NAME_LIMIT and not ambiguous:
        return name
    # Two leases may spell the same joined name: a-b/c and a/b-c.
    digest = lease_digest(lease_namespace, lease_name)
    return f"{name[: _NAME_LIMIT - 9].rstrip('-')}-{digest}"


def router_url(name: str, namespace: str) -> str:
    """The URL that trainers use."""
    return f"http://{name}.{namespace}.svc:{HTTP_PORT}"


def replicas_name(name: str) -> str:
    """The headless Service by which a router's replicas find each other, by the router's name."""
    if len(name) + len("-all") <= _NAME_LIMIT:
        return f"{name}-all"
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: _NAME_LIMIT - 13].rstrip('-')}-{digest}-all"


def turn_secret(name: str) -> str:
    """The Secret with the tokens of a router's callers, by the router's name."""
    return f"{name}-turns"


def labels_of(name: str) -> dict[str, str]:
    """Labels by which the pods of a router are found."""
    return {"app.kubernetes.io/name": "rose-router", "app.kubernetes.io/instance": name}


def attach_address(name: str, settings: Settings) -> str:
    """Where engine owners dial in; a router listens as the operator does."""
    scheme = tls.SCHEME if settings.tls_dir else ""
    return f"{scheme}{name}.{settings.routers}.svc:{ATTACH_PORT}"


def enrol_address(settings: Settings) -> str:
    """Where a router asks the operator who it is."""
    scheme = tls.SCHEME if settings.tls_dir else ""
    return f"{scheme}rose-operator.{settings.namespace}.svc:{ENROL_PORT}"


def hosts_of(lease: RolloutLease, namespace: str) -> list[str]:
    """Every name under which a lease's router, or all its replicas, are dialled."""
    name = router_name(lease.metadata.namespace, lease.metadata.name)
    names = (name, replicas_name(name))
    return [f"{one}.{namespace}.{end}" for one in names for end in ("svc", "svc.cluster.local")]


def size(lease: RolloutLease, live: Raw | None) -> RouterSize:
    """How large the lease's router is; one that runs does not shrink."""
    spec = lease.spec
    wanted = size_of(
        context_tokens=spec.context_tokens,
        turns=spec.slots.max * spec.max_trajectories_per_slot,
        waiting=spec.router.queue_limit,
        replicas=spec.router.replicas,
    )
    return kept(_size_of(live) if state_of(live) is RouterState.RUNS else None, wanted)


def _size_of(live: Raw | None) -> RouterSize | None:
    """The size that was written on it; None where another version wrote none."""
    text = ((live or {}).get("metadata", {}).get("annotations") or {}).get(SIZE, "")
    memory, _, connections = text.partition("/")
    # Python refuses numbers of thousands of digits.
    if not (memory.isdecimal() and connections.isdecimal()) or len(text) > _LONGEST_SIZE:
        return None
    return RouterSize(int(memory), int(connections))


def deployment(
    lease: RolloutLease, settings: Settings, *, rests: bool = False, live: Raw | None = None
) -> Raw:
    """The router's Deployment, extended by the installation's template.

    Args:
        lease: whose router it is.
        settings: the installation's.
        rests: it has no pod, and keeps everything by which it is found.
        live: as it is now.
    """
    large = size(lease, live)
    name = router_name(lease.metadata.namespace, lease.metadata.name)
    labels = labels_of(name)
    template = settings.router_template
    container = merge(_container(lease, settings, large), template.get("container", {}))
    own = _pod(name, lease.metadata.key, settings, container)
    pod = _of_lease(merge(own, template.get("podSpec", {})), lease)
    return _finished(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": merge(
                _metadata(name, lease, settings, labels),
                {"annotations": {SIZE: f"{large.memory_bytes}/{large.connections}"}},
            ),
            "spec": {
                "replicas": 0 if rests else lease.spec.router.replicas,
                "strategy": _strategy(lease),
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {
                        "labels": {**MANAGED, **labels, **template.get("podLabels", {})},
                        "annotations": dict(template.get("podAnnotations", {})),
                    },
                    "spec": pod,
                },
            },
        }
    )


def _of_lease(pod: dict[str, Any], lease: RolloutLease) -> dict[str, Any]:
    """The pod with the lease's names in its Secrets' names: a template serves all leases."""
    volumes = []
    for volume in pod.get("volumes", ()):
        secret = volume.get("secret")
        if secret and "{" in secret.get("secretName", ""):
            name = named_for(secret["secretName"], lease.metadata.namespace, lease.metadata.name)
            volume = {**volume, "secret": {**secret, "secretName": name}}  # noqa: PLW2901
        volumes.append(volume)
    return {**pod, "volumes": volumes}


def _strategy(lease: RolloutLease) -> dict[str, Any]:
    """How pods are replaced.

    Turns live in a router's memory; two that do not know of each other would split a lease's queue.
    Replicas do, and pass turns on when they leave. A rolling update's fields are written, not
    left to defaults: an apply takes back only what it has written, and Recreate forbids them.
    """
    if lease.spec.router.replicas == 1:
        return {"type": "Recreate"}
    return {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}


def service(lease: RolloutLease, settings: Settings) -> Raw:
    """The router's Service."""
    name = router_name(lease.metadata.namespace, lease.metadata.name)
    labels = labels_of(name)
    return _finished(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(name, lease, settings, labels),
            "spec": {
                "selector": labels,
                "ports": [
                    {"name": "http", "port": HTTP_PORT, "targetPort": "http"},
                    {"name": "attach", "port": ATTACH_PORT, "targetPort": "attach"},
                ],
            },
        }
    )


def replicas_service(lease: RolloutLease, settings: Settings) -> Raw:
    """A name with the address of every replica."""
    found = service(lease, settings)
    metadata, spec = found["metadata"], found["spec"]
    name = replicas_name(metadata["name"])
    del metadata["annotations"][HASH]
    ports = [*spec["ports"], {"name": "peer", "port": PEER_PORT, "targetPort": "peer"}]
    spec = {"clusterIP": "None", **spec, "ports": ports}
    return _finished({**found, "metadata": {**metadata, "name": name}, "spec": spec})


def host_of(name: str, gateway: GatewaySettings) -> str:
    """The host under which callers outside reach a router, by the router's name."""
    return f"{name}.{gateway.domain}"


def url_of(name: str, settings: Settings, route: Raw | None) -> str:
    """The URL for trainers: the Gateway's once that takes the route, the Service's until then."""
    gateway = settings.gateway
    if gateway is not None and route is not None and is_routed(route):
        return f"{gateway.scheme}://{host_of(name, gateway)}"
    return router_url(name, settings.routers)


def is_routed(route: Raw) -> bool:
    """Whether a Gateway has accepted this route, as it is now, and found the router."""
    generation = route["metadata"].get("generation")
    for parent in (route.get("status") or {}).get("parents") or ():
        conditions = {
            one["type"]: one["status"] == "True"
            for one in parent.get("conditions") or ()
            if one.get("observedGeneration") in {None, generation}
        }
        if conditions.get("Accepted") and conditions.get("ResolvedRefs", True):
            return True
    return False


def route(lease: RolloutLease, settings: Settings, gateway: GatewaySettings) -> Raw:
    """The router's HTTPRoute; where TLS ends, and with which certificate, is the Gateway's matter.

    Turns last as long as they do, so the Gateway has no time limit of its own; scrapers have a way
    inside, so the page that needs no token stays there.
    """
    found = service(lease, settings)
    name = found["metadata"]["name"]
    parent = {"namespace": gateway.namespace, "name": gateway.name}
    parent |= {"sectionName": gateway.section} if gateway.section else {}
    backend = {"name": name, "port": HTTP_PORT}
    forever = {"request": "0s"}
    return _finished(
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "HTTPRoute",
            "metadata": _metadata(name, lease, settings, labels_of(name)),
            "spec": {
                "parentRefs": [
                    parent | ({"sectionName": gateway.section} if gateway.section else {})
                ],
                "hostnames": [host_of(name, gateway)],
                "rules": [
                    # Without a backend the Gateway answers 500: it is not there.
                    {"matches": [{"path": {"type": "PathPrefix", "value": "/metrics"}}]},
                    {"backendRefs": [backend], "timeouts": forever},
                ],
            },
        }
    )


def is_current(wanted: Raw, live: Raw | None) -> bool:
    """Whether the live object was written from this manifest."""
    if live is None:
        return False
    annotations = live["metadata"].get("annotations") or {}
    return bool(annotations.get(HASH) == wanted["metadata"]["annotations"][HASH])


def state_of(live: Raw | None) -> RouterState:
    """What there is of a router, by its Deployment."""
    if live is None:
        return RouterState.NONE
    return RouterState.RUNS if live["spec"].get("replicas", 1) else RouterState.RESTS


def is_ready(live: Raw | None) -> bool:
    """Whether the router has a ready pod."""
    return bool(live and (live.get("status") or {}).get("readyReplicas"))


def merge(base: Any, extra: Any) -> Any:  # noqa: ANN401  # any YAML value
    """Mappings merge key by key, lists are joined, anything else is replaced."""
    if isinstance(base, dict) and isinstance(extra, dict):
        return base | {
            key: merge(base[key], extra[key]) if key in base else extra[key] for key in extra
        }
    if isinstance(base, list) and isinstance(extra, list):
        return base + extra
    return extra


def _metadata(
    name: str, lease: RolloutLease, settings: Settings, labels: dict[str, str]
) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": settings.routers,
        "labels": {**MANAGED, **labels, "app.kubernetes.io/part-of": "rose"},
        "annotations": {LEASE: lease.metadata.key},
    }


def _container(lease: RolloutLease, settings: Settings, large: RouterSize) -> dict[str, Any]:
    several = lease.spec.router.replicas > 1
    return {
        "name": "router",
        "image": settings.router_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["rose", "router"],
        "args": [*_arguments(lease, settings), f"--max-connections={large.connections}"],
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT},
            {"name": "attach", "containerPort": ATTACH_PORT},
            *([{"name": "peer", "containerPort": PEER_PORT}] if several else []),
        ],
        **({"env": env} if (env := _environment(settings, several=several)) else {}),
        # Until the operator has enrolled the router; it may be away for a while.
        "startupProbe": {
            "httpGet": {"path": "/healthz", "port": "http"},
            "periodSeconds": 2,
            "failureThreshold": 1800,
        },
        "readinessProbe": {
            "httpGet": {"path": "/healthz", "port": "http"},
            "periodSeconds": 2,
        },
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            # A router refuses what would not fit (``rose_router.http.admission.memory``); the limit
            # is for what it does not foresee. A template may set another; the router reads its own.
            "limits": {"memory": f"{large.memory_bytes // MIB}Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "proof", "mountPath": _PROOF_FOLDER, "readOnly": True},
            {"name": "identity", "mountPath": _IDENTITY_FOLDER},
            *(
                [{"name": "turns", "mountPath": _TURNS_FOLDER, "readOnly": True}]
                if settings.turn_secrets
                else []
            ),
        ],
    }


def _environment(settings: Settings, *, several: bool) -> list[dict[str, Any]]:
    # The authority of the operator's certificate, which is no secret.
    trust = {"name": tls.TRUST_TEXT, "value": settings.operator_authority}
    return [*([_POD_IP] if several else []), *([trust] if settings.operator_authority else [])]


def _replicas(lease: RolloutLease, settings: Settings) -> list[str]:
    if lease.spec.router.replicas == 1:
        return []
    name = replicas_name(router_name(lease.metadata.namespace, lease.metadata.name))
    return [
        f"--replicas-dns={name}.{settings.routers}.svc",
        *([f"--peer-address=0.0.0.0:{PEER_PORT}"] if settings.tls_dir else []),
    ]


def _arguments(lease: RolloutLease, settings: Settings) -> list[str]:
    stale, oldest = lease.spec.weights.max_staleness_versions, lease.spec.router.max_age_versions
    return [
        f"--lease={lease.metadata.key}",
        *_replicas(lease, settings),
        f"--http-address=0.0.0.0:{HTTP_PORT}",
        f"--attach-address=0.0.0.0:{ATTACH_PORT}",
        f"--enrol={enrol_address(settings)}",
        f"--enrol-token-file={_PROOF_FOLDER}/token",
        f"--identity-dir={_IDENTITY_FOLDER}/identity",
        *(["--authenticate"] if settings.router_authentication else []),
        *([f"--turn-token-file={_TURNS_FOLDER}/token"] if settings.turn_secrets else []),
        f"--lame-duck-seconds={_LAME_DUCK_SECONDS}",
        f"--context-tokens={lease.spec.context_tokens}",
        f"--max-staleness={stale}",
        f"--max-age={stale if oldest is None else oldest}",
        f"--model={lease.spec.model.name}",
        f"--queue-limit={lease.spec.router.queue_limit}",
        f"--queue-seconds={lease.spec.router.queue_timeout_seconds}",
        f"--policy={lease.spec.router.policy.value}",
        f"--lent-weight={settings.lent_weight:g}",
        *(f"--dedicated={name}" for name in lease.spec.dedicated_engines),
        *(["--routed-experts"] if ROUTED_EXPERTS in lease.spec.engine_arguments else []),
    ]


def _pod(name: str, lease: str, settings: Settings, container: dict[str, Any]) -> dict[str, Any]:
    proof = {
        "path": "token",
        "audience": router_audience(lease),
        "expirationSeconds": _PROOF_SECONDS,
    }
    volumes: list[dict[str, Any]] = [
        {"name": "proof", "projected": {"sources": [{"serviceAccountToken": proof}]}},
        {"name": "identity", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]
    if settings.turn_secrets:  # the pod waits until it exists, and is not open meanwhile
        volumes.append({"name": "turns", "secret": {"secretName": turn_secret(name)}})
    return {
        "serviceAccountName": settings.router_service_account,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            **_user(settings.router_user),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _user(number: int | None) -> dict[str, int]:
    return {} if number is None else dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), number)


def _finished(manifest: Raw) -> Raw:
    text = json.dumps(manifest, sort_keys=True)
    manifest["metadata"]["annotations"][HASH] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return manifest
