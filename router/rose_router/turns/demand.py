"""What the lease's operator hears of its turns: ``DEMAND``, the router's side.

The operator dials, because it must hear of turns that wait when no engine is attached and so no
node agent either; and each router can only speak for the lease that the operator asked it about.
``rose_core.rollouts.rhythm`` learns when turns come, ``rose_core.lending.demand`` makes slots of
it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rose_core.rollouts.rhythm import Phase, Rhythm, observe
from rose_core.wire.routing import DemandNote, DemandRequest, EngineKind
from rose_router import metrics
from rose_router.turns.service import Service
from rose_wire.errors import Refused
from rose_wire.rpc import Server
from rose_wire.services import DEMAND

_LOOK_SECONDS = 1.0
_SAY_SECONDS = 10.0
"""An unchanged note is repeated so often; the operator takes a router for deaf after a minute."""


class DemandFeed:
    """Watches the service's turns, and tells whoever asks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._began = service.clock()
        self._rhythm = Rhythm()
        self._came = asyncio.Event()
        service.on_turn = self._came.set

    def serve_on(self, server: Server) -> None:
        """Bind the method."""
        server.server_stream(DEMAND, self.listen)

    async def run(self) -> None:
        """Look at the turns until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        """Take one look."""
        head = self._service.fleet.head
        turns = len(self._service.ledger)
        named = str(head) if head else ""
        self._rhythm = observe(self._rhythm, turns, named, self._service.clock())
        now = self._rhythm.phase(self._service.clock())
        for phase in Phase:
            metrics.PHASE.labels(phase.value).set(phase is now)

    def note(self) -> DemandNote:
        """What stands now."""
        service, rhythm = self._service, self._rhythm
        now, turns = service.clock(), len(service.ledger)
        queued = min(turns, len(service.room))
        published = rhythm.published_at if rhythm.published else None
        return DemandNote(
            live_turns=turns - queued,
            queued_turns=queued,
            waiting_tokens=service.room.waiting_tokens,
            peak_turns=max(turns, rhythm.most(now)),
            usual_turns=rhythm.usual,
            dedicated_turns=sum(
                engine.cap // 2
                for engine in service.fleet
                if engine.kind is EngineKind.DEDICATED and engine.gate_open
            ),
            phase=rhythm.phase(now).value,
            idle_seconds=0.0 if turns else rhythm.idle_seconds(now),
            published_seconds=None if published is None else now - published,
            expected_seconds=rhythm.expected_seconds(now),
            up_seconds=now - self._began,
        )

    async def listen(self, request: DemandRequest) -> AsyncIterator[DemandNote]:
        """One listener's stream.

        Raises:
            Refused: this is the router of another lease.
        """
        lease = self._service.settings.lease
        if request.lease != lease:
            message = f"this is the router of lease {lease}, not of {request.lease}"
            raise Refused(message)
        while True:
            said, at = self._key(), self._service.clock()
            yield self.note()
            while self._key() == said and self._service.clock() - at < _SAY_SECONDS:
                await self._until_look()

    def _key(self) -> object:
        """What is worth saying at once: turns that come or go, and not each of a thousand."""
        turns, rhythm = len(self._service.ledger), self._rhythm
        return turns.bit_length(), rhythm.usual, rhythm.published_at

    async def _until_look(self) -> None:
        """A second, or less when the first turn comes after none."""
        idle = not len(self._service.ledger)
        if not idle:
            await asyncio.sleep(_LOOK_SECONDS)
            return
        self._came.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._came.wait()
