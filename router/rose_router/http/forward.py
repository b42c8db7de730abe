"""Passes requests on to the replica that they belong to, and tells all what concerns all.

| request | goes to |
|---|---|
| a turn with a session key or an id | the home of its trajectory; if that is lost, the next one |
| a conversation without | the home of how it begins: later turns begin so too |
| a response's successor, rows of a session | here; if they are unknown here, whoever knows them |
| a list of sessions | everywhere; each session is told once |
| a turn without | here; elsewhere when this replica is leaving |
| abort, pause, continue, pull, end of a session | here and every other replica |
| a fork or a restore | here; the others are told of the sessions that it made |
| a report of trajectories | everywhere; unknown is what nobody knows |
| anything else | here |

A request that was passed on once (``X-Rose-Forwarded``) is never passed on again. Next: ``relay``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from multidict import CIMultiDict

from rose_core.rollouts.errors import InvalidTurn
from rose_core.unreadable import UNREADABLE
from rose_router.errors import NotFound, draining
from rose_router.http.admission.bodies import raw_body, read_around_numbers
from rose_router.http.dialects.common import Hints
from rose_router.http.routes import virtual
from rose_router.http.routes.branches import FOR_PEERS
from rose_router.replicas import relay
from rose_router.replicas.peers import Peer, Peers

LOG = logging.getLogger(__name__)

FORWARDED = "X-Rose-Forwarded"
_TURNS = frozenset(
    {"/generate", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"}
    | {"/v1/messages", "/v1/responses"}
)
_EVERYWHERE = frozenset(
    {"/abort_request", "/pause_generation", "/pause", "/continue_generation", "/resume"}
    | {"/trajectories", "/pull_weights", "/finish_session"}
)
_SESSIONS = "/sessions"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def middleware(peers: Peers, session: aiohttp.ClientSession) -> Middleware:
    """The forwarding of one replica."""

    @web.middleware
    async def forward(request: web.Request, handler: Handler) -> web.StreamResponse:
        if FORWARDED in request.headers and request.path in _TURNS and peers.leaving:
            raise draining()  # whoever passed it on finds another
        if FORWARDED in request.headers or not peers.others:
            return await handler(request)
        if request.path.startswith("/sessions/"):
            pass_on = _answer_then_forward if request.method == "POST" else _where_known
            return await pass_on(request, handler, peers, session)
        if request.method != "POST":
            listing = request.method == "GET" and request.path == _SESSIONS
            pages = _sessions_of_all(request, handler, peers, session) if listing else None
            return await (pages or handler(request))
        if request.path in _EVERYWHERE:
            return await _answer_everywhere(request, handler, peers, session)
        if request.path in _TURNS:
            passed = await _at_home(request, peers, session)
            return passed or await _where_known(request, handler, peers, session)
        return await handler(request)

    return forward


async def _where_known(
    request: web.Request, handler: Handler, peers: Peers, session: aiohttp.ClientSession
) -> web.StreamResponse:
    """The answer of this replica, or of the first that knows what is unknown here."""
    try:
        return await handler(request)
    except NotFound:
        for peer in peers.others:
            answer = await _passed_on(request, peer, peers, session)
            if answer is not None and answer.status != 404:
                return answer
        raise


async def _sessions_of_all(
    request: web.Request, handler: Handler, peers: Peers, session: aiohttp.ClientSession
) -> web.StreamResponse:
    """This replica's sessions, then what the others have besides."""
    ours = await handler(request)
    asked = (_passed_on(request, peer, peers, session) for peer in peers.others)
    told: dict[str, Any] = {}
    left_out = 0
    for answer in (ours, *await asyncio.gather(*asked)):
        body = answer.body if isinstance(answer, web.Response) and answer.status == 200 else None
        page = msgspec.json.decode(body) if isinstance(body, bytes) else {}  # lost, or of before
        left_out += page.get("left_out", 0)
        for one in page.get("sessions", ()):
            told.setdefault(one["session"], one)
    whole = msgspec.json.encode({"sessions": list(told.values()), "left_out": left_out})
    return web.Response(body=whole, content_type="application/json")


async def _passed_on(
    request: web.Request, peer: Peer, peers: Peers, session: aiohttp.ClientSession
) -> web.StreamResponse | None:
    headers, body = _headers(request, peers.me), await raw_body(request)
    return await relay.pass_on(request, peer, peers, session, headers, body=body)


async def _at_home(
    request: web.Request, peers: Peers, session: aiohttp.ClientSession
) -> web.StreamResponse | None:
    """The answer of the turn's home; ``None`` when that is here."""
    key = _key(await read_around_numbers(request), request.headers)  # empty: here
    for _ in peers.others:  # whoever is lost over it is the home no more
        peer = peers.home(key)
        if peer is None:
            break
        answer = await _passed_on(request, peer, peers, session)
        if answer is not None:
            return answer
    return None


def _key(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """The trajectory's key; a request without one stays where it is."""
    try:
        session = Hints(body, headers).session
    except InvalidTurn:
        return ""  # the handler says what is wrong
    rid = body.get("rid") or body.get("request_id")
    return session or (rid if isinstance(rid, str) else "") or _beginning(body)


def _beginning(body: Mapping[str, Any]) -> str:
    """A key of how the conversation begins; a response's successor does not say how."""
    content = body.get("messages") or body.get("input")
    if not content or body.get("previous_response_id"):
        return ""
    first = (
        [one for one in content if one.get("role") == "user"][:1] if _listed(content) else content
    )
    raw = msgspec.json.encode([first, body.get("tools")])
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def _listed(content: object) -> bool:
    return isinstance(content, list) and all(isinstance(one, dict) for one in content)


async def _answer_everywhere(
    request: web.Request, handler: Handler, peers: Peers, session: aiohttp.ClientSession
) -> web.StreamResponse:
    raw, headers = await raw_body(request), _headers(request, peers.me)
    tls = peers.http()
    calls = (
        _post_to_peer(peer, request.path_qs, raw, headers, session, tls=tls)
        for peer in peers.others
    )
    answers = asyncio.gather(*calls)
    try:
        ours = await handler(request)
    finally:  # also where it is refused here: nobody else would see how telling them ends
        theirs = await answers
    if request.path == "/trajectories" and isinstance(ours, web.Response) and ours.status == 200:
        return _unknown_everywhere(ours, theirs)
    return ours


async def _answer_then_forward(
    request: web.Request, handler: Handler, peers: Peers, session: aiohttp.ClientSession
) -> web.StreamResponse:
    """The answer of this replica, after which the others have the session's turns, too."""
    answer = await handler(request)
    if (payload := request.get(FOR_PEERS)) is not None:
        path = request.rel_url.raw_path.rpartition("/")[0] + "/turns"
        headers, tls = _headers(request, peers.me), peers.http()
        calls = (
            _post_to_peer(peer, path, payload, headers, session, tls=tls) for peer in peers.others
        )
        await asyncio.gather(*calls)
    return answer


def labels_to(peers: Peers, session: aiohttp.ClientSession) -> virtual.PostLabel:
    """Tells the other replicas what a trainer calls a version."""

    async def post_label(request: web.Request, body: dict[str, str]) -> None:
        headers = _headers(request, peers.me)
        tls = peers.http()
        calls = (
            _post_to_peer(peer, "/labels", body, headers, session, tls=tls) for peer in peers.others
        )
        await asyncio.gather(*calls)

    return post_label


async def _post_to_peer(
    peer: Peer,
    path: str,
    body: object,
    headers: CIMultiDict[str],
    session: aiohttp.ClientSession,
    *,
    tls: dict[str, Any],
) -> bytes:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    limit = aiohttp.ClientTimeout(total=60, sock_connect=relay.CONNECT_SECONDS)
    try:
        async with session.post(
            peer.http + path, data=data, headers=headers, timeout=limit, **tls
        ) as reply:
            return await reply.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        LOG.warning("replica %s was not told of %s: %s", peer.name, path, error)
        return b""


def _unknown_everywhere(ours: web.Response, theirs: list[bytes]) -> web.Response:
    unknown = set(_unknown(ours.body if isinstance(ours.body, bytes) else b""))
    for raw in theirs:
        if raw:
            unknown &= set(_unknown(raw))
    body = msgspec.json.encode({"unknown": sorted(unknown)})
    return web.Response(body=body, content_type="application/json")


def _unknown(raw: bytes) -> list[str]:
    try:
        found = msgspec.json.decode(raw)
    except UNREADABLE:
        return []
    names = found.get("unknown") if isinstance(found, dict) else None
    return names if isinstance(names, list) else []


def _headers(request: web.Request, me: str) -> CIMultiDict[str]:
    kept = CIMultiDict(
        (name, value) for name, value in request.headers.items() if name.lower() not in relay.HOP
    )
    kept[FORWARDED] = me
    return kept
