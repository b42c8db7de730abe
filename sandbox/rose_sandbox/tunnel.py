"""A TCP connection into a sandbox, carried by a WebSocket: each message is bytes of it.

So whatever speaks TCP reaches a server in a sandbox through the host's own port and token. An end
of either side ends both. Whoever does not read is not read for: at most a message, and what
buffers of ``CHUNK`` hold, is under way in each direction.
Next step: ``http`` has the host's end, ``client`` the caller's.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from math import isfinite
from typing import NamedTuple

from aiohttp import ClientWebSocketResponse, WSCloseCode, WSMsgType, web

from rose_core.sandboxes.tunnels import End, TunnelLimits, end_of

CHUNK = 64 * 1024
MESSAGE_BYTES = 1 << 20
"""Of one message: sixteen times what ``client`` sends."""
ENDLESS = TunnelLimits(idle_seconds=float("inf"))
"""Of the caller's end: its host says when a tunnel ends."""


class Tunnel(NamedTuple):
    """The host's end of a connection into a sandbox.

    Attributes:
        connection: to its server; non-blocking.
        gone: set when the sandbox ends.
    """

    connection: socket.socket
    gone: asyncio.Event


async def carry(
    line: web.WebSocketResponse | ClientWebSocketResponse,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    limits: TunnelLimits = ENDLESS,
    gone: asyncio.Event | None = None,
) -> tuple[End, str]:
    """Carry bytes both ways until one side ends; the other one is hung up then.

    Args:
        line: of the other end.
        reader: of the connection.
        writer: of the same.
        limits: of the tunnel.
        gone: set when its sandbox ends.

    Returns:
        Why it ended, and the other end's reason.
    """
    loop = asyncio.get_running_loop()
    moved, reason = loop.time(), ""

    async def out() -> None:
        nonlocal moved
        while data := await reader.read(CHUNK):
            await line.send_bytes(data)
            moved = loop.time()

    async def back() -> None:
        nonlocal moved, reason
        while (message := await line.receive()).type is WSMsgType.BINARY:
            writer.write(message.data)
            await writer.drain()
            moved = loop.time()
        if message.type is WSMsgType.CLOSE:
            reason = message.extra or ""

    ways = {asyncio.create_task(out()), asyncio.create_task(back())}
    gone = gone or asyncio.Event()
    waits = asyncio.create_task(gone.wait())
    end = None
    try:
        while end is None:
            left = moved + limits.idle_seconds - loop.time()
            await asyncio.wait(
                {*ways, waits},
                timeout=left if isfinite(left) else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            closed = any(way.done() for way in ways)
            end = end_of(limits, moved=moved, now=loop.time(), closed=closed, gone=gone.is_set())
        return end, reason
    finally:
        for task in (*ways, waits):
            task.cancel()
        await asyncio.gather(*ways, waits, return_exceptions=True)
        writer.close()
        with suppress(OSError):
            code = WSCloseCode.OK if end in {None, End.CLOSED} else WSCloseCode.POLICY_VIOLATION
            await line.close(code=code, message=_reason_text(end, limits).encode())


def _reason_text(end: End | None, limits: TunnelLimits) -> str:
    if end is End.IDLE:
        return f"nothing passed for {limits.idle_seconds:g} s: open another tunnel"
    return "its sandbox has ended here" if end is End.SANDBOX else ""
