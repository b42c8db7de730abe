"""A proxy that passes bytes on and reads none: ``python -m bench.router.passer URL``.

The least that a router of one Python process adds, whatever it does: whoever wants to know what is
left to gain in ours compares it with this one.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast
from urllib.parse import urlsplit

import uvloop


class Side(asyncio.Protocol):
    """One end of a connection; ``other`` gets what comes here."""

    def __init__(self, other: Side | None = None) -> None:
        self.other = other
        self.transport: asyncio.Transport | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self.transport = cast("asyncio.Transport", transport)
        if self.other is not None:
            self.other.join(self)

    def join(self, other: Side) -> None:
        """The other end stands now."""
        self.other = other
        if self._early and other.transport is not None:
            other.transport.write(self._early)
            self._early = b""

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)
        else:
            self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """End both."""
        del exc
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def serve(url: str) -> None:
    """Run until killed; prints its URL."""
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    dialled: set[asyncio.Task[object]] = set()

    def caller() -> Side:
        side = Side()
        there = loop.create_connection(lambda: Side(side), host, port)
        task: asyncio.Task[object] = loop.create_task(there)
        dialled.add(task)
        task.add_done_callback(dialled.discard)
        return side

    server = await loop.create_server(caller, "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))
