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

import aiohttp
import msgspec

from rose_core.rollouts.transcript import PER_TOKEN, StreamEvent
from rose_router.errors import EngineRefused, LegLost

_DATA = b"data:"
_DONE = b"[DONE]"
# Statuses by which a gateway says that nobody is behind it: nothing is left to abort there.
_NOBODY = frozenset({404, 410, 502})
# Time for what follows the last event; an engine may be stopped just there.
_END_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """An engine's data route."""

    url: str
    token: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What every request to it carries."""
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        return headers


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
        session: connections; the caller closes it.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def stream(self, target: Target, body: Mapping[str, Any]) -> AsyncIterator[StreamEvent]:
        """Send one leg and yield its events, the last with a finish reason.

        Raises:
            EngineRefused: the engine says that the request is wrong.
            LegLost: anything else that ends the leg before its last event.
        """
        try:
            async with self._session.post(
                f"{target.url}/generate",
                data=msgspec.json.encode(body),
                headers=target.headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            ) as response:
                await _check_status(response)
                async for event in _events(response.content):
                    yield event
                    if event.finish is not None:
                        await _read_to_end(response.content)
                        return
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
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
            async with self._session.post(
                f"{target.url}/abort_request",
                data=msgspec.json.encode({"rid": rid}),
                headers=target.headers,
                timeout=aiohttp.ClientTimeout(total=2),
            ) as response:
                return response.status < 400 or response.status in _NOBODY
        except aiohttp.ClientConnectorError:
            return True
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = (await response.text())[:500]
    if response.status == 400:
        raise EngineRefused(_error_text(text))
    message = f"HTTP {response.status}: {text}"
    raise LegLost(message, refused=True)


async def _read_to_end(content: aiohttp.StreamReader) -> None:
    """Let the engine end the response itself: hanging up earlier looks like a lost caller."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_END_SECONDS):
            await content.read()


def _error_text(text: str) -> str:
    try:
        body = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    found: Any = body.get("error", body) if isinstance(body, dict) else body
    return str(found.get("message", found)) if isinstance(found, dict) else str(found)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[StreamEvent]:
    rest = b""
    async for chunk in content.iter_any():
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
