"""Who may call: bearer tokens of a lease, from a file that a Secret is mounted as.

The file holds one token per line and is read again when it has changed, so a token is replaced by
writing the new one beside the old one, moving the callers, and removing the old one. A line may
begin with the name of a job: then the token's turns are that job's, which no hint can change, and
it ends no other job's turns.

Where the router knows the keys of its cluster, service accounts of the lease's namespace are
believed too, and nothing has to be handed out: the token is signed for this lease alone.

| audience of the token | opens |
|---|---|
| ``rose-lease/NAMESPACE/NAME`` | everything: the trainer's |
| ``rose-turns/NAMESPACE/NAME`` | turns, and no route of ``CONTROL``: for agents' harnesses |

Callers without an account there are named by the lease itself (``rose_router.callers``). Who may
call no longer is cut off within a second, also in the middle of an answer (``RunningRequests``).

Who changes what concerns all turns of the lease, or tries to, is written down
(``rose_router.access``): the route, the lease, the caller's name and address, and how it ended.
No token is, good or wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from rose_core import rights
from rose_core.rights import CallerParty, Listener
from rose_router.callers import NamedCallers
from rose_router.errors import Forbidden, NotAllowed, RouterError
from rose_wire.service_accounts import ServiceAccounts

ENVIRONMENT = "ROSE_TURN_TOKEN"
ACCESS = logging.getLogger("rose_router.access")

_LOOK_SECONDS = 2.0
_MOST_KNOWN = 4096
_AGAIN_SECONDS = 1.0
"""How often callers of requests that run are asked for again."""

_TRAINERS = rights.paths(rights.allowed(Listener.ROUTER, CallerParty.TRAINER))
_HARNESSES = rights.paths(rights.allowed(Listener.ROUTER, CallerParty.HARNESS))
# What concerns the turns of all callers, or shows them.
CONTROL = _TRAINERS - _HARNESSES
_WRITTEN_DOWN = (CONTROL | {"/abort_request"}) - {"/trajectories", "/init_weight_transfer_engine"}

# Probes and scrapers bring no token; these pages say nothing about turns.
OPEN_PATHS = rights.paths(rights.allowed(Listener.ROUTER, CallerParty.ANYBODY))


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        job: whose turns these are; empty = the lease's.
        limited: may ask for turns, and for nothing that concerns those of others.
    """

    name: str
    job: str = ""
    limited: bool = False


_ANYBODY = Caller("anybody")
_NOBODY_KNOWN = Caller("nobody known")
_CALLER = web.RequestKey("caller", Caller)


def caller_of(request: web.Request) -> Caller:
    """Who has sent a request."""
    found: Caller = request.get(_CALLER, _ANYBODY)
    return found


@dataclass(frozen=True, slots=True)
class _Known:
    """An account's token that was good: a signature costs as much as a turn.

    Attributes:
        generation: of the keys that it was good by.
        expires: Unix seconds, its own.
    """

    caller: Caller
    generation: int
    expires: float


class Tokens:
    """The tokens that are good now.

    Args:
        file: one token per line; ``None`` = the environment's ``ROSE_TURN_TOKEN``, else nobody is
            asked.
        given: a token beside the file's.
        accounts: whose service accounts are believed; ``None`` = nobody's.
        callers: whom the lease names besides; ``None`` = nobody.
        lease: ``namespace/name``, for the audiences of their tokens.
        required: nobody is heard without a token, also while none is known that would be good.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is there but holds no token; then nobody could call, or anybody.
    """

    def __init__(
        self,
        file: Path | None = None,
        given: str = "",
        *,
        accounts: ServiceAccounts | None = None,
        callers: NamedCallers | None = None,
        lease: str = "",
        required: bool = False,
    ) -> None:
        self._file, self._required = file, required
        self._accounts, self._callers, self._lease = accounts, callers, lease
        self._known: dict[str, _Known] = {}
        self._fixed = [given] if given else []
        if file is None and os.environ.get(ENVIRONMENT):
            self._fixed.append(os.environ[ENVIRONMENT])
        self._looked = -_LOOK_SECONDS
        self._changed = 0
        self._tokens: list[tuple[bytes, str]] = [(token.encode(), "") for token in self._fixed]
        if file is not None:
            self._read(file)

    @property
    def lease(self) -> str:
        """Whose callers these are, ``namespace/name``; empty where nobody said."""
        return self._lease

    @property
    def asked(self) -> bool:
        """Whether callers must bring one."""
        return self._required or bool(self._tokens) or self._accounts is not None

    def good(self, authorization: str) -> bool:
        """Whether this ``Authorization`` header is one of them."""
        return self.job_of(authorization) is not None

    def caller_of(self, authorization: str) -> Caller | None:
        """Who shows this ``Authorization`` header; ``None``: nobody known."""
        job = self.job_of(authorization)
        if job is not None:
            return Caller(f"job {job}" if job else "token", job)
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        named = self._callers.find(token.strip()) if self._callers is not None else None
        if named is not None:
            return Caller(f"caller {named.name}", limited=named.turns_only)
        return None if self._accounts is None else self._account(self._accounts, token.strip())

    def _account(self, accounts: ServiceAccounts, token: str) -> Caller | None:
        known = self._known.get(token)
        if known is not None:
            if known.generation == accounts.generation and accounts.now() < known.expires:
                return known.caller
            del self._known[token]
        for audience in ("lease", "turns"):
            account = accounts.account_of(token, f"rose-{audience}/{self._lease}")
            if account is None:
                continue
            # Another namespace could ask for this audience as well: it is the lease's that counts.
            if account.name.partition("/")[0] == self._lease.partition("/")[0] != "":
                made = Caller(f"serviceaccount {account.name}", "", limited=audience == "turns")
                while len(self._known) >= _MOST_KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[token] = _Known(made, accounts.generation, account.expires)
                return made
        return None

    def complaint(self, authorization: str) -> str:
        """Why nobody is heard with this ``Authorization`` header, and what to do about it."""
        namespace, _, name = self._lease.partition("/")
        scheme, _, token = authorization.partition(" ")
        if not token.strip() or scheme.lower() != "bearer":
            wrong = "no bearer token came with the request"
        elif self._accounts is None:
            wrong = "the bearer token is none of this router's"
        else:
            wrong = self._accounts.complaint(token.strip(), f"rose-lease/{self._lease}", namespace)
        wrong += "; send Authorization: Bearer TOKEN"
        if self._accounts is None:
            return f"{wrong}. Whoever runs this router hands tokens out"
        make = (
            f"kubectl create token ACCOUNT --namespace {namespace} "
            f"--audience rose-lease/{namespace}/{name} --duration 8h"
        )
        outside = f"from outside the cluster: rose caller grant NAME --lease {name} -n {namespace}"
        return f"{wrong}. A service account's token for this lease: {make}; {outside}"

    def job_of(self, authorization: str) -> str | None:
        """The job that this ``Authorization`` header names, empty for none; ``None``: no token."""
        self._refresh()
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode(errors="replace")
        # All are compared, always: the time taken tells nothing.
        jobs = [job for known, job in self._tokens if hmac.compare_digest(given, known)]
        return jobs[0] if jobs and scheme.lower() == "bearer" else None

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        try:
            if self._file.stat().st_mtime_ns != self._changed:
                self._read(self._file)
        except (OSError, ValueError):
            return  # the Secret is being replaced; the tokens known stay good

    def _read(self, file: Path) -> None:
        changed = file.stat().st_mtime_ns
        try:
            lines = [line.split() for line in file.read_text().splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} holds no text; write one token per line") from error
        if not lines:
            message = f"{file} holds no token; write one per line"
            raise ValueError(message)
        for number, line in enumerate(lines, 1):
            if len(line) > 2:
                message = f"{file}, token {number}: expected TOKEN or JOB TOKEN"
                raise ValueError(message)
        found = [(line[-1], line[0] if len(line) == 2 else "") for line in lines]
        given = [(token, "") for token in self._fixed] + found
        self._tokens = [(token.encode(), job) for token, job in given]
        self._changed = changed


_NOBODY_ASKED: AbstractContextManager[None] = contextlib.nullcontext()


class _Held:
    """A request in the list for as long as it runs; entered for every one of them."""

    __slots__ = ("_entry", "_number", "_shown")

    def __init__(
        self, shown: dict[int, tuple[web.Request, str]], request: web.Request, header: str
    ) -> None:
        self._shown, self._number, self._entry = shown, id(request), (request, header)

    def __enter__(self) -> None:
        self._shown[self._number] = self._entry

    def __exit__(self, *_: object) -> None:
        del self._shown[self._number]


class RunningRequests:
    """Requests of callers, who are asked for again while these run.

    A token ends at its second and a caller who was taken off the list is heard no longer, also in
    the middle of an answer: the connection is closed, and the next request reads why.

    Attributes:
        loops: what looks at them, while the application runs.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.loops: list[asyncio.Task[None]] = []
        # By number: requests are mappings, which have no hash.
        self._shown: dict[int, tuple[web.Request, str]] = {}

    def hold(self, request: web.Request, shown: str | None) -> AbstractContextManager[object]:
        """While a request runs whose caller has shown this header; ``None``: nobody was asked."""
        return _NOBODY_ASKED if shown is None else _Held(self._shown, request, shown)

    def look(self) -> None:
        """Close the connections of those who may not call any more."""
        for request, shown in list(self._shown.values()):
            if self._tokens.caller_of(shown) is None and request.transport is not None:
                text = "%s of lease %s by %s from %s: cut, the caller is no longer heard"
                ACCESS.info(
                    *(
                        text,
                        request.path,
                        self._tokens.lease,
                        caller_of(request).name,
                        request.remote,
                    )
                )
                request.transport.abort()

    async def watch(self, _app: web.Application) -> AsyncIterator[None]:
        """Look again and again, from the start of the application to its end."""
        watching = asyncio.create_task(self._run())
        self.loops = [watching]
        yield
        watching.cancel()
        await asyncio.wait({watching})  # what it failed with is for whoever saw it end

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_AGAIN_SECONDS)
            self.look()


RUNNING = web.AppKey("running", RunningRequests)
"""Key of an application under which its requests that run are found."""


def middleware(tokens: Tokens, running: RunningRequests) -> Middleware:
    """Asks every caller for a token, probes and scrapers excepted."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.method != "POST" or request.path not in _WRITTEN_DOWN:
            shown = _admit(tokens, request)
            if shown is None:
                return await handler(request)
            with running.hold(request, shown):
                return await handler(request)
        outcome = "failed"
        try:
            with running.hold(request, _admit(tokens, request)):
                reply = await handler(request)
        except RouterError as error:
            outcome = f"{error.status} {error.reason}"
            raise
        else:
            outcome = str(reply.status)
            return reply
        finally:
            who = request.get(_CALLER, _NOBODY_KNOWN).name
            text = "%s of lease %s by %s from %s: %s"
            ACCESS.info(text, request.path, tokens.lease, who, request.remote, outcome)

    return check


def _admit(tokens: Tokens, request: web.Request) -> str | None:
    """Who calls, written into the request too.

    Returns:
        What was shown; ``None`` where nobody is asked.

    Raises:
        NotAllowed: nobody known.
        Forbidden: somebody whose token is for less.
    """
    caller, shown = _ANYBODY, None
    if tokens.asked and request.path not in OPEN_PATHS:
        shown = request.headers.get("Authorization", "")
        if not shown and (key := request.headers.get("x-api-key")):
            shown = f"Bearer {key}"  # Anthropic's clients
        found = tokens.caller_of(shown)
        if found is None:
            raise NotAllowed("NotAllowed", tokens.complaint(shown))
        caller = found
    request[_CALLER] = caller
    if caller.limited and _route(request) not in _HARNESSES:
        message = f"{request.path}: this token is for turns only; the trainer's may"
        raise Forbidden("TurnsOnly", message)
    return shown


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return request.path if resource is None else resource.canonical
