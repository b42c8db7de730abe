"""``python alone.py PORT SOCKET COMMAND...``: run a command that reaches one server, nothing else.

In a network namespace of its own there is a loopback and no route. Connections to its port PORT go
through the Unix socket SOCKET, behind which the caller's relay stands. Standard library only: it
runs with whatever Python there is. Needs root, or user namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys

_CHUNK = 1 << 16


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until there are no more."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Pass bytes both ways, then close both."""
    try:
        await asyncio.gather(pump(reader, other[1]), pump(other[0], writer))
    finally:
        writer.close()
        other[1].close()


async def main(port: int, socket: str, command: list[str]) -> int:
    """Run the command behind the relay; its exit status."""

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join(reader, writer, await asyncio.open_unix_connection(socket))

    server = await asyncio.start_server(taken, "127.0.0.1", port)
    async with server:
        process = await asyncio.create_subprocess_exec(*command)
        return await process.wait()


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    sys.exit(asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])))
