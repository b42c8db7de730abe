"""The API server, as little of it as the operator needs; every write is counted.

Writes are server-side apply with one field manager, ``rose-operator``. It is forced only on what
the operator owns alone: status of its kinds, slots, routers.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import Enum
from typing import TypeVar

from rose_core.api import GROUP, VERSION
from rose_operator.errors import NOT_FOUND, ApiRefused, ApiUnavailable, NotLeader
from rose_operator.kube.object_cache import Raw
from rose_operator.metrics import API_FAILURES, API_WRITES
from rose_wire.api_server import ApiServer, Resource
from rose_wire.errors import StatusError, Unavailable

FIELD_MANAGER = "rose-operator"
MANAGED = {"app.kubernetes.io/managed-by": FIELD_MANAGER}
MANAGED_SELECTOR = ",".join(f"{label}={value}" for label, value in MANAGED.items())

_log = logging.getLogger(__name__)
_ResultT = TypeVar("_ResultT")
_RETRYABLE = frozenset({408, 409, 429, 500, 502, 503, 504})
# Server-side apply answers 500 when not the server but the stored object is at fault: its spec does
# not fit the types of the schema that holds now.
_NOT_TYPED = "failed to create typed"
_LONGEST_WAIT = 5.0
_TRIES = 6

# Both are there before the first failure: a rate over a missing series shows nothing, not 0.
for _why in (ApiRefused, ApiUnavailable):
    API_FAILURES.labels(_why.__name__)


_TOKEN_REVIEW = Resource(
    "authentication.k8s.io", "v1", "TokenReview", "tokenreviews", namespaced=False
)
_NODES = Resource("", "v1", "Node", "nodes", namespaced=False)


class ObjectKind(Enum):
    """Kinds the operator reads or writes; ``CORDONED`` is the nodes that are unschedulable."""

    POOL = "ServingPool"
    LEASE = "RolloutLease"
    SLOT = "RolloutSlot"
    DEPLOYMENT = "Deployment"
    SERVICE = "Service"
    EVENT = "Event"
    LOCK = "Lease"
    SECRET = "Secret"  # noqa: S105  # a kind
    NODE = "Node"
    CORDONED = "CordonedNode"
    AUTOSCALER = "HorizontalPodAutoscaler"
    SCALED_OBJECT = "ScaledObject"
    POLICY = "TenantPolicy"
    NAMESPACE = "Namespace"
    ROUTE = "HTTPRoute"


RESOURCES = {
    ObjectKind.POOL: Resource(GROUP, VERSION, "ServingPool", "servingpools"),
    ObjectKind.LEASE: Resource(GROUP, VERSION, "RolloutLease", "rolloutleases"),
    ObjectKind.SLOT: Resource(GROUP, VERSION, "RolloutSlot", "rolloutslots"),
    ObjectKind.DEPLOYMENT: Resource("apps", "v1", "Deployment", "deployments"),
    ObjectKind.SERVICE: Resource("", "v1", "Service", "services"),
    ObjectKind.EVENT: Resource("", "v1", "Event", "events"),
    ObjectKind.LOCK: Resource("coordination.k8s.io", "v1", "Lease", "leases"),
    ObjectKind.SECRET: Resource("", "v1", "Secret", "secrets"),
    ObjectKind.NODE: _NODES,
    ObjectKind.CORDONED: _NODES,
    ObjectKind.AUTOSCALER: Resource(
        "autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"
    ),
    ObjectKind.SCALED_OBJECT: Resource("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects"),
    ObjectKind.POLICY: Resource(GROUP, VERSION, "TenantPolicy", "tenantpolicies", namespaced=False),
    ObjectKind.NAMESPACE: Resource("", "v1", "Namespace", "namespaces", namespaced=False),
    ObjectKind.ROUTE: Resource("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes"),
}
KINDS_OF_ROUTERS = (ObjectKind.DEPLOYMENT, ObjectKind.SERVICE, ObjectKind.ROUTE)
"""What a router is made of; they live in the routers' namespace."""
_EVERYWHERE = frozenset(
    {
        ObjectKind.POOL,
        ObjectKind.LEASE,
        ObjectKind.AUTOSCALER,
        ObjectKind.SCALED_OBJECT,
        ObjectKind.NODE,
        ObjectKind.POLICY,
        ObjectKind.NAMESPACE,
    }
)
# Node objects are large: a page of them must not stop the loop for long.
_PAGE = 250


class Api:
    """Requests of the operator.

    A server that is overloaded and says how long to wait is asked again after that, a few times:
    a pass of many requests would otherwise hardly ever get through.

    Args:
        server: the cluster's.
        namespace: where slots and the leader Lease live.
        routers: where routers do; empty = the same.
        may_write: whether the leader lock is held, asked whenever a write is about to be sent: one
            that was refused for a while may find that another operator leads by then.
    """

    def __init__(
        self,
        server: ApiServer,
        namespace: str,
        may_write: Callable[[], bool] = lambda: True,
        *,
        routers: str = "",
    ) -> None:
        self._server = server
        self._may_write = may_write
        self.namespace = namespace
        self._routers = routers or namespace

    async def list(self, kind: ObjectKind) -> tuple[list[Raw], int]:
        """Every object of a kind and the resource version of the listing.

        Pools, leases and autoscalers of all namespaces; nodes, policies, namespaces; slots,
        ROSE's own; Deployments, Services and HTTPRoutes of the routers', only those the operator
        made.

        Raises:
            ApiUnavailable, ApiRefused: as everywhere in this class.
        """
        namespace, labels, fields = self._scope(kind)
        return await self._ask(
            lambda: self._server.list(
                RESOURCES[kind], namespace, labels=labels, fields=fields, page=_PAGE
            )
        )

    async def watch(self, kind: ObjectKind, version: int) -> AsyncIterator[tuple[str, Raw]]:
        """Changes after a version; ends when the server closes, raises when it must be relisted."""
        namespace, labels, fields = self._scope(kind)
        changes = self._server.watch(
            RESOURCES[kind], version, namespace, labels=labels, fields=fields
        )
        try:
            async for change in changes:
                yield change
        except (StatusError, Unavailable) as error:
            raise _translate(error) from error

    def _scope(self, kind: ObjectKind) -> tuple[str | None, str | None, str | None]:
        """Namespace, labels and fields of the objects that are the operator's business."""
        if kind in _EVERYWHERE:
            return None, None, None
        if kind is ObjectKind.CORDONED:
            return None, None, "spec.unschedulable=true"
        if kind is ObjectKind.SLOT:
            return self.namespace, None, None
        return self._place(kind), MANAGED_SELECTOR, None

    def _place(self, kind: ObjectKind) -> str:
        return self._routers if kind in KINDS_OF_ROUTERS else self.namespace

    async def apply(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Create or change an object the operator owns.

        Raises:
            NotLeader: the lead was lost before it could be sent; as for every other write.
        """
        return await self._write(
            kind, "apply", lambda: self._server.apply(RESOURCES[kind], manifest)
        )

    async def apply_status(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Write the status of an object."""
        return await self._write(
            kind, "status", lambda: self._server.apply(RESOURCES[kind], manifest, "status")
        )

    async def delete(self, kind: ObjectKind, name: str) -> None:
        """Delete a slot, or an object of a router; one that is gone already is fine."""
        place = self._place(kind)
        try:
            await self._write(
                kind, "delete", lambda: self._server.delete(RESOURCES[kind], name, place)
            )
        except ApiRefused as error:
            if error.code != NOT_FOUND:
                raise

    async def create(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Create an object that must not exist yet."""
        return await self._write(
            kind, "create", lambda: self._server.create(RESOURCES[kind], manifest)
        )

    async def replace(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Replace an object if it still has the manifest's resource version."""
        return await self._write(
            kind, "replace", lambda: self._server.replace(RESOURCES[kind], manifest)
        )

    async def review_token(self, token: str, audience: str) -> Raw:
        """What the API server says of a token: the status of a TokenReview; nothing is stored."""
        review = {"metadata": {}, "spec": {"token": token, "audiences": [audience]}}
        answered = await self._ask(lambda: self._server.create(_TOKEN_REVIEW, review))
        status: Raw = answered.get("status") or {}
        return status

    async def signing_keys(self) -> str:
        """The public keys of this cluster's service accounts, as a JSON Web Key Set.

        Every service account may read them (ClusterRole system:service-account-issuer-discovery).
        """
        found = await self._ask(
            lambda: self._server.request(
                "get", "/openid/v1/jwks", header_params={"Accept": "application/jwk-set+json"}
            )
        )
        keys = sorted(found["keys"], key=lambda key: str(key.get("kid")))
        return json.dumps({"keys": keys}, sort_keys=True)

    async def get(self, kind: ObjectKind, name: str) -> Raw | None:
        """One object of ROSE's namespace, None when there is none."""
        try:
            return await self._ask(lambda: self._server.get(RESOURCES[kind], name, self.namespace))
        except ApiRefused as error:
            if error.code == NOT_FOUND:
                return None
            raise

    async def _write(
        self, kind: ObjectKind, verb: str, ask: Callable[[], Awaitable[_ResultT]]
    ) -> _ResultT:
        def counted() -> Awaitable[_ResultT]:
            if not self._may_write():
                message = f"the leader Lease was lost before the {verb} of a {kind.value} was sent"
                raise NotLeader(message)
            API_WRITES.labels(kind.value, verb).inc()
            return ask()

        return await self._ask(counted)

    async def _ask(self, ask: Callable[[], Awaitable[_ResultT]]) -> _ResultT:
        for _ in range(_TRIES - 1):
            try:
                return await self._once(ask)
            except ApiUnavailable as error:
                if not error.retry_after:
                    raise
                await asyncio.sleep(error.retry_after)
        return await self._once(ask)

    async def _once(self, ask: Callable[[], Awaitable[_ResultT]]) -> _ResultT:
        try:
            return await ask()
        except (StatusError, Unavailable) as error:
            translated = _translate(error)
            if getattr(translated, "code", 0) != NOT_FOUND:
                API_FAILURES.labels(type(translated).__name__).inc()
            raise translated from error


def _translate(error: StatusError | Unavailable) -> ApiUnavailable | ApiRefused:
    """A status that says no is a refusal; everything else is worth another try."""
    if isinstance(error, Unavailable):
        return ApiUnavailable(str(error))
    if error.code not in _RETRYABLE or _NOT_TYPED in error.message:
        return ApiRefused(error.code, error.message)
    return ApiUnavailable(str(error), retry_after=min(_LONGEST_WAIT, error.retry_after))
