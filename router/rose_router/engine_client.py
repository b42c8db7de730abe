"""Speaks SGLang's ``/generate`` and ``/abort_request`` to an engine's data route.

Always streamed. An event that cannot be read, a status other than 200 and an end without a last
event are a ``LegLost``; only a 400 is the request's own fault.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from rose_core.rollouts.transcript import PER_TOKEN, StreamEvent
from rose_router.connections import Connection, Connections, Stage, place_of
from rose_router.errors import EngineRefused, LegLost, Unreachable

_DATA = b"data:"
_DONE = b"[DONE]"
# Statuses by which a gateway says that nobody is behind it: nothing is left to abort there.
_NOBODY = frozenset({404, 410, 502})
_ABORT_SECONDS = 2.0
_MOST_ERROR = 65536


@dataclass(frozen=True, slots=True)
class Target:
    """An engine's data route."""

    url: str
    token: str = ""


class EngineClient(Protocol):
    """How the router reaches engines; tests put engines of their own behind it."""

    def stream(self, target: Target, body: Mapping[str, Any]) -> AsyncIterator[StreamEvent]:
        """Send one leg and yield its events; see ``HttpEngineClient.stream``."""
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

    async def stream(self, target: Target, body: Mapping[str, Any]) -> AsyncIterator[StreamEvent]:
        """Send one leg and yield its events, the last with a finish reason.

        Raises:
            EngineRefused: the engine says that the request is wrong.
            LegLost: anything else that ends the leg before its last event.
        """
        try:
            connection = await self._ask(target, "/generate", msgspec.json.encode(body))
            try:
                await _check_status(connection)
                async for event in _events(connection):
                    yield event
                    if event.finish is not None:
                        connection.leave()
                        return
            finally:
                if connection.stage is Stage.ANSWERING:
                    connection.hang_up()
        except (OSError, TimeoutError) as error:
            message = f"{type(error).__name__}: {error}"
            raise LegLost(message) from error
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
                connection = await self._ask(target, "/abort_request", body)
                connection.leave()
                return connection.status < 400 or connection.status in _NOBODY
        except Unreachable:
            return True
        except (OSError, TimeoutError):
            return False

    async def _ask(self, target: Target, path: str, body: bytes) -> Connection:
        host, port, secure, before = place_of(target.url)
        token = f"Authorization: Bearer {target.token}\r\n" if target.token else ""
        head = (
            f"POST {before}{path} HTTP/1.1\r\nHost: {host}:{port}\r\n{token}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._connections.ask((host, port, secure), head.encode("latin-1") + body)


async def _check_status(connection: Connection) -> None:
    if connection.status == 200:
        return
    text = (await _beginning(connection)).decode(errors="replace")[:500]
    if connection.status == 400:
        raise EngineRefused(_error_text(text))
    message = f"HTTP {connection.status}: {text}"
    raise LegLost(message, refused=True)


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
    except msgspec.DecodeError:
        return text
    found: Any = body.get("error", body) if isinstance(body, dict) else body
    return str(found.get("message", found)) if isinstance(found, dict) else str(found)


async def _events(connection: Connection) -> AsyncIterator[StreamEvent]:
    rest = b""
    while chunk := await connection.chunk():
        *frames, rest = (rest + chunk).split(b"\n\n")
        for frame in frames:
            if frame.startswith(_DATA):
                payload = frame[len(_DATA) :].strip()
                if payload == _DONE:
                    return
                yield read_event(payload)


def read_event(payload: bytes) -> StreamEvent:
    """One ``data:`` line of SGLang's stream.

    Raises:
        EngineRefused: the event is an error that names the request.
        LegLost: it is no event.
    """
    try:
        body: Any = msgspec.json.decode(payload)
        if "error" in body and "meta_info" not in body:
            _refuse(body["error"])
        meta: dict[str, Any] = body["meta_info"]
        spans = meta.get("weight_versions")
        return StreamEvent(
            ids=body.get("output_ids") or (),
            count=meta["completion_tokens"],
            per_token={name: meta[name] for name in PER_TOKEN if meta.get(name)},
            text=body.get("text"),
            finish=meta.get("finish_reason"),
            spans=None if spans is None else [(s["version"], s["start"], s["end"]) for s in spans],
            label=meta.get("weight_version") or "",
            meta=meta,
        )
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        message = f"not an event of SGLang: {type(error).__name__}: {error}: {payload[:200]!r}"
        raise LegLost(message) from error


def _refuse(error: Any) -> None:  # noqa: ANN401  # whatever JSON the engine sent
    code = error.get("code") if isinstance(error, dict) else None
    text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    if code == 400:
        raise EngineRefused(text)
    raise LegLost(text, refused=True)
