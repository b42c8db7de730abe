"""Runs in a sandbox beside an OpenEnv server: holds its connections while their callers are away.

    python openenv_inside.py PORT SERVER_PORT

Of ROSE it imports nothing: it is copied into the sandbox, and its library is one that OpenEnv's
server needs itself. It is saved and given back with the server, and so are the connections between
the two, which do not leave the sandbox. A caller comes by ``/?line=NAME&given=N``, with ``target=``
at first; then each side says a line of JSON before each message:

| from | keys |
|---|---|
| here, at first | ``took``, ``made``; or ``unknown``; or ``refused`` |
| here | ``took``: messages had from the caller; ``then``: one of the server follows; ``closed`` |
| caller | ``given``: messages it has; ``then``: one follows; ``close`` |

Next step: ``openenv_forward`` is the caller.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, WebSocketException

CLOSE_SECONDS = 1
"""For a caller who may be gone to say that it has heard of an end."""


class Line:
    """A connection to the server, and what its caller may not have heard yet."""

    def __init__(self, server: ClientConnection) -> None:
        self.server = server
        self.took = self.made = 0
        self.kept: deque[str | bytes] = deque()
        self.closed: tuple[int, str] | None = None
        self.news = asyncio.Event()
        self.holder: ServerConnection | None = None
        self.held = asyncio.Lock()
        self.reading = asyncio.create_task(self.read())

    async def read(self) -> None:
        """What the server says, until it ends."""
        with suppress(ConnectionClosed):  # as told below
            async for message in self.server:
                self.kept.append(message)
                self.made += 1
                self.news.set()
        self.closed = (self.server.close_code or 1006, self.server.close_reason or "")
        self.news.set()

    def forget(self, given: int) -> None:
        """The caller has so many of its messages."""
        while self.kept and self.made - len(self.kept) < given:
            self.kept.popleft()

    async def send(self, caller: ServerConnection, at: int) -> None:
        """Say everything from a message on to a caller, until the server has ended."""
        while True:
            self.news.clear()
            while at < self.made:
                message = self.kept[at - self.made]
                await caller.send(json.dumps({"took": self.took, "then": True}))
                await caller.send(message)
                at += 1
            if self.closed is not None:
                await caller.send(json.dumps({"took": self.took, "closed": self.closed}))
            await self.news.wait()

    async def receive(self, caller: ServerConnection) -> bool:
        """Pass on what a caller says; whether it has closed the connection."""
        async for head in caller:
            ack = json.loads(head)
            self.forget(ack["given"])
            if ack.get("close"):
                return True
            if ack.get("then"):
                message = await caller.recv()
                self.took += 1
                with suppress(ConnectionClosed):  # the server has ended, as ``send`` says
                    await self.server.send(message)
        return False


class Switch:
    """All connections of this sandbox.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.lines: dict[str, Line] = {}

    async def take(self, caller: ServerConnection) -> None:
        """A caller came, with a new connection or back for one."""
        if caller.request is None:
            return
        query = parse_qs(urlsplit(caller.request.path).query)
        asked = {key: values[0] for key, values in query.items()}
        name, given = asked["line"], int(asked["given"])
        if name not in self.lines and "target" in asked:
            try:
                self.lines[name] = Line(await self.dial(asked["target"]))
            except (OSError, TimeoutError, WebSocketException) as error:
                await caller.send(json.dumps({"refused": str(error)}))
                return
        line = self.lines.get(name)
        if line is None:
            await caller.send(json.dumps({"unknown": True}))
            return
        if line.holder is not None:  # who was there before it has lost its way here
            await line.holder.close()
        async with line.held:
            line.holder = caller
            await self.serve(name, line, caller, given)

    async def dial(self, target: str) -> ClientConnection:
        """A connection to the server, of which nothing here is ever idle or too large."""
        return await connect(
            f"ws://127.0.0.1:{self.port}{target}",
            max_size=None,
            compression=None,
            ping_interval=None,
            proxy=None,
        )

    async def serve(self, name: str, line: Line, caller: ServerConnection, given: int) -> None:
        """Both ways, until the caller is gone."""
        await caller.send(json.dumps({"took": line.took, "made": line.made}))
        line.forget(given)
        sending = asyncio.create_task(line.send(caller, given))
        ended = False
        try:
            with suppress(ConnectionClosed):  # the caller is away, and the line stays
                ended = await line.receive(caller)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if ended:  # a caller who does not say so may not have heard the last answer yet
            del self.lines[name]
            line.reading.cancel()
            await line.server.close()


async def main(port: int, server: int) -> None:
    """Serve for ever."""
    switch = Switch(server)
    async with serve(
        switch.take,
        "127.0.0.1",
        port,
        max_size=None,
        compression=None,
        ping_interval=None,
        close_timeout=CLOSE_SECONDS,
    ):
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
