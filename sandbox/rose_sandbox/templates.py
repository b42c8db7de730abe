"""Sandboxes as a team's ``SandboxTemplate`` describes them (agent-sandbox, ``v1beta1``).

Templates are read from one namespace, when a sandbox is asked for, and nothing is written: claims,
warm pools and ``Sandbox`` objects are their controller's. ``rose_core.sandboxes.templates`` says
what of a template is honoured.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import create_namespaced_resource

from rose_core.sandboxes.templates import (
    TemplateLimits,
    TemplateRefused,
    TemplateSandbox,
    read_template,
)
from rose_sandbox.answers import SessionStatus
from rose_sandbox.errors import (
    NoTemplates,
    RuntimeFailed,
    Unavailable,
    UnknownImage,
    UnknownTemplate,
)
from rose_sandbox.host import Host
from rose_sandbox.runtimes.runtime import Limits

GROUP, VERSION, PLURAL = "extensions.agents.x-k8s.io", "v1beta1", "sandboxtemplates"
COMMAND_LOG = "/var/log/template-command.log"
"""In the sandbox: what a template's command says, as ``kubectl logs`` shows it of a pod."""
READ_SECONDS = 10.0
"""Of an API server, for one small object."""
_START_SECONDS = 30.0
"""To make folders and to begin a command, not to end it."""
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""Of an object of a cluster. Of another the client would make a path that leads elsewhere, as
``..`` does: to templates of other namespaces, or to whatever else this host may get."""
_SandboxTemplate = create_namespaced_resource(GROUP, VERSION, "SandboxTemplate", PLURAL)


class TemplateSource(Protocol):
    """Where templates are read."""

    async def read(self, name: str) -> Mapping[str, Any]:
        """The specification of a template.

        Raises:
            UnknownTemplate, NoTemplates, Unavailable: there is none of that name; the cluster has
                none at all, or does not let this host see them; it does not answer.
        """
        ...


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


@dataclass(frozen=True)
class Templates:
    """Makes sandboxes of templates on one host.

    Attributes:
        source: of the templates; None: this host reads none.
        runtime: of the host.
        images: names of the host's images, by what templates call them.
    """

    source: TemplateSource | None = None
    runtime: str = ""
    images: Mapping[str, str] | None = None

    async def create(
        self, host: Host, session: str, name: str, environment: Mapping[str, str]
    ) -> tuple[SessionStatus, TemplateSandbox]:
        """A sandbox of a template, and what was taken of that.

        Args:
            host: that it is on.
            session: whose.
            name: of the template.
            environment: the caller's own variables, as the template allows them.

        Raises:
            UnknownTemplate, NoTemplates, Unavailable: as ``TemplateSource``.
            TemplateRefused: it asks for what a sandbox is not, or for another runtime.
            AlreadyThere, UnknownImage: as ``Host.create``.
            RuntimeFailed: a folder cannot be made, or its command is not there; there is no
                sandbox.
        """
        if self.source is None:
            raise NoTemplates("this host reads no templates; start it with --templates NAMESPACE")
        spec = await self.source.read(name)
        try:
            made = read_template(spec, environment)
        except TemplateRefused as error:
            raise TemplateRefused(f"template {name}: {error}") from error
        if made.runtime not in {"", self.runtime}:
            raise TemplateRefused(
                f"template {name}: podTemplate.spec.runtimeClassName: it is for {made.runtime}, "
                f"and this host runs {self.runtime}"
            )
        image = (self.images or {}).get(made.image, made.image)
        folder = {"folder": made.folder} if made.folder else {}
        try:
            state = await host.create(
                session,
                image=image,
                limits=limits_of(made.limits, made.requests),
                environment=made.environment,
                networks=made.networks,
                **folder,
            )
        except UnknownImage as error:
            raise UnknownImage(
                f"template {name}: image {made.image}: {error}; a host is told what it stands for "
                "by --template-image REFERENCE=NAME"
            ) from error
        if steps := _beginning(made):
            try:
                for step in steps:
                    await _begin(host, session, name, step)
            except BaseException:  # also where its caller goes away: it is not what was asked for
                await host.end(session, forget=True)
                raise
            state = await host.state(session)
        return state, made


def limits_of(limits: TemplateLimits, requests: TemplateLimits) -> Limits:
    """What a sandbox may use: as the template limits it, else the usual, and what it requests."""
    usual = Limits()
    return Limits(
        limits.cpus or max(usual.cpus, requests.cpus or 0.0),
        limits.memory_bytes or max(usual.memory_bytes, requests.memory_bytes or 0),
        usual.pids,
        limits.disk_bytes or max(usual.disk_bytes, requests.disk_bytes or 0),
    )


async def _begin(host: Host, session: str, name: str, step: str) -> None:
    began = await host.exec(session, step, _START_SECONDS, shell=None)
    if began.exit_code:
        output = (began.stderr or began.stdout).decode(errors="replace")[-500:]
        raise RuntimeFailed(f"template {name} does not begin: {output}")


def _beginning(made: TemplateSandbox) -> list[str]:
    """Makes its folders, also where commands start, and begins its command beside what agents run.

    In two steps, since what begins in the background says of nothing before it that it failed.
    """
    folders = [*([made.folder] if made.folder else []), *made.folders]
    lines = [f"mkdir -p {shlex.quote(one)}" for one in folders]
    if not made.command:
        return [" && ".join(lines)] if lines else []
    lines += ["mkdir -p /var/log", f"type {shlex.quote(made.command[0])}"]
    log = f"> {COMMAND_LOG} 2>&1 < /dev/null"
    return [" && ".join(lines), f"setsid {shlex.join(made.command)} {log} &"]
