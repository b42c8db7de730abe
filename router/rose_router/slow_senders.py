"""Callers whose request comes in crumbs: the kernel keeps them until there is more.

Each arrival wakes the event loop, be it a byte or 64 KiB: a thousand callers that sent a byte each
second took 4 to 9 ms of it, in one go (decision 0480). Who sends slowly is heard less often, by the
low-water mark of its socket (``SO_RCVLOWAT``, socket(7)). Below it the kernel wakes nobody, takes
what comes all the same, and tells at once who hangs up.

| a caller whose head or body is not whole | is heard |
|---|---|
| and what is missing is known | when that, or ``_MOST_KEPT``, has come: never late |
| else, for less than ``patience`` | at every arrival |
| for longer: a head, chunks | when ``_MOST_KEPT`` have come, or at its turn if a line ended |
| for longer, compressed or through TLS | when ``_MOST_KEPT`` have come, or at its turn |
| of these two, just before it would be too late | at every arrival |

``_AT_ONCE`` of those who wait for a turn are looked at every ``_LOOK_SECONDS``: with ``n`` of them
one waits for 0.1 s * (n / 16 + 1) at most. Next step: ``listener`` passes arrivals on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import socket
from dataclasses import dataclass
from typing import Protocol

_MOST_KEPT = 1 << 14
"""Bytes that the kernel keeps of a caller unheard; 16 KiB of a slow line are worth waking for."""
_AT_ONCE = 16
"""Callers that are heard in a step of the loop, 20 us each."""
_LOOK_SECONDS = 0.1
_LAST_SECONDS = 1.0
"""Before a limit: whoever is not late is heard in time, however many wait for their turn."""
_LOOKED_AT = bytearray(_MOST_KEPT)
"""What the last caller had sent."""


class IncomingBody(Protocol):
    """What aiohttp has made of a body so far."""

    total_bytes: int

    def is_eof(self) -> bool:
        """Whether it is whole."""


def low_water_mark(age: float, patience: float, limit: float, missing: int | None) -> int:
    """Bytes that must have come of an incomplete request before its caller is heard.

    Args:
        age: of the head or body that is coming, in seconds.
        patience: the age up to which it is heard at every arrival, where ``missing`` is unknown.
        limit: the age at which it is too late.
        missing: bytes until it is whole; ``None``: unknown.
    """
    if missing is not None:
        return max(1, min(missing, _MOST_KEPT))
    soon = age < patience or abs(limit - age) <= last_seconds(limit)
    return 1 if soon else _MOST_KEPT


def last_seconds(limit: float) -> float:
    """How long before and after a limit every arrival is heard."""
    return min(_LAST_SECONDS, limit / 4)


@dataclass(eq=False, slots=True)
class Sender:
    """A caller that speaks, and what is coming from it.

    Attributes:
        caller: the socket below its transport.
        encrypted: its bytes are not those of the body.
        begun: when the head or body that is coming began, as the loop tells time; ``None``:
            nothing is.
        limit: seconds after which that is too late.
        body: that is coming; ``None``: a head is.
        length: of the body, where its sender said it.
        ends_with_line: what is coming: a head and chunks do, a compressed body need not.
        mark: of the socket.
        last: will hear it before the limit.
    """

    caller: socket.socket
    encrypted: bool = False
    begun: float | None = None
    limit: float = math.inf
    body: IncomingBody | None = None
    length: int | None = None
    ends_with_line: bool = True
    mark: int = 1
    last: asyncio.TimerHandle | None = None

    def missing(self) -> int | None:
        """Bytes until the body is whole; ``None``: unknown."""
        if self.body is None or self.length is None or self.encrypted:
            return None
        return self.length - self.body.total_bytes

    def set_mark(self, mark: int) -> None:
        """Tell the kernel; when there is as much already, the loop hears it in its next step."""
        if mark != self.mark:
            self.mark = mark
            with contextlib.suppress(OSError):  # closed
                self.caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)

    def may_be_whole(self) -> bool:
        """Whether what waits to be heard may end what is coming."""
        try:
            count = self.caller.recv_into(_LOOKED_AT, 0, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:  # closed, which its transport knows
            return True
        if self.encrypted or not self.ends_with_line:
            return count > 0
        return _LOOKED_AT.find(b"\n", 0, count) >= 0


class SlowSenders:
    """Decides when callers with an incomplete request are heard.

    Args:
        patience: seconds for which a request is heard at every arrival, unless what it lacks is
            known.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._turns: dict[Sender, None] = {}  # who waits for one; the first is next
        self._looking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._turns)

    def begin(
        self,
        sender: Sender,
        limit: float,
        body: IncomingBody | None = None,
        length: int | None = None,
        *,
        ends_with_line: bool = True,
    ) -> None:
        """A head is coming, or a body.

        Args:
            sender: of it.
            limit: seconds within which it must be whole.
            body: that is coming.
            length: of the body, where its sender said it.
            ends_with_line: a whole one does.
        """
        self.rest(sender)
        sender.begun, sender.limit = asyncio.get_running_loop().time(), limit
        sender.body, sender.length, sender.ends_with_line = body, length, ends_with_line

    def rest(self, sender: Sender) -> None:
        """Nothing is coming from it: its next byte is heard."""
        sender.begun = sender.body = sender.length = None
        if sender.last is not None or sender in self._turns:
            self.leave(sender)
        if sender.mark != 1:  # seldom, and this is called twice for every turn
            sender.set_mark(1)

    def leave(self, sender: Sender) -> None:
        """It has no turn any more."""
        self._turns.pop(sender, None)
        if sender.last is not None:
            sender.last.cancel()
            sender.last = None

    def note_bytes(self, sender: Sender, *, reading: bool) -> None:
        """Take note that bytes of it were passed on.

        Args:
            sender: of them.
            reading: aiohttp takes more. While it does not, more has come than it says.
        """
        if sender.begun is None:
            return
        if sender.body is not None and sender.body.is_eof():
            self.rest(sender)
            return
        loop = asyncio.get_running_loop()
        now, missing = loop.time(), sender.missing()
        age = now - sender.begun
        mark = low_water_mark(age, self._patience, sender.limit, missing) if reading else 1
        sender.set_mark(mark)
        if mark == 1 or missing is not None:
            self._turns.pop(sender, None)
            return
        self._turns[sender] = None
        if self._looking is None:
            self._looking = loop.call_later(_LOOK_SECONDS, self._look)
        if sender.last is None and age < sender.limit < math.inf:
            due = sender.begun + sender.limit - last_seconds(sender.limit)
            sender.last = loop.call_at(due, self._check, sender)

    def _look(self) -> None:
        for sender in list(itertools.islice(self._turns, _AT_ONCE)):
            del self._turns[sender]
            if sender.may_be_whole():
                sender.set_mark(1)  # until it was heard
            else:
                self._turns[sender] = None
        self._looking = None
        if self._turns:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _check(self, sender: Sender) -> None:
        sender.last = None  # a timer may be early, and the next arrival then makes another
        self._turns.pop(sender, None)
        sender.set_mark(1)
