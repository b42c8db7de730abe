"""Sandboxes as a team's ``SandboxTemplate`` describes them (agent-sandbox, ``v1beta1``).

Templates are read from one namespace, when a sandbox is asked for, and nothing is written: claims,
warm pools and ``Sandbox`` objects are their controller's. ``rose_core.sandboxes.templates`` says
what of a template is honoured. Next step: ``cluster_templates`` reads them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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
    UnknownImage,
)
from rose_sandbox.host import Host
from rose_sandbox.runtimes.runtime import Limits

COMMAND_LOG = "/var/log/template-command.log"
"""In the sandbox: what a template's command says, as ``kubectl logs`` shows it of a pod."""
_START_SECONDS = 30.0
"""To make folders and to begin a command, not to end it."""


class TemplateSource(Protocol):
    """Where templates are read."""

    async def read(self, name: str) -> Mapping[str, Any]:
        """The specification of a template.

        Raises:
            UnknownTemplate, NoTemplates, Unavailable: there is none of that name; the cluster has
                none at all, or does not let this host see them; it does not answer.
        """
        ...


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
