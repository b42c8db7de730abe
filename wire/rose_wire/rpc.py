"""Typed gRPC methods without generated code: msgspec structs in MessagePack frames.

A ``Method`` names a service method and its two message types. ``Server`` binds handlers to
methods, ``call``/``stream`` use them. ``bytes`` as a message type travels as it is, which is what
weight blocks need. gRPC itself (connections, deadlines, cancellation, keep-alive, TLS) is grpcio's.

``local:/path`` is a Unix socket without gRPC, for calls of one message each way inside a node
(``local``). Next step: ``services`` lists the methods.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import grpc
import grpc.aio
import msgspec

from rose_wire import local, tls
from rose_wire.errors import MalformedMessage, Refused, Unavailable, WireError

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")

# A weight block and its frame; everything else is a few kilobytes.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
    # gRPC's own back-off grows to two minutes; grants lapse in ten seconds.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_UNAVAILABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


_peer: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("peer", default=())


def peer() -> tuple[str, ...]:
    """Names in the certificate of whom a handler is answering; empty without one."""
    return _peer.get()


def _greet(context: grpc.aio.ServicerContext) -> None:
    found = context.peer_identities() or ()
    _peer.set(tuple(name.decode(errors="replace") for name in found))


def encode(message: object) -> bytes:
    """Message to frame; ``bytes`` pass through."""
    return message if isinstance(message, bytes) else msgspec.msgpack.encode(message)


def decode(kind: type[ReplyT], frame: bytes) -> ReplyT:
    """Frame to message.

    Raises:
        MalformedMessage: the frame is no such message; says where it differs.
    """
    if kind is bytes:
        return cast("ReplyT", frame)
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except msgspec.MsgspecError as error:
        message = f"not a {kind.__name__}: {error}"
        raise MalformedMessage(message) from error


@dataclass(frozen=True)
class Method(Generic[RequestT, ReplyT]):
    """One method of a service; ``path`` is gRPC's ``/service/method``."""

    service: str
    name: str
    request: type[RequestT]
    reply: type[ReplyT]

    @property
    def path(self) -> str:
        """The gRPC path."""
        return f"/{self.service}/{self.name}"


def _refusing(error: Exception) -> tuple[grpc.StatusCode, str]:
    if isinstance(error, MalformedMessage):
        return grpc.StatusCode.INVALID_ARGUMENT, str(error)
    if isinstance(error, Refused):
        return grpc.StatusCode.FAILED_PRECONDITION, str(error)
    if isinstance(error, Unavailable):  # what stands behind us is away: trying again may help
        return grpc.StatusCode.UNAVAILABLE, str(error)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"


class Server:
    """A gRPC server made of ``Method`` handlers.

    Args:
        token: when given, every call must carry ``authorization: Bearer <token>``.
        credentials: TLS; without it the port is plain text.
    """

    def __init__(
        self, *, token: str = "", credentials: grpc.ServerCredentials | None = None
    ) -> None:
        self._token, self._credentials = token, credentials
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._plain: dict[str, local.Handler] = {}
        self._server: grpc.aio.Server | local.Server | None = None

    def unary(
        self,
        method: Method[RequestT, ReplyT],
        handler: Callable[[RequestT], Awaitable[ReplyT]],
    ) -> None:
        """Answer one message with one message."""

        async def answer(frame: bytes, context: grpc.aio.ServicerContext) -> bytes:
            _greet(context)
            try:
                return encode(await handler(decode(method.request, frame)))
            except WireError as error:
                await context.abort(*_refusing(error))
                raise

        async def plain(frame: bytes) -> bytes:
            return encode(await handler(decode(method.request, frame)))

        self._plain[method.path] = plain
        self._add(method, grpc.unary_unary_rpc_method_handler(answer))

    def server_stream(
        self,
        method: Method[RequestT, ReplyT],
        handler: Callable[[RequestT], AsyncIterator[ReplyT]],
    ) -> None:
        """Answer one message with many."""

        async def answer(frame: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            _greet(context)
            try:
                async for reply in handler(decode(method.request, frame)):
                    yield encode(reply)
            except WireError as error:
                await context.abort(*_refusing(error))

        self._add(method, grpc.unary_stream_rpc_method_handler(answer))

    def bidirectional(
        self,
        method: Method[RequestT, ReplyT],
        handler: Callable[[AsyncIterator[RequestT]], AsyncIterator[ReplyT]],
    ) -> None:
        """Answer many messages with many, in either order."""

        async def answer(
            frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[bytes]:
            _greet(context)

            async def requests() -> AsyncIterator[RequestT]:
                async for frame in frames:
                    yield decode(method.request, frame)

            try:
                async for reply in handler(requests()):
                    yield encode(reply)
            except WireError as error:
                await context.abort(*_refusing(error))

        self._add(method, grpc.stream_stream_rpc_method_handler(answer))

    async def start(self, address: str) -> int:
        """Listen on ``host:port``, ``unix:/path`` or ``local:/path``; port 0 picks one.

        Returns:
            The port, 1 for a Unix socket.

        Raises:
            Unavailable: the address cannot be bound.
            ValueError: ``local:`` with a token or TLS, which it does not ask for.
        """
        if address.startswith(local.SCHEME):
            if self._token or self._credentials is not None:
                raise ValueError(f"{address} is guarded by the socket's mode alone")
            self._server = beside = local.Server(self._plain)
            await beside.start(Path(address.removeprefix(local.SCHEME)))
            return 1
        interceptors = (_BearerCheck(self._token),) if self._token else ()
        self._server = server = grpc.aio.server(
            handlers=self._handlers, options=_OPTIONS, interceptors=interceptors
        )
        try:
            if self._credentials is None:
                port = int(server.add_insecure_port(address))
            else:
                port = int(server.add_secure_port(address, self._credentials))
        except RuntimeError as error:
            message = f"cannot listen on {address}: {error}"
            raise Unavailable(message) from error
        await server.start()
        return port

    async def stop(self, grace_seconds: float = 0.5) -> None:
        """End calls in flight after the grace and close the port."""
        if self._server is not None:
            await self._server.stop(grace_seconds)

    def _add(self, method: Method[Any, Any], handler: grpc.RpcMethodHandler) -> None:
        generic = grpc.method_handlers_generic_handler(method.service, {method.name: handler})
        self._handlers.append(generic)


class _BearerCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}"

        async def refuse(_request: object, context: grpc.aio.ServicerContext) -> bytes:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "bearer token missing or wrong; both sides must mount the same Secret",
            )
            return b""

        self._refuse = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        metadata = dict(details.invocation_metadata or ())
        if metadata.get("authorization") == self._expected:
            return await continuation(details)
        return self._refuse


def connect(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    name: str = "",
    own: bool = False,
) -> grpc.aio.Channel:
    """Open a channel; it connects by itself and again after a loss.

    Args:
        address: ``host:port``, ``tls://host:port``, ``unix:/path`` or ``local:/path``.
        credentials: instead of those that the scheme asks for.
        name: what the other's certificate must name, where that is not the address.
        own: a connection of its own; channels to one address share one otherwise.

    Raises:
        OSError: the authorities for ``tls://`` cannot be read (``rose_wire.tls``).
    """
    if address.startswith(local.SCHEME):
        return local.Channel(Path(address.removeprefix(local.SCHEME)))
    options = [*_OPTIONS, ("grpc.use_local_subchannel_pool", 1)] if own else _OPTIONS
    if credentials is not None:  # then what the environment names is not even read
        target = address.removeprefix(tls.SCHEME)
        named = [("grpc.ssl_target_name_override", name)] if name else []
        return grpc.aio.secure_channel(target, credentials, options=[*options, *named])
    target, found = tls.dial(address)
    if found is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, found, options=options)


def translate(error: grpc.aio.AioRpcError, path: str) -> WireError:
    """GRPC's error as ours, naming the method."""
    text = f"{path}: {error.code().name}: {error.details()}"
    return Unavailable(text) if error.code() in _UNAVAILABLE else Refused(text)


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


async def call(
    channel: grpc.aio.Channel,
    method: Method[RequestT, ReplyT],
    request: RequestT,
    *,
    timeout: float,  # noqa: ASYNC109  # gRPC's own deadline, sent to the peer
    token: str = "",
) -> ReplyT:
    """Send one message, await one.

    Raises:
        Unavailable: no answer inside ``timeout`` seconds.
        Refused: the peer said no.
        MalformedMessage: the answer is no such message.
    """
    if isinstance(channel, local.Channel):
        return decode(method.reply, await channel.ask(method.path, encode(request), timeout))
    try:
        frame = await channel.unary_unary(method.path)(
            encode(request), timeout=timeout, metadata=_metadata(token)
        )
    except grpc.aio.AioRpcError as error:
        raise translate(error, method.path) from error
    return decode(method.reply, frame)


async def receive(
    channel: grpc.aio.Channel,
    method: Method[RequestT, ReplyT],
    request: RequestT,
    *,
    token: str = "",
) -> AsyncIterator[ReplyT]:
    """Send one message, yield many.

    Raises:
        Unavailable: the stream broke.
        Refused: the peer said no.
    """
    stream = channel.unary_stream(method.path)(encode(request), metadata=_metadata(token))
    try:
        async for frame in stream:
            yield decode(method.reply, frame)
    except grpc.aio.AioRpcError as error:
        raise translate(error, method.path) from error
    finally:
        stream.cancel()


async def converse(
    channel: grpc.aio.Channel,
    method: Method[RequestT, ReplyT],
    requests: AsyncIterable[RequestT],
    *,
    token: str = "",
) -> AsyncIterator[ReplyT]:
    """Send many messages, yield many.

    Raises:
        Unavailable: the stream broke.
        Refused: the peer said no.
    """

    async def frames() -> AsyncIterator[bytes]:
        async for request in requests:
            yield encode(request)

    stream = channel.stream_stream(method.path)(frames(), metadata=_metadata(token))
    try:
        async for frame in stream:
            yield decode(method.reply, frame)
    except grpc.aio.AioRpcError as error:
        raise translate(error, method.path) from error
    finally:
        stream.cancel()
