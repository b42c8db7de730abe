"""A TCP connection into a sandbox, carried by a WebSocket: each message is bytes of it.

So whatever speaks TCP reaches a server in a sandbox through the host's own port and token. An end
of either side ends both.
Next step: ``http`` has the host's end, ``client`` the caller's.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from aiohttp import ClientWebSocketResponse, WSMsgType, web

CHUNK = 64 * 1024


async def carry(
    line: web.WebSocketResponse | ClientWebSocketResponse,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Carry bytes both ways until one side ends; the other one is hung up then."""

    async def out() -> None:
        while data := await reader.read(CHUNK):
            await line.send_bytes(data)

    async def back() -> None:
        async for message in line:
            if message.type is not WSMsgType.BINARY:
                return
            writer.write(message.data)
            await writer.drain()

    tasks = [asyncio.create_task(out()), asyncio.create_task(back())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()
        with suppress(OSError):
            await line.close()
