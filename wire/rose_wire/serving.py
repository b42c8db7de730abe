"""A gRPC server made of ``Method`` handlers; a handler raises ``rose_wire.errors`` to say no.

Who calls is asked again at every message of a stream, in either direction: a credential that has
expired or was revoked meanwhile gets no further message.

| a handler raises | the caller gets |
|---|---|
| ``MalformedMessage``, ``Refused`` | ``Refused``: the same again does not help |
| ``Unavailable`` | ``Unavailable``: trying again may help |
| anything else | ``Refused``, with the error's name |

Next step: ``rpc`` is the caller's side.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from rose_wire import local
from rose_wire.bearer import is_bearer
from rose_wire.errors import MalformedMessage, Refused, Unavailable, WireError
from rose_wire.method import OPTIONS, Method, ReplyT, RequestT, decode, encode

Identify = Callable[[str, tuple[str, ...]], tuple[str, ...] | None]
"""From an ``Authorization`` header and the names in a certificate to a caller's names; None: no."""

_peer: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("peer", default=())


def peer() -> tuple[str, ...]:
    """Names of whom a handler is answering: in its certificate, or as ``Identify`` says."""
    return _peer.get()


async def _greet(context: grpc.aio.ServicerContext, identify: Identify | None) -> None:
    """Learn who calls, for ``peer``; who is nobody is refused."""
    found = context.peer_identities() or ()
    names = tuple(name.decode(errors="replace") for name in found)
    if identify is not None:
        metadata = dict(context.invocation_metadata() or ())
        known = identify(str(metadata.get("authorization", "")), names)
        if known is None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "no credential, or one that was revoked, has expired, or is not of this store",
            )
            return
        names = known
    _peer.set(names)


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
        identify: instead of it, says who each caller is.
        credentials: TLS; without it the port is plain text.
    """

    def __init__(
        self,
        *,
        token: str = "",
        identify: Identify | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._token, self._identify, self._credentials = token, identify, credentials
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._plain: dict[str, local.Handler] = {}
        self._server: grpc.aio.Server | local.LocalServer | None = None

    def unary(
        self,
        method: Method[RequestT, ReplyT],
        handler: Callable[[RequestT], Awaitable[ReplyT]],
    ) -> None:
        """Answer one message with one message."""

        async def answer(frame: bytes, context: grpc.aio.ServicerContext) -> bytes:
            await _greet(context, self._identify)
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
            await _greet(context, self._identify)
            try:
                async for reply in handler(decode(method.request, frame)):
                    await _greet(context, self._identify)
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
            await _greet(context, self._identify)

            async def requests() -> AsyncIterator[RequestT]:
                async for frame in frames:
                    await _greet(context, self._identify)
                    yield decode(method.request, frame)

            try:
                async for reply in handler(requests()):
                    await _greet(context, self._identify)
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
            if self._token or self._identify or self._credentials is not None:
                raise ValueError(f"{address} is guarded by the socket's mode alone")
            self._server = beside = local.LocalServer(self._plain)
            await beside.start(Path(address.removeprefix(local.SCHEME)))
            return 1
        interceptors = (_BearerCheck(self._token),) if self._token else ()
        self._server = server = grpc.aio.server(
            handlers=self._handlers, options=OPTIONS, interceptors=interceptors
        )
        try:
            if self._credentials is None:
                port = int(server.add_insecure_port(address))
            else:
                port = int(server.add_secure_port(address, self._credentials))
        except RuntimeError as error:
            message = f"cannot listen on {address}: {str(error).partition('; set GRPC')[0]}"
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
        self._token = token

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
        if is_bearer(str(metadata.get("authorization", "")), self._token):
            return await continuation(details)
        return self._refuse
