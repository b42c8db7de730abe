"""Where a session's sandbox is, and calls to its host.

A host says of each session whether it has it, and in which moment that is (``ETag``). A name with
several addresses (a headless Service of a DaemonSet) is a host at each. What was found is kept
until a call fails; that a session has no sandbox is believed for ``ABSENT_SECONDS``. A host that
did not answer is left alone for ``REST_SECONDS``, so that one that is dead costs one call and not
one for each session.

Forks and restores may take long, so a host is asked beside them whether it lives. A restore names
the fence that the session had: a host that slept meanwhile takes it from nobody when it wakes up.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from rose_core.sandboxes.heartbeats import Heartbeats
from rose_core.unreadable import UNREADABLE
from rose_router.errors import (
    BadRequest,
    Conflict,
    NotFound,
    Overloaded,
    RouterError,
    Unprocessable,
)
from rose_router.turns.turn_clock import Body, StepOutcome, TurnLateness
from rose_wire.heartbeat import FellSilent, Heartbeat

LOG = logging.getLogger(__name__)

CALL_SECONDS = 5.0
"""A host that holds a reply for its record takes 2 s; nobody waits for this but the next step."""
LONG_SECONDS = 60.0
"""Of a fork or a restore of the largest sandbox that fits a host."""
REST_SECONDS = 5.0
ABSENT_SECONDS = 5.0
ADDRESS_SECONDS = 10.0
"""How long the addresses of a name are believed."""
_MOST_KNOWN = 65536
_AWAY = 599
"""Stands for no answer; none of HTTP's."""
_KINDS = {400: BadRequest, 404: NotFound, 409: Unprocessable, 410: Conflict}
"""What a host's answer is to callers; of 409s none becomes another one by asking again."""

_PASSED = "passed"
"""Named instead of the moment of a turn that can have no record: no session is ever in it."""
_STILL, _PROMPT = "Rose-Still-Seconds", "Rose-Prompt-Tokens"
"""Headers that ``rose_sandbox.http`` describes."""
_SECONDS = re.compile(r"[0-9]{1,12}\.[0-9]{1,9}").fullmatch
_NO_HEADERS: Mapping[str, str] = {}

Resolve = Callable[[str, int], Awaitable[tuple[str, ...]]]
Name = tuple[str, str]


@dataclass(frozen=True)
class _Answer:
    """What a host says to a call.

    Attributes:
        status: of HTTP; ``_AWAY`` where it does not answer.
        document: its body.
        moment: of the session, where the host says it.
        still: seconds since the last act of the session's agent began, where the host says it.
    """

    status: int
    document: dict[str, Any]
    moment: str = ""
    still: float | None = None


async def addresses_of(name: str, port: int) -> tuple[str, ...]:
    """Addresses of a name, as they stand in a URL.

    Raises:
        OSError: the name is not known now.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(entry[4][0]) for entry in found})
    return tuple(f"[{one}]" if ":" in one else one for one in addresses)


class SandboxHosts:
    """The hosts of a lease's jobs.

    Args:
        urls: of hosts, by job.
        token: that they ask for, or what reads it at each call.
        http: for calls.
        clock: monotonic seconds.
        resolve: the addresses of a name.
        beats: by which a host counts as lost that somebody waits for.
    """

    def __init__(
        self,
        urls: Mapping[str, tuple[str, ...]],
        token: str | Callable[[], str],
        http: aiohttp.ClientSession,
        clock: Callable[[], float],
        resolve: Resolve = addresses_of,
        *,
        beats: Heartbeats = Heartbeats(),  # noqa: B008 - frozen
    ) -> None:
        self._urls, self._http, self._clock, self._resolve = urls, http, clock, resolve
        self._token = token
        self._where: OrderedDict[Name, str] = OrderedDict()
        self._absent: OrderedDict[Name, float] = OrderedDict()
        self._resting: dict[str, float] = {}
        self._addresses: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._beats = beats

    def serves(self, job: str) -> bool:
        """Whether turns of the job have hosts."""
        return job in self._urls

    async def notify(
        self,
        job: str,
        session: str,
        step: str,
        body: Body,
        *,
        lateness: TurnLateness | None = None,
        prompt: int | None = None,
    ) -> StepOutcome | None:
        """Tell the session's host a step, as ``turn_clock.NotifiedHosts`` says. Never raises."""
        headers: dict[str, str] = {} if prompt is None else {_PROMPT: str(prompt)}
        if lateness is not None:
            seen = await self._ask_it(job, session, (), None)
            if seen is None or seen.status >= 400:
                return None if seen is None else StepOutcome.UNDELIVERED
            moment = seen.moment
            if lateness.judge(seen.still):
                body, moment = lateness.body, _PASSED
            if moment:
                headers["If-Match"] = f'"{moment}"'
        answer = await self._ask_it(job, session, (step,), body, headers)
        if answer is None:
            return None
        if answer.status == 412:
            return StepOutcome.LATE
        if answer.status not in {404, 409, 410, _AWAY} and answer.status >= 400:
            details = answer.status, step, answer.document
            LOG.warning("session %s: its host answered %d to %s: %s", session, *details)
        return StepOutcome.DELIVERED if answer.status < 400 else StepOutcome.UNDELIVERED

    async def _ask_it(
        self,
        job: str,
        session: str,
        path: tuple[str, ...],
        body: Body | None,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> _Answer | None:
        """The answer of the session's host, wherever it is by now; None: no host has it."""
        for _ in range(2):
            try:
                url = await self.find(job, session)
                if url is None:
                    return None
                asked = None if body is None else body()
                answer = await self._call(url, (session, *path), asked, CALL_SECONDS, headers)
            except RouterError as error:
                LOG.info("session %s: %s", session, error)
                self._where.pop((job, session), None)
                return _Answer(_AWAY, {})
            if answer.status not in {404, 410}:
                return answer
            # It ended, or another host has it now, which is looked for once.
            self._where.pop((job, session), None)
        return answer

    def _headers(self) -> dict[str, str]:
        token = self._token() if callable(self._token) else self._token
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def find(self, job: str, session: str) -> str | None:
        """The URL of the host that has a session; None: none of those that answer."""
        name = (job, session)
        if (known := self._where.get(name)) is not None and not self._rests(known):
            self._where.move_to_end(name)
            return known
        if self._clock() < self._absent.get(name, 0.0):
            return None
        asked = [url for url in await self.urls(job) if not self._rests(url)]
        for url, has in zip(
            asked, await asyncio.gather(*(self._has(url, session) for url in asked)), strict=True
        ):
            if has:
                _keep(self._where, name, url)
                self._absent.pop(name, None)
                return url
        _keep(self._absent, name, self._clock() + ABSENT_SECONDS)
        return None

    async def go_on(
        self, job: str, session: str, step: str, body: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Fork or restore a session: at the host that has it, else at any: its records are shared.

        Returns:
            The host's URL, and its answer.

        Raises:
            BadRequest, NotFound, Conflict, Unprocessable: as the host says.
            Overloaded: no host answers.
        """
        found = await self.find(job, session)
        # Also those that lately did not answer: whoever asks for this waits for it.
        urls = [url for url in await self.urls(job) if url != found]
        waiting = [*([found] if found is not None else []), *urls]
        tried: set[str] = set()
        last: RouterError | None = None
        while waiting:
            url = waiting.pop(0)
            tried.add(url)
            try:
                answer = await self._long(url, session, step, body)
            except Overloaded as error:
                last = error
                if not waiting:  # the successor of one that died has another address
                    self._addresses.clear()
                    waiting = [one for one in await self.urls(job) if one not in tried]
                continue
            status, document = answer.status, answer.document
            if status < 400:
                return url, document
            kind = _KINDS.get(status, Overloaded)
            raise kind(
                str(document.get("error", "SandboxHost")), str(document.get("message", status))
            )
        raise last or Overloaded(
            "NoSandboxHost", "no sandbox host answers; try again later", retry_after=5
        )

    def settle(self, job: str, session: str, url: str) -> None:
        """A session's sandbox is at that host."""
        _keep(self._where, (job, session), url)
        self._absent.pop((job, session), None)

    def unsettle(self, job: str, session: str) -> None:
        """A session's sandbox may be at any host: its next turn asks them all."""
        self._where.pop((job, session), None)
        self._absent.pop((job, session), None)

    async def urls(self, job: str) -> tuple[str, ...]:
        """All hosts of a job, by address."""
        found: list[str] = []
        for url in self._urls.get(job, ()):
            found += await self._each(url)
        return tuple(found)

    async def _each(self, url: str) -> tuple[str, ...]:
        parts = urlsplit(url)
        if parts.scheme == "https" or parts.hostname is None:
            return (url,)  # a certificate names the name
        until, known = self._addresses.get(url, (0.0, ()))
        if self._clock() < until:
            return known
        port = parts.port or 80
        try:
            made = await self._resolve(parts.hostname, port)
        except OSError as error:
            LOG.warning("sandbox hosts at %s: %s", url, error)
            return known
        fresh = tuple(f"http://{one}:{port}" for one in made)
        self._addresses[url] = (self._clock() + ADDRESS_SECONDS, fresh)
        return fresh

    async def _has(self, url: str, session: str) -> bool:
        try:
            answer = await self._call(url, (session,), None, CALL_SECONDS)
        except RouterError:
            return False
        return answer.status < 400

    async def _long(self, url: str, session: str, step: str, body: dict[str, Any]) -> _Answer:
        """A fork or a restore; as ``_call``."""
        life = Heartbeat(lambda: self._ask(url), self._beats)
        try:
            async with life.waited_for():
                if step == "restore":
                    seen = await self._call(url, (session, "fence"), None, LONG_SECONDS)
                    if seen.status >= 400:
                        return seen
                    body = {**body, "over": seen.document.get("fence")}
                return await self._call(url, (session, step), body, LONG_SECONDS)
        except FellSilent as error:
            raise self._away(url, error) from error

    async def _ask(self, url: str) -> None:
        async with self._http.get(f"{url}/healthz"):
            pass  # whatever it says, it lives

    def _away(self, url: str, error: Exception) -> Overloaded:
        self._resting[url] = self._clock() + REST_SECONDS
        message = f"sandbox host {url} does not answer: {type(error).__name__} {error}"
        return Overloaded("NoSandboxHost", message, retry_after=5)

    async def _call(
        self,
        url: str,
        path: tuple[str, ...],
        body: dict[str, Any] | None,
        seconds: float,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> _Answer:
        """What a host says: to a POST where there is a body, else to a GET.

        Raises:
            Overloaded: it does not answer.
        """
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._http.request(
                "GET" if body is None else "POST",
                "/".join((url, "sessions", *(quote(one, safe="") for one in path))),
                data=data,
                headers={**self._headers(), **headers},
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CALL_SECONDS),
            ) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._away(url, error) from error
        try:
            document = msgspec.json.decode(raw or b"{}", type=dict[str, Any])
        except UNREADABLE:
            document = {"message": raw[:200].decode(errors="replace")}
        moment, still = answer.headers.get("ETag", "").strip('"'), answer.headers.get(_STILL, "")
        return _Answer(answer.status, document, moment, float(still) if _SECONDS(still) else None)

    def _rests(self, url: str) -> bool:
        return self._clock() < self._resting.get(url, 0.0)


def _keep(kept: OrderedDict[Name, Any], name: Name, value: object) -> None:
    kept[name] = value
    kept.move_to_end(name)
    if len(kept) > _MOST_KNOWN:
        kept.popitem(last=False)
