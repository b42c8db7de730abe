"""Speaks SGLang's ``/generate`` and ``/abort_request`` to an engine's data route.

Always streamed. An event that cannot be read, a status other than 200 and an end without a last
event are a ``LegLost``; a 4xx is the request's own fault, and a 500 may be (``doubtful``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import msgspec

from rose_core.rollouts.transcripts.transcript import PER_TOKEN, StreamEvent
from rose_core.unreadable import UNREADABLE
from rose_core.wire.routing import UNSENT, EngineUpdate
from rose_router.engines.connections import Connection, Connections, Place, Stage, place_of
from rose_router.errors import EngineRefused, LegLost, Unreachable

_DATA = b"data:"
_DONE = b"[DONE]"
_EVENT, _LAST_FRAME = b"data: {", b"data: [DONE]"
# Statuses by which a gateway says that nobody is behind it: nothing is left to abort there.
_NOBODY = frozenset({404, 410, 502})
# Statuses that say something of the engine or its host at this moment, and not of the request.
_PASSING = frozenset({401, 403, 408, 429, 503, 504}) | _NOBODY
_ABORT_SECONDS = 2.0
_MOST_ERROR = 65536
MOST_IDS = 1 << 15  # that are written at once: half a millisecond
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
# What may stand in a head that we write ourselves: a line end would begin a header of its own.
_VISIBLE = re.compile(r"[\x21-\x7e]*")
_LOGPROBS, _SELDOM = PER_TOKEN[0], frozenset(PER_TOKEN[1:])
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Target(msgspec.Struct, frozen=True, gc=False):
    """An engine's data route; made for every leg.

    Attributes:
        certificates: SHA-256, in hex, of those that it may show.
        traceparent: of the span that the request belongs to, as W3C writes it; empty = none.
    """

    url: str
    token: str = ""
    certificates: tuple[str, ...] = ()
    traceparent: str = ""

    @classmethod
    def of(cls, update: EngineUpdate, traceparent: str = "") -> Target:
        """Of an engine as its owner describes it."""
        return cls(update.url, update.token, update.certificates, traceparent)

    def complaint(self) -> str:
        """Why no request can be sent there, never with the token in it; empty when one can."""
        if not _VISIBLE.fullmatch(self.token):
            return "token: expected visible ASCII characters, without spaces and line ends"
        if not _VISIBLE.fullmatch(self.url):
            return f"url: expected visible ASCII characters, got {self.url!r:.100}"
        try:
            host = place_of(self.url)[0]
        except ValueError as error:
            return f"url: {self.url:.100}: {error}"
        if self.certificates and not self.url.startswith("https://"):
            return f"url: {self.url:.100} is not https, and a certificate is named"
        if not all(map(_SHA256.fullmatch, self.certificates)):
            return "certificates: expected SHA-256 as 64 lower-case hex digits"
        known = self.url.startswith(("http://", "https://"))
        return "" if host and known else f"url: expected http(s)://host:port, got {self.url:.100}"


LegBody = Mapping[str, Any] | bytes
"""A leg's request: an object, or its JSON."""

Take = Callable[[Iterable[StreamEvent]], bool]
"""Takes events that came together; false when no more is wanted."""


class EngineClient(Protocol):
    """How the router reaches engines; tests put engines of their own behind it."""

    async def stream(self, target: Target, body: LegBody, take: Take) -> None:
        """Send one leg and hand its events on; see ``HttpEngineClient.stream``."""
        ...

    async def abort(self, target: Target, rid: str) -> bool:
        """End a leg; True when it is certain that the engine no longer works on it."""
        ...


class HttpEngineClient:
    """The real one.

    Args:
        connections: to engines; the caller closes them.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def stream(self, target: Target, body: LegBody, take: Take) -> None:
        """Send one leg and hand its events on, in the moment in which they come.

        Returns when the last event has been taken, the one with a finish reason, or no more is
        wanted. What ``take`` raises ends the leg and is raised here.

        Raises:
            EngineRefused: the engine says that the request is wrong.
            LegLost: anything else that ends the leg before its last event.
        """
        events = _Events(take)
        raw = (body,) if isinstance(body, bytes) else await _encoded(body)
        try:
            connection = await self._ask(target, "/generate", raw, events.feed)
            try:
                if connection.status != 200:
                    await _raise_status(connection)
                if events.ended:
                    connection.leave()
            finally:
                if connection.stage is Stage.ANSWERING:
                    connection.hang_up()
        except (OSError, TimeoutError) as error:
            message = f"{type(error).__name__}: {error}"
            raise LegLost(message, unsent=isinstance(error, Unreachable)) from error
        if events.wanted:
            message = "the stream ended without a finish reason"
            raise LegLost(message)

    async def abort(self, target: Target, rid: str) -> bool:
        """Ask the engine to end a leg.

        Returns:
            True when it has taken the abort, or when no process is there that could work on it.
        """
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                body = msgspec.json.encode({"rid": rid})
                connection = await self._ask(target, "/abort_request", (body,))
                connection.leave()
                return connection.status < 400 or connection.status in _NOBODY
        except Unreachable:
            return True
        except (OSError, TimeoutError):
            return False

    def _ask(
        self,
        target: Target,
        path: str,
        body: Sequence[bytes],
        take: Callable[[bytes], bool] | None = None,
    ) -> Awaitable[Connection]:
        place, head = _head(target.url, target.token, target.certificates, path)
        trace = target.traceparent and f"traceparent: {target.traceparent}\r\n"
        first, *more = body
        length = len(first) + sum(map(len, more)) if more else len(first)
        begin = b"%b%d\r\n%b\r\n%b" % (head, length, trace.encode("ascii"), first)
        return self._connections.ask(place, begin, take, more)


async def _encoded(body: Mapping[str, Any]) -> Sequence[bytes]:
    """A leg's body; a long prompt is written in slices, between which other streams move.

    They are not joined: seven megabytes are copied in 4 ms.
    """
    ids = body.get("input_ids")
    if not isinstance(ids, list | tuple) or len(ids) <= MOST_IDS:
        return (_encode(body),)
    slices = await encoded_ids(ids)
    rest = msgspec.json.encode({name: one for name, one in body.items() if name != "input_ids"})
    more = b"," if rest != b"{}" else b""
    return [b'{"input_ids":', *slices, b"%b%b" % (more, rest[1:])]


async def encoded_ids(ids: Sequence[int]) -> list[bytes]:
    """A list of ids as JSON, in pieces; others have the loop between them."""
    slices = []
    for begin in range(0, len(ids), MOST_IDS):
        await asyncio.sleep(0)
        numbers = msgspec.json.encode(ids[begin : begin + MOST_IDS])
        slices.append(b"%b%b" % (b"," if begin else b"[", numbers[1:-1]))
    return [*slices, b"]"]


_DRAFT_SECONDS = 20.0


async def send_drafts(
    connections: Connections, target: Target, texts: Sequence[Sequence[int]]
) -> bool:
    """Send an engine's host what it shall draft from from now on; whether it has taken it."""
    body = msgspec.json.encode({"texts": texts})
    try:
        async with asyncio.timeout(_DRAFT_SECONDS):
            place, head = _head(target.url, target.token, target.certificates, "/drafts")
            whole = b"%b%d\r\n\r\n%b" % (head, len(body), body)
            connection = await connections.ask(place, whole)
            connection.leave()
            return connection.status == 200
    except (OSError, TimeoutError, Unreachable):
        return False


@functools.lru_cache(maxsize=4096)
def _head(url: str, token: str, certificates: tuple[str, ...], path: str) -> tuple[Place, bytes]:
    """Where a request goes and how it begins, up to the length of its body.

    Raises:
        Unreachable: the route cannot be one.
    """
    complaint = Target(url, token, certificates).complaint()
    if complaint:
        raise Unreachable(complaint)
    host, port, secure, before = place_of(url)
    name = f"[{host}]" if ":" in host else host
    shown = f"Authorization: Bearer {token}\r\n" if token else ""
    head = (
        f"POST {before}{path} HTTP/1.1\r\nHost: {name}:{port}\r\n{shown}"
        "Content-Type: application/json\r\nContent-Length: "
    )
    return (host, port, secure, certificates), head.encode("ascii")


async def _raise_status(connection: Connection) -> NoReturn:
    """Raises what a status other than 200 means."""
    text = (await _beginning(connection)).decode(errors="replace")[:500]
    if connection.status == 502:  # its host found it gone, before or after it saw the request
        raise LegLost(f"HTTP 502: {text}", unsent=_error_type(text) == UNSENT)
    _refuse(connection.status, _error_text(text))


async def _beginning(connection: Connection) -> bytes:
    """The body of an error, as far as it comes and is of interest."""
    body = b""
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        async with asyncio.timeout(_ABORT_SECONDS):
            while len(body) < _MOST_ERROR and (piece := await connection.chunk()):
                body += piece
    connection.leave()
    return body


def _error_text(text: str) -> str:
    try:
        body = msgspec.json.decode(text)
    except UNREADABLE:
        return text
    found: Any = body.get("error", body) if isinstance(body, dict) else body
    return str(found.get("message", found)) if isinstance(found, dict) else str(found)


def _error_type(text: str) -> str:
    try:
        body = msgspec.json.decode(text)
    except UNREADABLE:
        return ""
    found: Any = body.get("error") if isinstance(body, dict) else None
    return str(found.get("type", "")) if isinstance(found, dict) else ""


class _Events:
    """A stream's bytes as events.

    Attributes:
        ended: the engine has said its last.
        wanted: whoever takes them wants more.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self._rest = b""
        self.ended = False
        self.wanted = True

    def feed(self, data: bytes) -> bool:
        """Hand on the events that are whole now; false when nothing more is to come."""
        *frames, self._rest = (self._rest + data if self._rest else data).split(b"\n\n")
        if not frames:
            return self.wanted
        if len(frames) > 1 and frames[-1] == _LAST_FRAME:
            frames.pop()
        if len(frames) == 1 and frames[0].startswith(_EVENT):  # the usual case
            event = read_event(frames[0][len(_DATA) :])
            self.ended = event.finish is not None
            self.wanted = self._take((event,)) and not self.ended
        else:
            self.wanted = self._take(self._read(frames)) and not self.ended
        return self.wanted

    def _read(self, frames: list[bytes]) -> Iterator[StreamEvent]:
        for frame in frames:
            payload = frame[len(_DATA) :].strip() if frame.startswith(_DATA) else _DONE
            if payload == _DONE:
                continue
            event = read_event(payload)
            self.ended = event.finish is not None
            yield event
            if self.ended:
                return


def read_event(payload: bytes) -> StreamEvent:
    """One ``data:`` line of SGLang's stream.

    Raises:
        EngineRefused: the event is an error that names the request.
        LegLost: it is no event.
    """
    try:
        body: Any = _decode(payload)
        if "error" in body and "meta_info" not in body:
            _refuse_by(body["error"])
        meta: dict[str, Any] = body["meta_info"]
        spans = meta.get("weight_versions")
        return StreamEvent(
            body.get("output_ids") or (),
            meta["completion_tokens"],
            _per_token(meta),
            body.get("text"),
            meta.get("finish_reason"),
            None if spans is None else _spans(spans),
            meta.get("weight_version") or "",
            meta,
        )
    except (*UNREADABLE, KeyError, TypeError, AttributeError) as error:
        message = f"not an event of SGLang: {type(error).__name__}: {error}: {payload[:200]!r}"
        raise LegLost(message) from error


def _spans(listed: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, int, int]]:
    if len(listed) == 1:  # the usual case: no call for a list
        span = listed[0]
        return ((span["version"], span["start"], span["end"]),)
    return [(span["version"], span["start"], span["end"]) for span in listed]


def _per_token(meta: dict[str, Any]) -> dict[str, Sequence[Any]]:
    """The lists with an entry per token that came along."""
    logprobs = meta.get(_LOGPROBS)
    found = {_LOGPROBS: logprobs} if logprobs else {}
    if not _SELDOM.isdisjoint(meta):
        found |= {name: meta[name] for name in PER_TOKEN[1:] if meta.get(name)}
    return found


def _refuse_by(error: Any) -> None:  # noqa: ANN401  # whatever JSON the engine sent
    code = error.get("code") if isinstance(error, dict) else None
    text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    _refuse(code if isinstance(code, int) else 500, text)


def _refuse(status: int, text: str) -> NoReturn:
    """Raise what a status other than 200 means.

    Raises:
        EngineRefused: the request is wrong.
        LegLost: the engine or its host cannot take it now, or failed at it.
    """
    if 400 <= status < 500 and status not in _PASSING:
        raise EngineRefused(text)
    raise LegLost(f"HTTP {status}: {text}", refused=True, doubtful=status not in _PASSING)
