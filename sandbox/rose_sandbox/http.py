"""A host's sandboxes over HTTP, for callers with the host's token.

| route | body | answer |
|---|---|---|
| ``POST /sessions`` | ``session``, ``image``, ``limits``, ``environment``, ``folder`` | state |
| the same | ``network``: false for none at all; ``lifetime``: seconds until it is forgotten | |
| the same | ``session``, ``template``, ``environment`` | state, ``template``: what it passed over |
| ``GET /sessions``, ``GET /sessions/{key}`` | | keys; state, ``ETag``, ``Rose-Still-Seconds`` |
| ``POST /sessions/{key}/exec`` | ``command``, ``within``, ``name``, ``shell`` | result |
| ``GET``, ``PUT /sessions/{key}/files?path=`` | the file | the file |
| ``* /sessions/{key}/port/{port}/{path}`` | | what the server in the sandbox says |
| ``GET /sessions/{key}/tunnel/{port}`` | | a WebSocket that is a connection to it (``tunnel``) |
| ``POST /sessions/{key}/turn`` | ``ids``, ``wait`` and more; ``If-Match`` | state: a turn began |
| ``POST /sessions/{key}/ready`` | | state, once the agent may act |
| ``POST /sessions/{key}/ended`` | ``ids`` and more; ``Rose-Prompt-Tokens`` | state: it is over |
| ``POST /sessions/{key}/checkpoint`` | ``ids`` | state, once durable |
| ``GET /sessions/{key}/fence`` | | the fence under which its records are held, here or not |
| ``POST /sessions/{key}/restore`` | ``turn``, ``crossing``, ``tokens``, ``over`` | state, ids |
| ``POST /sessions/{key}/fork`` | ``turn``, ``n``, ``name`` | the children's keys, and more |
| ``POST /sessions/{key}/suspend``, ``resume`` | | state |
| ``DELETE /sessions/{key}?forget=`` | | |
| ``POST /traffic`` | ``serving_burns``, ``seconds`` | the node's guard says how serving is |

Errors are ``{"error": name, "message": ...}``; the name is the exception's.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from rose_core.sandboxes.outside import EffectsCrossed
from rose_core.sandboxes.policy import HostPressure, ModelWait
from rose_core.sandboxes.templates import TemplateRefused
from rose_core.sandboxes.turns import OutOfTurn
from rose_core.unreadable import UNREADABLE
from rose_sandbox import errors, metrics
from rose_sandbox.admission import memory_pressure
from rose_sandbox.box import BoundTokens
from rose_sandbox.host import COMMAND_SECONDS, Host
from rose_sandbox.runtimes.runtime import FILE_BYTES, Limits
from rose_sandbox.templates import Templates
from rose_sandbox.tunnel import CHUNK, MESSAGE_BYTES, carry
from rose_weights.errors import Fenced, WeightsError
from rose_wire.bearer import is_bearer
from rose_wire.observability import pages

STATUS: dict[type[Exception], int] = {
    errors.UnknownSandbox: 404,
    errors.UnknownImage: 404,
    errors.UnknownTurn: 404,
    errors.UnknownTemplate: 404,
    TemplateRefused: 422,
    errors.NoTemplates: 501,
    errors.BadPath: 400,
    errors.AlreadyThere: 409,
    errors.Suspended: 409,
    errors.CommandDiffers: 409,
    errors.HeardLate: 412,
    errors.TokensDiffer: 409,
    errors.CannotCheckpoint: 409,
    errors.CannotRestore: 409,
    errors.TooLarge: 413,
    errors.NotListening: 502,
    errors.TooManyTunnels: 429,
    errors.Unavailable: 503,
    errors.RuntimeFailed: 500,
    EffectsCrossed: 409,
    OutOfTurn: 409,
    Fenced: 410,
    WeightsError: 503,
    ValueError: 400,
}
"""Of each error that has a name; the most special one counts."""
REFUSAL = "Rose-Error"
"""Header with the error of a WebSocket that was refused, as bodies have it elsewhere."""
LIFE = "Rose-Host-Life"
"""Header of every answer: the same for as long as the host's process lives, which knows no sandbox
of the one before it."""
STILL = "Rose-Still-Seconds"
"""Header of a session's state: how long ago its agent can have acted last; 0 while it has a
connection, through which nobody sees what comes."""
PROMPT = "Rose-Prompt-Tokens"
"""Header of a session's end: how many of its tokens the model was last given. No field of the body,
since hosts refuse those that they do not know."""
PROMPT_LENGTH = re.compile("[0-9]{1,10}").fullmatch
MOST_HEADERS = 100
"""Of a server in a sandbox, whose word takes the host's memory: what web servers allow."""
STATUS_CODE = re.compile("[2-5][0-9]{2}")
"""Of an answer; those below 200 promise another one, which no server in a sandbox may give."""
BODILESS = {HTTPStatus.NO_CONTENT, HTTPStatus.RESET_CONTENT, HTTPStatus.NOT_MODIFIED}
UNNAMED_BYTES = 1 << 20
"""Of a file, or a body to a port, whose length its caller does not say: it is held to know it."""
GONE_SECONDS = 1.0
"""Between looks whether the caller of a port or of a command is there: what it asked for goes."""
MOST_BURN_SECONDS = 60.0
"""A guard that dies must not stop checkpoints for ever."""


class _Create(msgspec.Struct, forbid_unknown_fields=True):
    session: str
    image: str = "base"
    limits: dict[str, float] = {}
    environment: dict[str, str] = {}
    folder: str = "/home"
    template: str = ""
    network: bool = True
    lifetime: Annotated[float, msgspec.Meta(gt=0)] | None = None


class _Exec(msgspec.Struct, forbid_unknown_fields=True):
    command: str
    within: float = COMMAND_SECONDS
    name: str | None = None
    shell: str | None = "main"


class _Wait(msgspec.Struct, forbid_unknown_fields=True):
    seconds: float
    confidence: float = 1.0


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    ids: tuple[int, ...] = ()
    weight_versions: tuple[str, ...] = ()
    wait: _Wait | None = None
    history: bytes = b""


class _Restore(msgspec.Struct, forbid_unknown_fields=True):
    turn: int | None = None
    crossing: str = "refuse"
    tokens: str = ""
    over: int | None = None


class _Fork(msgspec.Struct, forbid_unknown_fields=True):
    n: int
    turn: int | None = None
    name: str = ""


class _Burns(msgspec.Struct, forbid_unknown_fields=True):
    serving_burns: bool
    seconds: float = 5.0


class ServingTraffic:
    """The machine's memory, and the node's guard's report of serving until it is old."""

    def __init__(self) -> None:
        self._until = 0.0

    def burns(self, seconds: float) -> None:
        """Serving burns its budget for so long, unless told otherwise."""
        self._until = time.monotonic() + min(seconds, MOST_BURN_SECONDS)

    def __call__(self) -> HostPressure:
        """Now."""
        return replace(memory_pressure(), serving_burns=time.monotonic() < self._until)


def application(
    host: Host,
    traffic: ServingTraffic,
    token: Callable[[], str],
    traffic_token: Callable[[], str] = str,
    templates: Templates = Templates(),  # noqa: B008 - frozen
) -> web.Application:
    """The routes over a host.

    Args:
        host: that they are over.
        traffic: what guards tell it.
        token: reads at each call what callers must show; empty: nobody is heard.
        traffic_token: reads what opens ``POST /traffic`` and nothing else; empty: nothing does.
        templates: that sandboxes may be made of.
    """
    api = _Api(host, traffic, templates)
    guarded = _guarded(token, traffic_token)
    app = web.Application(client_max_size=FILE_BYTES, middlewares=[_named, guarded])
    app.add_routes(pages(metrics.REGISTRY))
    app.on_response_prepare.append(_naming_its_process())
    app.on_shutdown.append(api.hang_up)
    app.add_routes(
        [
            web.post("/traffic", api.traffic),
            web.get("/sessions", api.sessions),
            web.post("/sessions", api.create),
            web.get("/sessions/{key}", api.state),
            web.delete("/sessions/{key}", api.end),
            web.post("/sessions/{key}/exec", api.exec),
            web.get("/sessions/{key}/files", api.read),
            web.put("/sessions/{key}/files", api.write),
            web.route("*", "/sessions/{key}/port/{port}/{path:.*}", api.port),
            web.get("/sessions/{key}/tunnel/{port}", api.tunnel),
            web.post("/sessions/{key}/turn", api.turn),
            web.post("/sessions/{key}/ready", api.ready),
            web.post("/sessions/{key}/ended", api.ended),
            web.post("/sessions/{key}/checkpoint", api.checkpoint),
            web.get("/sessions/{key}/fence", api.fence),
            web.post("/sessions/{key}/restore", api.restore),
            web.post("/sessions/{key}/fork", api.fork),
            web.post("/sessions/{key}/suspend", api.suspend),
            web.post("/sessions/{key}/resume", api.resume),
        ]
    )
    return app


Body = TypeVar("Body")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _named(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except tuple(STATUS) as error:
        kind = next(kind for kind in type(error).__mro__ if kind in STATUS)
        body: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
        if isinstance(error, EffectsCrossed):
            body["effects"] = [asdict(one) for one in error.effects]
        if isinstance(error, errors.CannotCheckpoint):
            body["what"] = error.what
        # Whoever asks for a WebSocket is given no body of an answer that is none.
        refusal = {REFUSAL: json.dumps(body)} if "Upgrade" in request.headers else {}
        return web.json_response(body, status=STATUS[kind], headers=refusal)


def _naming_its_process() -> Callable[[web.Request, web.StreamResponse], Coroutine[Any, Any, None]]:
    life = secrets.token_hex(8)

    async def name(_request: web.Request, answer: web.StreamResponse) -> None:
        answer.headers[LIFE] = life

    return name


def _guarded(token: Callable[[], str], traffic_token: Callable[[], str]) -> Middleware:
    def may(request: web.Request) -> bool:
        header = request.headers.get("Authorization", "")
        if request.path in {"/healthz", "/metrics"}:  # they say nothing of sessions
            return True
        tokens = [token(), *([traffic_token()] if request.path == "/traffic" else [])]
        return any(is_bearer(header, one) for one in tokens if one)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not may(request):
            body = {"error": "NotAllowed", "message": "bearer token missing or wrong"}
            return web.json_response(body, status=401)
        return await handler(request)

    return check


async def _read(request: web.Request, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except UNREADABLE as error:
        raise ValueError(str(error)) from error


class _Api:
    def __init__(self, host: Host, traffic: ServingTraffic, templates: Templates) -> None:
        self._host, self._traffic, self._templates = host, traffic, templates
        self._tunnels: set[web.WebSocketResponse] = set()

    async def hang_up(self, _app: web.Application) -> None:
        """End tunnels, for whose end a host that is to stop would be waiting."""
        await asyncio.gather(*(one.close() for one in self._tunnels), return_exceptions=True)

    async def traffic(self, request: web.Request) -> web.Response:
        status = await _read(request, _Burns)
        self._traffic.burns(status.seconds if status.serving_burns else 0.0)
        return web.Response(status=204)

    async def sessions(self, _request: web.Request) -> web.Response:
        return _json({"sessions": self._host.sessions()})

    async def create(self, request: web.Request) -> web.Response:
        asked = await _read(request, _Create)
        if asked.template:
            return await self._of_template(asked)
        known = asdict(Limits())
        if unknown := sorted(asked.limits.keys() - known.keys()):
            raise ValueError(f"limits: {', '.join(unknown)}; there are {', '.join(known)}")
        given = {name: type(known[name])(value) for name, value in asked.limits.items()}
        status = await self._host.create(
            asked.session,
            image=asked.image,
            limits=Limits(**{**known, **given}),
            environment=asked.environment,
            folder=asked.folder,
            networks=None if asked.network else (),
        )
        if asked.lifetime is not None:
            self._host.end_after(asked.session, asked.lifetime)
        return _json(asdict(status), 201)

    async def _of_template(self, asked: _Create) -> web.Response:
        usual = _Create("")
        names = ("image", "limits", "folder", "network", "lifetime")
        if own := [name for name in names if _differs(asked, usual, name)]:
            raise ValueError(f"{', '.join(own)}: they are the template's; leave them out")
        status, made = await self._templates.create(
            self._host, asked.session, asked.template, asked.environment
        )
        passed_over = {"passed_over": made.passed_over}
        return _json({**asdict(status), "template": passed_over}, 201)

    async def state(self, request: web.Request) -> web.Response:
        key = _key(request)
        status = await self._host.state(key)
        answer = _json(asdict(status))
        answer.etag, still = await self._host.moment(key)
        answer.headers[STILL] = f"{still:.6f}"
        return answer

    async def end(self, request: web.Request) -> web.Response:
        await self._host.end(_key(request), forget=request.query.get("forget") == "true")
        return web.Response(status=204)

    async def exec(self, request: web.Request) -> web.StreamResponse:
        asked = await _read(request, _Exec)

        async def run() -> web.StreamResponse:
            made = await self._host.exec(
                _key(request), asked.command, asked.within, name=asked.name, shell=asked.shell
            )
            return _json(asdict(made))  # streams are base64

        return await _for_its_caller(request, run())

    async def read(self, request: web.Request) -> web.Response:
        data = await self._host.read_file(_key(request), request.query.get("path", ""))
        return web.Response(body=data, content_type="application/octet-stream")

    async def write(self, request: web.Request) -> web.Response:
        mode = int(request.query.get("mode", "644"), 8)
        path = request.query.get("path", "")
        _, held = await _body(request)
        await self._host.write_file(_key(request), path, held or await request.read(), mode)
        return web.Response(status=204)

    async def port(self, request: web.Request) -> web.StreamResponse:
        number = request.match_info["port"]
        # As the caller wrote it: what is decoded may have spaces and ends of lines.
        path = request.rel_url.raw_path_qs.partition(f"/port/{number}/")[2]
        head = [f"{request.method} /{path} HTTP/1.0"]
        length, held = await _body(request)
        kept = {"accept", "content-type", "cookie", "user-agent"}
        head += [
            f"{name}: {value}" for name, value in request.headers.items() if name.lower() in kept
        ]
        head += [f"Host: localhost:{number}", f"Content-Length: {length}", "", ""]
        async with self._inside(request) as (reader, writer, _):
            within = self._host.tunnel_limits.idle_seconds
            writer.write("\r\n".join(head).encode("latin-1") + held)
            sending = asyncio.create_task(_sent(request, writer, within))
            try:
                return await _for_its_caller(request, _relayed(request, reader, within, sending))
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def tunnel(self, request: web.Request) -> web.WebSocketResponse:
        # Compressed messages would cost the host what their sender says.
        line = web.WebSocketResponse(max_msg_size=MESSAGE_BYTES, compress=False)
        if not line.can_prepare(request):
            raise ValueError("a tunnel is a WebSocket: ask for that protocol")
        async with self._inside(request) as (reader, writer, gone):
            await line.prepare(request)
            self._tunnels.add(line)
            try:
                end, _ = await carry(line, reader, writer, self._host.tunnel_limits, gone)
                metrics.TUNNEL_ENDS.labels(str(end)).inc()
            finally:
                self._tunnels.discard(line)
        return line

    @asynccontextmanager
    async def _inside(
        self, request: web.Request
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, asyncio.Event]]:
        number = request.match_info["port"]
        if not number.isdecimal() or not 0 < int(number) < 1 << 16:
            raise ValueError(f"{number!r} is no port: 1 to 65535")
        try:
            async with self._host.tunnel(_key(request), int(number)) as (connection, gone):
                reader, writer = await asyncio.open_connection(sock=connection)
                try:
                    yield reader, writer, gone
                finally:
                    writer.close()
        except errors.TooManyTunnels:
            metrics.TUNNEL_ENDS.labels("refused").inc()
            raise

    async def turn(self, request: web.Request) -> web.Response:
        asked = await _read(request, _Turn)
        wait = (
            ModelWait(asked.wait.seconds, asked.wait.confidence) if asked.wait is not None else None
        )
        status = await self._host.turn_began(
            _key(request),
            asked.ids,
            weight_versions=asked.weight_versions,
            wait=wait,
            history=asked.history,
            if_match=_moment(request),
        )
        return _json(asdict(status))

    async def ready(self, request: web.Request) -> web.Response:
        return _json(asdict(await self._host.tokens_ready(_key(request))))

    async def ended(self, request: web.Request) -> web.Response:
        asked = await _read(request, _Turn)
        prompt = request.headers.get(PROMPT)
        if prompt is not None and not (PROMPT_LENGTH(prompt) and int(prompt) <= len(asked.ids)):
            raise ValueError(f"{PROMPT} is {prompt:.20}, of {len(asked.ids)} ids")
        given = int(prompt) if prompt is not None else None
        whole = BoundTokens(asked.ids, asked.weight_versions, asked.history, given)
        return _json(asdict(await self._host.ended(_key(request), whole)))

    async def checkpoint(self, request: web.Request) -> web.Response:
        asked = await _read(request, _Turn)
        return _json(asdict(await self._host.checkpoint(_key(request), asked.ids)))

    async def fence(self, request: web.Request) -> web.Response:
        return _json({"fence": await self._host.fence(_key(request))})

    async def restore(self, request: web.Request) -> web.Response:
        asked = await _read(request, _Restore)
        if asked.crossing not in {"refuse", "flag"}:
            raise ValueError(f"crossing is {asked.crossing!r}; it is refuse or flag")
        back = await self._host.restore(
            _key(request),
            asked.turn,
            flag=asked.crossing == "flag",
            tokens=asked.tokens,
            over=asked.over,
        )
        return _json(asdict(back))

    async def fork(self, request: web.Request) -> web.Response:
        asked = await _read(request, _Fork)
        made = await self._host.fork(_key(request), asked.n, asked.turn, name=asked.name)
        return _json(asdict(made), 201)

    async def suspend(self, request: web.Request) -> web.Response:
        return _json(asdict(await self._host.suspend(_key(request))))

    async def resume(self, request: web.Request) -> web.Response:
        return _json(asdict(await self._host.resume(_key(request))))


def _differs(one: object, other: object, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


async def _body(request: web.Request) -> tuple[int, bytes]:
    """Length of a request's body, and what of it has been read to know that.

    Raises:
        TooLarge: it is over a file's bound, or its length is not said and it is no short one.
    """
    if not request.body_exists:
        return 0, b""
    length = request.content_length
    # One that is packed is unpacked on its way here: its length is of something else.
    if length is not None and hdrs.CONTENT_ENCODING not in request.headers:
        if length > FILE_BYTES:
            raise errors.TooLarge(f"{length} bytes; {FILE_BYTES} at most are taken at once")
        return length, b""
    held = bytearray()
    async for piece in request.content.iter_any():
        held += piece
        if len(held) > UNNAMED_BYTES:
            raise errors.TooLarge(
                f"a body of more than {UNNAMED_BYTES} bytes has to say its length, and not be "
                "packed (Content-Length, no Content-Encoding)"
            )
    return len(held), bytes(held)


async def _sent(request: web.Request, writer: asyncio.StreamWriter, within: float) -> None:
    """Send on what is left of a request's body, as fast as who listens there reads.

    Raises:
        NotListening: it does not read.
        ValueError: its caller does not send.
    """
    with suppress(ConnectionError):  # it may have answered without reading it all
        while True:
            try:
                async with asyncio.timeout(within):
                    piece = await request.content.readany()
            except TimeoutError as error:
                raise ValueError(f"the rest of the body did not come for {within:g} s") from error
            if not piece:
                return
            writer.write(piece)
            try:
                async with asyncio.timeout(within):
                    await writer.drain()
            except TimeoutError as error:
                raise errors.NotListening(
                    f"what listens there does not read for {within:g} s"
                ) from error


async def _for_its_caller(
    request: web.Request, work: Coroutine[Any, Any, web.StreamResponse]
) -> web.StreamResponse:
    """A server that says nothing, or a command, is waited for while its caller waits."""
    task = asyncio.create_task(work)
    try:
        while not task.done() and request.transport is not None:
            await asyncio.wait({task}, timeout=GONE_SECONDS)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return task.result() if not task.cancelled() else web.Response(status=499)


async def _relayed(
    request: web.Request, reader: asyncio.StreamReader, within: float, sending: asyncio.Task[None]
) -> web.StreamResponse:
    """An HTTP answer of a server that may be anybody's; each piece of it comes in so many seconds.

    It may come before all was sent; its first piece has its seconds from when all was.

    Raises:
        NotListening: it is none, or the server does not read.
        ValueError: the caller does not send.
    """
    answered = asyncio.create_task(_head(reader))
    try:
        await asyncio.wait({answered, sending}, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            sending.result()
        async with asyncio.timeout(within):
            status, headers = await answered
    except TimeoutError as error:
        raise errors.NotListening(f"what listens there said nothing for {within:g} s") from error
    except OSError as error:
        raise errors.NotListening(f"what listens there hung up: {error}") from error
    finally:
        answered.cancel()
        await asyncio.gather(answered, return_exceptions=True)
    answer = web.StreamResponse(status=status)
    if "content-type" in headers:
        answer.headers["Content-Type"] = headers["content-type"]
    await answer.prepare(request)
    # Bytes after a head without a body would be the next answer of the caller's connection.
    while request.method != "HEAD" and status not in BODILESS:
        async with asyncio.timeout(within):
            data = await reader.read(CHUNK)
            if not data:
                break
            await answer.write(data)
    await answer.write_eof()
    return answer


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    line = (await _line(reader)).split(" ", 2)
    if len(line) < 2 or not STATUS_CODE.fullmatch(line[1].strip()):
        raise errors.NotListening("what listens there does not speak HTTP")
    headers: dict[str, str] = {}
    for _ in range(MOST_HEADERS):
        field = (await _line(reader)).strip()
        if not field:
            return int(line[1]), headers
        name, _, value = field.partition(":")
        headers[name.strip().lower()] = "".join(filter(str.isprintable, value.strip()))
    raise errors.NotListening(f"what listens there has more than {MOST_HEADERS} headers")


async def _line(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readline()).decode("latin-1")
    except ValueError as error:  # over the reader's limit
        raise errors.NotListening("what listens there has too long a header") from error


def _moment(request: web.Request) -> str:
    """The moment that a caller names, quoted as HTTP does; empty: none."""
    named = request.if_match or ()
    return named[0].value if named else ""


def _key(request: web.Request) -> str:
    return request.match_info["key"]


def _json(body: object, status: int = 200) -> web.Response:
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, content_type="application/json")
