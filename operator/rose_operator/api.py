"""The API server, as little of it as the operator needs; every write is counted.

Writes are server-side apply with one field manager, ``rose-operator``. It is forced only on what
the operator owns alone: status of its kinds, slots, routers.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable
from enum import Enum
from typing import Any, TypeVar

import httpx
from lightkube import ApiError, AsyncClient
from lightkube.generic_resource import (
    GenericNamespacedResource,
    create_api_info,
    create_namespaced_resource,
)
from lightkube.types import PatchType

from rose_core.api import GROUP, VERSION
from rose_operator.errors import NOT_FOUND, ApiRefused, ApiUnavailable
from rose_operator.metrics import API_FAILURES, API_WRITES
from rose_operator.store import Raw

FIELD_MANAGER = "rose-operator"
MANAGED = {"app.kubernetes.io/managed-by": FIELD_MANAGER}

_log = logging.getLogger(__name__)
_ResultT = TypeVar("_ResultT")
_RETRYABLE = frozenset({408, 409, 429, 500, 502, 503, 504})


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


class Kind(Enum):
    """Kinds the operator reads or writes."""

    POOL = "ServingPool"
    LEASE = "RolloutLease"
    SLOT = "RolloutSlot"
    DEPLOYMENT = "Deployment"
    SERVICE = "Service"
    EVENT = "Event"
    LOCK = "Lease"


RESOURCES: dict[Kind, Any] = {
    Kind.POOL: create_namespaced_resource(GROUP, VERSION, "ServingPool", "servingpools"),
    Kind.LEASE: create_namespaced_resource(GROUP, VERSION, "RolloutLease", "rolloutleases"),
    Kind.SLOT: create_namespaced_resource(GROUP, VERSION, "RolloutSlot", "rolloutslots"),
    Kind.DEPLOYMENT: _Deployment,
    Kind.SERVICE: _Service,
    Kind.EVENT: _Event,
    Kind.LOCK: _Lease,
}


class Api:
    """Requests of the operator.

    Args:
        client: a lightkube client for the cluster.
        namespace: where slots, routers and the leader Lease live.
    """

    def __init__(self, client: AsyncClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    async def list(self, kind: Kind) -> tuple[list[Raw], int]:
        """Every object of a kind and the resource version of the listing.

        Pools and leases of all namespaces; slots, Deployments and Services of ROSE's own, the
        latter two only those the operator made.

        Raises:
            ApiUnavailable, ApiRefused: as everywhere in this class.
        """
        listing = self._client.list(RESOURCES[kind], **self._scope(kind))

        async def gather() -> list[Raw]:
            return [_plain(item) async for item in listing]

        items = await self._ask(gather())
        return items, int(listing.resourceVersion)

    async def watch(self, kind: Kind, version: int) -> AsyncIterator[tuple[str, Raw]]:
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

    def _scope(self, kind: Kind) -> dict[str, Any]:
        if kind in {Kind.POOL, Kind.LEASE}:
            return {"namespace": "*"}
        if kind is Kind.SLOT:
            return {"namespace": self.namespace}
        return {"namespace": self.namespace, "labels": dict(MANAGED)}

    async def apply(self, kind: Kind, manifest: Raw) -> Raw:
        """Create or change an object the operator owns."""
        return await self._write(kind, "apply", self._patch(RESOURCES[kind], manifest))

    async def apply_status(self, kind: Kind, manifest: Raw) -> Raw:
        """Write the status of an object."""
        return await self._write(kind, "status", self._patch(RESOURCES[kind].Status, manifest))

    async def delete(self, kind: Kind, name: str) -> None:
        """Delete an object of ROSE's namespace; one that is gone already is fine."""
        try:
            await self._write(
                kind,
                "delete",
                self._client.delete(RESOURCES[kind], name, namespace=self.namespace),
            )
        except ApiRefused as error:
            if error.code != NOT_FOUND:
                raise

    async def create(self, kind: Kind, manifest: Raw) -> Raw:
        """Create an object that must not exist yet."""
        return await self._write(kind, "create", self._client.create(RESOURCES[kind](manifest)))

    async def replace(self, kind: Kind, manifest: Raw) -> Raw:
        """Replace an object if it still has the manifest's resource version."""
        return await self._write(kind, "replace", self._client.replace(RESOURCES[kind](manifest)))

    async def get(self, kind: Kind, name: str) -> Raw | None:
        """One object of ROSE's namespace, None when there is none."""
        try:
            found = await self._ask(
                self._client.get(RESOURCES[kind], name, namespace=self.namespace)
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

    async def _write(self, kind: Kind, verb: str, request: Awaitable[Any]) -> Raw:
        API_WRITES.labels(kind.value, verb).inc()
        return _plain(await self._ask(request))

    async def _ask(self, request: Awaitable[_ResultT]) -> _ResultT:
        try:
            return await request
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
    """A status that says no is a refusal; everything else is worth another try."""
    if isinstance(error, ApiError):
        code = error.status.code or error.response.status_code
        if code not in _RETRYABLE:
            return ApiRefused(code, error.status.message or "refused")
        return ApiUnavailable(f"{code}: {error.status.message}")
    return ApiUnavailable(f"{type(error).__name__}: {error}")
