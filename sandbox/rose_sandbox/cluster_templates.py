"""Reads templates of a cluster. Apart, since the client of Kubernetes is half of a host's start.

Only a host that is started with ``--templates`` imports it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import httpx
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import create_namespaced_resource

from rose_sandbox.errors import NoTemplates, Unavailable, UnknownTemplate

GROUP, VERSION, PLURAL = "extensions.agents.x-k8s.io", "v1beta1", "sandboxtemplates"
READ_SECONDS = 10.0
"""Of an API server, for one small object."""
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""Of an object of a cluster. Of another the client would make a path that leads elsewhere, as
``..`` does: to templates of other namespaces, or to whatever else this host may get."""
_SandboxTemplate = create_namespaced_resource(GROUP, VERSION, "SandboxTemplate", PLURAL)


class ClusterTemplates:
    """Templates of one namespace of the cluster.

    Args:
        namespace: of the templates.
        config: of the API server; None: as a pod finds it, or ``KUBECONFIG``.
    """

    def __init__(self, namespace: str, config: KubeConfig | None = None) -> None:
        self._namespace, self._config = namespace, config
        self._client: AsyncClient | None = None

    async def read(self, name: str) -> Mapping[str, Any]:
        """See ``TemplateSource``."""
        if not _NAME.fullmatch(name):
            raise UnknownTemplate(f"{name!r} is no name of a SandboxTemplate")
        client = self._opened()
        try:
            found = await client.get(_SandboxTemplate, name, namespace=self._namespace)
        except ApiError as error:
            raise self._named(error, name) from error
        except httpx.HTTPStatusError as error:
            # An API server that does not know the kind says so in plain text.
            if error.response.status_code == httpx.codes.NOT_FOUND:
                raise _not_installed() from error
            raise Unavailable(f"the API server answered {error.response.status_code}") from error
        except httpx.HTTPError as error:
            raise Unavailable(f"the API server does not answer: {error!r}") from error
        spec: Mapping[str, Any] = found["spec"]
        return spec

    def _opened(self) -> AsyncClient:
        if self._client is None:
            try:
                config = self._config or KubeConfig.from_env()
                timeout = httpx.Timeout(READ_SECONDS)
                self._client = AsyncClient(config=config, timeout=timeout, trust_env=False)
            except (ConfigError, OSError, ValueError) as error:
                raise NoTemplates(f"this host finds no API server: {error}") from error
        return self._client

    def _named(self, error: ApiError, name: str) -> Exception:
        where = f"namespace {self._namespace}"
        if error.status.code == httpx.codes.NOT_FOUND:
            return UnknownTemplate(f"no SandboxTemplate {name} in {where}")
        if error.status.code in {httpx.codes.FORBIDDEN, httpx.codes.UNAUTHORIZED}:
            return NoTemplates(
                f"this host may not get {PLURAL}.{GROUP} in {where}: {error.status.message}"
            )
        return Unavailable(f"the API server refused {name}: {error.status.message}")

    async def close(self) -> None:
        """Let go of the API server."""
        if self._client is not None:
            await self._client.close()


def _not_installed() -> NoTemplates:
    return NoTemplates(
        f"the cluster has no {PLURAL}.{GROUP} of {VERSION}: its administrator installs "
        "agent-sandbox (0.5 or later) with its extensions"
    )
