"""A typed gRPC method, and its messages as frames; what both ends of ``rpc`` share.

Messages are msgspec structs in MessagePack; ``bytes`` as a message type travels as it is, which is
what weight blocks need. Next step: ``serving`` answers methods, ``rpc`` calls them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import msgspec

from rose_core.unreadable import UNREADABLE
from rose_wire.errors import MalformedMessage

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")

# A weight block and its frame. Plans, sandboxes' records and their blocks take some megabytes.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

OPTIONS: tuple[tuple[str, int], ...] = (
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
    except UNREADABLE as error:
        message = f"not a {kind.__name__}: {error}"
        raise MalformedMessage(message) from error
