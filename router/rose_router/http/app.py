"""HTTP in front of the service: the lease's URL.

| path | for |
|---|---|
| POST /generate | SGLang's dialect |
| POST /v1/completions, /v1/chat/completions | OpenAI's, with token ids |
| POST /v1/messages, /v1/messages/count_tokens | Anthropic's, for agents' harnesses |
| POST /v1/responses | OpenAI's, with and without ``previous_response_id`` |
| GET /sessions | sessions of chats, messages and responses whose turns are kept |
| GET /sessions/{key}/rows | training rows of such a session, exact to the token |
| POST /tokenize, /detokenize | text or a conversation as token ids, and back |
| POST /inference/v1/generate | vLLM's, token ids only |
| /v1/files, /v1/batches | OpenAI's batch files, kept and run by ``rose batches`` |
| POST /abort_request | end turns of this lease, by exact id or all |
| GET /health, /health_generate, /ready, /v1/models, /get_weight_version | start-up checks |
| GET /server_info, /model_info, /workers, /v1/loads | the lease as one SGLang server and router |
| POST, GET /trajectories | what was trained on; the bias meter |
| POST /pause_generation, /update_weights_from_disk, ... | weights pushed as into one engine |
| GET /engines, /turns | state, for people and dashboards |
| POST /finish_session | a trajectory comes back no more |
| GET /metrics, /healthz | as every process of ROSE |
| /s/{session}/... | a harness's routes, as requests of that session (``below_sessions``) |
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

import aiohttp
import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware
from multidict import CIMultiDict
from yarl import URL

from rose_core import rights
from rose_core.rights import CallerParty, Listener
from rose_core.rollouts.conversations.message_tree import MessageTree
from rose_core.rollouts.errors import (
    InvalidTurn,
    PromptTooLong,
    RolloutError,
    UnknownVersion,
    UnsafeTurn,
    VersionGone,
)
from rose_router import metrics
from rose_router.errors import REASON, BadRequest, EngineRefused, RouterError, Unforeseen
from rose_router.http import forward
from rose_router.http.admission import bearer, memory
from rose_router.http.admission.bodies import (
    BODY_SECONDS,
    LARGE_BODIES,
    LargeBodies,
    known_length,
    pass_by,
)
from rose_router.http.admission.memory import MemoryLimiter, limit_of_process
from rose_router.http.conversations.stored_responses import StoredResponses
from rose_router.http.dialects.common import SESSION_HEADERS, SESSION_OF_URL
from rose_router.http.replies import message_replies, response_replies
from rose_router.http.routes import (
    batches,
    branches,
    engine_metrics,
    facade,
    pages,
    rows,
    trajectories,
    virtual,
)
from rose_router.http.routes.turns import TurnHandlers
from rose_router.http.tokenizer.model_tokenizer import ModelTokenizer
from rose_router.http.whole_requests import WHOLE_ROUTES, Handler, resolve
from rose_router.listener import ConnectionLimiter
from rose_router.replicas.peers import Peers
from rose_router.turns.barrier import Barrier
from rose_router.turns.service import Service
from rose_wire.observability import pages as process_pages

LOG = logging.getLogger(__name__)
_OF_TURNS = (
    "/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/inference/v1/generate",
)
"""What is asked turn after turn."""
_SESSION_URLS = "/s/"
"""Before a session's name in a path: what stands there is short, for harnesses show their URL."""
_BELOW_SESSIONS = rights.paths(rights.allowed(Listener.ROUTER, CallerParty.HARNESS))
"""What a harness may ask for. Whoever closes a path in front of the router has closed it."""
_MODEL = "/v1/models/"  # of those the one with a variable
# What no header's value has: a name in a URL is none that a header could not say.
_NO_NAME = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
# Of the memory that the process may have, each: tokens sampled under messages, the objects of their
# turns, conversations behind responses. Requests leave more than that free (``memory.PART``).
_KEPT_PART = 1 / 16
_TOKEN_BYTES, _TURN_BYTES = 8, 2048  # an id and a log-prob; a node with its digests and spans


def create(
    service: Service,
    model_tokenizer: ModelTokenizer | None = None,
    doors: ConnectionLimiter | None = None,
    barrier: Barrier | None = None,
    *,
    hosts: branches.BranchingHosts | None = None,
    peers: Peers | None = None,
    session: aiohttp.ClientSession | None = None,
) -> web.Application:
    """The application; run it with handler cancellation, so that hung-up callers are noticed.

    Args:
        service: runs turns.
        model_tokenizer: the model's tokenizer; by default what engines bring.
        doors: counts connections.
        barrier: pushes weights, where they are pushed.
        hosts: of agents' sandboxes.
        peers: the lease's other routers; ``None`` = it is alone.
        session: to reach those and ``rose batches``.

    Raises:
        OSError: the file of tokens cannot be read.
        ValueError: it holds none.
    """
    settings = service.settings
    tokens = bearer.Tokens(
        settings.turn_token_file,
        settings.turn_token,
        accounts=settings.accounts,
        callers=settings.callers,
        lease=settings.lease,
        required=settings.authenticate,
    )
    running = bearer.RunningRequests(tokens)
    doors = ConnectionLimiter(settings.limits) if doors is None else doors
    room = MemoryLimiter(settings.memory_bytes or limit_of_process())
    model_tokenizer = ModelTokenizer(service.fleet) if model_tokenizer is None else model_tokenizer
    model_tokenizer.bound(room.most_text)
    app = web.Application(
        client_max_size=settings.max_body_bytes,
        middlewares=[
            _outermost(doors, service),
            bearer.middleware(tokens, running),
            memory.middleware(room, settings.max_body_bytes),
            *([forward.middleware(peers, session)] if peers and session else []),
        ],
    )
    app.cleanup_ctx.append(running.watch)
    app[bearer.RUNNING] = running
    app[BODY_SECONDS] = settings.limits.body_seconds
    app[LARGE_BODIES] = LargeBodies(service.bounds)
    kept = int(room.limit * _KEPT_PART)
    tree = MessageTree(kept // _TOKEN_BYTES, kept // _TURN_BYTES)
    answering = TurnHandlers(service, model_tokenizer, tree, StoredResponses(kept))
    health = partial(_health, service)
    app.add_routes(process_pages(engine_metrics.registry(service), health))
    app.add_routes(pages.routes(service))
    app.add_routes(facade.routes(service))
    if barrier is not None:
        post_label = forward.labels_to(peers, session) if peers and session else None
        app.add_routes(virtual.routes(service, barrier, post_label))
    app.add_routes(trajectories.routes(service))
    app.add_routes(rows.routes(tree, service))
    app.add_routes(batches.routes(settings.batches_url, settings.batches_token, session))
    made = branches.Branches(tree, service, hosts)
    app.add_routes(made.routes())
    service.sandboxes.remember(made.history)
    app.add_routes(
        [
            web.post("/generate", answering.generate),
            web.post("/v1/completions", answering.completions),
            web.post("/v1/chat/completions", answering.chat),
            web.post("/v1/messages", answering.messages),
            web.post("/v1/messages/count_tokens", answering.count_tokens),
            web.post("/v1/responses", answering.responses),
            web.post("/tokenize", answering.tokenize),
            web.post("/v1/tokenize", answering.tokenize),
            web.post("/detokenize", answering.detokenize),
            web.post("/inference/v1/generate", answering.inference),
            web.post("/abort_request", answering.abort),
        ]
    )
    app[WHOLE_ROUTES] = resolve(app, _OF_TURNS)
    return app


Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def below_sessions(answer: Answer) -> Answer:
    """The same for requests to a session's URL, which come to it as if a header named the session.

    A harness of which only base URL and key can be set says so whose turn it is.

    Args:
        answer: to requests, before anything of them was looked at. Those that are answered past it
            (``whole_requests``) have a route's own path.
    """

    def named(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        if request.raw_path.startswith(_SESSION_URLS):
            request = _of_session(request)
        return answer(request)

    return named


def _of_session(request: web.BaseRequest) -> web.BaseRequest:
    """A request to a session's URL, without that; the same where it is none, for which is a 404."""
    path, _, _ = request.raw_path.partition("?")
    segment, _, _ = path.removeprefix(_SESSION_URLS).partition("/")
    begin = len(_SESSION_URLS) + len(segment)
    name, below = unquote(segment, errors="surrogateescape").strip(" "), path[begin:]
    if not name or _NO_NAME.search(name):
        return request
    if below not in _BELOW_SESSIONS and not below.startswith(_MODEL):
        return request
    headers = CIMultiDict(
        # A clone's are text. What is none stands in no header that the router reads.
        (key, value.encode("utf-8", "replace").decode())
        for key, value in request.headers.items()
    )
    for other in SESSION_HEADERS:  # a harness's own: the URL is what its trainer has set
        headers.popall(other, None)
    headers[SESSION_OF_URL] = name
    return request.clone(rel_url=URL(request.raw_path[begin:], encoded=True), headers=headers)


def error_response(error: Exception, path: str = "") -> web.Response:
    """An exception as callers of a path's dialect understand it."""
    status, reason, retry_after = classify(error)
    metrics.REFUSED.labels(reason).inc()
    body = _error_json(error, path, status, reason)
    headers = {REASON: reason}
    if retry_after:
        headers["Retry-After"] = str(retry_after)
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def _error_json(error: Exception, path: str, status: int, reason: str) -> dict[str, Any]:
    """In the words of the path's dialect; of an overlong prompt in those that clients look for."""
    words = str(error)
    too_long = error if isinstance(error, PromptTooLong) else None
    if path.startswith("/v1/messages"):
        words = message_replies.too_long_words(too_long) if too_long else words
        return message_replies.error_json(status, words, reason)
    if path.startswith("/v1/responses"):
        words = response_replies.too_long_words(too_long) if too_long else words
        code = response_replies.CONTEXT_EXCEEDED if too_long else reason
        return response_replies.error_json(status, words, code)
    inner: dict[str, Any] = {"message": words, "type": reason, "param": None, "code": status}
    if too_long:
        if path == "/generate":
            # SGLang's own, in its dialect.
            words = (
                f"The input ({too_long.tokens} tokens) is longer than the model's context length "
                f"({too_long.context} tokens)."
            )
        inner |= {"message": words, "type": "invalid_request_error"}
        inner["code"] = response_replies.CONTEXT_EXCEEDED
    outer = {"object": "error", "message": words, "type": reason, "param": None, "code": status}
    return {**outer, "error": inner}


def classify(error: Exception) -> tuple[int, str, int]:
    """Status, closed reason and Retry-After (0 = none) of an exception."""
    if isinstance(error, RouterError):
        return error.status, error.reason, error.retry_after
    if isinstance(error, InvalidTurn):
        # After a 422 no client asks again.
        return 422 if isinstance(error, UnsafeTurn) else 400, type(error).__name__, 0
    if isinstance(error, RolloutError):
        may_come = isinstance(error, UnknownVersion) and not isinstance(error, VersionGone)
        return (409 if may_come else 400), type(error).__name__, int(may_come)
    if isinstance(error, EngineRefused):
        return 400, "EngineRefused", 0
    if isinstance(error, web.HTTPException):
        return error.status, type(error).__name__.removeprefix("HTTP"), 0
    return 500, "Internal", 0


def _health(service: Service) -> str:
    """Why the kubelet should send nobody here; without engines turns wait for one."""
    return "leaving" if service.leaving else ""


def _unforeseen(request: web.Request, error: Exception) -> web.Response:
    """The answer to what nobody has thought of; its traceback is in the log, and not in the answer.

    A body may be nested deeper than Python goes, wherever it is gone through.
    """
    if isinstance(error, RecursionError):
        message = "the body is nested too deeply; send it with fewer lists and objects in another"
        return error_response(BadRequest("InvalidTurn", message), request.path)
    LOG.error("%s %s failed", request.method, request.path, exc_info=error)
    kind = type(error).__name__
    message = f"the router failed at this request ({kind}); its log says where"
    return error_response(Unforeseen(message), request.path)


def _outermost(doors: ConnectionLimiter, service: Service) -> Middleware:
    """Notes that a request has come and is answered; says errors in the words of the route."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        transport, content = request.transport, request.content
        if content.is_eof():
            doors.note_whole(transport)
        else:
            chunked = hdrs.TRANSFER_ENCODING in request.headers
            doors.note_head(transport, content, known_length(request), chunked=chunked)
        if service.leaving and request.method == hdrs.METH_POST:  # probes go on to the end
            service.asked_at = service.clock()
        try:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = error_response(error, request.path)
            except (RouterError, RolloutError, EngineRefused) as error:
                response = error_response(error, request.path)
            except Exception as error:  # whatever it is: clients read the dialect's shape only
                if isinstance(error, ConnectionError) or request.writer.output_size:
                    raise  # the caller has hung up, or its answer has begun
                response = _unforeseen(request, error)
            if service.leaving:
                response.force_close()  # the caller's next connection is another router's
            return response if content.is_eof() else await pass_by(request, response)
        finally:
            doors.note_answered(transport)

    return answer
