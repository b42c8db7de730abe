"""Frames on the node's ``tap.sock``: a length and a MessagePack list of messages.

The guard sends ``TapWatch`` and ``Unwatch``; the tap sends lists of ``rose_core.telemetry.events``.
Next step: ``parser`` at the tap's end, ``rose_agent.guard.links.taplink`` at the guard's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from rose_core.identity import PodUid
from rose_core.telemetry.events import TapEvent
from rose_wire import frames

if TYPE_CHECKING:  # the opener needs none of it
    import asyncio

_LONGEST = 4 * 1024 * 1024
_WHERE = "the tap's socket"
T = TypeVar("T")


class TapWatch(msgspec.Struct, frozen=True, tag="watch"):
    """Follow one serving replica.

    Attributes:
        replica: the name events will carry.
        pid: a process inside the pod, seen from the tap's own pid namespace; 0 = our namespace.
        port: serving port.
        netns: namespace file of the runtime, used instead of ``pid`` when given.
        interfaces: names; empty = every interface that is there.
        closely: a guard paces by tokens. They are sent with the next other event or with a
            heartbeat, twice in each period of the duty. Otherwise heartbeats are rarer.
        firsts: of a replica that is watched closely, first tokens are sent as they happen: a gate
            may be shut for one. Otherwise they wait like later ones.
        at_once: something may have to be stopped for a request, so its arrival is told as it
            happens, and the last end. Otherwise all that happens waits for the heartbeat, which
            says so.
    """

    replica: PodUid
    pid: int
    port: int
    netns: str = ""
    interfaces: tuple[str, ...] = ()
    closely: bool = True
    firsts: bool = True
    at_once: bool = True

    def same_sockets(self, other: TapWatch) -> bool:
        """The other one can be served by the same sockets; it may want to watch more closely."""
        own = {"closely": self.closely, "firsts": self.firsts, "at_once": self.at_once}
        return msgspec.structs.replace(other, **own) == self


class Unwatch(msgspec.Struct, frozen=True, tag="unwatch"):
    """Stop following a replica."""

    replica: PodUid


Command = TapWatch | Unwatch
commands: msgspec.msgpack.Decoder[list[Command]] = msgspec.msgpack.Decoder(list[Command])
events: msgspec.msgpack.Decoder[list[TapEvent]] = msgspec.msgpack.Decoder(list[TapEvent])
_encoder = msgspec.msgpack.Encoder()


def pack(messages: list[Any]) -> bytes:
    """One frame."""
    return frames.pack(_encoder.encode(messages))


class Splitter(Generic[T]):
    """Cuts frames out of bytes as they come, for a reader that cannot wait for a turn of the loop.

    Args:
        decoder: of what a frame holds.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._frames = frames.Splitter(_LONGEST, _WHERE)

    def feed(self, data: bytes) -> list[T]:
        """Take bytes; the frames that are complete now.

        Raises:
            ValueError: bytes that are no frame of these messages.
        """
        return [self._decoder.decode(body) for body in self._frames.feed(data)]


async def read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Next frame.

    Raises:
        asyncio.IncompleteReadError: the peer has gone.
        ValueError: bytes that are no frame of these messages.
    """
    return decoder.decode(await frames.read(reader, _LONGEST, _WHERE))
