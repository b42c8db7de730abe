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
from typing import Any, TypeVar, cast

import httpx
from lightkube import ApiError, AsyncClient
from lightkube.generic_resource import (
    GenericGlobalResource,
    GenericNamespacedResource,
    create_api_info,
    create_global_resource,
    create_namespaced_resource,
)
from lightkube.types import PatchType

from rose_core.api import GROUP, VERSION
from rose_operator.errors import NOT_FOUND, ApiRefused, ApiUnavailable, NotLeader
from rose_operator.kube.object_cache import Raw
from rose_operator.metrics import API_FAILURES, API_WRITES

FIELD_MANAGER = "rose-operator"
MANAGED = {"app.kubernetes.io/managed-by": FIELD_MANAGER}

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


# Kubernetes' own kinds as plain dictionaries, outside lightkube's registry: there they would clash
# with the typed classes that another library of the same process may load.
class _Deployment(GenericNamespacedResource):
    _api_info = create_api_info("apps", "v1", "Deployment", "deployments")


class _Service(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Service", "services")


class _Event(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Event", "events")


class _Lease(GenericNamespacedResource):
    _api_info = create_api_info("coordination.k8s.io", "v1", "Lease", "leases")


class _Secret(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Secret", "secrets")


class _Node(GenericGlobalResource):
    _api_info = create_api_info("", "v1", "Node", "nodes")


class _Namespace(GenericGlobalResource):
    _api_info = create_api_info("", "v1", "Namespace", "namespaces")


class _Autoscaler(GenericNamespacedResource):
    _api_info = create_api_info(
        "autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"
    )


class _TokenReview(GenericGlobalResource):
    _api_info = create_api_info("authentication.k8s.io", "v1", "TokenReview", "tokenreviews")


class _Route(GenericNamespacedResource):
    _api_info = create_api_info("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes")


class _ScaledObject(GenericNamespacedResource):
    _api_info = create_api_info("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects")


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


RESOURCES: dict[ObjectKind, Any] = {
    ObjectKind.POOL: create_namespaced_resource(GROUP, VERSION, "ServingPool", "servingpools"),
    ObjectKind.LEASE: create_namespaced_resource(GROUP, VERSION, "RolloutLease", "rolloutleases"),
    ObjectKind.SLOT: create_namespaced_resource(GROUP, VERSION, "RolloutSlot", "rolloutslots"),
    ObjectKind.DEPLOYMENT: _Deployment,
    ObjectKind.SERVICE: _Service,
    ObjectKind.EVENT: _Event,
    ObjectKind.LOCK: _Lease,
    ObjectKind.SECRET: _Secret,
    ObjectKind.NODE: _Node,
    ObjectKind.CORDONED: _Node,
    ObjectKind.AUTOSCALER: _Autoscaler,
    ObjectKind.SCALED_OBJECT: _ScaledObject,
    ObjectKind.POLICY: create_global_resource(GROUP, VERSION, "TenantPolicy", "tenantpolicies"),
    ObjectKind.NAMESPACE: _Namespace,
    ObjectKind.ROUTE: _Route,
}
KINDS_OF_ROUTERS = (ObjectKind.DEPLOYMENT, ObjectKind.SERVICE, ObjectKind.ROUTE)
"""What a router is made of; they live in the routers' namespace."""
_EVERYWHERE = frozenset(
    {ObjectKind.POOL, ObjectKind.LEASE, ObjectKind.AUTOSCALER, ObjectKind.SCALED_OBJECT}
)
# Node objects are large: a page of them must not stop the loop for long.
_PAGE = 250


class Api:
    """Requests of the operator.

    A server that is overloaded and says how long to wait is asked again after that, a few times:
    a pass of many requests would otherwise hardly ever get through.

    Args:
        client: a lightkube client for the cluster.
        namespace: where slots and the leader Lease live.
        routers: where routers do; empty = the same.
        may_write: whether the leader lock is held, asked whenever a write is about to be sent: one
            that was refused for a while may find that another operator leads by then.
    """

    def __init__(
        self,
        client: AsyncClient,
        namespace: str,
        may_write: Callable[[], bool] = lambda: True,
        *,
        routers: str = "",
    ) -> None:
        self._client = client
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

        async def gather() -> tuple[list[Raw], int]:
            listing = self._client.list(RESOURCES[kind], chunk_size=_PAGE, **self._scope(kind))
            items = [_plain(item) async for item in listing]
            return items, int(listing.resourceVersion)

        return await self._ask(gather)

    async def watch(self, kind: ObjectKind, version: int) -> AsyncIterator[tuple[str, Raw]]:
        """Changes after a version; ends when the server closes, raises when it must be relisted."""
        changes = self._client.watch(
            RESOURCES[kind],
            resource_version=str(version),
            server_timeout=300,
            **self._scope(kind),
        )
        try:
            async for change, item in changes:
                yield change, _plain(item)
        except (ApiError, httpx.HTTPError, ValueError) as error:
            raise _translate(error) from error

    def _scope(self, kind: ObjectKind) -> dict[str, Any]:
        if kind in _EVERYWHERE:
            return {"namespace": "*"}
        if kind in {ObjectKind.NODE, ObjectKind.POLICY, ObjectKind.NAMESPACE}:
            return {}
        if kind is ObjectKind.CORDONED:
            return {"fields": {"spec.unschedulable": "true"}}
        if kind is ObjectKind.SLOT:
            return {"namespace": self.namespace}
        return {"namespace": self._place(kind), "labels": dict(MANAGED)}

    def _place(self, kind: ObjectKind) -> str:
        return self._routers if kind in KINDS_OF_ROUTERS else self.namespace

    async def apply(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Create or change an object the operator owns.

        Raises:
            NotLeader: the lead was lost before it could be sent; as for every other write.
        """
        return await self._write(kind, "apply", lambda: self._patch(RESOURCES[kind], manifest))

    async def apply_status(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Write the status of an object."""
        resource = RESOURCES[kind].Status
        return await self._write(kind, "status", lambda: self._patch(resource, manifest))

    async def delete(self, kind: ObjectKind, name: str) -> None:
        """Delete a slot, or an object of a router; one that is gone already is fine."""
        place = self._place(kind)
        try:
            await self._write(
                kind,
                "delete",
                lambda: self._client.delete(RESOURCES[kind], name, namespace=place),
            )
        except ApiRefused as error:
            if error.code != NOT_FOUND:
                raise

    async def create(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Create an object that must not exist yet."""
        resource = RESOURCES[kind](manifest)
        return await self._write(kind, "create", lambda: self._client.create(resource))

    async def replace(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Replace an object if it still has the manifest's resource version."""
        resource = RESOURCES[kind](manifest)
        return await self._write(kind, "replace", lambda: self._client.replace(resource))

    async def review_token(self, token: str, audience: str) -> Raw:
        """What the API server says of a token: the status of a TokenReview; nothing is stored."""
        review = _TokenReview(spec={"token": token, "audiences": [audience]})
        answered = _plain(await self._ask(lambda: self._client.create(review)))
        status: Raw = answered.get("status") or {}
        return status

    async def signing_keys(self) -> str:
        """The public keys of this cluster's service accounts, as a JSON Web Key Set.

        Every service account may read them (ClusterRole system:service-account-issuer-discovery).
        """
        # lightkube's public methods know resources only, and these are none.
        http = cast("httpx.AsyncClient", self._client._client._client)  # noqa: SLF001

        async def ask() -> bytes:
            reply = await http.get("/openid/v1/jwks")
            reply.raise_for_status()
            return bytes(reply.content)

        found = json.loads(await self._ask(ask))
        keys = sorted(found["keys"], key=lambda key: str(key.get("kid")))
        return json.dumps({"keys": keys}, sort_keys=True)

    async def get(self, kind: ObjectKind, name: str) -> Raw | None:
        """One object of ROSE's namespace, None when there is none."""
        try:
            found = await self._ask(
                lambda: self._client.get(RESOURCES[kind], name, namespace=self.namespace)
            )
        except ApiRefused as error:
            if error.code == NOT_FOUND:
                return None
            raise
        return _plain(found)

    def _patch(self, resource: Any, manifest: Raw) -> Awaitable[Any]:  # noqa: ANN401  # lightkube's own dynamic classes
        metadata = manifest["metadata"]
        return self._client.patch(
            resource,
            metadata["name"],
            manifest,
            namespace=metadata["namespace"],
            patch_type=PatchType.APPLY,
            field_manager=FIELD_MANAGER,
            force=True,
        )

    async def _write(self, kind: ObjectKind, verb: str, ask: Callable[[], Awaitable[Any]]) -> Raw:
        def counted() -> Awaitable[Any]:
            if not self._may_write():
                message = f"the leader Lease was lost before the {verb} of a {kind.value} was sent"
                raise NotLeader(message)
            API_WRITES.labels(kind.value, verb).inc()
            return ask()

        return _plain(await self._ask(counted))

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
        except (ApiError, httpx.HTTPError, ValueError) as error:
            translated = _translate(error)
            if getattr(translated, "code", 0) != NOT_FOUND:
                API_FAILURES.labels(type(translated).__name__).inc()
            raise translated from error


def _plain(item: Any) -> Raw:  # noqa: ANN401  # lightkube's own dynamic classes
    if item is None:
        return {}
    plain: Raw = item.to_dict()
    return plain


def _translate(error: Exception) -> ApiUnavailable | ApiRefused:
    """A status that says no is a refusal; everything else is worth another try.

    An overloaded API server, and whatever stands before it, answers in plain text: lightkube makes
    its own error of JSON alone.
    """
    if isinstance(error, ApiError):
        response = getattr(error, "response", None)  # none when a watch brings the status
        code = error.status.code or (response.status_code if response is not None else 0)
        if code not in _RETRYABLE or _NOT_TYPED in (error.status.message or ""):
            return ApiRefused(code, error.status.message or "refused")
        return ApiUnavailable(f"{code}: {error.status.message}", retry_after=_wait_of(response))
    if isinstance(error, httpx.HTTPStatusError):
        code, text = error.response.status_code, error.response.reason_phrase
        if code not in _RETRYABLE:
            return ApiRefused(code, text or "refused")
        return ApiUnavailable(f"{code}: {text}", retry_after=_wait_of(error.response))
    return ApiUnavailable(f"{type(error).__name__}: {error}")


def _wait_of(response: httpx.Response | None) -> float:
    """What the server asks for in ``Retry-After``, bounded; 0 when it asks for nothing."""
    asked = response.headers.get("Retry-After", "") if response is not None else ""
    return min(_LONGEST_WAIT, float(asked)) if asked.isdecimal() else 0.0
