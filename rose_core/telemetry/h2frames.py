"""HTTP/2 framing for an observer: a byte stream with holes -> frames (RFC 9113 section 4).

Contents of DATA pass through piece by piece; header blocks are kept until they are complete;
everything else is skipped. A hole inside a DATA frame does no harm. A hole anywhere else loses the
frame boundaries for good: nothing in HTTP/2 marks them again.
Next step: ``http2`` follows the streams.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = 9
_LARGEST_FRAME = 1 << 20  # engines and proxies use 16 kB; a larger one is taken for lost framing
_LARGEST_BLOCK = 256 * 1024


class FrameType(IntEnum):
    """Frame types that matter here."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    PUSH_PROMISE = 5
    GOAWAY = 7
    CONTINUATION = 9


END_STREAM, END_HEADERS, PADDED, PRIORITY = 0x1, 0x4, 0x8, 0x20
_KEPT = frozenset(
    {FrameType.HEADERS, FrameType.RST_STREAM, FrameType.GOAWAY, FrameType.CONTINUATION}
)
_KINDS = frozenset(FrameType)


class Http2Frame(NamedTuple):
    """A frame, or a part of a DATA frame.

    Attributes:
        data: payload; of a header frame without padding and priority.
        whole: its last byte has passed; a header frame that is not whole has only begun.
    """

    kind: FrameType
    flags: int
    stream: int
    data: bytes
    whole: bool


class FrameReader:
    """Splits one direction of a connection into frames."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._kept = b""
        self._kind = self._flags = self._stream = 0
        self._emitted = False
        self.lost = False

    def feed(self, data: bytes) -> list[Http2Frame]:
        """Take the next bytes of the stream."""
        frames: list[Http2Frame] = []
        position = 0
        while position < len(data) and not self.lost:
            if len(self._head) < _HEAD:
                position = self._take_head(data, position, frames)
            else:
                position = self._take_payload(data, position, frames)
        if len(self._head) == _HEAD and self._kind == FrameType.HEADERS and not self._emitted:
            self._emitted = True
            frames.append(
                Http2Frame(FrameType.HEADERS, self._flags, self._stream, b"", whole=False)
            )
        return frames

    def skip(self, hole: int) -> list[Http2Frame]:
        """Note bytes that passed unseen."""
        inside = len(self._head) == _HEAD and self._kind == FrameType.DATA and hole <= self._left
        if not inside:
            self.lost = True
            return []
        self._left -= hole
        return [] if self._left else [self._finish(b"")]

    def _take_head(self, data: bytes, position: int, frames: list[Http2Frame]) -> int:
        used = data[position : position + _HEAD - len(self._head)]
        self._head += used
        if len(self._head) == _HEAD:
            self._left = int.from_bytes(self._head[:3])
            self._kind, self._flags = self._head[3], self._head[4]
            self._stream = int.from_bytes(self._head[5:]) & 0x7FFFFFFF
            self._kept, self._emitted = b"", False
            self.lost = self._left > _LARGEST_FRAME
            if not self._left and not self.lost:
                self._emit(frames, self._finish(b""))
        return position + len(used)

    def _take_payload(self, data: bytes, position: int, frames: list[Http2Frame]) -> int:
        used = data[position : position + self._left]
        self._left -= len(used)
        if self._kind in _KEPT:
            self._kept += used
            self.lost = len(self._kept) > _LARGEST_BLOCK
        if not self._left:
            self._emit(frames, self._finish(used))
        elif self._kind == FrameType.DATA:
            frames.append(Http2Frame(FrameType.DATA, self._flags, self._stream, used, whole=False))
        return position + len(used)

    def _finish(self, last: bytes) -> Http2Frame:
        self._head = b""
        kind = FrameType(self._kind) if self._kind in _KINDS else FrameType.PUSH_PROMISE
        payload = last if kind is FrameType.DATA else self._kept
        if kind is FrameType.HEADERS:
            payload = _block(payload, self._flags)
        return Http2Frame(kind, self._flags, self._stream, payload, whole=True)

    def _emit(self, frames: list[Http2Frame], frame: Http2Frame) -> None:
        if frame.kind is not FrameType.PUSH_PROMISE:  # this and unknown types are passed over
            frames.append(frame)


def _block(payload: bytes, flags: int) -> bytes:
    """The header block of a HEADERS frame's payload."""
    start, end = 0, len(payload)
    if flags & PADDED and payload:
        start, end = 1, end - payload[0]
    if flags & PRIORITY:
        start += 5
    return payload[start : max(start, end)]


def looks_like_frames(data: bytes) -> bool:
    """Whether a segment in the middle of a connection reads as HTTP/2 from its first byte on."""
    position = frames = 0
    while position + _HEAD <= len(data):
        length, kind = int.from_bytes(data[position : position + 3]), data[position + 3]
        stream = int.from_bytes(data[position + 5 : position + 9])
        connection_wide = kind in {4, 6, 7}
        if length > _LARGEST_FRAME or kind > FrameType.CONTINUATION or stream >> 31:
            return False
        if connection_wide != (stream == 0) and kind != 8:
            return False
        position += _HEAD + length
        frames += 1
    return frames > 0
