"""Reads templates of a cluster. Apart, since the client of Kubernetes is half of a host's start.

Only a host that is started with ``--templates`` imports it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from rose_sandbox.errors import NoTemplates, Unavailable, UnknownTemplate
from rose_wire.api_server import ApiServer, ClusterAccess, Resource, find_access
from rose_wire.errors import NotConfigured, StatusError
from rose_wire.errors import Unavailable as NoAnswer

GROUP, VERSION, PLURAL = "extensions.agents.x-k8s.io", "v1beta1", "sandboxtemplates"
READ_SECONDS = 10.0
"""Of an API server, for one small object."""
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""Of an object of a cluster. Of another the client would make a path that leads elsewhere, as
``..`` does: to templates of other namespaces, or to whatever else this host may get."""
_TEMPLATES = Resource(GROUP, VERSION, "SandboxTemplate", PLURAL)


class ClusterTemplates:
    """Templates of one namespace of the cluster.

    Args:
        namespace: of the templates.
        access: to the API server; None: as a pod finds it, or ``KUBECONFIG``.
    """

    def __init__(self, namespace: str, access: ClusterAccess | None = None) -> None:
        self._namespace, self._access = namespace, access
        self._server: ApiServer | None = None

    async def read(self, name: str) -> Mapping[str, Any]:
        """See ``TemplateSource``."""
        if not _NAME.fullmatch(name):
            raise UnknownTemplate(f"{name!r} is no name of a SandboxTemplate")
        server = await self._opened()
        try:
            found = await server.get(_TEMPLATES, name, self._namespace)
        except StatusError as error:
            raise self._named(error, name) from error
        except NoAnswer as error:
            raise Unavailable(f"the API server does not answer: {error}") from error
        spec: Mapping[str, Any] = found["spec"]
        return spec

    async def _opened(self) -> ApiServer:
        if self._server is None:
            try:
                access = self._access or await find_access()
                self._server = ApiServer(access, seconds=READ_SECONDS, trust_env=False)
            except NotConfigured as error:
                raise NoTemplates(f"this host finds no API server: {error}") from error
        return self._server

    def _named(self, error: StatusError, name: str) -> Exception:
        where = f"namespace {self._namespace}"
        if error.code == HTTPStatus.NOT_FOUND and not error.details:
            return _not_installed()  # a server that does not know the kind says so in plain text
        if error.code == HTTPStatus.NOT_FOUND:
            return UnknownTemplate(f"no SandboxTemplate {name} in {where}")
        if error.code in {HTTPStatus.FORBIDDEN, HTTPStatus.UNAUTHORIZED}:
            return NoTemplates(
                f"this host may not get {PLURAL}.{GROUP} in {where}: {error.message}"
            )
        return Unavailable(f"the API server refused {name}: {error.message}")

    async def close(self) -> None:
        """Let go of the API server."""
        if self._server is not None:
            await self._server.close()


def _not_installed() -> NoTemplates:
    return NoTemplates(
        f"the cluster has no {PLURAL}.{GROUP} of {VERSION}: its administrator installs "
        "agent-sandbox (0.5 or later) with its extensions"
    )
