"""TCP segments of one replica -> request events, request by request.

One connection per client address. Its two directions are byte streams (``segments``); what they
carry is read by a *conversation*, chosen by the first bytes seen:

| first bytes | conversation |
|---|---|
| HTTP/2 preface; frames, where the tap joined late | ``http2`` |
| TLS record | ``Opaque`` |
| anything else | ``plain``: HTTP/1.1 |
| a conversation that can no longer be read | ``Opaque`` from then on |

| connection | segment | then |
|---|---|---|
| new | SYN | fresh streams |
| new | data without SYN | the tap joined late; a response under way counts as in flight |
| open or closed | SYN with the sequence number it began with | seen before: ignored |
| open | any other SYN | the address was taken anew; every open request ends |
| any | RST, or FIN of the server | every open request of the connection ends |
| closed | server bytes | ignored until a SYN, forgotten after 5 s |

Memory is bounded: a closed connection leaves its name only, and above ``MOST_CONNECTIONS`` the
longest silent one is given up, which counts as loss when a request was under way on it.
Next step: ``book`` on the guard's side.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rose_core.identity import PodUid
from rose_core.telemetry.events import Arrived, EndKind, TapEvent
from rose_core.telemetry.h2frames import looks_like_frames
from rose_core.telemetry.http2 import Http2
from rose_core.telemetry.ledger import Request, RequestLedger
from rose_core.telemetry.plain import METHODS, Plain
from rose_core.telemetry.segments import (
    FIN,
    NOTHING,
    RST,
    SYN,
    Client,
    Segment,
    SegmentPiece,
    StreamPosition,
)

_RECORD_TYPES = (b"\x14", b"\x15", b"\x16", b"\x17")

_CLOSED_NS = 5_000_000_000
MOST_CONNECTIONS = 65_536
_MOST_CLOSED = 65_536
_PREFACE_START = b"PRI"


def is_tls(data: bytes) -> bool:
    """Whether the bytes begin with a TLS record."""
    return data[:1] == b"\x16" or (data[:1] in _RECORD_TYPES and data[1:2] == b"\x03")


class Opaque:
    """A connection whose contents cannot be read: TLS, a switched protocol, lost framing.

    Only arrivals and life show. Bytes of the client after bytes of the server are a request
    (without pipelining that is what they are); no byte ever shows an end. So one request is
    outstanding until the connection closes, and whether it is still being computed is for other
    sources to say (``signal``). Handshakes and window updates count as arrivals too: they may only
    close the gate.
    """

    garbled = False
    needs_every_segment = False
    ends_unmarked = False
    unreadable = True

    def __init__(self, ledger: RequestLedger) -> None:
        self._ledger = ledger
        self._request: Request | None = None
        self._answered = False

    def requests(self) -> Iterator[Request]:
        """The outstanding request."""
        if self._request is not None:
            yield self._request

    def feed_client(self, _piece: SegmentPiece, time_ns: int) -> None:
        """Take bytes of the client: more of a request, or the next one."""
        if self._request is None or self._answered:
            self.end_all(time_ns, EndKind.REPLACED)
            self._request = self._ledger.arrive(time_ns, opaque=True)
        self._answered = False
        self._ledger.touch(self._request, time_ns)

    def feed_server(self, _piece: SegmentPiece, time_ns: int) -> None:
        """Take bytes of the server: the request is alive."""
        if self._request is None:
            self._request = self._ledger.arrive(time_ns, opaque=True)
        self._answered = True
        self._ledger.touch(self._request, time_ns)

    def end_all(self, time_ns: int, how: EndKind) -> None:
        """The connection is over."""
        if self._request is not None:
            self._ledger.end(self._request, time_ns, how)
            self._request = None


class TrackedConversation(Protocol):
    """What a connection carries.

    Attributes:
        unreadable: its ends cannot be seen.
        garbled: it can be read no longer.
        needs_every_segment: do not sample the server's segments.
        ends_unmarked: an end may come in a segment that looks like any other.
    """

    @property
    def unreadable(self) -> bool: ...  # noqa: D102

    @property
    def garbled(self) -> bool: ...  # noqa: D102

    @property
    def needs_every_segment(self) -> bool: ...  # noqa: D102

    @property
    def ends_unmarked(self) -> bool: ...  # noqa: D102

    def requests(self) -> Iterator[Request]:
        """Requests without an end yet."""

    def feed_client(self, piece: SegmentPiece, time_ns: int) -> None:
        """Take bytes of the client."""

    def feed_server(self, piece: SegmentPiece, time_ns: int) -> None:
        """Take bytes of the server."""

    def end_all(self, time_ns: int, how: EndKind) -> None:
        """The connection is over."""


@dataclass(slots=True)
class _Connection:
    began: int | None
    """Sequence number of the client's SYN; None when the tap joined late."""
    client: StreamPosition = field(default_factory=StreamPosition)
    server: StreamPosition = field(default_factory=StreamPosition)
    talk: TrackedConversation | None = None
    touched_ns: int = 0

    def busy(self) -> bool:
        """A request is under way."""
        return self.talk is not None and next(self.talk.requests(), None) is not None


class _Closed(NamedTuple):
    time_ns: int
    began: int | None


class Tracker:
    """Follows every connection of one serving port.

    Args:
        replica: name put into every event.
        number: gives the next request number.
        most: connections remembered.
    """

    def __init__(
        self, replica: PodUid, number: Callable[[], int], most: int = MOST_CONNECTIONS
    ) -> None:
        self.ledger = RequestLedger(replica, number)
        self._most = most
        # Both in the order of their last segment, so that the old ones are found first.
        self._connections: OrderedDict[Client, _Connection] = OrderedDict()
        self._closed: OrderedDict[Client, _Closed] = OrderedDict()
        # Those with a request under way: the questions below are asked for every batch, and
        # thousands of connections may be remembered.
        self._active: dict[Client, _Connection] = {}
        # What those questions are answered from, and of whom it has to be found out anew.
        self._loads: dict[Client, int] = {}
        self._in_flight = 0
        self._awaiting: set[Client] = set()
        self._unmarked: set[Client] = set()
        self._changed: set[Client] = set()
        self._unreadable: set[Client] = set()
        self.packets = 0
        self.lost_ns = 0

    @property
    def counts(self) -> dict[str, int]:
        """Requests seen, by path."""
        return self.ledger.counts

    @property
    def connections(self) -> int:
        """Connections that are open as far as is known."""
        return len(self._connections)

    @property
    def in_flight(self) -> int:
        """Requests under way that may make the engine compute."""
        self._look_again()
        return self._in_flight

    @property
    def opaque(self) -> bool:
        """Whether connections are open whose contents cannot be read."""
        return bool(self._unreadable)

    @property
    def needs_every_segment(self) -> bool:
        """A first token is awaited or a response has no recognisable tail: do not sample."""
        self._look_again()
        return bool(self._awaiting)

    @property
    def ends_unmarked(self) -> bool:
        """The end of a request under way may come unmarked: look at every segment at once."""
        self._look_again()
        return bool(self._unmarked)

    def open_requests(self) -> list[Arrived]:
        """The requests under way as arrivals, for a guard that has just connected."""
        return [self.ledger.arrival(r) for r in self._under_way()]

    def _look_again(self) -> None:
        """Ask the connections that a segment was of since the last question, and no other."""
        for client in self._changed:
            connection = self._active.get(client)
            talk = connection.talk if connection is not None else None
            load = sum(not request.quiet for request in talk.requests()) if talk else 0
            self._in_flight += load - self._loads.pop(client, 0)
            if load:
                self._loads[client] = load
            _keep(self._awaiting, client, holds=talk is not None and talk.needs_every_segment)
            _keep(self._unmarked, client, holds=talk is not None and talk.ends_unmarked)
        self._changed.clear()

    def _under_way(self) -> Iterator[Request]:
        for connection in self._active.values():
            if connection.talk is not None:
                yield from (r for r in connection.talk.requests() if not r.quiet)

    def feed(self, segment: Segment) -> list[TapEvent]:
        """Take one segment."""
        self.packets += 1
        client = segment.client
        opens = segment.sequence if segment.flags & SYN and segment.to_server else None
        connection = self._connections.get(client)
        if connection is None:
            if client in self._closed and opens in {None, self._closed[client].began}:
                return self.ledger.take()  # the server was still writing when it closed
            connection = self._open(client, opens)
        elif opens is not None:
            if opens == connection.began:
                return self.ledger.take()
            self._drop(client, segment.time_ns, EndKind.REPLACED)
            connection = self._open(client, opens)
        connection.touched_ns = segment.time_ns
        self._connections.move_to_end(client)
        if segment.flags & SYN:
            stream = connection.client if segment.to_server else connection.server
            if stream.next is None:
                stream.next = (segment.sequence + 1) & 0xFFFFFFFF
        elif segment.size:
            self._take(connection, segment)
        self._index(client, connection)
        if segment.flags & (FIN | RST):
            self._close(client, connection, segment)
        return self.ledger.take()

    # --- tokens that somebody else counts (``rose_agent.tap.kernel_counts``)

    def position(self, client: Client) -> int | None:
        """Sequence number of the server's next byte; None where it is not known."""
        connection = self._connections.get(client)
        return None if connection is None else connection.server.next

    def countable(self, client: Client) -> Request | None:
        """Whose later tokens follow: the server's next byte begins a chunk of an event stream."""
        connection = self._connections.get(client)
        talk = None if connection is None else connection.talk
        return talk.countable if isinstance(talk, Plain) else None

    def count(
        self, client: Client, begin: int, until: int, time_ns: int, *, tokens: int, each: float
    ) -> bool:
        """Take whole chunks that somebody else has counted; ``take`` has the events.

        Args:
            client: of a connection that was countable at ``begin``.
            begin: its position then.
            until: sequence number after them, the connection's new position.
            time_ns: of the newest token.
            tokens: events among them.
            each: bytes of the newest token.

        Returns:
            False where the connection has moved since, or is closed: nothing was taken.
        """
        connection = self._connections.get(client)
        if connection is None or connection.server.next != begin:
            return False
        connection.server.next = until
        connection.touched_ns = max(connection.touched_ns, time_ns)
        self._connections.move_to_end(client)
        if isinstance(connection.talk, Plain):
            connection.talk.take_counted(tokens, each, time_ns)
        return True

    def take(self) -> list[TapEvent]:
        """The events since the last call."""
        return self.ledger.take()

    def _open(self, client: Client, began: int | None) -> _Connection:
        self._closed.pop(client, None)
        connection = self._connections[client] = _Connection(began)
        return connection

    def _index(self, client: Client, connection: _Connection) -> None:
        self._changed.add(client)
        if connection.busy():
            self._active[client] = connection
        else:
            self._active.pop(client, None)
        if connection.talk is not None and connection.talk.unreadable:
            self._unreadable.add(client)

    def _take(self, connection: _Connection, segment: Segment) -> None:
        stream = connection.client if segment.to_server else connection.server
        joined = stream.next is None
        piece = stream.advance(segment)
        if piece == NOTHING:
            return
        if connection.talk is None:
            connection.talk = self._recognise(piece.data, joined=joined)
        talk = connection.talk
        if segment.to_server:
            talk.feed_client(piece, segment.time_ns)
        else:
            talk.feed_server(piece, segment.time_ns)
        if talk.garbled:
            # Whatever was under way goes on unseen: one outstanding request stands for it.
            connection.talk = Opaque(self.ledger)
            connection.talk.feed_server(piece, segment.time_ns)
            talk.end_all(segment.time_ns, EndKind.REPLACED)

    def _recognise(self, data: bytes, *, joined: bool) -> TrackedConversation:
        if data.startswith(_PREFACE_START):
            return Http2(self.ledger, joined=False)
        if is_tls(data):
            return Opaque(self.ledger)
        plain = data.startswith((*METHODS, b"HTTP/1."))
        if joined and not plain and looks_like_frames(data):
            return Http2(self.ledger, joined=True)
        return Plain(self.ledger, joined=joined)

    # --- ends

    def _close(self, client: Client, connection: _Connection, segment: Segment) -> None:
        reset = bool(segment.flags & RST)
        if segment.to_server and not reset and connection.busy():
            # A half-closed client may still read; SGLang and vLLM abort at once and then close
            # their side, which is the end that counts.
            return
        self._drop(client, segment.time_ns, EndKind.RESET if reset else EndKind.CLOSED)
        # Kept for a while: what the server was still writing must not look like a new response.
        self._closed[client] = _Closed(segment.time_ns, connection.began)
        if len(self._closed) > _MOST_CLOSED:
            self._closed.popitem(last=False)

    def _drop(self, client: Client, time_ns: int, how: EndKind) -> None:
        connection = self._connections.pop(client)
        if connection.talk is not None:
            connection.talk.end_all(time_ns, how)
        self._active.pop(client, None)
        self._changed.add(client)
        self._unreadable.discard(client)

    def expire(self, now_ns: int, age_ns: int) -> list[TapEvent]:
        """Forget connections that were silent for ``age_ns`` (the end was lost)."""
        while self._closed and now_ns - next(iter(self._closed.values())).time_ns > _CLOSED_NS:
            self._closed.popitem(last=False)
        while self._connections:
            client, connection = next(iter(self._connections.items()))
            crowded = len(self._connections) > self._most
            if now_ns - connection.touched_ns <= age_ns and not crowded:
                break
            if crowded and connection.busy():
                self.lost_ns = now_ns
            self._drop(client, now_ns, EndKind.EXPIRED)
        return self.ledger.take()


def _keep(among: set[Client], client: Client, *, holds: bool) -> None:
    if holds:
        among.add(client)
    else:
        among.discard(client)
