"""What the guard and the reader of one replica say to each other, as MessagePack datagrams.

A reader may have been taken over by what it read, so all its messages are bounded in size, count
and range by these types; what does not fit them ends that reader. Next step: ``reader`` at the
guard's end, ``confined`` at the other.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from rose_core.telemetry.dialects import Figures

LARGEST = 64 * 1024
"""Bytes of one message."""
MOST_COMMAND_LINES = 32
"""Processes of one pod whose command lines are read."""

Count = Annotated[int, Meta(ge=0, lt=2**53)]
_Path = Annotated[str, Meta(max_length=256)]


class WireFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """``Figures`` within bounds."""

    running: Count | None = None
    waiting: Count | None = None
    kv_permille: Annotated[int, Meta(ge=0, le=1000)] | None = None
    requests: Annotated[dict[_Path, Count], Meta(max_length=64)] | None = None
    at_arrival: bool = True
    activity: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    level_only: bool = False
    input_tokens: Count | None = None
    output_tokens: Count | None = None

    @classmethod
    def of(cls, figures: Figures | None) -> WireFigures | None:
        """The same, for the wire; what is outside of the bounds makes all of it unknown."""
        if figures is None:
            return None
        try:
            return msgspec.convert(msgspec.to_builtins(figures), cls)
        except msgspec.ValidationError:
            return cls()

    def plain(self) -> Figures:
        """As the guard uses them."""
        return Figures(
            running=self.running,
            waiting=self.waiting,
            kv_permille=self.kv_permille,
            requests=self.requests,
            at_arrival=self.at_arrival,
            activity=self.activity,
            level_only=self.level_only,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
        )


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """To the factory, with two sockets: fork a reader.

    Attributes:
        base: of the engine, ``http://host:port``.
        engine: the pool's engine kind.
        feed_host, feed_port: where the engine publishes its load; 0 = nowhere.
        every_seconds: how often the snapshot is read.
    """

    replica: str
    base: str
    engine: str
    feed_host: str = ""
    feed_port: int = 0
    every_seconds: float = 0.2


class Open(msgspec.Struct, frozen=True, tag="open"):
    """To the factory, with one socket: hand the snapshot of this scheduler over through it."""

    pid: int


Factory = Begin | Open


class Page(enum.StrEnum):
    """A page of the engine."""

    METRICS = "metrics"
    LOADS = "loads"


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Read a page; the answer carries the number."""

    number: int
    page: Page


class Aim(msgspec.Struct, frozen=True, tag="aim"):
    """Read another address from now on."""

    base: str
    engine: str


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Read the command lines of these processes."""

    pids: tuple[int, ...]


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Read the snapshot this often from now on."""

    every_seconds: float


Command = Ask | Aim | Describe | Watch


class PageReply(msgspec.Struct, frozen=True, tag="answer"):
    """A page's figures, None when nobody answered.

    Attributes:
        scrapes: pages of metrics that were answered since this reader began.
    """

    number: int
    scrapes: Count
    figures: WireFigures | None


class Latest(msgspec.Struct, frozen=True, tag="latest"):
    """What the load snapshot or feed says now."""

    figures: WireFigures


class Described(msgspec.Struct, frozen=True, tag="described"):
    """Over how many machines the engine stretches."""

    machines: Annotated[int, Meta(ge=1, le=999_999)]


Reply = PageReply | Latest | Described

_encoder = msgspec.msgpack.Encoder()
pack = _encoder.encode
factory_orders: msgspec.msgpack.Decoder[Factory] = msgspec.msgpack.Decoder(Factory)
commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
