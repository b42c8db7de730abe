"""A connection whose contents cannot be read: TLS, a protocol that was switched to, lost framing.

Only arrivals and life show. Bytes of the client after bytes of the server are a request (without
pipelining that is what they are); no byte ever shows an end. So one request is outstanding until
the connection closes, and whether it is still being computed is for other sources to say
(``signal``). Handshakes and window updates count as arrivals too: they may only close the gate.
"""

from __future__ import annotations

from collections.abc import Iterator

from rose_core.telemetry.events import EndKind
from rose_core.telemetry.ledger import Ledger, Request
from rose_core.telemetry.segments import Piece

_RECORD_TYPES = (b"\x14", b"\x15", b"\x16", b"\x17")


def is_tls(data: bytes) -> bool:
    """Whether the bytes begin with a TLS record."""
    return data[:1] == b"\x16" or (data[:1] in _RECORD_TYPES and data[1:2] == b"\x03")


class Opaque:
    """Conversation about which nothing is known but that it takes place."""

    garbled = False
    needs_every_segment = False
    ends_unmarked = False
    unreadable = True

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._request: Request | None = None
        self._answered = False

    def requests(self) -> Iterator[Request]:
        """The outstanding request."""
        if self._request is not None:
            yield self._request

    def feed_client(self, _piece: Piece, time_ns: int) -> None:
        """Take bytes of the client: more of a request, or the next one."""
        if self._request is None or self._answered:
            self.end_all(time_ns, EndKind.REPLACED)
            self._request = self._ledger.arrive(time_ns, opaque=True)
        self._answered = False
        self._ledger.touch(self._request, time_ns)

    def feed_server(self, _piece: Piece, time_ns: int) -> None:
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
