"""Files and batches under the lease's one URL: passed on to ``rose batches``, which keeps them.

This router has asked who calls, and says so; ``rose batches`` believes it by a token of their own.
Bytes go through as they come, so a large file takes none of this process's memory.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from rose_router.errors import NotFound, Overloaded
from rose_router.http.admission.bearer import caller_of

TENANT = "X-Rose-Tenant"
_KEPT = frozenset({"content-type", "content-length", "content-disposition", "accept", "range"})
_PIECE = 1 << 16
_SILENT_SECONDS, _CONNECT_SECONDS = 60.0, 2.0


def routes(url: str, token: str, session: aiohttp.ClientSession | None) -> list[web.RouteDef]:
    """The routes.

    Args:
        url: of ``rose batches``; empty = this lease has none.
        token: that it asks for.
        session: to reach it with.
    """

    async def pass_on(request: web.Request) -> web.StreamResponse:
        if not url or session is None:
            message = (
                f"{request.path}: this lease runs no batches; whoever runs its router starts rose "
                "batches and names it with --batches"
            )
            raise NotFound("NoBatches", message)
        headers = _some(request.headers)
        headers[TENANT] = urllib.parse.quote(caller_of(request).name, safe=" /:@")
        if token:
            headers["Authorization"] = f"Bearer {token}"
        limit = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS
        )
        try:
            async with session.request(
                request.method,
                url + request.raw_path,
                data=request.content if request.body_exists else None,
                headers=headers,
                timeout=limit,
            ) as reply:
                return await _answered(request, reply)
        except (aiohttp.ClientError, OSError) as error:
            message = f"rose batches does not answer: {error or 'it is silent'}; ask again"
            raise Overloaded("BatchesAway", message, retry_after=2) from error

    return [
        web.post("/v1/files", pass_on),
        web.get("/v1/files", pass_on),
        web.get("/v1/files/{id}", pass_on),
        web.delete("/v1/files/{id}", pass_on),
        web.get("/v1/files/{id}/content", pass_on),
        web.post("/v1/batches", pass_on),
        web.get("/v1/batches", pass_on),
        web.get("/v1/batches/{id}", pass_on),
        web.post("/v1/batches/{id}/cancel", pass_on),
    ]


async def _answered(request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=reply.status, headers=_some(reply.headers))
    await response.prepare(request)
    try:
        async for piece in reply.content.iter_chunked(_PIECE):
            await response.write(piece)
        await response.write_eof()
    except (aiohttp.ClientError, OSError):
        # The answer has begun: a cut connection is the only way to say that it is not whole.
        if request.transport is not None:
            request.transport.abort()
    return response


def _some(headers: Mapping[str, str]) -> CIMultiDict[str]:
    kept = ((name, value) for name, value in headers.items() if name.lower() in _KEPT)
    return CIMultiDict(kept)
