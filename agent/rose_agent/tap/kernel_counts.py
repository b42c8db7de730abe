"""Streams whose tokens the kernel counts in place of the reader: who they are, and what it counted.

| a connection | then |
|---|---|
| its first token has been read, the next byte begins a chunk, nothing waits unread | *entrusted* |
| entrusted, a segment of it is passed | the kernel's count is taken, then the segment is read |
| it was read on, or closed | withdrawn; entrusted anew when nothing waits |
| a heartbeat | what lies in the map goes to the guard as it is, by one call |
| every other second | every count is taken, so that none grows old here |
| withdrawn three times and nothing was counted | the reader's until its next response |
| the map is full | the reader's |

So the tracker sees each byte of a stream once: as a segment, or as a range that was counted. Should
both claim the same range (a segment that was sent twice within microseconds of being entrusted)
that is loss, as when packets are dropped. Next step: ``tokens.bpf.c`` counts,
``rose_core.telemetry.tracker`` takes what it counted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from rose_agent.os.bpf_maps import HashMap
from rose_agent.tap import metrics
from rose_core.telemetry.events import RECORD, RECORD_TOKENS, Counted, TapEvent
from rose_core.telemetry.segments import Client, Segment
from rose_core.telemetry.tracker import Tracker

KEY_BYTES, MOST = 20, 1024
"""As ``tokens.bpf.c`` has them."""
_KEY = struct.Struct("=16sHH")
_MOST_FRUITLESS = 3
_LAST_EVENT = b"data: [D"


@dataclass(slots=True)
class _Stream:
    client: Client
    position: int
    """As the tracker has it: what was counted before it has been taken."""
    tokens: int = 0


def streams(descriptor: int) -> HashMap:
    """The program's map, from its descriptor."""
    return HashMap(descriptor, KEY_BYTES, RECORD.size, MOST)


def key_of(client: Client) -> bytes:
    """A connection as the program names it."""
    address = bytes.fromhex(client[0])
    return _KEY.pack(address, client[1], 4 if len(address) == 4 else 6)


class KernelCounts:
    """The streams of one replica.

    Args:
        streams: the program's map.
        tracker: follows the replica.
    """

    def __init__(self, streams: HashMap, tracker: Tracker) -> None:
        self._map = streams
        self._tracker = tracker
        self._streams: dict[bytes, _Stream] = {}
        self._fruitless: dict[Client, int] = {}
        self._next: set[Client] = set()
        self.doubtful = False
        """Something was counted twice or not at all since this was last set to False."""
        self._stopped = False
        self._counted = 0  # since the metric was set

    def feed(self, segment: Segment) -> list[TapEvent]:
        """Take a segment that the kernel passed.

        Raises:
            OSError: the kernel does not answer.
        """
        key = key_of(segment.client)
        stream = self._streams.get(key)
        if stream is None:
            events = self._tracker.feed(segment)
        else:
            self._take(stream, self._map.get(key))
            events = self._tracker.feed(segment)
            if self._tracker.position(stream.client) != stream.position:
                self._withdraw(key, stream)
        if not segment.to_server and segment.size:
            self._consider(segment)
        return events

    def _consider(self, segment: Segment) -> None:
        client, payload = segment.client, segment.payload
        if payload.startswith(b"HTTP/1."):
            self._fruitless.pop(client, None)
        if self._stopped:
            return
        patient = self._fruitless.get(client, 0) < _MOST_FRUITLESS
        if patient and _LAST_EVENT not in payload and self._tracker.countable(client) is not None:
            self._next.add(client)

    def settle(self) -> None:
        """Nothing waits unread: entrust what can be counted from here on.

        Raises:
            OSError: the kernel does not answer.
        """
        for client in self._next:
            key, position = key_of(client), self._tracker.position(client)
            request = self._tracker.countable(client)
            if position is None or key in self._streams or request is None:
                continue
            value = RECORD.pack(position << 32, 0, 0, 0, request.number, request.tokens())
            if self._map.put(key, value):
                self._streams[key] = _Stream(client, position)
            else:
                metrics.NOT_ENTRUSTED.inc()
        self._next.clear()

    def counted(self) -> list[TapEvent]:
        """What the kernel has counted by now, for the guard; nothing is taken.

        Raises:
            OSError: the kernel does not answer.
        """
        if not self._streams:
            return []
        return [Counted(self._tracker.ledger.replica, self._map.values())]

    def take_all(self) -> list[TapEvent]:
        """Take every count.

        Raises:
            OSError: the kernel does not answer.
        """
        for key, value in self._map.all() if self._streams else ():
            stream = self._streams.get(key)
            # Given up, as silent or because there are too many: the reader has to see what comes.
            if (
                stream is not None
                and not self._take(stream, value)
                and self._tracker.position(stream.client) is None
            ):
                self._withdraw(key, stream)
        self._note_counted()
        for client in [lost for lost in self._fruitless if self._tracker.position(lost) is None]:
            del self._fruitless[client]
        return self._tracker.take()

    def stop(self) -> list[TapEvent]:
        """Take every count for the last time: until ``resume`` every segment is passed.

        Raises:
            OSError: the kernel does not answer.
        """
        for key, stream in self._streams.items():
            self._take(stream, self._map.take(key))
        self._note_counted()
        self._streams.clear()
        self._next.clear()
        self._stopped = True
        return self._tracker.take()

    def resume(self) -> None:
        """Entrust streams again."""
        self._stopped = False

    def close(self) -> None:
        """Give the map back."""
        self._map.close()

    def _take(self, stream: _Stream, value: bytes | None) -> bool:
        """Take a count; whether there was anything new."""
        if value is None:
            self.doubtful = True
            return False
        packed, last_ns, size, of_tokens, _, _ = RECORD.unpack(value)
        until, tokens = packed >> 32, packed & RECORD_TOKENS
        if until == stream.position:
            return False
        fresh, each = tokens - stream.tokens, size / of_tokens if of_tokens else 0.0
        taken = self._tracker.count(
            stream.client, stream.position, until, last_ns, tokens=fresh, each=each
        )
        self._counted += fresh
        stream.position, stream.tokens = until, tokens
        self.doubtful |= not taken
        return taken

    def _note_counted(self) -> None:
        metrics.COUNTED.inc(self._counted)
        self._counted = 0

    def _withdraw(self, key: bytes, stream: _Stream) -> None:
        del self._streams[key]
        value = self._map.take(key)
        if self._tracker.position(stream.client) is None:
            return  # closed: whatever came afterwards belongs to nobody
        until = RECORD.unpack(value)[0] >> 32 if value is not None else None
        self.doubtful |= until != stream.position
        if stream.tokens:
            self._fruitless.pop(stream.client, None)
        else:
            self._fruitless[stream.client] = self._fruitless.get(stream.client, 0) + 1
