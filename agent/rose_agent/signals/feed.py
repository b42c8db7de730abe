"""SGLang's load feed: the load snapshot, pushed over ZeroMQ after every batch and once a second.

For pods whose shared memory cannot be reached. SGLang publishes it when started with
``--kv-events-config`` and ``--load-publish-endpoint auto``; the pod says where with the annotation
``rose-gpu.dev/load-feed-port``. A feed that is silent for longer than its heartbeat is unknown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from rose_agent.pods.model import ServingPod
from rose_agent.signals.snapshot import Snapshot
from rose_agent.signals.zmtp import Subscription
from rose_core.telemetry.dialects import Figures, sglang_feed

_log = logging.getLogger(__name__)
_TOPIC = b"load"
_SILENT_SECONDS = 1.5  # its heartbeat comes every second
_RETRY_SECONDS = 1.0


class LoadSource(Protocol):
    """The engine's own snapshot of its load, however it is reached."""

    def read(self) -> Figures:
        """Current figures; unknown when there are none."""

    def close(self) -> None:
        """Let go of it."""


def load_source(pod: ServingPod, scheduler: int) -> LoadSource | None:
    """The feed a pod offers, else the shared memory of its ``scheduler`` (pid, 0 = not visible)."""
    if pod.feed_port and pod.address:
        return Feed(pod.address, pod.feed_port)
    return Snapshot(scheduler) if scheduler else None


class Feed:
    """One subscription, renewed by itself; make it inside the running loop.

    Args:
        host, port: where SGLang publishes.
    """

    def __init__(self, host: str, port: int) -> None:
        self._where = (host, port)
        self._figures = Figures()
        self._heard = 0.0
        self._task = asyncio.create_task(self._run())

    def read(self) -> Figures:
        """The newest figures; unknown when none came lately."""
        fresh = time.monotonic() - self._heard < _SILENT_SECONDS
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
            self._heard = 0.0
            await asyncio.sleep(_RETRY_SECONDS)

    async def _listen(self) -> None:
        subscription = await Subscription.connect(*self._where, _TOPIC)
        try:
            while True:
                message = await subscription.receive()
                self._figures, self._heard = sglang_feed(message[-1]), time.monotonic()
        finally:
            subscription.close()
