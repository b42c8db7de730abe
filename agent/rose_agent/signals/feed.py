"""SGLang's load feed: the load snapshot, pushed over ZeroMQ after every batch and once a second.

For pods whose shared memory cannot be reached. SGLang publishes it when started with
``--kv-events-config`` and ``--load-publish-endpoint auto``; the pod says where with the annotation
``rose-gpu.dev/load-feed-port``. A feed that is silent for longer than its heartbeat is unknown.
"""

from __future__ import annotations

import asyncio
import logging
import time

from rose_agent.signals.zmtp import Subscription
from rose_core.telemetry.dialects import Figures, sglang_feed

_log = logging.getLogger(__name__)
_TOPIC = b"load"
_SILENT_SECONDS = 1.5  # its heartbeat comes every second
_RETRY_SECONDS = 1.0


class Feed:
    """One subscription, renewed by itself; make it inside the running loop.

    Args:
        host, port: where SGLang publishes.
    """

    def __init__(self, host: str, port: int) -> None:
        self._where = (host, port)
        self._figures = Figures()
        self._received_s = 0.0
        self._task = asyncio.create_task(self._run())

    def read(self) -> Figures:
        """The newest figures; unknown when none came lately."""
        fresh = time.monotonic() - self._received_s < _SILENT_SECONDS
        return self._figures if fresh else Figures()

    def close(self) -> None:
        """Unsubscribe."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                _log.debug("load feed of %s:%d: %s", *self._where, error)
            self._received_s = 0.0
            await asyncio.sleep(_RETRY_SECONDS)

    async def _listen(self) -> None:
        subscription = await Subscription.connect(*self._where, _TOPIC)
        try:
            while True:
                message = await subscription.receive()
                self._figures, self._received_s = sglang_feed(message[-1]), time.monotonic()
        finally:
            subscription.close()
