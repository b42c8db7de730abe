"""One HTTP/2 connection in clear text: streams instead of messages.

| frame | of the client | of the server |
|---|---|---|
| HEADERS | a request begins; path and method by HPACK | status; END_STREAM ends the request |
| DATA | more of the request | first event, events, gRPC messages; END_STREAM ends it |
| RST_STREAM | the request ends | the request ends |
| GOAWAY | | requests above its last stream end |

HPACK needs a connection's first byte. On a connection that was open before the tap, paths and
status stay unknown: there a request without a body (END_STREAM on its HEADERS) counts as quiet,
because every route that generates takes a body, and all others count as generating.
Lost framing (dropped packets outside DATA) makes the connection ``Opaque``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hpack import Decoder, HPACKError

from rose_core.telemetry.events import EndKind
from rose_core.telemetry.h2frames import (
    END_HEADERS,
    END_STREAM,
    PREFACE,
    FrameReader,
    FrameType,
    Http2Frame,
)
from rose_core.telemetry.http1 import decimal
from rose_core.telemetry.ledger import Request, RequestLedger
from rose_core.telemetry.segments import SegmentPiece

_TABLE_BYTES = 64 * 1024
_HEADERS_BYTES = 128 * 1024
UNREAD_PATH = "(unread)"


@dataclass(slots=True)
class _Side:
    """One direction: frames, and the header block that is being assembled."""

    reader: FrameReader = field(default_factory=FrameReader)
    decoder: Decoder | None = None
    block: bytes = b""
    block_flags: int = 0

    def frames(self, piece: SegmentPiece) -> list[Http2Frame]:
        """Frames of the next bytes."""
        frames = self.reader.skip(piece.hole) if piece.hole else []
        frames += self.reader.feed(piece.data) if piece.data else []
        return frames + (self.reader.skip(piece.cut) if piece.cut else [])

    def headers(self, frame: Http2Frame) -> dict[str, str] | None:
        """Headers once their block is complete; empty when it cannot be read.

        Raises:
            HPACKError: the block contradicts what was seen before.
        """
        if frame.kind is FrameType.HEADERS:
            self.block, self.block_flags = b"", frame.flags
        self.block += frame.data
        if not frame.flags & END_HEADERS:
            return None
        block, self.block = self.block, b""
        if self.decoder is None:
            return {}
        return {str(name): str(value) for name, value in self.decoder.decode(block)}


def _decoder() -> Decoder:
    decoder = Decoder(max_header_list_size=_HEADERS_BYTES)
    # Tables up to this size are accepted without following SETTINGS of both sides.
    decoder.max_allowed_table_size = _TABLE_BYTES
    return decoder


@dataclass(slots=True)
class _Stream:
    request: Request
    grpc: bool = False


class Http2:
    """Conversation in HTTP/2.

    Args:
        ledger: takes what is read.
        joined: the connection was open before the tap was.
    """

    unreadable = False

    def __init__(self, ledger: RequestLedger, *, joined: bool) -> None:
        self._ledger = ledger
        self._sides = {True: _Side(), False: _Side()}
        if not joined:
            for side in self._sides.values():
                side.decoder = _decoder()
        self._preface = b"" if joined else PREFACE
        self._streams: dict[int, _Stream] = {}
        self._newest = 0
        self.garbled = False

    def requests(self) -> Iterator[Request]:
        """Requests without an end yet."""
        return (stream.request for stream in self._streams.values())

    @property
    def needs_every_segment(self) -> bool:
        """Framing survives no missing segment."""
        return bool(self._streams)

    @property
    def ends_unmarked(self) -> bool:
        """END_STREAM is a bit in the head of a frame."""
        return any(not request.quiet for request in self.requests())

    def feed_client(self, piece: SegmentPiece, time_ns: int) -> None:
        """Take bytes of the client."""
        if self._preface:
            piece = self._take_preface(piece)
        self._read(self._sides[True], piece, time_ns, to_server=True)

    def feed_server(self, piece: SegmentPiece, time_ns: int) -> None:
        """Take bytes of the server."""
        self._read(self._sides[False], piece, time_ns, to_server=False)

    def end_all(self, time_ns: int, how: EndKind) -> None:
        """The connection is over."""
        for number in list(self._streams):
            self._end(number, time_ns, how)

    def _take_preface(self, piece: SegmentPiece) -> SegmentPiece:
        used = len(self._preface)
        head, rest = piece.data[:used], piece.data[used:]
        if piece.hole or not self._preface.startswith(head):
            self.garbled = True
        self._preface = self._preface[len(head) :]
        return piece._replace(data=rest)

    def _read(self, side: _Side, piece: SegmentPiece, time_ns: int, *, to_server: bool) -> None:
        try:
            for frame in side.frames(piece):
                if to_server:
                    self._from_client(side, frame, time_ns)
                else:
                    self._from_server(side, frame, time_ns)
        except HPACKError:
            self.garbled = True
        self.garbled = self.garbled or side.reader.lost

    # --- client side

    def _from_client(self, side: _Side, frame: Http2Frame, time_ns: int) -> None:
        if frame.kind is FrameType.RST_STREAM:
            self._end(frame.stream, time_ns, EndKind.RESET)
        elif frame.kind is FrameType.HEADERS and frame.stream > self._newest:
            self._newest = frame.stream
            self._streams[frame.stream] = _Stream(self._ledger.arrive(time_ns))
        if frame.kind in {FrameType.HEADERS, FrameType.CONTINUATION} and frame.whole:
            headers = side.headers(frame)
            if headers is not None:
                self._know(frame.stream, headers, bare=bool(side.block_flags & END_STREAM))

    def _know(self, number: int, headers: dict[str, str], *, bare: bool) -> None:
        stream = self._streams.get(number)
        if stream is None or stream.request.known:
            return  # trailers
        # Without HPACK: what has no body is taken for a GET of the quiet root.
        method, path = ("GET", "/") if bare else ("POST", UNREAD_PATH)
        size = decimal(headers.get("content-length", ""))
        length = size if size is not None else 0 if bare else -1
        self._ledger.know(
            stream.request, headers.get(":method", method), headers.get(":path", path), length
        )

    # --- server side

    def _from_server(self, side: _Side, frame: Http2Frame, time_ns: int) -> None:
        if frame.kind is FrameType.GOAWAY:
            self._go_away(frame, time_ns)
            return
        headers = None
        if frame.kind in {FrameType.HEADERS, FrameType.CONTINUATION} and frame.whole:
            headers = side.headers(frame)
        stream = self._streams.get(frame.stream)
        if stream is None:
            if frame.kind is FrameType.DATA and side.decoder is None:
                self._join(frame.stream, time_ns)
            return
        if headers is not None:
            self._answer(stream, headers)
            if side.block_flags & END_STREAM:
                self._end(frame.stream, time_ns, EndKind.COMPLETE)
        elif frame.kind is FrameType.DATA:
            self._data(stream, frame, time_ns)
        elif frame.kind is FrameType.RST_STREAM:
            self._end(frame.stream, time_ns, EndKind.RESET)

    def _go_away(self, frame: Http2Frame, time_ns: int) -> None:
        """End the streams that the server will not answer."""
        last = int.from_bytes(frame.data[:4]) & 0x7FFFFFFF
        for number in [n for n in self._streams if n > last]:
            self._end(number, time_ns, EndKind.RESET)

    def _join(self, number: int, time_ns: int) -> None:
        """A response whose request was sent before the tap began."""
        request = self._ledger.arrive(time_ns)
        request.first_ns = time_ns
        self._streams[number] = _Stream(request)

    def _answer(self, stream: _Stream, headers: dict[str, str]) -> None:
        status = decimal(headers.get(":status", ""))
        if status is not None and status >= 200:
            stream.request.status = status
        stream.grpc = stream.grpc or headers.get("content-type", "").startswith("application/grpc")

    def _data(self, stream: _Stream, frame: Http2Frame, time_ns: int) -> None:
        if stream.grpc:
            if frame.whole and frame.data:
                self._ledger.take_message(stream.request, time_ns)
        else:
            self._ledger.take_body(stream.request, frame.data, time_ns)
        if frame.whole and frame.flags & END_STREAM:
            self._end(frame.stream, time_ns, EndKind.COMPLETE)

    def _end(self, number: int, time_ns: int, how: EndKind) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            self._ledger.end(stream.request, time_ns, how)
