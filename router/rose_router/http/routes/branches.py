"""``/sessions/{key}/fork`` and ``restore``: sandbox and session together, from a turn on.

| route | body | does |
|---|---|---|
| ``fork`` | ``turn``, ``n``, ``name`` | n sandboxes and sessions that go on from a turn's record |
| ``restore`` | ``turn``, ``crossing``, ``tokens`` | both of the session itself, as they were then |
| ``turns`` | ``sessions``, ``history``, ``inherited``, ``home`` | gives sessions a conversation |

A sandbox host makes the sandboxes and says which token ids the record is bound to. The router's
session goes on from the turns that are a beginning of these ids: its own where it has them, else
those that it gave the record then. So a parent may run, be away or be gone, and the router may be
another one. First turns of children go where their parent's keys are.

``turns`` is how a router's other replicas hear of it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec
from aiohttp import web

from rose_core.rollouts.conversations import saved_turns
from rose_core.rollouts.conversations.message_tree import MessageTree, TurnNode
from rose_core.unreadable import UNREADABLE
from rose_router.errors import BadRequest, NotHere
from rose_router.http.admission.bearer import caller_of
from rose_router.http.admission.bodies import read_body
from rose_router.http.dialects.common import Hints, Whole, read_as
from rose_router.turns.request import named
from rose_router.turns.service import Service
from rose_router.turns.sessions import Home

FOR_PEERS = web.RequestKey("told", bytes)
"""What other replicas of the router are to be told at ``turns``, once a request is answered."""
MOST_CHILDREN = 64
"""As a sandbox host makes of one fork."""
MOST_NAME = 256
"""Of a fork, in characters."""
MOST_COPIES = 1 << 16
"""Turns times sessions that get them at once: a whole fork of 1,000 turns, half a second's work."""
_DIGESTS_PER_COPY = 16
"""Of messages and beginnings: as much work as a turn's copy, amply."""


class BranchingHosts(Protocol):
    """The sandbox hosts that a router knows."""

    def serves(self, job: str) -> bool:
        """Whether turns of the job have hosts."""
        ...

    async def go_on(
        self, job: str, session: str, step: str, body: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Fork or restore a session; the URL of the host that did it, and its answer."""
        ...

    def settle(self, job: str, session: str, url: str) -> None:
        """A session's sandbox is at that host."""
        ...

    def unsettle(self, job: str, session: str) -> None:
        """A session's sandbox may be at any host."""
        ...


class _Fork(msgspec.Struct, forbid_unknown_fields=True):
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHILDREN)]
    turn: Whole | None = None
    name: Annotated[str, msgspec.Meta(max_length=MOST_NAME)] = ""


class _Restore(msgspec.Struct, forbid_unknown_fields=True):
    turn: Whole | None = None
    crossing: Literal["refuse", "flag"] = "refuse"
    tokens: str = ""


class _Turns(msgspec.Struct, forbid_unknown_fields=True):
    sessions: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_CHILDREN)]
    history: bytes = b""
    inherited: bool = False
    home: tuple[str, int, str] | None = None


@dataclass(frozen=True)
class Branches:
    """Gives sessions the conversations of others.

    Args:
        tree: the router's conversations.
        service: its turns.
        hosts: of sandboxes; None: there are none.
    """

    tree: MessageTree
    service: Service
    hosts: BranchingHosts | None = None

    def history(self, job: str, session: str, ids: Sequence[int]) -> bytes:
        """What is known of a session up to these tokens, for the record of its sandbox."""
        owner = job, session
        last = self.tree.last_before(owner, ids)
        if last is None:
            return b""
        return saved_turns.to_bytes(self.tree.turns(last), self.tree.roots(owner))

    def routes(self) -> list[web.RouteDef]:
        """The handlers."""
        return [
            web.post("/sessions/{key}/fork", self._fork),
            web.post("/sessions/{key}/restore", self._restore),
            web.post("/sessions/{key}/turns", self._give),
        ]

    async def _fork(self, request: web.Request) -> web.Response:
        asked = msgspec.to_builtins(read_as(await read_body(request), _Fork))
        if not asked["name"]:
            del asked["name"]  # hosts from before forks had names refuse a field they do not know
        job, key, hosts = self._named(request)
        url, made = await hosts.go_on(job, key, "fork", asked)
        sessions = tuple(made["sessions"])
        # Of a fork with a name others may have made some before, at hosts of theirs. A host from
        # before hosts told which are here says nothing.
        here = frozenset(made.get("here", () if "name" in asked else sessions))
        for session in sessions:
            if session in here:
                hosts.settle(job, session, url)
            else:
                hosts.unsettle(job, session)
        given = self._given(job, key, sessions, made, inherited=True)
        request[FOR_PEERS] = msgspec.json.encode(given)
        known = await self._adopt(job, given)
        answer = {"sessions": sessions, "turn": made["turn"], "tokens": len(made["ids"])}
        return _json(answer | {"known_turns": known, "home": given.home and given.home[0]}, 201)

    async def _restore(self, request: web.Request) -> web.Response:
        asked = msgspec.to_builtins(read_as(await read_body(request), _Restore))
        job, key, hosts = self._named(request)
        url, made = await hosts.go_on(job, key, "restore", asked)
        hosts.settle(job, key, url)
        given = self._given(job, key, (key,), made, inherited=False)
        request[FOR_PEERS] = msgspec.json.encode(given)
        known = await self._adopt(job, given)
        made.pop("history", None)
        return _json(made | {"known_turns": known, "host": url})

    async def _give(self, request: web.Request) -> web.Response:
        try:
            given = msgspec.json.decode(await request.read(), type=_Turns)
        except UNREADABLE as error:
            raise BadRequest("InvalidTurns", str(error)) from error
        return _json({"known_turns": await self._adopt(_job(request), given)})

    def _given(
        self,
        job: str,
        parent: str,
        sessions: tuple[str, ...],
        made: dict[str, Any],
        *,
        inherited: bool,
    ) -> _Turns:
        ids: list[int] = made["ids"]
        history = _decoded(made.get("history", ""))
        turns, roots = _read(history)
        turns = _before(turns, ids)
        last = self.tree.last_before((job, parent), ids)
        # The record has more where another replica of this router had the last turns.
        if last is not None and (not turns or turns[-1].total <= last.total):
            turns, roots = self.tree.turns(last), self.tree.roots((job, parent))
        history = saved_turns.to_bytes(turns, roots)
        if _copies(turns, roots, len(sessions)) > MOST_COPIES:
            history = b""  # as of one that is too long: the sandboxes are there, and go on
        home = self.service.home_of(named(job, parent))
        where = (home.engine, min(home.tokens, len(ids)), home.version) if home else None
        return _Turns(sessions, history, inherited, where)

    async def _adopt(self, job: str, given: _Turns) -> int:
        turns, roots = _read(given.history)
        if (copies := _copies(turns, roots, len(given.sessions))) > MOST_COPIES:
            raise BadRequest(
                "InvalidTurns",
                f"sessions: {len(turns)} turns for {len(given.sessions)} sessions make {copies} "
                f"copies, over {MOST_COPIES}; give them to fewer sessions at a time",
            )
        for number, session in enumerate(given.sessions):
            if number:
                await asyncio.sleep(0)  # others' turns go on between two sessions
            self.tree.adopt((job, session), turns, roots, inherited=given.inherited)
            self.service.sandboxes.forget(named(job, session))
            if given.home is not None:
                self.service.settle(named(job, session), Home(*given.home))
        return len(turns)

    def _named(self, request: web.Request) -> tuple[str, str, BranchingHosts]:
        job = _job(request)
        if self.hosts is None or not self.hosts.serves(job):
            of = f" of job {job}" if job else ""
            message = f"no sandbox host{of} is known here; start the router with --sandbox-host"
            raise NotHere("NoSandboxHost", message)
        return job, request.match_info["key"], self.hosts


def _before(turns: Sequence[TurnNode], ids: Sequence[int]) -> list[TurnNode]:
    """Those whose ids are a beginning of the record's: of others it does not vouch."""
    for last in reversed(turns):
        if last.total <= len(ids) and last.ids() == list(ids[: last.total]):
            return [one for one in turns if one.total <= last.total]
    return []


def _copies(turns: Sequence[TurnNode], roots: Collection[bytes], sessions: int) -> int:
    """What it costs to give sessions a conversation, in copies of a turn."""
    digests = len(roots) + sum(len(one.path) for one in turns)
    return sessions * (len(turns) + digests // _DIGESTS_PER_COPY)


def _read(history: bytes) -> tuple[list[TurnNode], Collection[bytes]]:
    if not history:
        return [], ()
    try:
        return saved_turns.of_bytes(history)
    except saved_turns.NotReadable as error:
        raise BadRequest("InvalidTurns", str(error)) from error


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError) as error:
        raise BadRequest("InvalidTurns", f"history: {error}") from error


def _job(request: web.Request) -> str:
    return caller_of(request).job or Hints({}, request.headers).job


def _json(body: object, status: int = 200) -> web.Response:
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, content_type="application/json")
