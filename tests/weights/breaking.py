"""A TCP proxy that cuts one of its connections, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Proxy:
    """What has come through.

    Attributes:
        connections: opened so far.
        broken: cut so far.
    """

    address: str = ""
    connections: int = 0
    broken: int = 0


@asynccontextmanager
async def breaking(upstream: str, *, bytes_until: int) -> AsyncIterator[Proxy]:
    """Pass connections on; the first whose answers exceed ``bytes_until`` bytes is cut."""
    proxy = Proxy()
    host, port = upstream.rsplit(":", 1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        proxy.connections += 1
        far_reader, far_writer = await asyncio.open_connection(host, int(port))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 14):
                sink.write(data)
                await sink.drain()

        async def answers() -> None:
            passed = 0
            while data := await far_reader.read(1 << 14):
                passed += len(data)
                if passed > bytes_until and not proxy.broken:
                    proxy.broken += 1
                    return
                writer.write(data)
                await writer.drain()

        try:
            tasks = [asyncio.create_task(pump(reader, far_writer)), asyncio.create_task(answers())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            writer.transport.abort()
            far_writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield proxy
