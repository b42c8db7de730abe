"""How much memory requests may take: refused before it is taken, not ended by the kernel.

What a request will take is told from its length, before a byte of it is read: a body becomes up to
``PER_BYTE`` bytes per byte while it is decoded. Once its turns are known, what they hold takes the
place of that: the ids of a prompt once, however many answers share it, and for every answer its
own record and what sending its leg needs. Tokens that are sampled later are not foreseen; against
those stands the second limit, on what the process really holds.

| a request that | meets |
|---|---|
| would never fit, whatever else there is | 413: smaller, or in several requests |
| does not fit beside the others now | 503 with ``Retry-After`` |
| is large, while large ones hold ``LARGE_PART`` | the same: a last part is for small ones |
| comes while the process holds more than ``_FULL`` of its memory | the same |
| is answered with a long page, which does not fit beside the others | the same |

Such a page (state, rows of a session) is counted until its caller has read it. The answer of a turn
is never refused for its length, nor are metrics, which are asked for most when memory is short.

Next step: ``app`` puts ``middleware`` before every route; ``routes.turns`` says what turns hold.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

from aiohttp import web
from aiohttp.typedefs import Middleware

from rose_core.rollouts.capacity.router_size import (
    LARGE_PART,
    MIB,
    PART,
    PER_BYTE,
    PER_ID,
    PER_SENT_ID,
    PER_TURN,
)
from rose_router import metrics
from rose_router.errors import Overloaded, TooLarge
from rose_router.http.admission.bodies import (
    LARGE_BODIES,
    LONG_BODY,
    MOST_HISTORY,
    NUMBERS,
    known_length,
    too_long,
)
from rose_router.turns.request import TurnRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BATCH_PATHS = ("/v1/files", "/v1/batches")
"""What is passed on as it comes, and so takes none of this memory."""
_SMALL_PART = 1 / 32
"""Of what requests may take: one that takes less is small. Of 1 GiB that is 1.4 MB of JSON."""
_FULL = 0.85
_METRICS = "/metrics"
_LONG_ANSWER = 1 << 16
"""Bytes: as much a connection may hold of what its caller has not read, whatever it is."""
_LOOK_SECONDS = 0.1
_UNLIMITED = 1 << 60
DEFAULT_BYTES = 2 << 30
"""Where nobody says how much memory there is."""
_RETRY_SECONDS = 2
CONVERSATIONS = frozenset(
    {"/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"}
)
_CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def limit_of_process() -> int:
    """Bytes that this process may have: its cgroup's or its address space's, else a default."""
    found = [resource.getrlimit(resource.RLIMIT_AS)[0]]
    for file in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):
            found.append(int(file.read_text()))
    return min((one for one in found if 0 < one < _UNLIMITED), default=DEFAULT_BYTES)


_STATM = Path("/proc/self/statm")
_PAGE = resource.getpagesize()


def resident_bytes() -> int:
    """What this process holds now; asked ten times a second, in a request."""
    statm = os.open(_STATM, os.O_RDONLY)  # a file of Python's costs five times that
    try:
        return int(os.read(statm, 256).split()[1]) * _PAGE
    finally:
        os.close(statm)


class MemoryLimiter:
    """What requests take of a router's memory.

    Args:
        limit: bytes that the process may have.
        resident: bytes that it holds.
    """

    def __init__(self, limit: int, resident: Callable[[], int] = resident_bytes) -> None:
        self.limit = limit
        self.budget = int(limit * PART)
        self._small, self._of_large = self.budget * _SMALL_PART, int(self.budget * LARGE_PART)
        self.taken, self._full = 0, _FULL * limit
        self._resident = resident
        self._seen, self._looked = 0, -math.inf
        metrics.MEMORY_TAKEN.set_function(
            lambda: self.taken
        )  # asked for, not told three times a turn

    @property
    def most_text(self) -> int:
        """Characters of a text that may be tokenized: each may become a token of 160 bytes."""
        return self.budget // 160

    def room_for(self, body_bytes: int) -> MemoryReservation:
        """Memory for a request of that length, given back at the end of the ``with``.

        Raises:
            TooLarge: it would not fit if it were alone; said on entering, as the next.
            Overloaded: it does not fit now.
        """
        return MemoryReservation(self, body_bytes * PER_BYTE)

    def take(self, more: int, whole: int) -> None:
        """Count bytes more as taken by a request that then holds ``whole``; see ``room_for``."""
        now, taken = time.monotonic(), self.taken + more
        if now - self._looked > _LOOK_SECONDS:
            self._seen, self._looked = self._resident(), now
        most = self.budget if whole <= self._small else self._of_large
        if taken > most or self._seen > self._full:
            self._refuse(whole, most)
        self.taken = taken

    def _refuse(self, whole: int, most: int) -> NoReturn:
        if whole > most:
            message = (
                f"the request would take {whole // MIB} MiB of this router's memory, and all "
                f"requests of its size together may take {most // MIB}; ask for fewer answers or "
                "shorter prompts at a time"
            )
            raise TooLarge("TooLarge", message)
        message = (
            f"requests hold {self.taken // MIB} of {most // MIB} MiB of this router's "
            "memory already; try again later"
        )
        raise Overloaded("Memory", message, retry_after=_RETRY_SECONDS)


class MemoryReservation:
    """What one request takes; it changes once, when its turns are known.

    Args:
        memory: of which.
        first: bytes that it takes from the beginning of the ``with``.
    """

    def __init__(self, memory: MemoryLimiter, first: int = 0) -> None:
        self._memory = memory
        self._first = first
        self.bytes = 0

    def __enter__(self) -> MemoryReservation:
        self.take_first()
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def take_first(self) -> None:
        """Begin; see ``MemoryLimiter.room_for``."""
        self._memory.take(self._first, self._first)
        self.bytes = self._first

    def give_back(self) -> None:
        """End."""
        self._memory.taken -= self.bytes
        self.bytes = 0

    def resize(self, bytes_: int) -> None:
        """Take more or give back; see ``MemoryLimiter.room_for``."""
        more = bytes_ - self.bytes
        if more > 0:
            self._memory.take(more, bytes_)
        else:
            self._memory.taken += more
        self.bytes = bytes_


ROOM = web.RequestKey("room", MemoryReservation)
"""Key of a request under which its room is found."""


def held_by(turns: Sequence[TurnRequest]) -> int:
    """Bytes that turns hold while they wait and run, without what they sample."""
    if len(turns) == 1:
        return PER_TURN + (PER_SENT_ID + PER_ID) * len(turns[0].prompt)
    prompts: dict[int, int] = {}
    total = 0
    for turn in turns:
        prompts[id(turn.prompt)] = len(turn.prompt)
        total += PER_TURN + PER_SENT_ID * len(turn.prompt)
    return total + PER_ID * sum(prompts.values())


def middleware(memory: MemoryLimiter, most_body: int) -> Middleware:
    """Gives every request with a body room for it before it is read, and long pages theirs."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        if path.startswith(BATCH_PATHS):
            return await handler(request)  # what is passed on in pieces is never held
        if not request.body_exists:
            if path == _METRICS:
                return await handler(request)
            return await _page(memory, request, handler)
        length, most = known_length(request), most_body
        if path in CONVERSATIONS:
            most = min(most, MOST_HISTORY)
            if length is None:
                request = request.clone(client_max_size=most)
            elif length > most:
                raise too_long(length)
        expected = most if length is None else min(length, most)
        room = request[ROOM] = memory.room_for(expected)
        room.take_first()
        try:
            return await handler(request)
        finally:
            numbers = request.pop(NUMBERS, None) if expected > LONG_BODY else None
            if numbers is None:
                room.give_back()
            else:
                request.app[LARGE_BODIES].release(numbers, room.give_back)

    return check


async def _page(
    memory: MemoryLimiter, request: web.Request, handler: Handler
) -> web.StreamResponse:
    """Answer a request without a body; a long answer is counted until its caller has read it."""
    room = request[ROOM] = MemoryReservation(memory)
    try:
        response = await handler(request)
        if isinstance(response, web.Response) and (response.content_length or 0) > _LONG_ANSWER:
            room.resize(response.content_length or 0)
            with contextlib.suppress(ConnectionResetError):  # of which aiohttp hears, too
                await response.prepare(request)
                await response.write_eof()
        return response
    finally:
        room.give_back()
