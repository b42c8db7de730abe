"""One stream per borrowed engine to its lease's router: the gate, the cap, the attested version.

The newest update replaces the one before, so a slow router never sees a stale queue. A closed gate
is sent at once. The stream connects again by itself; while it is down the router treats the gate
as closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec

from rose_agent.guard import metrics
from rose_core.wire.routing import EngineUpdate
from rose_wire import rpc
from rose_wire.errors import WireError
from rose_wire.services import ATTACH

_log = logging.getLogger(__name__)
_RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)


class Attachment:
    """The stream of one engine.

    Args:
        router: ``host:port``.
        token: the installation's bearer token.
    """

    def __init__(self, router: str, token: str) -> None:
        self._router = router
        self._token = token
        self._update: EngineUpdate | None = None
        self._changed = asyncio.Event()

    def set(self, update: EngineUpdate) -> None:
        """Send this as soon as possible; an equal update is not sent again."""
        if update != self._update:
            self._update = update
            self._changed.set()

    def leave(self) -> None:
        """The engine will not come back: close its gate and say so."""
        if self._update is not None:
            self.set(msgspec.structs.replace(self._update, gate_open=False, leaving=True))

    async def run(self) -> None:
        """Stay attached until cancelled."""
        channel = rpc.connect(self._router)
        attempt = 0
        try:
            while True:
                try:
                    async for _ in rpc.converse(
                        channel, ATTACH, self._updates(), token=self._token
                    ):
                        attempt = 0
                    outcome = "ended"
                except WireError as error:
                    outcome = "failed"
                    _log.debug("router %s: %s", self._router, error)
                metrics.ATTACHES.labels(outcome).inc()
                await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
                attempt += 1
        finally:
            await channel.close()

    async def _updates(self) -> AsyncIterator[EngineUpdate]:
        sent: EngineUpdate | None = None
        while True:
            self._changed.clear()
            if self._update is not None and self._update != sent:
                sent = self._update
                yield sent
                continue
            await self._changed.wait()
