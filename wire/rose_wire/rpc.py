"""Typed gRPC methods without generated code: whom to dial and how to ask.

A ``Method`` (``method``) names a service method and its two message types. ``Server``
(``serving``) binds handlers to methods; ``call``, ``receive`` and ``converse`` use them. gRPC
itself (connections, deadlines, cancellation, keep-alive, TLS) is grpcio's.

``local:/path`` is a Unix socket without gRPC, for calls of one message each way inside a node
(``local``). Next step: ``services`` lists the methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path

import grpc
import grpc.aio

from rose_wire import local, tls
from rose_wire.errors import Refused, Unavailable, WireError
from rose_wire.method import OPTIONS, Method, ReplyT, RequestT, decode, encode
from rose_wire.serving import Server, peer

__all__ = [
    "Method",
    "Server",
    "call",
    "connect",
    "converse",
    "decode",
    "encode",
    "peer",
    "receive",
    "translate",
]

_UNAVAILABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


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
    options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)] if own else OPTIONS
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
    """Send many messages, yield many; with the end of the stream nobody sends any more.

    Raises:
        Unavailable: the stream broke.
        Refused: the peer said no.
    """
    sending: list[asyncio.Task[object]] = []

    async def frames() -> AsyncIterator[bytes]:
        if (task := asyncio.current_task()) is not None:
            sending.append(task)
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
        # gRPC leaves who sends waiting for its next message where the peer has ended the stream.
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
