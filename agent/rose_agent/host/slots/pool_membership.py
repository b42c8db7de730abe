"""One engine in the platform's pool of keys: it is told its lease's secret, and says how that goes.

The secret goes by the engine's control socket, which its own user and the host reach. In its
environment every process of its would have it, for as long as each lives. The same call is repeated
for its answer, over one connection: a frozen engine answers when it goes on, and until then it is
not asked again, since its socket takes few connections and others need them. Next step:
``rose_engines.kv.pool`` joins.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from rose_agent.host import metrics
from rose_core.rollouts.engines.kv_store import PoolCounts
from rose_engines.errors import CommitRefused, EngineUnavailable
from rose_engines.weights.control import ControlClient

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0


class PoolMembership:
    """What one engine process has to do with the pool.

    Args:
        socket: its control socket.
        secret: of the lease.
    """

    def __init__(self, socket: Path, secret: str) -> None:
        self._socket, self._secret = socket, secret
        self._seen = PoolCounts()

    async def keep(self) -> None:
        """Tell it, and count what it says, until cancelled; returns where it refuses."""
        metrics.KV_POOL_ENGINES.inc()
        try:
            while True:
                try:
                    await self._converse()
                except EngineUnavailable as error:
                    _log.debug("%s: %s", self._socket, error)
                except CommitRefused as refused:
                    _log.warning("%s joins no pool of keys: %s", self._socket, refused.message)
                    return
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._count_joined(joined=False)
            metrics.KV_POOL_ENGINES.dec()

    async def _converse(self) -> None:
        async with await ControlClient.connect(self._socket) as engine:
            while True:
                self._count((await engine.join_pool(self._secret)).counts)
                await asyncio.sleep(_LOOK_SECONDS)

    def _count(self, found: PoolCounts) -> None:
        seen = self._seen
        self._count_joined(joined=found.joined)
        for what in ("pulled", "written", "dropped"):
            name = f"{what}_bytes"
            more = getattr(found, name) - getattr(seen, name)
            metrics.KV_POOL_BYTES.labels(what=what).inc(max(0, more))
        metrics.KV_POOL_PULL_SECONDS.inc(max(0.0, found.pull_seconds - seen.pull_seconds))
        metrics.KV_POOL_LATE.inc(max(0, found.late_orders - seen.late_orders))
        metrics.KV_POOL_FAILURES.inc(max(0, found.failures - seen.failures))
        self._seen = found

    def _count_joined(self, *, joined: bool) -> None:
        metrics.KV_POOL_JOINED.inc(int(joined) - int(self._seen.joined))
        self._seen = replace(self._seen, joined=joined)
