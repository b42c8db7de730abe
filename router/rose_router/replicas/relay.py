"""A request passed on to one replica, and what is done when that replica dies over it.

| the replica dies | the caller gets |
|---|---|
| before its answer is whole, or before the first byte of a stream | the turn from another replica |
| in the middle of a stream | an event ``{"error": ...}`` of code 503, then a cut connection |
| in the middle of what comes in pieces otherwise (rows of a session) | a cut connection |

This replica's own end before the answer is a 503, and in the middle of a stream such an event.

One that hangs counts as dead once ``peer_health`` says so.

A turn that is tried again is sampled anew: nobody has seen a token of the first try, and the engine
of the lost replica sees its caller hang up. A stream that has begun cannot be taken back.

Next: ``forward`` chooses the replica.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from rose_router.errors import REASON, Overloaded, RouterError, TurnLost
from rose_router.replicas.peers import Peer, Peers

LOG = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
"""After which a replica that says nothing to a connection counts as gone."""

# Headers that belong to one connection.
HOP = frozenset({"host", "content-length", "transfer-encoding", "connection", "keep-alive"})


async def pass_on(
    request: web.Request,
    peer: Peer,
    peers: Peers,
    session: aiohttp.ClientSession,
    headers: CIMultiDict[str],
    *,
    body: bytes,
) -> web.StreamResponse | None:
    """The peer's answer; ``None`` when it is not there, or was lost before it had answered."""
    try:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(peers.passing_on())
            async with peers.pulse.awaiting(peer.name):
                reply = await stack.enter_async_context(
                    session.request(
                        request.method,
                        peer.http + request.path_qs,
                        data=body,
                        headers=headers,
                        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                        **peers.http(),
                    )
                )
                if reply.headers.get(REASON) == "Draining":
                    peers.mark_lost(peer)
                    return None
                kept = _kept(reply.headers)
                if not _comes_in_pieces(request, reply):
                    whole = await reply.read()
                    return web.Response(status=reply.status, headers=kept, body=whole)
                first = await reply.content.readany()
            return await _streamed(request, peer, peers, reply, kept, first=first)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        LOG.warning("replica %s does not answer: %s", peer.name, error or "it is silent")
        peers.mark_lost(peer)
        return None


def _comes_in_pieces(request: web.Request, reply: aiohttp.ClientResponse) -> bool:
    """Whether it is passed on before it is whole: streams, and rows of a session."""
    if reply.content_type == "text/event-stream":
        return True
    return request.path.startswith("/sessions/") and reply.content_length is None


def _kept(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP)


async def answers(session: aiohttp.ClientSession, peer: Peer, how: dict[str, Any]) -> bool:
    """Whether the replica's own loop still answers; a refusal is an answer."""
    limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    try:
        async with session.get(peer.http + "/healthz", timeout=limit, **how):
            return True
    except (aiohttp.ClientError, OSError):
        return False


async def _streamed(
    request: web.Request,
    peer: Peer,
    peers: Peers,
    reply: aiohttp.ClientResponse,
    headers: CIMultiDict[str],
    *,
    first: bytes,
) -> web.StreamResponse:
    response = web.StreamResponse(status=reply.status, headers=headers)
    try:
        await response.prepare(request)
        chunk = first
        while chunk:
            await response.write(chunk)
            chunk = await _next(reply, peer, peers)
        await response.write_eof()
    except TurnLost as error:
        LOG.warning("%s", error)
        peers.mark_lost(peer)
        await _cut(request, response, error)
    except Overloaded as error:  # this replica ends
        await _cut(request, response, error)
    except ConnectionResetError:
        _abort(request)  # the caller hung up
    return response


async def _next(reply: aiohttp.ClientResponse, peer: Peer, peers: Peers) -> bytes:
    try:
        async with peers.pulse.awaiting(peer.name):
            return await reply.content.readany()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why = error or "it is silent"
        message = f"replica {peer.name} was lost in the middle of the stream: {why}; ask again"
        raise TurnLost("ReplicaLost", message, retry_after=1) from error


async def _cut(request: web.Request, response: web.StreamResponse, error: RouterError) -> None:
    """Say why and close: without its end the stream cannot be taken for a whole one."""
    failure = {
        "message": str(error),
        "type": error.reason,
        "code": error.status,
        "retry_after": error.retry_after,
    }
    try:
        if response.content_type == "text/event-stream":  # else it would stand amid something else
            await response.write(b"data: " + msgspec.json.encode({"error": failure}) + b"\n\n")
    except ConnectionResetError:
        _abort(request)
        return
    if request.transport is not None:
        request.transport.close()


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
