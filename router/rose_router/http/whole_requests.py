"""Requests that come whole: answered by a task of their own, and nothing else is woken for them.

aiohttp's connection has a task that waits for requests, and makes another for each. Between the two
it resolves the route, takes the middlewares' chain from a cache and looks for what a turn never
has: an upgrade, a body that is still coming, a form, an access log. Here a request whose head and
body came in one piece, for a route that is asked for turn after turn, goes straight to that route's
chain. Everything is read by the same parser and answered by the same handlers.

| a request | is answered by |
|---|---|
| came whole and alone, for one of the routes | this |
| came in pieces, in chunks, compressed, with ``Expect``, with others | aiohttp |
| cannot be read, asks for another protocol | aiohttp |
| comes while another of its connection is answered | aiohttp, after that one |

| this connection is | its task of aiohttp | left by |
|---|---|---|
| new, or its first answer was just given | is about to wait | a request: answering, or busy |
| idle | waits | a request: answering, or busy |
| answering a whole request | waits | the answer: idle; busy where others have come; over |
| busy | answers | the answer: idle, over |
| over | is cancelled | |

It is answered in the moment in which it comes (``begun``): a burst of an engine's events that has
come beside it waits for it, and not the other way round.

Much of it is no interface of aiohttp's (``PRIVATE_NAMES``). Where an aiohttp lacks one of these
names, it answers all requests by itself, as ``choose_protocol`` says.

Next step: ``app`` names the routes, ``listener`` passes on what arrives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from aiohttp import hdrs, web
from aiohttp.http import HttpRequestParser
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import StreamWriter
from aiohttp.streams import StreamReader

from rose_router.begun import BegunTask

LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PRIVATE_NAMES: Mapping[type, frozenset[str]] = {
    web.RequestHandler: frozenset(
        {"_buffer_paused", "_close", "_current_request", "_force_close", "_handle_request"}
        | {"_handler_waiter", "_keepalive", "_keepalive_handle", "_keepalive_timeout", "_loop"}
        | {"_manager", "_messages", "_next_keepalive_close_time", "_parser", "_process_keepalive"}
        | {"_reading_paused", "_request_factory", "_request_in_progress", "_task_handler"}
        | {"_upgraded", "_waiter"}
    ),
    HttpRequestParser: frozenset({"message_consumed"}),
    web.Request: frozenset({"_match_info"}),
}
"""What is used here of aiohttp that is not its interface, by class."""


@dataclass(frozen=True, slots=True)
class WholeRoute:
    """A route without variables, resolved once.

    Attributes:
        handler: the route's, behind the application's middlewares.
        match: what its requests are told of the route.
    """

    handler: Handler
    match: web.UrlMappingMatchInfo


WHOLE_ROUTES = web.AppKey("whole_routes", Mapping[str, WholeRoute])
"""Key of an application under which these routes are found, by path."""


def resolve(app: web.Application, paths: Iterable[str]) -> dict[str, WholeRoute]:
    """The routes of POST with these paths.

    Raises:
        KeyError: the application has no such route.
    """
    routes = {
        route.resource.canonical: route
        for route in app.router.routes()
        if route.method == hdrs.METH_POST and route.resource is not None
    }
    found = {}
    for path in paths:
        match = web.UrlMappingMatchInfo({}, routes[path])
        match.add_app(app)
        match.freeze()
        handler: Any = routes[path].handler
        for middleware in reversed(app.middlewares):
            handler = partial(middleware, handler=handler)
        found[path] = WholeRoute(handler, match)
    return found


class WholeRequestHandler(web.RequestHandler):
    """A connection of aiohttp's that answers whole requests by itself.

    Args:
        manager: of all connections.
        routes: for which it does, by path.
        settings: of aiohttp's connections.

    Attributes:
        answers_whole: what arrived last was one whole request, which is being answered. Of what
            comes beside an answer something may be missing.
    """

    __slots__ = ("_answering", "_routes", "_waits", "answers_whole")

    def __init__(
        self,
        manager: web.Server,
        routes: Mapping[str, WholeRoute],
        **settings: Any,  # noqa: ANN401  # aiohttp's, which checks them
    ) -> None:
        super().__init__(manager, **settings)
        self._routes = routes
        self._answering: asyncio.Task[None] | None = None
        self._waits = False
        self.answers_whole = False

    async def start(self) -> None:
        """Wait for requests, once those are answered that came before: aiohttp's task."""
        while self._answering is not None:
            await asyncio.wait({self._answering})
        self._waits = True  # for aiohttp waits in this step
        if self._manager is not None:  # else the caller has gone meanwhile
            await super().start()

    def data_received(self, data: bytes) -> None:
        """Bytes of the caller."""
        waiter, self.answers_whole = self._waiter, False
        if not self._waits and self._answering is None:  # before aiohttp's task has come to wait
            super().data_received(data)
            self.answers_whole = bool(self._messages) and self._answer_whole()
            return
        if waiter is None or waiter.done():
            super().data_received(data)
            return
        self._waiter = None  # who waits is not woken by aiohttp: perhaps nobody need be
        try:
            super().data_received(data)
        finally:
            if not waiter.done():
                self._waiter = waiter
        if self._messages and self._answering is None:
            self.answers_whole = self._answer_whole()
            if not self.answers_whole:
                waiter.set_result(None)

    async def shutdown(self, timeout: float | None = 15.0) -> None:  # noqa: ASYNC109  # aiohttp's
        """Wait for the answer, then end it."""
        await super().shutdown(timeout)
        if self._answering is not None:
            self._answering.cancel()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The caller is gone."""
        cancels = self._manager is not None and self._manager.handler_cancellation
        super().connection_lost(exc)
        if cancels and self._answering is not None:
            self._answering.cancel()

    def resume_reading(self, resume_parser: bool = True) -> None:  # aiohttp's
        """Go on reading; aiohttp asks for it twice for every body, paused or not.

        Of requests that come many at a time its parser may keep the last ones until it is asked.
        """
        parses = resume_parser and self._answering is None
        if parses or self._reading_paused or self._buffer_paused:
            super().resume_reading(resume_parser)

    def _process_keepalive(self) -> None:
        if self._answering is None:
            super()._process_keepalive()
        else:
            self._keepalive_handle = None  # the end of the answer makes another

    def _answer_whole(self) -> bool:
        """Begin to answer what has come, if that is one whole request."""
        parser, manager = self._parser, self._manager
        if len(self._messages) != 1 or self._upgraded or parser is None or manager is None:
            return False
        message, payload = self._messages[0]
        if not isinstance(message, RawRequestMessage):
            return False
        route = self._routes.get(message.path)
        if route is None or message.method != hdrs.METH_POST or not payload.is_eof():
            return False
        if message.chunked or message.compression or hdrs.EXPECT in message.headers:
            return False
        self._messages.clear()
        parser.message_consumed()
        manager.requests_count += 1
        begun = BegunTask(self._loop, self._answer(message, payload, route))
        self._answering = begun.task
        begun.begin()
        return True

    async def _answer(
        self, message: RawRequestMessage, payload: StreamReader, route: WholeRoute
    ) -> None:
        make, waiting = self._request_factory, self._task_handler
        kept = False
        try:
            if make is None or waiting is None:
                return  # the caller has gone
            request: Any = make(message, payload, self, StreamWriter(self, self._loop), waiting)
            request._match_info = route.match  # noqa: SLF001  # as aiohttp sets it
            self._request_in_progress, self._current_request = True, request
            try:
                response = await route.handler(request)
            except Exception as error:  # noqa: BLE001  # aiohttp says what becomes of it
                response, cut = await self._handle_request(request, None, partial(_fail, error))
            else:
                self._current_request, cut = None, False
                await response.prepare(request)
                await response.write_eof()
            kept = self._keepalive = not cut and bool(response.keep_alive)
        except ConnectionError:
            pass  # the caller hung up
        except Exception as error:  # noqa: BLE001  # aiohttp's connections end so, too
            self.log_exception("Unhandled exception", exc_info=error)
        finally:
            self._answering = None
            self._rest(kept=kept)

    def _rest(self, *, kept: bool) -> None:
        """The answer is over: wait for the next request, or close."""
        self._request_in_progress, self._current_request = False, None
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)  # who shuts the server down
        if not kept or self._close or self._force_close:
            self.force_close()
            return
        self._next_keepalive_close_time = due = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(due, self._process_keepalive)
        waiter = self._waiter
        if self._messages and waiter is not None and not waiter.done():
            waiter.set_result(None)


def lacking() -> list[str]:
    """Names of ``PRIVATE_NAMES`` that this aiohttp has not."""
    return [
        f"{kind.__name__}.{name}"
        for kind, names in PRIVATE_NAMES.items()
        for name in sorted(names)
        if not hasattr(kind, name)
    ]


def choose_protocol(
    manager: web.Server,
    routes: Mapping[str, WholeRoute],
    **settings: Any,  # noqa: ANN401  # aiohttp's, which checks them
) -> Callable[[], web.RequestHandler]:
    """What makes connections: those above, or aiohttp's own where it lacks what they need.

    Args:
        manager: of all connections.
        routes: whose whole requests are answered past aiohttp's task, by path.
        settings: of aiohttp's connections.
    """
    lacks = lacking()
    if not lacks:
        return partial(WholeRequestHandler, manager, routes, **settings)
    LOG.warning(
        "aiohttp %s has no %s, by which turns are answered past its task; it answers all requests "
        "by itself, and a turn costs about a fifth more. Install the version that ROSE is "
        "tested with (constraints.txt)",
        *(aiohttp.__version__, ", ".join(lacks)),
    )
    return partial(web.RequestHandler, manager, **settings)


async def _fail(error: Exception, _: web.BaseRequest) -> web.StreamResponse:
    raise error
