"""Requests of one replica: who is under way, what has been counted, what the guard is sent.

Conversations (``plain``, ``http2``, ``Opaque``) say what they read; the ledger numbers requests,
tells probes from work, counts, and writes the events. Three counts are kept to be compared with
the engine's own (``verify``): requests that were *seen* to generate, those of them that have
*finished*, and those that finished so that nobody can know whether the engine counted them.
Next step: ``book`` on the guard's side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rose_core.identity import PodUid
from rose_core.telemetry.events import (
    Arrived,
    Dismissed,
    Ended,
    EndKind,
    FirstToken,
    Progress,
    Sized,
    TapEvent,
)
from rose_core.telemetry.paths import bare, generates

OTHER_PATHS = "(other)"
_PROGRESS_EVERY_NS = 5_000_000
_MAX_PATHS = 62  # and two more: the others, and the scrapes that prove the path
# Engines differ in whether they count requests for routes they do not have.
_NO_ROUTE = frozenset({404, 405})


@dataclass(slots=True)
class Request:
    """One request under way.

    Attributes:
        quiet: it does not make the engine compute; kept only to pair responses.
        known: its head has been read, so it is among the counted ones.
        opaque: its contents cannot be read, or not from the start; its end may not show.
        events: tokens seen.
        event_bytes: of one token, as last seen; engines that repeat the text make it grow.
        unseen_bytes: left out since then.
        guessed: tokens in what was left out before.
    """

    number: int
    arrived_ns: int
    path: str = ""
    quiet: bool = False
    known: bool = False
    opaque: bool = False
    status: int = 0
    first_ns: int = 0
    reported_ns: int = 0
    events: int = 0
    event_bytes: float = 0.0
    unseen_bytes: int = 0
    guessed: float = 0.0

    def tokens(self) -> int:
        """Events of the response; those in segments that were left out estimated from bytes."""
        since = self.unseen_bytes / self.event_bytes if self.event_bytes else 0.0
        return self.events + round(self.guessed + since)

    def count_tokens(self, tokens: int, size: float) -> None:
        """Count tokens of this size each; what was left out before was of a size in between."""
        if self.unseen_bytes:
            self.guessed += self.unseen_bytes / ((self.event_bytes or size) + size) * 2
            self.unseen_bytes = 0
        self.events += tokens
        self.event_bytes = size


class RequestLedger:
    """Writes the events of one replica.

    Args:
        replica: name put into every event.
        number: gives the next request number.
    """

    def __init__(self, replica: PodUid, number: Callable[[], int]) -> None:
        self.replica = replica
        self._number = number
        self._events: list[TapEvent] = []
        self.counts: dict[str, int] = {}
        self.seen = 0
        self.finished = 0
        self.unsure = 0

    def take(self) -> list[TapEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def arrive(self, time_ns: int, *, opaque: bool = False) -> Request:
        """A request begins."""
        request = Request(self._number(), time_ns, opaque=opaque, reported_ns=time_ns)
        self._events.append(self.arrival(request))
        return request

    def arrival(self, request: Request) -> Arrived:
        """The arrival of a request, for a guard that connects now."""
        return Arrived(
            self.replica, request.number, request.arrived_ns, request.path, request.opaque
        )

    def know(self, request: Request, method: str, path: str, size: int) -> None:
        """The head of a request is complete; ``size`` -1 when it does not say."""
        request.path, request.known = bare(path), True
        works = generates(method, path)
        self._count(request.path if works or method == "GET" else f"{method} {request.path}")
        if not works:
            request.quiet = True
            self._withdraw(request)
            return
        self.seen += 1
        self._replace_arrival(request)
        self._events.append(Sized(self.replica, request.number, size, request.path))

    def _count(self, path: str) -> None:
        full = len(self.counts) >= _MAX_PATHS and path not in self.counts
        key = OTHER_PATHS if full and path != "/metrics" else path
        self.counts[key] = self.counts.get(key, 0) + 1

    def _withdraw(self, request: Request) -> None:
        for index, event in enumerate(self._events):
            if isinstance(event, Arrived) and event.request == request.number:
                del self._events[index]
                return
        # Its arrival went out with an earlier segment.
        self._events.append(Dismissed(self.replica, request.number))

    def _replace_arrival(self, request: Request) -> None:
        for index, event in enumerate(self._events):
            if isinstance(event, Arrived) and event.request == request.number:
                self._events[index] = self.arrival(request)

    def take_body(self, request: Request, data: bytes, time_ns: int) -> None:
        """Take bytes of a response; events of an event stream among them are its tokens."""
        tokens = data.count(b"data: ") - data.count(b"data: [DONE]")
        if tokens > 0:
            self.take_tokens(request, tokens, len(data) / tokens, time_ns)

    def take_tokens(self, request: Request, tokens: int, each: float, time_ns: int) -> None:
        """Take tokens of a response; the newest has ``each`` bytes."""
        if tokens > 0:
            request.count_tokens(tokens, each)
            self._tokens(request, time_ns)

    def take_message(self, request: Request, time_ns: int) -> None:
        """Take a message of a gRPC response; a single one is an answer, from two on it streams."""
        request.events += 1
        if request.events == 1:
            request.reported_ns = time_ns
        elif request.events == 2 and not request.quiet:
            request.first_ns = request.reported_ns
            self._events.append(FirstToken(self.replica, request.number, request.first_ns))
        self.touch(request, time_ns)

    def _tokens(self, request: Request, time_ns: int) -> None:
        if request.quiet:
            return
        if request.first_ns:
            self.touch(request, time_ns)
            return
        request.first_ns = request.reported_ns = time_ns
        self._events.append(FirstToken(self.replica, request.number, time_ns))

    def touch(self, request: Request, time_ns: int) -> None:
        """Report that the request is alive; the tap gathers such events."""
        if not request.quiet and time_ns - request.reported_ns >= _PROGRESS_EVERY_NS:
            request.reported_ns = time_ns
            self._events.append(Progress(self.replica, request.number, time_ns, request.tokens()))

    def end(self, request: Request, time_ns: int, how: EndKind) -> None:
        """A request is over."""
        if request.quiet:
            return
        if request.known:
            self.finished += 1
            self.unsure += not request.status or request.status in _NO_ROUTE
        self._events.append(
            Ended(self.replica, request.number, time_ns, request.tokens(), request.status, how)
        )
