"""An address on this machine at which a server in a sandbox answers, whichever host has it.

A client of OpenEnv knows a URL and no token, and its episode is a WebSocket that must not end. So
it talks to this forwarder. Each of its WebSockets is a conversation with the program that stands
beside the server in the sandbox (``openenv_inside``): messages are counted at both ends, and where
the way between is lost, a conversation goes on over another one, or ends and says why
(``rose_core.sandboxes.conversations``). A lost way is sought again when somebody waits for an
answer, so that only an action wakes a sandbox that sleeps.

Everything else of HTTP is passed on as it is. The forwarder listens at the loopback address, and
whoever is on this machine may come.
Next step: ``openenv`` opens it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import tempfile
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import aiohttp
import msgspec
from aiohttp import WSMessage, WSMsgType, web
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.frames import CloseCode

from rose_core.sandboxes.conversations import ConversationLost, Inside, Outside, count_resent
from rose_core.sandboxes.turns import OutOfTurn
from rose_core.unreadable import UNREADABLE
from rose_sandbox.errors import SandboxError
from rose_weights.errors import Fenced
from rose_wire.local import stop_accepting

LOG = logging.getLogger(__name__)

KEPT_BYTES = 64 << 20
"""Of a caller's messages that the sandbox may not have: with more, a loss ends its conversation."""
ANSWER_BYTES = 128 << 20
"""Of a message of the server, who may be anybody: more than OpenEnv's client takes by default."""
MOST_REASON = 120
"""Bytes of why a WebSocket ends, of which its protocol has room for 123."""
AGAIN_SECONDS = 0.5
ALIVE_SECONDS = 20.0
"""Between questions whether a way that is open leads anywhere: what OpenEnv's client asks, too."""
_AWAY = (SandboxError, Fenced, OSError, WebSocketException)
"""No way to the sandbox now; where it is may be asked again."""
_OWN = {"connection", "host", "keep-alive", "transfer-encoding", "upgrade", "content-length"}


@dataclass(frozen=True)
class Way:
    """How the forwarder reaches the sandbox.

    All raise ``SandboxError`` or ``Fenced``, and the first two ``ConversationLost``.

    Attributes:
        server: a connection to the server.
        beside: a connection to the program beside it.
        answered: an answer was given: the agent may ask its model now.
        asked: the agent has acted; returns when the sandbox may.
        seconds: for which a lost way is sought.
    """

    server: Callable[[], Awaitable[socket.socket]]
    beside: Callable[[], Awaitable[socket.socket]]
    answered: Callable[[], Awaitable[object]]
    asked: Callable[[], Awaitable[object]]
    seconds: float


class _Ack(msgspec.Struct):
    """What the program beside the server says before a message, or at first."""

    took: int = 0
    made: int = 0
    closed: tuple[int, str] | None = None
    unknown: bool = False
    refused: str | None = None


@dataclass
class _Received:
    """A message of the server, or its end."""

    message: str | bytes | None
    took: int
    closed: tuple[int, str] | None = None


@dataclass
class Conversation:
    """One WebSocket of a client.

    Attributes:
        client: its end.
        target: path and query that it asked for.
        way: to the sandbox.
        sent, given: messages of the client, and of the server that it was given.
        owed: the client waits for an answer.
    """

    client: web.WebSocketResponse
    target: str
    way: Way
    sent: int = 0
    given: int = 0
    owed: bool = False
    _kept: deque[str | bytes] = field(default_factory=deque)
    _name: str = field(default_factory=lambda: uuid.uuid4().hex)
    _far: ClientConnection | None = None
    _received_from: ClientConnection | None = None
    _opened: float = float("-inf")
    _mine: asyncio.Task[WSMessage] | None = None
    _theirs: asyncio.Task[_Received | None] | None = None

    async def hold(self) -> None:
        """Until one side ends it, or it is lost."""
        self._mine = asyncio.create_task(self.client.receive())
        try:
            await self._open(target=self.target)
            while await self._step():
                pass
        except (ConversationLost, *_AWAY) as error:
            LOG.warning("a conversation at %s has ended: %s", self.target, error)
            await self._part(aiohttp.WSCloseCode.INTERNAL_ERROR, str(error))
        finally:
            for task in (self._mine, self._theirs):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            await self._lose(close=True)

    async def _step(self) -> bool:
        """Wait for the next message of either side, and pass it on; whether it goes on."""
        # 1. A way that was lost is found anew where an answer is owed; what came by the lost one
        # is passed on before, which the sandbox would otherwise send once more.
        if self._far is None and self.owed and self._theirs is None:
            await self._find()
        # 2. Listen to both sides.
        if self._far is not None and self._theirs is None:
            self._received_from = self._far
            self._theirs = asyncio.create_task(self._receive(self._far))
        mine, theirs = self._mine, self._theirs
        waited = [one for one in (mine, theirs) if one is not None]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        # 3. Pass on what came, the sandbox's first.
        if theirs is not None and theirs.done() and not await self._pass_back(theirs):
            return False
        return mine is None or not mine.done() or await self._pass_on(mine)

    async def _pass_back(self, theirs: asyncio.Task[_Received | None]) -> bool:
        received, self._theirs = theirs.result(), None
        # What ends a way that was given up already ends nothing.
        ignored = not received and self._received_from is not self._far
        return ignored or await self._give(received)

    async def _pass_on(self, mine: asyncio.Task[WSMessage]) -> bool:
        message = mine.result()
        if message.type not in {WSMsgType.TEXT, WSMsgType.BINARY}:
            return False
        # Before what may take a while: it is who answers the client's pings.
        self._mine = asyncio.create_task(self.client.receive())
        await self._take(message.data)
        return True

    async def _give(self, received: _Received | None) -> bool:
        """Give the client what was heard; whether it goes on."""
        if received is None:
            await self._lose()
            return True
        self._forget(self.sent - received.took)
        if received.closed is not None:
            await self._part(*received.closed)
            return False
        self.given += 1
        self.owed = self.sent > self.given
        with suppress(ConnectionError):  # it has gone, and says so as it is heard next
            if isinstance(received.message, bytes):
                await self.client.send_bytes(received.message)
            elif received.message is not None:
                await self.client.send_str(received.message)
        await _notify(self.way.answered)
        return True

    async def _part(self, code: int, reason: str) -> None:
        if not _may_be_sent(code):  # of a server that died, as its own library numbers that
            code, reason = aiohttp.WSCloseCode.INTERNAL_ERROR, reason or "the server has ended"
        text = reason.encode()[:MOST_REASON].decode(errors="ignore")
        await self.client.close(code=code, message=text.encode())

    async def _take(self, message: str | bytes) -> None:
        """Pass a client's message on."""
        self.sent += 1
        self.owed = True
        self._kept.append(message)
        while sum(map(len, self._kept)) > KEPT_BYTES and len(self._kept) > 1:
            self._kept.popleft()
        await _notify(self.way.asked)
        if self._far is not None:
            await self._send(self._far, message)

    def _forget(self, lacking: int) -> None:
        while len(self._kept) > max(lacking, 0):
            self._kept.popleft()

    async def _send(self, far: ClientConnection, message: str | bytes) -> None:
        try:
            await far.send(json.dumps({"given": self.given, "then": True}))
            await far.send(message)
        except ConnectionClosed:
            await self._lose()

    async def _receive(self, far: ClientConnection) -> _Received | None:
        try:
            ack = _read_ack(await far.recv())
            message = await far.recv() if ack.closed is None else None
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG:
                raise ConversationLost(f"an answer has over {ANSWER_BYTES} bytes") from error
            return None
        return _Received(message, ack.took, ack.closed)

    async def _find(self) -> None:
        """Go on over another way.

        Raises:
            ConversationLost: it cannot, or no way was found in time.
        """
        loop = asyncio.get_running_loop()
        until, why = loop.time() + self.way.seconds, ""
        # One that is lost as soon as it is there is not sought as fast as this machine can.
        await asyncio.sleep(self._opened + AGAIN_SECONDS - loop.time())
        while loop.time() < until:
            try:
                return await self._open()
            except _AWAY as error:
                why = str(error)
                await asyncio.sleep(AGAIN_SECONDS)
        raise ConversationLost(f"no way to the sandbox in {self.way.seconds:g} s: {why}")

    async def _open(self, **more: str) -> None:
        far = await connect(
            "ws://sandbox/?" + urlencode({"line": self._name, "given": self.given, **more}),
            sock=await self.way.beside(),
            max_size=ANSWER_BYTES,
            compression=None,
            ping_interval=ALIVE_SECONDS,
            ping_timeout=ALIVE_SECONDS,
            proxy=None,
        )
        try:
            again = self._compared(_read_ack(await far.recv()))
        except BaseException:  # also when cancelled: nobody else knows of it
            await far.close()
            raise
        self._far, self._opened = far, asyncio.get_running_loop().time()
        for message in list(self._kept)[len(self._kept) - again :]:
            await self._send(far, message)

    def _compared(self, ack: _Ack) -> int:
        """How many messages are said again; what the sandbox's end said at first."""
        if ack.refused is not None:
            raise ConversationLost(f"the server refuses {self.target}: {ack.refused}")
        if ack.unknown:
            raise ConversationLost("the sandbox was given back as it was before it began")
        outside = Outside(self.sent, len(self._kept), self.given)
        return count_resent(outside, Inside(ack.took, ack.made))

    async def _lose(self, *, close: bool = False) -> None:
        far, self._far = self._far, None
        if far is not None:
            with suppress(ConnectionClosed):
                if close:
                    await far.send(json.dumps({"given": self.given, "close": True}))
            await far.close()


def _read_ack(raw: str | bytes) -> _Ack:
    try:
        return msgspec.json.decode(raw, type=_Ack)
    except UNREADABLE as error:  # whoever is in the sandbox may be at that port
        raise ConversationLost(
            f"what stands beside the server speaks otherwise: {error}"
        ) from error


def _may_be_sent(code: int) -> bool:
    """Whether a code may stand in a close frame (RFC 6455, 7.4)."""
    reserved = {CloseCode.NO_STATUS_RCVD, CloseCode.ABNORMAL_CLOSURE, CloseCode.TLS_HANDSHAKE, 1004}
    return 1000 <= code < 5000 and code not in reserved


async def _notify(step: Callable[[], Awaitable[object]]) -> None:
    """Notify the turn clock; a host that is lost is found by who needs it."""
    try:
        await step()
    except (SandboxError, Fenced, OutOfTurn) as error:
        LOG.debug("a step of the turn clock: %s", error)


class Forwarder:
    """The address.

    Args:
        way: to the sandbox.
    """

    def __init__(self, way: Way) -> None:
        self._way = way
        self._folder = tempfile.TemporaryDirectory(prefix="rose-forwarder-")
        self._inner = Path(self._folder.name) / "server"
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        self._server: asyncio.Server | None = None
        self._http: aiohttp.ClientSession | None = None
        self._pumps: set[asyncio.Task[None]] = set()

    async def open(self, port: int) -> int:
        """Listen at a port of the loopback address; 0: a free one. Returns it.

        Raises:
            OSError: the port is taken.
        """
        self._server = await asyncio.start_unix_server(self._lead, self._inner)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(self._inner), limit=16),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, shutdown_timeout=1.0)
        await site.start()
        found: int = self._runner.addresses[0][1]
        return found

    async def close(self) -> None:
        """Let go of everyone."""
        await self._runner.cleanup()
        if self._http is not None:
            await self._http.close()
        if self._server is not None:
            await stop_accepting(self._server)
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        self._folder.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        line = web.WebSocketResponse(max_msg_size=0, compress=False)
        if line.can_prepare(request):
            await line.prepare(request)
            await Conversation(line, request.rel_url.raw_path_qs, self._way).hold()
            return line
        return await self._pass_on(request)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if self._http is None:
            raise RuntimeError("a forwarder is opened before it is used")
        kept = [(name, text) for name, text in request.headers.items() if name.lower() not in _OWN]
        body = request.content if request.body_exists else None
        url = f"http://localhost{request.rel_url.raw_path_qs}"
        try:
            async with self._http.request(
                request.method, url, headers=kept, data=body, allow_redirects=False
            ) as answer:
                made = web.StreamResponse(status=answer.status, reason=answer.reason)
                for name, text in answer.headers.items():
                    if name.lower() not in _OWN:
                        made.headers.add(name, text)
                await made.prepare(request)
                async for data in answer.content.iter_any():
                    await made.write(data)
                await made.write_eof()
                return made
        except aiohttp.ClientError as error:
            raise web.HTTPBadGateway(text=f"the server in the sandbox: {error}") from error

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)
        try:
            inside = await asyncio.open_connection(sock=await self._way.server())
        except (*_AWAY, ConversationLost) as error:
            LOG.debug("no way to the server: %s", error)
            writer.close()
            return
        try:
            await _pump(reader, inside[1], inside[0], writer)
        finally:
            writer.close()
            inside[1].close()


async def _pump(
    left: asyncio.StreamReader,
    to_right: asyncio.StreamWriter,
    right: asyncio.StreamReader,
    to_left: asyncio.StreamWriter,
) -> None:
    async def one(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()

    tasks = [asyncio.create_task(one(left, to_right)), asyncio.create_task(one(right, to_left))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
