"""``/metrics`` and ``/healthz`` without an HTTP library, for a process that has to stay small.

The same pages as ``observability``'s, for a scraper and the kubelet: one answer a connection, heads
only, nothing is read of a body. A process with a web application of its own uses that module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rose_wire.bearer import is_bearer

METRICS_TOKEN = "ROSE_METRICS_TOKEN"  # noqa: S105  # the variable's name
PATHS = ("/metrics", "/healthz")
_LONGEST_HEAD = 16 * 1024
_PATIENCE_SECONDS = 5.0
_TEXT = "text/plain; charset=utf-8"


async def serve(listener: socket.socket, registry: CollectorRegistry) -> asyncio.Server:
    """Answer on a listening socket until the server is closed."""
    token = os.environ.get(METRICS_TOKEN, "")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError)
        try:
            with contextlib.suppress(*gone):
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(response(head.decode("latin-1"), registry, token))
                    await writer.drain()
        finally:
            writer.close()

    return await asyncio.start_server(answer, sock=listener, limit=_LONGEST_HEAD)


def response(head: str, registry: CollectorRegistry, token: str) -> bytes:
    """The whole answer to a request's head."""
    first, *lines = head.split("\r\n")
    method, _, rest = first.partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    given = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    if method not in {"GET", "HEAD"}:
        status, kind, body = HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"only GET is answered here\n"
    elif path not in PATHS:
        status, kind, body = HTTPStatus.NOT_FOUND, _TEXT, b"here are /metrics and /healthz\n"
    elif path == "/healthz":
        status, kind, body = HTTPStatus.OK, _TEXT, b"ok\n"
    elif token and not is_bearer(given.get("authorization", ""), token):
        text = b"bearer token missing or wrong; send Authorization: Bearer TOKEN\n"
        status, kind, body = HTTPStatus.UNAUTHORIZED, _TEXT, text
    else:
        status, kind, body = HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry)
    return _frame(status, kind, body, with_body=method != "HEAD")


def _frame(status: HTTPStatus, kind: str, body: bytes, *, with_body: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if status is HTTPStatus.UNAUTHORIZED:
        lines.append("WWW-Authenticate: Bearer")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (body if with_body else b"")
