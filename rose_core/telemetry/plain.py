"""One HTTP/1.1 connection: requests and responses paired in order, each to its true end.

| connection | bytes | then |
|---|---|---|
| plain | of the client | a request begins, its head and body complete |
| plain | of the server | head, first event, events, true end |
| plain | of the client while a response has no end yet | pipelined, or the end was not seen |
| joined late | in the middle of a body | one is under way until that ends, or figures say so |
| any | no HTTP/1.1, or 101 Switching Protocols | garbled: followed as ``Opaque`` from then on |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rose_core.telemetry.events import EndKind
from rose_core.telemetry.http1 import Http1Reader, Mark, MarkKind, decimal
from rose_core.telemetry.ledger import Request, RequestLedger
from rose_core.telemetry.segments import SegmentPiece

METHODS = (b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC")


class Plain:
    """Conversation in HTTP/1.1.

    Args:
        ledger: takes what is read.
        joined: the connection was open before the tap was.
    """

    unreadable = False

    def __init__(self, ledger: RequestLedger, *, joined: bool) -> None:
        self._ledger = ledger
        self._asked = Http1Reader(response=False)
        self._answered = Http1Reader(response=True)
        self._open: deque[Request] = deque()
        self._client_seen = self._server_seen = not joined
        self.garbled = False

    def requests(self) -> Iterator[Request]:
        """Requests without an end yet."""
        return iter(self._open)

    @property
    def needs_every_segment(self) -> bool:
        """A first token is awaited, or a response has no recognisable tail."""
        return self._answered.needs_every_segment or any(not r.first_ns for r in self._open)

    @property
    def ends_unmarked(self) -> bool:
        """A body of known length is under way; chunked ones and closed connections have a mark."""
        return self._answered.needs_every_segment and any(not r.quiet for r in self._open)

    @property
    def countable(self) -> Request | None:
        """Nothing but whole chunks of its tokens has to follow: somebody else may count those."""
        request = self._open[0] if self._open else None
        if request is None or not request.first_ns or request.unseen_bytes:
            return None
        return request if self._answered.between_events and not self.garbled else None

    def take_counted(self, tokens: int, each: float, time_ns: int) -> None:
        """Take whole chunks that somebody else has counted; the newest token is of that time."""
        if self._open:
            self._ledger.take_tokens(self._open[0], tokens, each, time_ns)

    # --- client side

    def feed_client(self, piece: SegmentPiece, time_ns: int) -> None:
        """Take bytes of the client."""
        first, self._client_seen = not self._client_seen, True
        if first and not piece.data.startswith(METHODS):
            self._open.append(self._ledger.arrive(time_ns))  # middle of a request body
            return
        for mark in _marks(self._asked, piece):
            if mark.kind is MarkKind.BEGAN:
                self._open.append(self._ledger.arrive(time_ns))
            elif mark.kind is MarkKind.HEAD and mark.head and self._open:
                head = mark.head
                size = -1 if head.chunked else head.length or 0
                self._ledger.know(self._open[-1], head.first, head.second, size)
            elif mark.kind is MarkKind.LOST and not piece.hole:
                self.garbled = True

    # --- server side

    def feed_server(self, piece: SegmentPiece, time_ns: int) -> None:
        """Take bytes of the server."""
        first, self._server_seen = not self._server_seen, True
        reader = self._answered
        starts = piece.data.startswith(b"HTTP/1.")
        if starts and (piece.hole or reader.lost):
            self._missed_end(time_ns)
        elif not starts and reader.idle and (first or piece.hole or not self._open):
            self._join_response(time_ns)
        if piece.hole and self._open and not starts:
            self._open[0].unseen_bytes += piece.hole
        seen = piece._replace(hole=0) if starts else piece
        for mark in _marks(reader, seen):
            self._response(mark, time_ns)

    def _missed_end(self, time_ns: int) -> None:
        """A new response begins although the one before has not been seen to end."""
        if not self._answered.idle and len(self._open) > 1:
            self._ledger.end(self._open.popleft(), time_ns, EndKind.REPLACED)
        self._answered.reset()

    def _join_response(self, time_ns: int) -> None:
        if not self._open:
            # Opaque: a body whose length stood in the head that went by has no end to be seen.
            self._open.append(self._ledger.arrive(time_ns, opaque=True))
        self._open[0].first_ns = self._open[0].first_ns or time_ns
        self._answered.assume_open_body()

    def _response(self, mark: Mark, time_ns: int) -> None:
        if not self._open:
            return
        request = self._open[0]
        if mark.kind is MarkKind.HEAD and mark.head:
            request.status = decimal(mark.head.second) or 0
            self.garbled = self.garbled or request.status == 101
        elif mark.kind is MarkKind.DATA:
            self._ledger.take_body(request, mark.data, time_ns)
        elif mark.kind is MarkKind.DONE:
            interim = mark.head is not None and mark.head.second.startswith("1")
            if not interim:
                self._ledger.end(self._open.popleft(), time_ns, EndKind.COMPLETE)

    def end_all(self, time_ns: int, how: EndKind) -> None:
        """The connection is over."""
        while self._open:
            self._ledger.end(self._open.popleft(), time_ns, how)


def _marks(reader: Http1Reader, piece: SegmentPiece) -> list[Mark]:
    marks = reader.skip(piece.hole) if piece.hole else []
    marks += reader.feed(piece.data) if piece.data else []
    marks += reader.skip(piece.cut) if piece.cut else []
    return marks
