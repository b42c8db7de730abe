"""Reports a lease's turns to the operator: ``DEMAND``, the router's side.

The operator dials, because it must hear of turns that wait when no engine is attached and so no
node agent either; and each router can only speak for the lease that the operator asked it about.
``rose_core.rollouts.training.rhythm`` learns when turns come, ``rose_core.lending.demand`` makes
slots of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator

import msgspec

from rose_core.rollouts.training.rhythm import (
    LOOK_SECONDS,
    REPORT_SECONDS,
    Rhythm,
    TrainerPhase,
    TurnTraffic,
    half_full,
    key,
    note,
    observe,
)
from rose_core.wire.routing import DemandNote, DemandRequest
from rose_router import metrics
from rose_router.turns.service import Service
from rose_wire.errors import Refused
from rose_wire.rpc import Server
from rose_wire.services import DEMAND


class DemandFeed:
    """Watches the service's turns, and tells whoever asks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._began = service.clock()
        self._instance = uuid.uuid4().hex
        self._rhythm = Rhythm()
        self._came = asyncio.Event()
        self._idle = True  # at the last look
        service.on_turn = self._see_turn

    def serve_on(self, server: Server) -> None:
        """Bind the method."""
        server.server_stream(DEMAND, self.listen)

    async def run(self) -> None:
        """Look at the turns until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def _see_turn(self) -> None:
        """A turn begins: look at the first after none, which may have ended by the next look."""
        if not self._came.is_set():
            self._came.set()
        if self._idle:
            self.look()

    def look(self) -> None:
        """Take one look."""
        head = self._service.fleet.head
        turns = len(self._service.ledger)
        self._idle = not turns
        named = str(head) if head else ""
        self._rhythm = observe(self._rhythm, turns, named, self._service.clock())
        now = self._rhythm.phase(self._service.clock())
        for phase in TrainerPhase:
            metrics.PHASE.labels(phase.value).set(phase is now)

    def note(self) -> DemandNote:
        """What stands now."""
        service, turns = self._service, len(self._service.ledger)
        seen = TurnTraffic(turns, service.queue.waiting_tokens, half_full(service.fleet))
        now, totals = service.clock(), service.ledger.totals
        return msgspec.structs.replace(
            note(self._rhythm, seen, now - self._began, now),
            instance=self._instance,
            accepted=totals.accepted,
            correct=totals.correct,
            dedicated_tokens=totals.tokens - totals.borrowed_tokens,
            trained_tokens=totals.trained_tokens,
            reasoning_tokens=totals.reasoning_tokens,
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
            sent, at = self._key(), self._service.clock()
            yield self.note()
            while self._key() == sent and self._service.clock() - at < REPORT_SECONDS:
                await self._until_look()

    def _key(self) -> object:
        return key(self._rhythm, len(self._service.ledger))

    async def _until_look(self) -> None:
        """A second, or less when the first turn comes after none."""
        idle = not len(self._service.ledger)
        if not idle:
            await asyncio.sleep(LOOK_SECONDS)
            return
        self._came.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._came.wait()
