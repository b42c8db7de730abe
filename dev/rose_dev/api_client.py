"""The API server for tests and benchmarks: they wait for each answer, on any thread.

``rose_wire.api_server`` asks, on a loop of a thread. Next step: ``tests.operator.harness`` and
``bench.operator`` use it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from rose_wire.api_server import ApiServer, Raw, Resource, find_access

_AnswerT = TypeVar("_AnswerT")


class ApiClient:
    """A context manager: requests to the API server of a kubeconfig, which raise as ``ApiServer``.

    Args:
        kubeconfig: of it; the environment names no proxy.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api-client")
        self._thread.start()
        try:
            access = self._wait(find_access(kubeconfig))
            self._server = ApiServer(access, trust_env=False, field_manager="test")
        except BaseException:  # whatever it was, the thread must not outlive it
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait(self._server.close())
        finally:
            self._end()

    def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
    ) -> list[dict[str, Any]]:
        """Objects of a kind; None = of all namespaces."""
        return self._wait(self._server.list(resource, namespace, labels=labels, fields=fields))[0]

    def get(
        self, resource: Resource, name: str, namespace: str | None = None, subresource: str = ""
    ) -> Raw:
        """One object."""
        return self._wait(self._server.get(resource, name, namespace, subresource))

    def create(self, resource: Resource, manifest: Raw, *, dry_run: bool = False) -> Raw:
        """Create an object, or only see what it would be."""
        return self._wait(self._server.create(resource, manifest, dry_run=dry_run))

    def apply(self, resource: Resource, manifest: Raw) -> Raw:
        """Create or change an object, by force."""
        return self._wait(self._server.apply(resource, manifest))

    def merge(
        self,
        resource: Resource,
        name: str,
        changes: Raw,
        namespace: str | None = None,
        subresource: str = "",
    ) -> Raw:
        """Merge changes into an object."""
        return self._wait(self._server.merge(resource, name, changes, namespace, subresource))

    def delete(self, resource: Resource, name: str, namespace: str | None = None) -> None:
        """Begin to delete an object."""
        self._wait(self._server.delete(resource, name, namespace))

    def delete_all(self, resource: Resource, namespace: str) -> None:
        """Begin to delete every object of a kind in a namespace."""
        self._wait(self._server.request("delete", resource.path(namespace)))

    def _wait(self, request: Coroutine[Any, Any, _AnswerT]) -> _AnswerT:
        return asyncio.run_coroutine_threadsafe(request, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
