"""The data route of a slot: the only way into its engine from outside the node.

``POST /slots/<uid>/generate``, ``/v1/completions`` and ``/abort_request`` pass with the slot's
bearer token. ``POST /slots/<uid>/drafts`` takes what the engine shall draft from, and
``GET /slots/<uid>/tokenizer`` answers with files of its model
(``rose_core.wire.tokenizer_files``); everything else is 404, so the engine's admin routes are out
of reach; on the node they are closed by the engine itself
(``rose_engines.process.exposed_routes``), to which the proxy alone has the key.
Bytes are passed on as they come, in both directions of time: a stopped engine simply sends none,
and the caller's connection stays open until it goes on.

A caller that hangs up is followed by an ``/abort_request`` to the engine, because SGLang notices
a lost connection only seconds later. For that every request carries a ``rid``; one is added when
the caller sent none.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import logging
import re
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from rose_agent.host import metrics
from rose_core.identity import SlotUid
from rose_core.unreadable import UNREADABLE
from rose_core.wire.routing import UNSENT
from rose_engines.errors import CommitRefused, EngineUnavailable
from rose_engines.weights.control import ControlClient

_log = logging.getLogger(__name__)

ROUTES = ("generate", "v1/completions", "abort_request")
LONGEST_BODY = 16 * 1024 * 1024
# Engines may stand still for minutes: nothing here may give up before the caller does.
_PATIENT = aiohttp.ClientTimeout(total=None, connect=None, sock_read=None, sock_connect=30)
_PASSED_ON = ("Content-Type", "Retry-After", "X-Request-Id")
_CHUNK_BYTES = 64 * 1024
_DRAFT_SECONDS = 15.0

# An event larger than this is not looked into; what a stream counts is then a lower bound.
_LONGEST_EVENT = 8 * 1024 * 1024


class _Drafts(msgspec.Struct, frozen=True):
    """What the router sends to draft from: token ids."""

    texts: list[list[int]]


@dataclass(frozen=True)
class Target:
    """Where a slot's requests go.

    Attributes:
        url: the engine's own base URL; empty while it cannot serve.
        token: bearer token that the route demands.
        count: takes the output tokens of each request as they are seen.
        key: what the engine itself asks for before it aborts a request.
        tokenizer: reads the model's tokenizer files, as a frame; empty = there are none.
        control: socket of ROSE's plugin in the engine.
    """

    url: str
    token: str
    count: Callable[[int], None]
    key: str = ""
    tokenizer: Callable[[], bytes] = bytes
    control: Path | None = None

    @property
    def credentials(self) -> dict[str, str]:
        """Header for the engine; never the caller's own."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


Lookup = Callable[[SlotUid], Target | None]


def request_ids(body: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Make sure the request has an id.

    Returns:
        The body to send, and the ids that an abort must name.

    Raises:
        ValueError: the body is no JSON object, or its ``rid`` is neither text nor a list of it.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        rid = msgspec.json.decode(fields.get("rid", b"null"), type=str | list[str] | None)
    except UNREADABLE as error:
        message = f"the request's body is no valid JSON object: {error}"
        raise ValueError(message) from error
    if rid:
        return body, (rid,) if isinstance(rid, str) else tuple(rid)
    made = secrets.token_hex(16)
    fields["rid"] = msgspec.Raw(msgspec.json.encode(made))
    return msgspec.json.encode(fields), (made,)


class _CallerLost(Exception):
    """The caller has hung up."""


def _problem(status: int, message: str, kind: str = "", **headers: str) -> web.Response:
    metrics.PROXY_REQUESTS.labels(outcome=str(status)).inc()
    error = {"message": message, "type": kind} if kind else {"message": message}
    return web.json_response({"error": error}, status=status, headers=headers)


class DataProxy:
    """The data routes of all slots of a host.

    Args:
        lookup: finds a slot's target by uid; None = no such slot.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._draining = False
        self._live = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._reading = asyncio.Lock()
        # By identity: aiohttp's requests are mappings, and equal to each other when empty.
        self._turns: dict[int, tuple[SlotUid, web.Request]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._client: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    @property
    def live(self) -> int:
        """Requests in flight."""
        return self._live

    def turns(self, uid: SlotUid) -> int:
        """Turns of a slot under way."""
        return sum(slot == uid for slot, _ in self._turns.values())

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen, in plain text without a context.

        Returns:
            The port (port 0 picks one).

        Raises:
            OSError: the address is taken.
        """
        self._client = aiohttp.ClientSession(
            timeout=_PATIENT,
            auto_decompress=False,
            # A fresh connection each: an engine that stood still closes idle ones as it goes on,
            # just when the next request comes.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        app = web.Application(client_max_size=LONGEST_BODY)
        for route in ROUTES:
            app.router.add_post(f"/slots/{{uid}}/{route}", self._answer)
        app.router.add_post("/slots/{uid}/drafts", self._drafts)
        app.router.add_get("/slots/{uid}/tokenizer", self._tokenizer)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, ssl_context=tls)
        await site.start()
        # aiohttp has no public way to ask for the port it was given.
        return int(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]  # noqa: SLF001

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for those in flight.

        Returns:
            False when some are still in flight after ``seconds``.
        """
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def cut(self, uid: SlotUid) -> None:
        """Break every turn of a slot, as if its engine were lost: callers go on elsewhere."""
        for slot, request in tuple(self._turns.values()):
            if slot == uid and request.transport is not None:
                request.transport.abort()

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
        for task in tuple(self._aborts):
            task.cancel()
        if self._client is not None:
            await self._client.close()

    def _target(self, request: web.Request) -> Target | web.Response:
        """Whose slot it is, or why the caller gets no answer."""
        uid = SlotUid(request.match_info["uid"])
        target = self._lookup(uid)
        if target is None:
            return _problem(404, f"no slot {uid} on this host")
        given = request.headers.get("Authorization", "")
        if not target.token or not hmac.compare_digest(
            given.encode(errors="replace"), f"Bearer {target.token}".encode()
        ):
            return _problem(401, "bearer token missing or not this slot's")
        return target

    async def _tokenizer(self, request: web.Request) -> web.Response:
        target = self._target(request)
        if isinstance(target, web.Response):
            return target
        # Tens of megabytes, from a disk: one at a time, so that many who ask hold one frame.
        async with self._reading:
            frame = await asyncio.to_thread(target.tokenizer)
        if not frame:
            return _problem(404, "the model's folder on this node has no tokenizer.json")
        metrics.PROXY_REQUESTS.labels(outcome="200").inc()
        return web.Response(body=frame, content_type="application/msgpack")

    async def _drafts(self, request: web.Request) -> web.StreamResponse:
        """What the engine shall draft from, in place of what it had; the plugin checks every id."""
        target = self._target(request)
        if isinstance(target, web.Response):
            return target
        if self._draining or not target.url or target.control is None:
            return _problem(503, "the slot does not serve now", **{"Retry-After": "1"})
        try:
            asked = msgspec.json.decode(await request.read(), type=_Drafts)
        except UNREADABLE as error:
            return _problem(400, f"expected texts, lists of token ids: {error}")
        try:
            async with asyncio.timeout(_DRAFT_SECONDS):
                async with await ControlClient.connect(target.control) as engine:
                    taken = await engine.draft(asked.texts)
        except CommitRefused as refused:
            return _problem(409, str(refused))
        except (EngineUnavailable, TimeoutError) as error:
            return _problem(502, f"the engine did not answer: {type(error).__name__}")
        metrics.PROXY_REQUESTS.labels(outcome="200").inc()
        return web.json_response({"tokens": taken.tokens})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        target = self._target(request)
        if isinstance(target, web.Response):
            return target
        uid = SlotUid(request.match_info["uid"])
        if self._draining or not target.url:
            return _problem(503, f"slot {uid} does not serve now", **{"Retry-After": "1"})
        body = await request.read()
        path = request.path.removeprefix(f"/slots/{uid}")
        if path == "/abort_request":
            return await self._relay(request, target, path, body, ())
        try:
            body, ids = request_ids(body)
        except ValueError as error:
            return _problem(400, str(error))
        self._turns[id(request)] = (uid, request)
        try:
            return await self._relay(request, target, path, body, ids)
        finally:
            del self._turns[id(request)]

    async def _relay(
        self, request: web.Request, target: Target, path: str, body: bytes, ids: tuple[str, ...]
    ) -> web.StreamResponse:
        self._flight(+1)
        finished = False
        try:
            reply = await self._exchange(request, target, path, body)
            finished = True
        except _CallerLost:
            return web.Response(status=499)
        except aiohttp.ClientError as error:
            finished = True
            _log.info("engine of %s lost: %s", request.path, error)
            # A router must know whether the engine can have died of this request.
            kind = UNSENT if isinstance(error, aiohttp.ClientConnectorError) else ""
            return _problem(502, f"the engine did not answer: {type(error).__name__}", kind)
        else:
            return reply
        finally:
            self._flight(-1)
            if not finished:
                self._abort(target, ids)

    def _flight(self, change: int) -> None:
        self._live += change
        metrics.PROXY_LIVE.set(self._live)
        if self._live:
            self._idle.clear()
        else:
            self._idle.set()

    async def _exchange(
        self, request: web.Request, target: Target, path: str, body: bytes
    ) -> web.StreamResponse:
        if self._client is None:
            raise RuntimeError("the proxy has not been started")
        kind = request.headers.get("Content-Type", "application/json")
        headers = {"Content-Type": kind, **target.credentials}
        # aiohttp sends bytes in one piece on the event loop: long prompts go through a file.
        data = body if len(body) <= _CHUNK_BYTES else io.BytesIO(body)
        async with self._client.post(target.url + path, data=data, headers=headers) as engine:
            kept = {name: engine.headers[name] for name in _PASSED_ON if name in engine.headers}
            streamed = engine.content_type == "text/event-stream"
            reply = web.StreamResponse(status=engine.status, headers=kept)
            if not streamed and engine.content_length is not None:
                reply.content_length = engine.content_length
            await reply.prepare(request)
            await _pump(request, engine, reply, target, TokenCount(streamed=streamed))
        metrics.PROXY_REQUESTS.labels(outcome=str(engine.status)).inc()
        return reply

    def _abort(self, target: Target, ids: tuple[str, ...]) -> None:
        """Tell the engine, and go on doing so while it stands still."""
        metrics.PROXY_REQUESTS.labels(outcome="aborted").inc()
        if not ids or self._client is None or self._client.closed:
            return
        task = asyncio.create_task(self._send_aborts(self._client, target, ids))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    @staticmethod
    async def _send_aborts(
        client: aiohttp.ClientSession, target: Target, ids: tuple[str, ...]
    ) -> None:
        url, headers = f"{target.url}/abort_request", target.credentials
        for rid in ids:
            try:
                async with client.post(url, json={"rid": rid}, headers=headers) as reply:
                    await reply.read()
            except aiohttp.ClientError as error:
                _log.info("abort of %s not delivered: %s", rid, error)


async def _write(reply: web.StreamResponse, data: bytes) -> None:
    try:
        await reply.write(data)
    except ConnectionError as error:
        raise _CallerLost from error


async def _pump(
    request: web.Request,
    engine: aiohttp.ClientResponse,
    reply: web.StreamResponse,
    target: Target,
    tokens: TokenCount,
) -> None:
    counted = 0
    try:
        async for data in engine.content.iter_any():
            await _write(reply, data)
            tokens.feed(data)
            target.count(tokens.total - counted)
            counted = tokens.total
    except aiohttp.ClientError as error:
        _log.info("engine of %s lost inside a reply: %s", request.path, error)
        metrics.PROXY_REQUESTS.labels(outcome="broken").inc()
        # The head is out already: the caller must see a broken stream, never a short answer.
        if request.transport is not None:
            request.transport.abort()
    finally:
        target.count(tokens.finish() - counted)


class _Meta(msgspec.Struct):
    completion_tokens: int = 0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Reply(msgspec.Struct):
    meta_info: _Meta | None = None
    usage: _Usage | None = None
    choices: list[msgspec.Raw] = []
    index: int = 0


_TOKENS = b'"completion_tokens":'
_INDEX = b'"index":'
_NUMBER = re.compile(rb"\s*(\d+)")
_DECODER = msgspec.json.Decoder(_Reply | list[_Reply])


class TokenCount:
    """Counts the output tokens of one request; feed it the reply's bytes in order.

    SGLang's ``/generate`` says how many tokens a request has so far
    (``meta_info.completion_tokens``, cumulative per choice). OpenAI completions say it once in
    ``usage``, and until then every event with a choice counts as one token. Bytes are looked at
    after they have been passed on.

    SGLang's events repeat everything so far, so decoding each would cost more than passing it on:
    the two numbers are searched for instead. Inside a JSON text a quote is escaped, so no generated
    text can look like one of the keys.
    """

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        self._buffer = bytearray()
        self._by_index: dict[int, int] = {}
        self._events = 0
        self._usage: int | None = None

    @property
    def total(self) -> int:
        """Tokens seen so far."""
        if self._usage is not None:
            return self._usage
        return sum(self._by_index.values()) or self._events

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the reply."""
        self._buffer += data
        if not self._streamed:
            return
        while (end := self._buffer.find(b"\n\n")) >= 0:
            event = bytes(self._buffer[:end])
            del self._buffer[: end + 2]
            self._event(event)
        if len(self._buffer) > _LONGEST_EVENT:
            self._buffer.clear()

    def finish(self) -> int:
        """The reply is complete; returns its tokens."""
        if not self._streamed and len(self._buffer) <= _LONGEST_EVENT:
            self._payload(bytes(self._buffer), 0)
        self._buffer.clear()
        return self.total

    def _event(self, event: bytes) -> None:
        for line in event.splitlines():
            if not line.startswith(b"data:") or line[5:].lstrip() == b"[DONE]":
                continue
            if b'"meta_info":' in line:
                self._count(_number(line, _INDEX) or 0, _number(line, _TOKENS) or 0)
            else:
                self._payload(line[5:], 1)

    def _count(self, index: int, tokens: int) -> None:
        self._by_index[index] = max(self._by_index.get(index, 0), tokens)

    def _payload(self, payload: bytes, tokens_per_event: int) -> None:
        try:
            replies = _DECODER.decode(payload)
        except UNREADABLE:
            return
        for position, reply in enumerate(replies if isinstance(replies, list) else [replies]):
            if reply.meta_info is not None:
                self._count(reply.index or position, reply.meta_info.completion_tokens)
            if reply.usage is not None:
                self._usage = reply.usage.completion_tokens
            self._events += tokens_per_event if reply.choices else 0


def _number(line: bytes, key: bytes) -> int | None:
    """The number after the last occurrence of a key."""
    start = line.rfind(key)
    found = _NUMBER.match(line, start + len(key)) if start >= 0 else None
    return int(found[1]) if found else None
