"""HTTP in front of the service: the lease's URL.

| path | for |
|---|---|
| POST /generate | SGLang's dialect |
| POST /v1/completions | OpenAI's, with token ids |
| POST /inference/v1/generate | vLLM's, token ids only |
| POST /abort_request | end turns of this lease, by exact id or all |
| GET /health, /health_generate, /ready, /v1/models, /get_weight_version | start-up checks |
| GET /engines, /turns | state, for people and dashboards |
| GET /metrics, /healthz | as every process of ROSE |
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from rose_core.rollouts.errors import InvalidTurn, RolloutError
from rose_router import metrics, pages
from rose_router.answering import Answering
from rose_router.errors import EngineRefused, NotAllowed, RouterError
from rose_router.service import Service
from rose_router.text import Tokenizer
from rose_wire.observability import pages as process_pages

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OPEN_PATHS = frozenset({"/metrics", "/healthz", "/health", "/health_generate", "/ready"})


def create(service: Service, tokenizer: Tokenizer | None = None) -> web.Application:
    """The application; run it with handler cancellation, so that hung-up callers are noticed."""
    app = web.Application(
        client_max_size=service.settings.max_body_bytes,
        middlewares=[_errors_as_json, _bearer(service.settings.turn_token)],
    )
    answering = Answering(service, tokenizer)
    app.add_routes(process_pages(metrics.REGISTRY))
    app.add_routes(pages.routes(service))
    app.add_routes(
        [
            web.post("/generate", answering.generate),
            web.post("/v1/completions", answering.completions),
            web.post("/inference/v1/generate", answering.inference),
            web.post("/abort_request", answering.abort),
        ]
    )
    return app


def error_response(error: Exception) -> web.Response:
    """An exception as every dialect's callers understand it."""
    status, reason, retry_after = classify(error)
    metrics.REFUSED.labels(reason).inc()
    body = {
        "object": "error",
        "message": str(error),
        "type": reason,
        "code": status,
        "error": {"message": str(error), "type": reason, "code": status},
    }
    headers = {"Retry-After": str(retry_after)} if retry_after else {}
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def classify(error: Exception) -> tuple[int, str, int]:
    """Status, closed reason and Retry-After (0 = none) of an exception."""
    if isinstance(error, RouterError):
        return error.status, error.reason, error.retry_after
    if isinstance(error, InvalidTurn):
        return 400, "InvalidTurn", 0
    if isinstance(error, RolloutError):
        return 409, type(error).__name__, 1
    if isinstance(error, EngineRefused):
        return 400, "EngineRefused", 0
    if isinstance(error, web.HTTPException):
        return error.status, type(error).__name__.removeprefix("HTTP"), 0
    return 500, "Internal", 0


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return error_response(error)
    except (RouterError, RolloutError, EngineRefused) as error:
        return error_response(error)


def _bearer(token: str) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token and request.path not in _OPEN_PATHS:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                message = "bearer token missing or wrong; send Authorization: Bearer TOKEN"
                raise NotAllowed("NotAllowed", message)
        return await handler(request)

    return check
