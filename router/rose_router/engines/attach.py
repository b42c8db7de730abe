"""The ATTACH service: engine owners dial in and keep one stream per engine open.

The end of a stream closes the gate of its engine, whatever ended it. Notes go back at once, then
once a second. What another replica passes on is good for ``RELAY_SECONDS``: a replica that hangs
could not say that a gate has closed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator

from rose_core.wire.routing import EngineKind, EngineUpdate, RouterNote
from rose_router.engines.engine_client import Target
from rose_router.engines.fleet import Fleet
from rose_wire.errors import Refused, Unavailable
from rose_wire.rpc import Server
from rose_wire.services import ATTACH

LOG = logging.getLogger(__name__)

NOTE_SECONDS = 1.0
RELAY_SECONDS = 5.0


class Attachments:
    """Takes updates into the fleet.

    Args:
        fleet: the engines.
        lease: the only lease whose engines may attach.
        dedicated: names of the dedicated engines that may attach; empty = any.
    """

    def __init__(
        self,
        fleet: Fleet,
        lease: str,
        dedicated: frozenset[str] = frozenset(),
    ) -> None:
        self._fleet = fleet
        self._lease = lease
        self._dedicated = dedicated
        self._streams = itertools.count(1)

    def serve_on(self, server: Server) -> None:
        """Bind the method."""
        server.bidirectional(ATTACH, self.converse)

    async def converse(self, updates: AsyncIterator[EngineUpdate]) -> AsyncIterator[RouterNote]:
        """One owner's stream.

        Raises:
            Refused: an update is for another lease, of a dedicated engine that the lease does not
                name, or with a data route that no request can be sent to.
        """
        stream = next(self._streams)
        names: set[str] = set()
        reader = asyncio.create_task(self._read(updates, stream, names))
        try:
            while not reader.done():
                yield RouterNote(adapters=True)
                await asyncio.wait({reader}, timeout=NOTE_SECONDS)
            await reader
        except TimeoutError:
            message = f"nothing was passed on for {RELAY_SECONDS:g} s; try again"
            raise Unavailable(message) from None
        finally:
            reader.cancel()
            self._fleet.detach(stream)
            LOG.info("attach stream %d of %s ended", stream, sorted(names) or "nobody")

    async def _read(
        self, updates: AsyncIterator[EngineUpdate], stream: int, names: set[str]
    ) -> None:
        relayed = False
        while True:
            async with asyncio.timeout(RELAY_SECONDS if relayed else None):
                update = await anext(updates, None)
            if update is None:
                return
            relayed = update.relayed
            if update.lease != self._lease:
                message = f"this is the router of lease {self._lease}, not of {update.lease}"
                raise Refused(message)
            ours = update.kind is EngineKind.DEDICATED and self._dedicated
            if ours and update.engine not in self._dedicated:
                message = (
                    f"lease {self._lease} names {', '.join(sorted(self._dedicated))} as dedicated "
                    f"engines, not {update.engine}; add it to spec.dedicatedEngines"
                )
                raise Refused(message)
            # An engine that does not run yet has no route.
            complaint = Target.of(update).complaint() if update.url else ""
            if complaint:
                message = f"engine {update.engine}: {complaint}"
                raise Refused(message)
            if update.engine not in names:
                LOG.info("engine %s (%s) attached", update.engine, update.kind)
            names.add(update.engine)
            self._fleet.apply(update, stream)
