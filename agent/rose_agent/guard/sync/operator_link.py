"""The agent's side of ``Sync``: dials the operator, brings telemetry, takes grants and policies.

The deadline of a grant counts from the moment the request was *sent*. Without answers the grants
lapse; the loop goes on trying. Behind the operator's address stand several replicas of which one
leads: after an incomplete answer, or none, the link is made anew, so that the next try may meet
another one. A transition on the node is reported at once (at most four times a
second), otherwise every ``sync_period_seconds`` of the last reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import grpc.aio

from rose_agent.guard import metrics
from rose_core.wire.sync import NoticeRequest, SyncReply, SyncRequest
from rose_wire import rpc
from rose_wire.errors import WireError
from rose_wire.services import NOTICES, SYNC

_log = logging.getLogger(__name__)
_CALL_SECONDS = 5.0
_LEAST_SECONDS = 0.25
_FIRST_PERIOD = 2.0
# Several tries fit into a grant's life.
_REDIAL_SECONDS = 0.5


class OperatorLink:
    """Connection to the operator.

    Args:
        address: ``host:port``.
        token: the installation's bearer token.
        request: makes the next request.
        on_reply: takes a reply and the CLOCK_MONOTONIC seconds its request was sent at.
        ready: whether the first request may be made.
    """

    def __init__(
        self,
        address: str,
        token: str,
        request: Callable[[], SyncRequest],
        on_reply: Callable[[SyncReply, float], None],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._address = address
        self._token = token
        self._request = request
        self._on_reply = on_reply
        self._ready = ready
        self._soon = asyncio.Event()
        self._complaint = ""

    def report_soon(self) -> None:
        """Something changed that the operator should hear."""
        self._soon.set()

    async def run(self) -> None:
        """Sync until cancelled."""
        # A restarted agent that reported too early would have its node's slots taken back.
        while not self._ready():
            await self._pause(_LEAST_SECONDS)
        channel, listening = self._dial()
        period = _FIRST_PERIOD
        try:
            while True:
                self._soon.clear()
                sent_s = time.monotonic()
                complete = False
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
                    complete = reply.complete
                    self._on_reply(reply, sent_s)
                if not complete:
                    await _hang_up(channel, listening)
                    channel, listening = self._dial()
                await self._pause(period if complete else min(period, _REDIAL_SECONDS))
        finally:
            await _hang_up(channel, listening)

    def _dial(self) -> tuple[grpc.aio.Channel, asyncio.Task[None]]:
        channel = rpc.connect(self._address)
        return channel, asyncio.create_task(self._listen(channel))

    async def _listen(self, channel: grpc.aio.Channel) -> None:
        """Ask at once when the operator says that this node's grants have changed."""
        while True:
            with contextlib.suppress(WireError):  # an older operator has no notices
                request = NoticeRequest(self._request().node)
                async for _ in rpc.receive(channel, NOTICES, request, token=self._token):
                    self._soon.set()
            await asyncio.sleep(_FIRST_PERIOD)

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


async def _hang_up(channel: grpc.aio.Channel, listening: asyncio.Task[None]) -> None:
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await channel.close()
