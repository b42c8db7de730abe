"""What an engine under an engine host answers on its own port: turns and figures, nothing else.

An engine listens on the loopback, which its neighbours in the same pod share: another engine that
was taken over could call it. So its admin routes (weights, profiles, logging) are not there at all,
whoever asks, and what the host itself orders (an abort, a flush) asks for a key that it draws for
every process and hands over in its environment, which no other user reads. Pages that would tell an
engine's settings are closed as well. An engine that was started without a key (tests, benchmarks,
serving engines of the demo) answers everything, as its makers ship it.

Standard library only: the file is imported inside engines. Next step: ``sglang.launch`` and
``vllm.turns`` put ``RouteFilter`` around their engine's application, ``fake.server`` asks
``refusal`` itself; the host's data proxy brings the key.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "ROSE_ENGINE_KEY"

_OPEN = frozenset(
    {("POST", "/generate"), ("POST", "/v1/completions")}
    | {("GET", path) for path in ("/health", "/ready", "/metrics", "/v1/loads")}
    | {("GET", path) for path in ("/model_info", "/get_model_info")}
)
_KEYED = frozenset({("POST", "/abort_request"), ("POST", "/flush_cache")})
# SGLang calls itself by HTTP once it is warm.
_ONCE = frozenset({("POST", "/freeze_gc")})

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


def refusal(method: str, path: str, authorization: str, key: str) -> int:
    """Status that a request is refused with; 0 = it may pass.

    Args:
        method: of HTTP.
        path: without a query.
        authorization: the request's header of that name, empty without.
        key: the engine's own key; empty = everything passes.
    """
    asked = (method, path)
    if not key or asked in _OPEN:
        return 0
    if asked not in _KEYED:
        return 404
    good = hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode())
    return 0 if good else 401


class RouteFilter:
    """An ASGI application behind ``refusal``.

    Args:
        app: the engine's own application.
        key: the engine's key.
    """

    def __init__(self, app: Application, key: str) -> None:
        self._app = app
        self._key = key
        self._once = set(_ONCE)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer, or refuse before the engine has seen the request."""
        status = 0 if scope["type"] == "lifespan" else self._refusal(scope)
        if not status:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            start = {"type": "http.response.start", "status": status, "headers": []}
            await send(start)
            await send({"type": "http.response.body", "body": b""})
        # Anything else (a WebSocket) ends unanswered, which its server takes for a refusal.

    def _refusal(self, scope: Message) -> int:
        asked = (scope.get("method", ""), scope["path"])
        if asked in self._once:
            self._once.discard(asked)
            return 0
        headers = dict(scope.get("headers") or ())
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        return refusal(*asked, authorization, self._key)
