r"""HTTP/1.1 framing for an observer: when does a message begin, and where is its true end?

The observer sees segments, not calls, and the kernel filter may leave response segments out. So
each reader takes bytes *and holes* (bytes that passed unseen, known from TCP sequence numbers).
Inside a body of known length a hole does no harm. A chunked body that lost its chunk boundary is
ended by its tail (``0\r\n\r\n`` at the end of a segment), which the kernel filter lets pass.

Next step: ``tracker`` pairs requests with responses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

_MAX_HEAD = 64 * 1024
_TAIL = b"0\r\n\r\n"
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")


class LengthBody:
    """A body of a known number of bytes."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes) -> int:
        """Take bytes; returns how many belonged to the body."""
        used = min(self._left, len(data))
        self.skip(used)
        return used

    def skip(self, hole: int) -> None:
        """Note bytes that passed unseen."""
        self._left = max(0, self._left - hole)
        self.done = self._left == 0


class ChunkedBody:
    """A chunked body; after losing a chunk boundary only the tail ends it."""

    def __init__(self) -> None:
        self._line = b""
        self._left = 0
        self._trailer = False
        self.lost = False
        self.done = False

    def feed(self, data: bytes) -> int:
        """Take bytes; returns how many belonged to the body."""
        position = 0
        while position < len(data) and not (self.done or self.lost):
            position = self._step(data, position)
        return self._look_for_tail(data) if self.lost else position

    @property
    def between_chunks(self) -> bool:
        """The next byte begins a chunk."""
        return not (self._left or self._line or self._trailer or self.lost or self.done)

    def skip(self, hole: int) -> None:
        """Note bytes that passed unseen."""
        if hole <= self._left:
            self._left -= hole
        else:
            self.lost = True

    def _look_for_tail(self, data: bytes) -> int:
        self.done = data.endswith(_TAIL)
        return len(data)

    def _step(self, data: bytes, position: int) -> int:
        if self._left:
            used = min(self._left, len(data) - position)
            self._left -= used
            return position + used
        end = data.find(b"\n", position)
        if end < 0:
            self._line += data[position:]
            self.lost = len(self._line) > 1024
            return len(data)
        self._take_line((self._line + data[position:end]).strip())
        self._line = b""
        return end + 1

    def _take_line(self, line: bytes) -> None:
        if self._trailer:
            self.done = not line
            return
        digits = line.split(b";", 1)[0].strip()
        # ``int`` would take signs, prefixes and underscores, too.
        if not _CHUNK_SIZE.fullmatch(digits):
            self.lost = True
            return
        size = int(digits, 16)
        if size == 0:
            self._trailer = True
        else:
            self._left = size + 2


class CloseBody:
    """A body that ends with the connection."""

    done = False

    def feed(self, data: bytes) -> int:
        """Take bytes; all belong to the body."""
        return len(data)

    def skip(self, hole: int) -> None:
        """Note bytes that passed unseen; nothing to keep."""


Body = LengthBody | ChunkedBody | CloseBody


@dataclass(frozen=True)
class MessageHead:
    """Start line and the headers that framing needs.

    Attributes:
        first, second: method and path of a request; version and status of a response.
        length: content length, None when not given.
        stream: the content type is an event stream.
    """

    first: str
    second: str
    length: int | None
    chunked: bool
    stream: bool


# More digits than 2**63 has; ``int`` itself refuses text of thousands of digits.
_MOST_DIGITS = 18


def decimal(text: str) -> int | None:
    """A number as HTTP writes one (RFC 9110): ASCII digits alone, and no more than fit."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def parse_head(block: bytes) -> MessageHead | None:
    """Read start line and headers (without the empty line); None when it is no HTTP/1 head."""
    lines = block.split(b"\r\n")
    fields = lines[0].split(b" ", 2)
    if len(fields) < 2 or not (fields[0].startswith(b"HTTP/1.") or lines[0][-8:-1] == b"HTTP/1."):
        return None
    length: int | None = None
    chunked = stream = False
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        key = name.strip().lower()
        if key == b"content-length":
            length = decimal(value.strip().decode("latin-1"))
            if length is None:
                return None
        elif key == b"transfer-encoding":
            chunked = b"chunked" in value.lower()
        elif key == b"content-type":
            stream = b"text/event-stream" in value.lower()
    return MessageHead(
        fields[0].decode("latin-1"), fields[1].decode("latin-1"), length, chunked, stream
    )


class MarkKind(Enum):
    """What a reader noticed."""

    BEGAN = auto()
    """First byte of a message."""
    HEAD = auto()
    """Start line and headers are complete."""
    DATA = auto()
    """Body bytes passed."""
    DONE = auto()
    """The message's true end."""
    LOST = auto()
    """The bytes are no HTTP/1 message; the reader waits for the next one."""


@dataclass(frozen=True)
class Mark:
    """One thing a reader noticed; ``head`` with HEAD and DONE, ``data`` with DATA."""

    kind: MarkKind
    head: MessageHead | None = None
    data: bytes = b""


class Http1Reader:
    """Splits one direction of a connection into messages.

    Args:
        response: read responses; otherwise requests.
    """

    def __init__(self, *, response: bool) -> None:
        self._response = response
        self._buffer = b""
        self._body: Body | None = None
        self._head: MessageHead | None = None

    @property
    def idle(self) -> bool:
        """Between two messages."""
        return self._body is None and not self._buffer

    @property
    def needs_every_segment(self) -> bool:
        """A response body of known length is under way; its end has no tail to recognise."""
        return isinstance(self._body, LengthBody)

    @property
    def lost(self) -> bool:
        """A body is under way whose chunk boundaries were lost; only its tail ends it."""
        return isinstance(self._body, ChunkedBody) and self._body.lost

    @property
    def between_events(self) -> bool:
        """A chunked event stream is under way, and its next byte begins a chunk."""
        body, head = self._body, self._head
        streams = head is not None and head.stream
        return streams and isinstance(body, ChunkedBody) and body.between_chunks

    def feed(self, data: bytes) -> list[Mark]:
        """Take the next bytes of the stream."""
        marks: list[Mark] = []
        rest = data
        while rest:
            rest = self._take_body(rest, marks) if self._body else self._take_head(rest, marks)
        return marks

    def skip(self, hole: int) -> list[Mark]:
        """Note bytes that passed unseen."""
        if self._body is None:
            if self._buffer:
                self._buffer = b""
                return [Mark(MarkKind.LOST)]
            return []
        self._body.skip(hole)
        return [self._finish()] if self._body.done else []

    def assume_open_body(self) -> None:
        """The tap joined in the middle of a message: wait for a tail or the connection's end."""
        body = ChunkedBody()
        body.lost = True
        self._body = body
        self._buffer = b""

    def reset(self) -> None:
        """Forget the message under way."""
        self._body = self._head = None
        self._buffer = b""

    def _take_body(self, data: bytes, marks: list[Mark]) -> bytes:
        body = self._body
        assert body is not None  # noqa: S101  # the caller looked
        used = body.feed(data)
        marks.append(Mark(MarkKind.DATA, data=data[:used]))
        if body.done:
            marks.append(self._finish())
        return data[used:]

    def _take_head(self, data: bytes, marks: list[Mark]) -> bytes:
        if not self._buffer:
            data = data.lstrip(b"\r\n")  # tolerated between messages
            if not data:
                return b""
            marks.append(Mark(MarkKind.BEGAN))
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD:
                self.reset()
                marks.append(Mark(MarkKind.LOST))
            return b""
        head = parse_head(self._buffer[:end])
        rest = self._buffer[end + 4 :]
        self._buffer = b""
        if head is None:
            marks.append(Mark(MarkKind.LOST))
            return b""
        self._head = head
        marks.append(Mark(MarkKind.HEAD, head=head))
        self._body = self._framing(head)
        if self._body.done:
            marks.append(self._finish())
        return rest

    def _framing(self, head: MessageHead) -> Body:
        if not self._response:
            return ChunkedBody() if head.chunked else LengthBody(head.length or 0)
        if head.second in {"204", "304"} or head.second.startswith("1"):
            return LengthBody(0)
        if head.chunked:
            return ChunkedBody()
        return CloseBody() if head.length is None else LengthBody(head.length)

    def _finish(self) -> Mark:
        head = self._head
        self._body = self._head = None
        return Mark(MarkKind.DONE, head=head)
