"""TCP segments of one replica -> request events, request by request.

One ``Connection`` per client address. Each direction is a byte stream by sequence number:
retransmissions are trimmed, missing bytes become holes (lost packets, or segments the kernel
filter left out while only token streams are under way).

| connection | segment | then |
|---|---|---|
| new | SYN | fresh streams |
| new | data without SYN | the tap joined late; a response under way counts as in flight |
| plain | client bytes | request begins, head, body complete |
| plain | server bytes | head, first event, events, true end |
| plain | client bytes while the response has no end yet | pipelined, or the end was not seen |
| opaque (TLS, HTTP/2) | any client bytes | arrival; never any emptiness |
| any | RST, or FIN of the server | every open request of the connection ends |
| closed | server bytes | ignored until a SYN, forgotten after 5 s |

Next step: ``book`` on the guard's side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rose_core.telemetry.events import (
    Arrived,
    Dismissed,
    Ended,
    FirstToken,
    How,
    Progress,
    Sized,
    TapEvent,
)
from rose_core.telemetry.http1 import Head, MarkKind, Reader
from rose_core.telemetry.paths import bare, generates

FIN, SYN, RST = 0x01, 0x02, 0x04
_PROGRESS_EVERY_NS = 20_000_000
_CLOSED_NS = 5_000_000_000
_MAX_PATHS = 64
_METHODS = (b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC")


class Segment(NamedTuple):
    """One TCP segment; ``payload`` may be cut by the capture, ``size`` is its true length."""

    time_ns: int
    client: tuple[str, int]
    to_server: bool
    sequence: int
    flags: int
    payload: bytes
    size: int


@dataclass
class Request:
    """One request under way."""

    number: int
    arrived_ns: int
    path: str = ""
    method: str = ""
    quiet: bool = False
    stream: bool = False
    first_ns: int = 0
    told_ns: int = 0
    touched_ns: int = 0
    events: int = 0
    event_bytes: int = 0
    unseen_bytes: int = 0
    status: int = 0

    def tokens(self) -> int:
        """Events passed; those in segments that were left out are estimated from their bytes."""
        if not self.events or not self.unseen_bytes:
            return self.events
        return self.events + round(self.unseen_bytes * self.events / self.event_bytes)


@dataclass
class _Stream:
    """One direction of a connection."""

    reader: Reader
    next: int | None = None

    def advance(self, segment: Segment) -> tuple[int, bytes, int]:
        """Place the segment; returns (hole before it, new bytes, bytes cut off its end)."""
        if self.next is None:
            self.next = segment.sequence
        ahead = (segment.sequence - self.next) & 0xFFFFFFFF
        if ahead >= 0x80000000:  # starts before what we have: a retransmission
            old = 0x100000000 - ahead
            if old >= segment.size:
                return 0, b"", 0
            payload = segment.payload[old:]
            cut = segment.size - max(old, len(segment.payload))
            self.next = (segment.sequence + segment.size) & 0xFFFFFFFF
            return 0, payload, cut
        self.next = (segment.sequence + segment.size) & 0xFFFFFFFF
        return ahead, segment.payload, segment.size - len(segment.payload)


@dataclass
class _Connection:
    client: _Stream = field(default_factory=lambda: _Stream(Reader(response=False)))
    server: _Stream = field(default_factory=lambda: _Stream(Reader(response=True)))
    open: deque[Request] = field(default_factory=deque)
    opaque: bool = False
    closed: bool = False
    touched_ns: int = 0


class Tracker:
    """Follows every connection of one serving port.

    Args:
        replica: name put into every event.
        number: gives the next request number.
    """

    def __init__(self, replica: str, number: Callable[[], int]) -> None:
        self._replica = replica
        self._number = number
        self._connections: dict[tuple[str, int], _Connection] = {}
        # Those with a request under way: the questions below are asked for every batch, and
        # thousands of connections may be remembered.
        self._active: dict[tuple[str, int], _Connection] = {}
        self._opaque_clients: set[tuple[str, int]] = set()
        self._events: list[TapEvent] = []
        self.counts: dict[str, int] = {}
        self.packets = 0

    @property
    def in_flight(self) -> int:
        """Requests under way that may make the engine compute."""
        return sum(not r.quiet for c in self._active.values() for r in c.open)

    @property
    def opaque(self) -> bool:
        """Whether connections are open whose contents cannot be read."""
        return bool(self._opaque_clients)

    @property
    def needs_every_segment(self) -> bool:
        """A first token is awaited or a response has no recognisable tail: do not sample."""
        return any(
            c.server.reader.needs_every_segment or any(not r.first_ns for r in c.open)
            for c in self._active.values()
        )

    def open_requests(self) -> list[TapEvent]:
        """The requests under way as arrivals, for a guard that has just connected."""
        return [
            Arrived(self._replica, r.number, r.arrived_ns, r.path)
            for c in self._connections.values()
            for r in c.open
            if not r.quiet
        ]

    def feed(self, segment: Segment) -> list[TapEvent]:
        """Take one segment."""
        self._events = []
        self.packets += 1
        connection = self._connections.get(segment.client)
        if connection is None or (segment.flags & SYN and segment.to_server):
            if connection is not None:
                self._end_all(connection, segment.time_ns, How.REPLACED)
            connection = self._connections[segment.client] = _Connection()
        connection.touched_ns = segment.time_ns
        if segment.flags & SYN:
            stream = connection.client if segment.to_server else connection.server
            stream.next = (segment.sequence + 1) & 0xFFFFFFFF
        elif segment.size and not connection.closed:
            self._take(connection, segment)
        if segment.flags & (FIN | RST):
            self._close(connection, segment)
        self._index(segment.client, connection)
        return self._events

    def _index(self, client: tuple[str, int], connection: _Connection) -> None:
        if connection.open:
            self._active[client] = connection
        else:
            self._active.pop(client, None)
        if connection.opaque and not connection.closed:
            self._opaque_clients.add(client)
        else:
            self._opaque_clients.discard(client)

    def expire(self, now_ns: int, age_ns: int) -> list[TapEvent]:
        """Forget connections that were silent for ``age_ns`` (the end was lost)."""
        self._events = []
        for client, connection in list(self._connections.items()):
            age = now_ns - connection.touched_ns
            if age > (_CLOSED_NS if connection.closed else age_ns):
                self._end_all(connection, now_ns, How.EXPIRED)
                connection.closed = True
                self._index(client, connection)
                del self._connections[client]
        return self._events

    def _take(self, connection: _Connection, segment: Segment) -> None:
        if connection.opaque:
            self._opaque(connection, segment)
        elif segment.to_server:
            self._from_client(connection, segment)
        else:
            self._from_server(connection, segment)

    # --- client side

    def _from_client(self, connection: _Connection, segment: Segment) -> None:
        stream = connection.client
        joined_late = stream.next is None
        hole, data, cut = stream.advance(segment)
        if joined_late or stream.reader.idle:
            if data[:1] == b"\x16" or data.startswith(b"PRI * HTTP/2"):
                connection.opaque = True
                self._opaque(connection, segment)
                return
            if joined_late and not data.startswith(_METHODS):
                self._arrive(connection, segment.time_ns)  # middle of a request body
                return
        marks = stream.reader.skip(hole) if hole else []
        marks += stream.reader.feed(data) if data else []
        marks += stream.reader.skip(cut) if cut else []
        for mark in marks:
            if mark.kind is MarkKind.BEGAN:
                self._arrive(connection, segment.time_ns)
            elif mark.kind is MarkKind.HEAD and mark.head and connection.open:
                self._know(connection.open[-1], mark.head)

    def _arrive(self, connection: _Connection, time_ns: int) -> None:
        request = Request(self._number(), time_ns, touched_ns=time_ns)
        connection.open.append(request)
        self._events.append(Arrived(self._replica, request.number, time_ns, ""))

    def _know(self, request: Request, head: Head) -> None:
        request.method, request.path = head.first, bare(head.second)
        if len(self.counts) < _MAX_PATHS or request.path in self.counts:
            self.counts[request.path] = self.counts.get(request.path, 0) + 1
        if not generates(head.first, head.second):
            request.quiet = True
            self._drop_quiet(request)
            return
        size = -1 if head.chunked else head.length or 0
        self._replace_arrival(request)
        self._events.append(Sized(self._replica, request.number, size))

    def _drop_quiet(self, request: Request) -> None:
        before = len(self._events)
        self._events = [
            e for e in self._events if not (isinstance(e, Arrived) and e.request == request.number)
        ]
        if len(self._events) == before:  # its arrival went out with an earlier segment
            self._events.append(Dismissed(self._replica, request.number))

    def _replace_arrival(self, request: Request) -> None:
        for index, event in enumerate(self._events):
            if isinstance(event, Arrived) and event.request == request.number:
                self._events[index] = Arrived(
                    self._replica, request.number, event.time_ns, request.path
                )

    # --- server side

    def _from_server(self, connection: _Connection, segment: Segment) -> None:
        stream = connection.server
        joined_late = stream.next is None
        hole, data, cut = stream.advance(segment)
        if not (hole or data or cut):
            return  # a retransmission; after the true end it must not look like a response
        starts = data.startswith(b"HTTP/1.")
        if starts and (hole or stream.reader.lost):
            self._missed_end(connection, segment.time_ns)
        elif not starts and stream.reader.idle and (joined_late or hole or not connection.open):
            self._join_response(connection, segment.time_ns)
        if hole and connection.open and not starts:
            connection.open[0].unseen_bytes += hole
        marks = stream.reader.skip(hole) if hole and not starts else []
        marks += stream.reader.feed(data) if data else []
        marks += stream.reader.skip(cut) if cut else []
        for mark in marks:
            self._response_mark(connection, mark.kind, mark.head, mark.data, segment.time_ns)

    def _missed_end(self, connection: _Connection, time_ns: int) -> None:
        """A new response begins although the one before has not been seen to end."""
        if not connection.server.reader.idle and len(connection.open) > 1:
            self._end(connection.open.popleft(), time_ns, How.REPLACED)
        connection.server.reader.reset()

    def _join_response(self, connection: _Connection, time_ns: int) -> None:
        if not connection.open:
            self._arrive(connection, time_ns)
        connection.open[0].first_ns = connection.open[0].first_ns or time_ns
        connection.server.reader.assume_open_body()

    def _response_mark(
        self,
        connection: _Connection,
        kind: MarkKind,
        head: Head | None,
        data: bytes,
        time_ns: int,
    ) -> None:
        if not connection.open:
            return
        request = connection.open[0]
        if kind is MarkKind.HEAD and head:
            request.status = int(head.second) if head.second.isdigit() else 0
            request.stream = head.stream
        elif kind is MarkKind.DATA:
            self._body(request, data, time_ns)
        elif kind is MarkKind.DONE:
            interim = head is not None and head.second.startswith("1")
            if not interim:
                self._end(connection.open.popleft(), time_ns, How.COMPLETE)

    def _body(self, request: Request, data: bytes, time_ns: int) -> None:
        request.touched_ns = time_ns
        events = data.count(b"data: ") - data.count(b"data: [DONE]")
        if events <= 0:
            return
        request.events += events
        request.event_bytes += len(data)
        if request.quiet:
            return
        if not request.first_ns:
            request.first_ns = request.told_ns = time_ns
            self._events.append(FirstToken(self._replica, request.number, time_ns))
        elif time_ns - request.told_ns >= _PROGRESS_EVERY_NS:
            request.told_ns = time_ns
            self._events.append(Progress(self._replica, request.number, time_ns, request.tokens()))

    # --- ends

    def _close(self, connection: _Connection, segment: Segment) -> None:
        reset = bool(segment.flags & RST)
        if segment.to_server and not reset and connection.open:
            # A half-closed client may still read; SGLang and vLLM abort at once and then close
            # their side, which is the end that counts.
            return
        self._end_all(connection, segment.time_ns, How.RESET if reset else How.CLOSED)
        # Kept for a while: what the server was still writing must not look like a new response.
        connection.closed = True

    def _end_all(self, connection: _Connection, time_ns: int, how: How) -> None:
        while connection.open:
            self._end(connection.open.popleft(), time_ns, how)

    def _end(self, request: Request, time_ns: int, how: How) -> None:
        if not request.quiet:
            self._events.append(
                Ended(
                    self._replica,
                    request.number,
                    time_ns,
                    request.tokens(),
                    request.status,
                    how,
                )
            )

    def _opaque(self, connection: _Connection, segment: Segment) -> None:
        if not segment.to_server:
            return
        self._end_all(connection, segment.time_ns, How.REPLACED)
        self._arrive(connection, segment.time_ns)
