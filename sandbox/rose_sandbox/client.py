"""``Sandbox``: an agent's world for Python, on a sandbox host or in this process.

    async with Sandbox(session="episode-7") as box:
        result = await box.run("make test")
        await box.checkpoint(ids)
        children = await box.fork(4)

With ``url`` (or ``ROSE_SANDBOX_URL``, token in ``ROSE_SANDBOX_TOKEN``) it calls a host. With
neither it is a host of its own in this process, for one machine: root and ``make sandbox`` are
needed, and records lie in ``folder``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import secrets
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from rose_core.sandboxes.outside import EffectsCrossed, EgressEffect
from rose_core.sandboxes.policy import ModelWait
from rose_core.sandboxes.templates import TemplateRefused
from rose_core.sandboxes.turns import OutOfTurn
from rose_sandbox import errors
from rose_sandbox.answers import Forked, SessionStatus
from rose_sandbox.errors import CannotCheckpoint, HostAway, NoTemplates
from rose_sandbox.host import COMMAND_SECONDS
from rose_sandbox.http import REFUSAL
from rose_sandbox.main import open_host
from rose_sandbox.runtimes.runtime import ExecResult, Limits
from rose_sandbox.tunnel import MESSAGE_BYTES, carry
from rose_weights.errors import Fenced
from rose_wire.heartbeat import FellSilent, Heartbeat

__all__ = ["RemoteHost", "Sandbox", "Sandboxes"]

LOG = logging.getLogger(__name__)

URL, TOKEN = "ROSE_SANDBOX_URL", "ROSE_SANDBOX_TOKEN"
ROUTER, ROUTER_TOKEN = "ROSE_ROUTER_URL", "ROSE_TURN_TOKEN"
_ANSWER_SECONDS = 60.0
"""Beyond a command's own limit: a restore of the largest sandbox that fits a host."""


_CONNECT_SECONDS = 5.0
"""To a host that is there; one whose machine is gone says nothing at all."""
_CLOSE_SECONDS = 1.0
"""For a host to say that it has heard of a tunnel's end; one that is silent never does."""


class Sandboxes(Protocol):
    """What ``Sandbox`` needs of a host, near or far."""

    async def create(
        self,
        session: str,
        *,
        image: str,
        limits: Limits,
        environment: Mapping[str, str],
        folder: str,
    ) -> SessionStatus:
        """See ``Host``; so for all of these."""
        ...

    async def exec(
        self, session: str, command: str, within: float, *, name: str | None, shell: str | None
    ) -> ExecResult:
        """See ``Host``."""
        ...

    async def read_file(self, session: str, path: str) -> bytes:
        """See ``Host``."""
        ...

    async def write_file(self, session: str, path: str, data: bytes, mode: int) -> None:
        """See ``Host``."""
        ...

    async def connect(self, session: str, port: int) -> socket.socket:
        """See ``Host``."""
        ...

    async def turn_began(
        self,
        session: str,
        ids: Sequence[int],
        *,
        weight_versions: Sequence[str],
        wait: ModelWait | None,
    ) -> SessionStatus:
        """See ``Host``."""
        ...

    async def tokens_ready(self, session: str) -> SessionStatus:
        """See ``Host``."""
        ...

    async def checkpoint(self, session: str, ids: Sequence[int]) -> SessionStatus:
        """See ``Host``."""
        ...

    async def suspend(self, session: str) -> SessionStatus:
        """See ``Host``."""
        ...

    async def fork(self, session: str, n: int, turn: int | None, *, name: str) -> Forked:
        """See ``Host``."""
        ...

    async def end(self, session: str, *, forget: bool) -> None:
        """See ``Host``."""
        ...

    async def close(self) -> None:
        """See ``Host``."""
        ...


class _OneAddress(AbstractResolver):
    """One address of each name, and the same one as long as the name has it.

    A name with several addresses is a host at each (the chart's are), and a session is at one.
    """

    def __init__(self) -> None:
        self._all: AbstractResolver = aiohttp.DefaultResolver()
        self._kept: dict[str, str] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """See ``AbstractResolver``."""
        found = await self._all.resolve(host, port, family)
        kept = [one for one in found if one["host"] == self._kept.get(host)]
        kept = kept or [secrets.choice(found)]
        self._kept[host] = kept[0]["host"]
        return kept

    async def close(self) -> None:
        """See ``AbstractResolver``."""
        await self._all.close()


class RemoteHost:
    """A host over HTTP; raises what the host raised.

    One that falls silent ends every call and tunnel within seconds (``rose_wire.heartbeat``).

    Args:
        url: of the host.
        token: that it asks for.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self._url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limit = aiohttp.ClientTimeout(total=5 * _ANSWER_SECONDS, sock_connect=_CONNECT_SECONDS)
        same = _OneAddress()
        one = aiohttp.TCPConnector(resolver=same, use_dns_cache=False)
        self._http = aiohttp.ClientSession(headers=headers, timeout=limit, connector=one)
        # In a line of its own: calls that fill the other one must not look like silence.
        beside = aiohttp.TCPConnector(resolver=same, use_dns_cache=False)
        self._beside = aiohttp.ClientSession(connector=beside)
        self._life = Heartbeat(self._ask)
        self._tunnels: set[asyncio.Task[None]] = set()

    async def create(
        self,
        session: str,
        *,
        image: str,
        limits: Limits,
        environment: Mapping[str, str],
        folder: str,
    ) -> SessionStatus:
        """See ``Host``; so for all of these."""
        body = {
            "session": session,
            "image": image,
            "limits": asdict(limits),
            "environment": dict(environment),
            "folder": folder,
        }
        return SessionStatus(**await self._call("POST", "", body))

    async def create_of_template(
        self, session: str, template: str, environment: Mapping[str, str]
    ) -> tuple[SessionStatus, tuple[str, ...]]:
        """Start a sandbox of a template; also its fields that say nothing of a sandbox.

        Raises:
            NoTemplates, UnknownTemplate, TemplateRefused: there is none, or it asks for more.
        """
        body = {"session": session, "template": template, "environment": dict(environment)}
        reply = await self._call("POST", "", body)
        passed_over = tuple(reply.pop("template")["passed_over"])
        return SessionStatus(**reply), passed_over

    async def exec(
        self, session: str, command: str, within: float, *, name: str | None, shell: str | None
    ) -> ExecResult:
        """See ``Host``."""
        body = {"command": command, "within": within, "name": name, "shell": shell}
        reply = await self._call("POST", f"/{session}/exec", body, within)
        streams = {one: base64.b64decode(reply[one]) for one in ("stdout", "stderr")}
        return ExecResult(**{**reply, **streams})

    async def read_file(self, session: str, path: str) -> bytes:
        """See ``Host``."""
        return await self._bytes("GET", f"/{session}/files", {"path": path})

    async def write_file(self, session: str, path: str, data: bytes, mode: int) -> None:
        """See ``Host``."""
        asked = {"path": path, "mode": f"{mode:o}"}
        await self._bytes("PUT", f"/{session}/files", asked, data)

    async def connect(self, session: str, port: int) -> socket.socket:
        """See ``Host``; the connection is carried by the host's own (``tunnel``)."""
        try:
            # What all calls have is for files.
            async with self._life.waited_for(), asyncio.timeout(_ANSWER_SECONDS):
                line = await self._http.ws_connect(
                    f"{self._url}/sessions/{session}/tunnel/{port}",
                    max_msg_size=MESSAGE_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_SECONDS),
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.headers is None or REFUSAL not in error.headers:
                raise HostAway(f"{self._url} answered {error.status}: no tunnel") from error
            body = json.loads(error.headers[REFUSAL])
            raise _error(str(body["error"]), str(body["message"])) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise HostAway(f"{self._url} does not answer: {error}") from error
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=theirs)
        what = f"port {port} of {session}"
        task = asyncio.create_task(_carried(self._life, line, (reader, writer), what))
        self._tunnels.add(task)
        task.add_done_callback(self._tunnels.discard)
        return ours

    async def state(self, session: str) -> SessionStatus:
        """See ``Host``."""
        return SessionStatus(**await self._call("GET", f"/{session}", None))

    async def turn_began(
        self,
        session: str,
        ids: Sequence[int],
        *,
        weight_versions: Sequence[str],
        wait: ModelWait | None,
    ) -> SessionStatus:
        """See ``Host``."""
        body = {
            "ids": list(ids),
            "weight_versions": list(weight_versions),
            "wait": asdict(wait) if wait is not None else None,
        }
        return SessionStatus(**await self._call("POST", f"/{session}/turn", body))

    async def tokens_ready(self, session: str) -> SessionStatus:
        """See ``Host``."""
        return SessionStatus(**await self._call("POST", f"/{session}/ready", {}))

    async def checkpoint(self, session: str, ids: Sequence[int]) -> SessionStatus:
        """See ``Host``."""
        return SessionStatus(
            **await self._call("POST", f"/{session}/checkpoint", {"ids": list(ids)})
        )

    async def restore(
        self, session: str, turn: int | None = None, *, flag: bool = False, tokens: str = ""
    ) -> dict[str, Any]:
        """See ``Host``; the answer as ``http`` writes it.

        The fence is asked for first. So a host that falls silent before it reads this, and wakes up
        when the session lives elsewhere, does not take it over from there.
        """
        fence = (await self._call("GET", f"/{session}/fence", None))["fence"]
        crossing = "flag" if flag else "refuse"
        body = {"turn": turn, "crossing": crossing, "tokens": tokens, "over": fence}
        return await self._call("POST", f"/{session}/restore", body)

    async def suspend(self, session: str) -> SessionStatus:
        """See ``Host``."""
        return SessionStatus(**await self._call("POST", f"/{session}/suspend", {}))

    async def fork(self, session: str, n: int, turn: int | None, *, name: str = "") -> Forked:
        """See ``Host``."""
        body = _fork_body(n, turn, name)
        made = await self._call("POST", f"/{session}/fork", body)
        return msgspec.convert(made, Forked)

    async def end(self, session: str, *, forget: bool) -> None:
        """See ``Host``."""
        await self._bytes("DELETE", f"/{session}", {"forget": str(forget).lower()})

    async def close(self) -> None:
        """Hang up; sandboxes live on."""
        for task in self._tunnels:
            task.cancel()
        await asyncio.gather(*self._tunnels, return_exceptions=True)
        await self._http.close()
        await self._beside.close()

    async def answers(self) -> bool:
        """Whether the host says that it lives; a few seconds at most."""
        return await self._life.answers()

    async def _ask(self) -> None:
        async with self._beside.get(f"{self._url}/healthz"):
            pass  # whatever it says, it lives

    async def _call(
        self, method: str, path: str, body: object, within: float = 0.0
    ) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=within + _ANSWER_SECONDS, sock_connect=_CONNECT_SECONDS)
        try:
            async with (
                self._life.waited_for(),
                self._http.request(
                    method, f"{self._url}/sessions{path}", json=body, timeout=limit
                ) as answer,
            ):
                await _check(answer)
                reply: dict[str, Any] = await answer.json()
                return reply
        except (aiohttp.ClientError, TimeoutError) as error:
            raise HostAway(f"{self._url} does not answer: {error}") from error

    async def _bytes(
        self, method: str, path: str, query: Mapping[str, str], data: bytes | None = None
    ) -> bytes:
        try:
            async with (
                self._life.waited_for(),
                self._http.request(
                    method, f"{self._url}/sessions{path}", params=query, data=data
                ) as answer,
            ):
                await _check(answer)
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise HostAway(f"{self._url} does not answer: {error}") from error


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.ok:
        return
    try:
        reply = await answer.json()
        name, text = str(reply["error"]), str(reply["message"])
    except (ValueError, KeyError, TypeError, aiohttp.ClientError) as error:
        raise HostAway(f"{answer.url} answered {answer.status}") from error
    if name == "EffectsCrossed":
        raise EffectsCrossed(tuple(EgressEffect(**one) for one in reply["effects"]))
    if name == "CannotCheckpoint":
        raise CannotCheckpoint(str(reply["what"]), text)
    _raise(name, text)


async def _carried(
    life: Heartbeat,
    line: aiohttp.ClientWebSocketResponse,
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    what: str,
) -> None:
    try:
        async with life.waited_for():
            _, problem = await carry(line, *streams)
    except FellSilent as error:
        problem = f"its host has fallen silent: {error}"
    if problem:  # a socket that ends says nothing
        LOG.warning("the tunnel to %s has ended: %s", what, problem)


def _raise(name: str, text: str) -> NoReturn:
    raise _error(name, text)


def _error(name: str, text: str) -> Exception:
    others: dict[str, type[Exception]] = {
        "NotAllowed": HostAway,
        "Fenced": Fenced,
        "OutOfTurn": OutOfTurn,
        "TemplateRefused": TemplateRefused,
        "ValueError": ValueError,
    }
    made: Exception = others.get(name, getattr(errors, name, HostAway))(text)
    return made


def sandbox_address(url: str = "", token: str = "") -> tuple[str, str]:
    """Of a host and its token: as given, or what the environment says."""
    return url or os.environ.get(URL, ""), token or os.environ.get(TOKEN, "")


class Sandbox:
    """A sandbox for as long as a block lasts.

    Args:
        session: of the trajectory, as at the router; made up where none is given.
        image, limits, environment, folder: as in ``SandboxSpec``.
        url, token: of a host; by default what the environment says, else this process.
        router, router_token: where the session's turns are sampled; by default what the environment
            says. A fork is then one of sandbox and session.
        at: a folder for a host in this process.
        host: one that is there already, which this does not close.
        existing: the session has a sandbox: a child of ``fork``.
        template: a ``SandboxTemplate`` of the host's namespace: image, limits and folder are its.

    Raises:
        ValueError: image, limits or folder are given beside a template.

    Attributes:
        passed_over: fields of the template that say nothing of a sandbox.
    """

    def __init__(
        self,
        *,
        session: str = "",
        image: str = "base",
        limits: Limits | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str = "/home",
        url: str = "",
        token: str = "",
        router: str = "",
        router_token: str = "",
        at: Path = Path("/var/lib/rose/sandboxes"),
        host: Sandboxes | None = None,
        existing: bool = False,
        template: str = "",
    ) -> None:
        if template and (image, limits, folder) != ("base", None, "/home"):
            raise ValueError("image, limits and folder are the template's; leave them out")
        self._template, self.passed_over = template, tuple[str, ...]()
        self.session = session or uuid.uuid4().hex
        self._limits, self._image, self._folder = limits or Limits(), image, folder
        self._environment = dict(environment or {})
        self._url, self._token = sandbox_address(url, token)
        self._router = router or os.environ.get(ROUTER, "")
        self._router_token = router_token or os.environ.get(ROUTER_TOKEN, "")
        self._at, self._given, self._host, self._existing = at, host, host, existing

    async def __aenter__(self) -> Self:
        """Start it.

        Raises:
            Unavailable: no host is named, and this machine lacks a part.
            UnknownImage, AlreadyThere, HostAway: as the host says.
        """
        if self._host is None and self._url:
            self._host = RemoteHost(self._url, self._token)
        elif self._host is None:
            self._host = open_host(self._at, str(self._at / "store"), "embedded")
        if not self._existing:
            try:
                await self._create(self._host)
            except BaseException:  # also when cancelled: ``__aexit__`` will not run
                await self.leave()
                raise
        return self

    async def _create(self, host: Sandboxes) -> None:
        if not self._template:
            await host.create(
                self.session,
                image=self._image,
                limits=self._limits,
                environment=self._environment,
                folder=self._folder,
            )
            return
        if not isinstance(host, RemoteHost):
            raise NoTemplates("a host in this process reads no templates; name one by url=")
        _, self.passed_over = await host.create_of_template(
            self.session, self._template, self._environment
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it; its records stay where the block failed, so that it can be restored."""
        try:
            await self._there.end(self.session, forget=kind is None)
        finally:
            await self.leave()

    async def run(
        self,
        command: str,
        within: float = COMMAND_SECONDS,
        *,
        name: str | None = None,
        shell: str | None = "main",
    ) -> ExecResult:
        """Run a command; ``cd`` and ``export`` last until the next one."""
        return await self._there.exec(self.session, command, within, name=name, shell=shell)

    async def read(self, path: str) -> bytes:
        """A file's bytes."""
        return await self._there.read_file(self.session, path)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file."""
        await self._there.write_file(self.session, path, data, mode)

    async def connect(self, port: int) -> socket.socket:
        """A TCP connection to a server in it; a non-blocking socket.

        By a host elsewhere it ends as ``rose_core.sandboxes.tunnels`` says.

        Raises:
            NotListening: nothing answers there.
            TooManyTunnels: the sandbox has as many as its host allows.
        """
        return await self._there.connect(self.session, port)

    async def checkpoint(self, ids: Sequence[int] = ()) -> SessionStatus:
        """Make this moment recoverable, with the token ids that led to it."""
        return await self._there.checkpoint(self.session, ids)

    async def began(
        self,
        ids: Sequence[int] = (),
        *,
        weight_versions: Sequence[str] = (),
        wait: ModelWait | None = None,
    ) -> SessionStatus:
        """The model is asked: what the turn changed is saved while it thinks."""
        return await self._there.turn_began(
            self.session, ids, weight_versions=weight_versions, wait=wait
        )

    async def ready(self) -> SessionStatus:
        """The model has answered; returns when the sandbox may act."""
        return await self._there.tokens_ready(self.session)

    async def suspend(self) -> SessionStatus:
        """Free its memory until it is needed."""
        return await self._there.suspend(self.session)

    async def fork(self, n: int, turn: int | None = None, *, name: str = "") -> list[Sandbox]:
        """Children that go on from a turn; each is ended by ``async with`` of its own.

        A fork with a ``name`` is made once: asked again, also after a ``HostAway``, it gives the
        same children.

        With a router the children are sessions there, too, whose first turns go where the prefix's
        keys are.

        Raises:
            UnknownTurn: the turn has no record; ``checkpoint`` makes one.
        """
        if self._router and self._url:
            names = await self._fork_with_session(_fork_body(n, turn, name))
        else:
            names = (await self._there.fork(self.session, n, turn, name=name)).sessions
        return [
            Sandbox(
                session=name,
                host=self._there,
                existing=True,
                url=self._url,
                router=self._router,
                router_token=self._router_token,
            )
            for name in names
        ]

    async def _fork_with_session(self, body: dict[str, object]) -> tuple[str, ...]:
        at = f"{self._router.rstrip('/')}/sessions/{quote(self.session, safe='')}/fork"
        token = self._router_token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=limit) as http,
                http.post(at, json=body) as answer,
            ):
                listing = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise HostAway(f"{self._router} does not answer: {error}") from error
        if not answer.ok:
            _raise(str(listing.get("type", "")), str(listing.get("message", answer.status)))
        return tuple(listing["sessions"])

    @property
    def _there(self) -> Sandboxes:
        if self._host is None:
            raise RuntimeError("a Sandbox is used inside `async with`")
        return self._host

    async def leave(self) -> None:
        """Let go of it; it lives on."""
        if self._given is None and self._host is not None:
            await self._host.close()
            self._host = None


def _fork_body(n: int, turn: int | None, name: str) -> dict[str, object]:
    # Hosts and routers from before forks had names refuse a field that they do not know.
    return {"n": n, "turn": turn, **({"name": name} if name else {})}
