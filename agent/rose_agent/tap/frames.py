"""Frames on the node's ``tap.sock``: a length and a MessagePack list of messages.

The guard sends ``Watch`` and ``Unwatch``; the tap sends lists of ``rose_core.telemetry.events``.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, TypeVar

import msgspec

from rose_core.telemetry.events import TapEvent

_LENGTH = struct.Struct("<I")
_LONGEST = 4 * 1024 * 1024
T = TypeVar("T")


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Follow one serving replica.

    Attributes:
        replica: the name events will carry.
        pid: a process inside the pod, seen from the tap's own pid namespace; 0 = our namespace.
        port: serving port.
        netns: namespace file of the runtime, used instead of ``pid`` when given.
        interfaces: names; empty = every interface that is there.
    """

    replica: str
    pid: int
    port: int
    netns: str = ""
    interfaces: tuple[str, ...] = ()


class Unwatch(msgspec.Struct, frozen=True, tag="unwatch"):
    """Stop following a replica."""

    replica: str


Command = Watch | Unwatch
commands: msgspec.msgpack.Decoder[list[Command]] = msgspec.msgpack.Decoder(list[Command])
events: msgspec.msgpack.Decoder[list[TapEvent]] = msgspec.msgpack.Decoder(list[TapEvent])
_encoder = msgspec.msgpack.Encoder()


def pack(messages: list[Any]) -> bytes:
    """One frame."""
    body = _encoder.encode(messages)
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Next frame.

    Raises:
        asyncio.IncompleteReadError: the peer has gone.
        ValueError: bytes that are no frame of these messages.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _LONGEST:
        raise ValueError(f"frame of {length} bytes on the tap's socket; at most {_LONGEST}")
    return decoder.decode(await reader.readexactly(length))
