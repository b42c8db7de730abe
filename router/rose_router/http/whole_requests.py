"""Requests that come whole: answered by a task of their own, and nothing else is woken for them.

aiohttp's connection has a task that waits for requests, and makes another for each. Between the two
it resolves the route, takes the middlewares' chain from a cache and looks for what a turn never
has: an upgrade, a body that is still coming, a form, an access log. Here a request whose head and
body came in one piece, for a route that is asked for turn after turn, goes straight to that route's
chain. Everything is read by the same parser and answered by the same handlers. What that parser has
read once it need not read again (``KnownHeads``): callers send one head with all of their requests,
but for the length of the body.

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
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from multidict import CIMultiDict, CIMultiDictProxy

from rose_router.begun import BegunTask
from rose_router.http.admission.bodies import ARRIVED

LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PRIVATE_NAMES: Mapping[type, frozenset[str]] = {
    web.RequestHandler: frozenset(
        {"_buffer_paused", "_close", "_current_request", "_force_close", "_handle_request"}
        | {"_request_count"}
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


_HEAD_END, _LENGTH = b"\r\n\r\n", b"ength: "
_LENGTH_LINE = b"\r\ncontent-length: "
_MOST_KNOWN, _MOST_HEAD, _MOST_BODY = 512, 2048, 1 << 16
"""Heads that are known at one time, bytes of one of them and of the body behind it: a parser takes
no thousandth of what a longer body does."""


class KnownHeads:
    """Heads that aiohttp's parser has read, by their bytes without the digits of the body's length.

    A head with the same bytes means the same, whoever sends it. Of the digits nothing is read: they
    must be those of the length of what has come behind the head.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[RawRequestMessage, WholeRoute, bytes]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, data: bytes) -> tuple[RawRequestMessage, WholeRoute, bytes] | None:
        """A whole request's head as the parser would read it, its route and its body.

        Args:
            data: begins with a request.

        Returns:
            ``None`` where no such head was read before, or not all of the body is there, or more.
        """
        end = data.find(_HEAD_END, 0, _MOST_HEAD)
        begin = data.find(_LENGTH, 0, max(end, 0)) + len(_LENGTH)
        if begin < len(_LENGTH):
            return None
        behind = data.find(b"\r", begin)  # as in ``_without_length``, which would be a call more
        known = self._known.get(data[:begin] + data[behind:end])
        if known is None:
            return None
        digits, body = data[begin:behind], data[end + len(_HEAD_END) :]
        if digits != b"%d" % len(body) or not 0 < len(body) <= _MOST_BODY:
            return None
        message, route, length = known
        return message if digits == length else _with_length(message, digits), route, body

    def learn(self, data: bytes, message: RawRequestMessage, route: WholeRoute) -> None:
        """Remember what the parser has made of a request.

        Args:
            data: it, head and body and nothing behind.
            message: what was read of its head; it has a body of that length.
            route: its.
        """
        head, digits, begin = _without_length(data)
        line = data[: data.find(_LENGTH) + len(_LENGTH)].lower()
        if not line.endswith(_LENGTH_LINE) or len(data) - begin > _MOST_BODY:
            return
        if message.headers.getall(hdrs.CONTENT_LENGTH) != [digits.decode("ascii")]:
            return  # another line has that name, too
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[head] = message, route, digits


def _without_length(data: bytes) -> tuple[bytes, bytes, int]:
    """A head without the digits of its body's length, these, and where its body begins.

    The head is empty where none is whole, and where it names no length.
    """
    end = data.find(_HEAD_END, 0, _MOST_HEAD)
    begin = data.find(_LENGTH, 0, max(end, 0)) + len(_LENGTH)
    if begin < len(_LENGTH):
        return b"", b"", 0
    behind = data.find(b"\r", begin)
    return data[:begin] + data[behind:end], data[begin:behind], end + len(_HEAD_END)


def _with_length(message: RawRequestMessage, digits: bytes) -> RawRequestMessage:
    """The same head before a body of another length."""
    headers = CIMultiDict(message.headers)
    headers[hdrs.CONTENT_LENGTH] = digits.decode("ascii")
    raw = [
        (name, digits if name.lower() == b"content-length" else value)
        for name, value in message.raw_headers
    ]
    return message._replace(headers=CIMultiDictProxy(headers), raw_headers=tuple(raw))


def _is_exact(data: bytes, payload: StreamReader) -> bool:
    """Whether a request that was read of these bytes is all of them: a next one has not begun."""
    if payload is EMPTY_PAYLOAD:
        return data.find(_HEAD_END) + len(_HEAD_END) == len(data)
    _, digits, begin = _without_length(data)
    return payload.is_eof() and digits == b"%d" % (len(data) - begin)


class WholeRequestHandler(web.RequestHandler):
    """A connection of aiohttp's that answers whole requests by itself.

    Args:
        manager: of all connections.
        routes: for which it does, by path.
        heads: that were read over any of them.
        settings: of aiohttp's connections.

    Attributes:
        answers_whole: what arrived last was one whole request, which is being answered. Of what
            comes beside an answer something may be missing.
    """

    __slots__ = ("_answering", "_between", "_heads", "_routes", "_waits", "answers_whole")

    def __init__(
        self,
        manager: web.Server,
        routes: Mapping[str, WholeRoute],
        heads: KnownHeads,
        **settings: Any,  # noqa: ANN401  # aiohttp's, which checks them
    ) -> None:
        super().__init__(manager, **settings)
        self._routes, self._heads = routes, heads
        # The parser has read whole requests and nothing of another.
        self._between = True
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
        free, waits = self._answering is None, waiter is not None and not waiter.done()
        # Before aiohttp's task has come to wait it is not woken either.
        if free and (waits or not self._waits) and self._answer_known(data):
            return
        if free and not self._waits:
            self._feed(data)
            self.answers_whole = bool(self._messages) and self._answer_whole(data)
            return
        if waiter is None or not waits:
            self._feed(data)
            return
        self._waiter = None  # who waits is not woken by aiohttp: perhaps nobody need be
        try:
            self._feed(data)
        finally:
            if not waiter.done():
                self._waiter = waiter
        if self._messages and self._answering is None:
            self.answers_whole = self._answer_whole(data)
            if not self.answers_whole:
                waiter.set_result(None)

    def _feed(self, data: bytes) -> None:
        """Have the parser read, and see whether anything of another request was there."""
        between, count, self._between = self._between, len(self._messages), False
        super().data_received(data)
        if between and len(self._messages) == count + 1:
            message, payload = self._messages[-1]
            self._between = isinstance(message, RawRequestMessage) and _is_exact(data, payload)

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

    def _answer_known(self, data: bytes) -> bool:
        """Begin to answer a whole request past the parser, if its like has been read before."""
        manager = self._manager
        if not self._between or self._messages or manager is None:
            return False
        if self._force_close or self._close or self._upgraded:
            return False
        known = self._heads.find(data)
        if known is None:
            return False
        message, route, body = known
        payload = StreamReader(self, limit=_MOST_BODY, loop=self._loop)
        payload.feed_data(body)
        payload.feed_eof()
        self._request_count += 1
        self._begin(manager, message, payload, route, body)
        return True

    def _answer_whole(self, data: bytes) -> bool:
        """Begin to answer what has come, if that is one whole request.

        Args:
            data: that came last.
        """
        parser, manager = self._parser, self._manager
        if len(self._messages) != 1 or self._upgraded or parser is None or manager is None:
            return False
        message, payload = self._messages[0]
        if not isinstance(message, RawRequestMessage):
            return False
        route = self._routes.get(message.path)
        if route is None or message.method != hdrs.METH_POST or not payload.is_eof():
            return False
        headers = message.headers
        if message.chunked or message.compression or hdrs.EXPECT in headers:
            return False
        if self._between and hdrs.CONTENT_ENCODING not in headers:
            self._heads.learn(data, message, route)
        self._messages.clear()
        parser.message_consumed()
        self._begin(manager, message, payload, route)
        return True

    def _begin(
        self,
        manager: web.Server,
        message: RawRequestMessage,
        payload: StreamReader,
        route: WholeRoute,
        body: bytes = b"",
    ) -> None:
        self.answers_whole = True
        manager.requests_count += 1
        begun = BegunTask(self._loop, self._answer(message, payload, route, body))
        self._answering = begun.task
        begun.begin()

    async def _answer(
        self, message: RawRequestMessage, payload: StreamReader, route: WholeRoute, body: bytes
    ) -> None:
        make, waiting = self._request_factory, self._task_handler
        kept = False
        try:
            if make is None or waiting is None:
                return  # the caller has gone
            request: Any = make(message, payload, self, StreamWriter(self, self._loop), waiting)
            request._match_info = route.match  # noqa: SLF001  # as aiohttp sets it
            if body and len(body) <= request.client_max_size:
                request[ARRIVED] = body  # for who would have to ask aiohttp's stream
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
        return partial(WholeRequestHandler, manager, routes, KnownHeads(), **settings)
    LOG.warning(
        "aiohttp %s has no %s, by which turns are answered past its task; it answers all requests "
        "by itself, and a turn costs about a fifth more. Install the version that ROSE is "
        "tested with (constraints.txt)",
        *(aiohttp.__version__, ", ".join(lacks)),
    )
    return partial(web.RequestHandler, manager, **settings)


async def _fail(error: Exception, _: web.BaseRequest) -> web.StreamResponse:
    raise error
