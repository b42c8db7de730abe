"""The agent's side of ``Sync``: dials the operator, brings telemetry, takes grants and policies.

The deadline of a grant counts from the moment the request was *sent*. Without answers the grants
lapse; the loop goes on trying. A transition on the node is reported at once (at most four times a
second), otherwise every ``sync_period_seconds`` of the last reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from rose_agent.guard import metrics
from rose_core.wire.sync import SyncReply, SyncRequest
from rose_wire import rpc
from rose_wire.errors import WireError
from rose_wire.services import SYNC

_log = logging.getLogger(__name__)
_CALL_SECONDS = 5.0
_LEAST_SECONDS = 0.25
_FIRST_PERIOD = 2.0


class OperatorLink:
    """Connection to the operator.

    Args:
        address: ``host:port``.
        token: the installation's bearer token.
        request: makes the next request.
        on_reply: takes a reply and the CLOCK_MONOTONIC seconds its request was sent at.
    """

    def __init__(
        self,
        address: str,
        token: str,
        request: Callable[[], SyncRequest],
        on_reply: Callable[[SyncReply, float], None],
    ) -> None:
        self._address = address
        self._token = token
        self._request = request
        self._on_reply = on_reply
        self._soon = asyncio.Event()
        self._complaint = ""

    def report_soon(self) -> None:
        """Something changed that the operator should hear."""
        self._soon.set()

    async def run(self) -> None:
        """Sync until cancelled."""
        channel = rpc.connect(self._address)
        period = _FIRST_PERIOD
        try:
            while True:
                self._soon.clear()
                sent_s = time.monotonic()
                try:
                    reply = await rpc.call(
                        channel, SYNC, self._request(), timeout=_CALL_SECONDS, token=self._token
                    )
                except WireError as error:
                    metrics.SYNCS.labels("failed").inc()
                    self._complain(str(error))
                else:
                    metrics.SYNCS.labels("answered").inc()
                    self._complain("")
                    period = max(_LEAST_SECONDS, reply.sync_period_seconds)
                    self._on_reply(reply, sent_s)
                await self._pause(period)
        finally:
            await channel.close()

    async def _pause(self, period: float) -> None:
        await asyncio.sleep(_LEAST_SECONDS)
        # Not `wait_for`: Python 3.11's can lose a cancellation that meets the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, period - _LEAST_SECONDS)):
                await self._soon.wait()

    def _complain(self, text: str) -> None:
        if text and text != self._complaint:
            _log.warning("operator %s: %s", self._address, text)
        elif self._complaint and not text:
            _log.info("operator %s answers again", self._address)
        self._complaint = text
