"""The elastic KV memory of one engine: switched on, found, limited, and watched while it serves.

kvcached gives no error when it is missing or does not know this version of the engine: the engine
then simply has an ordinary pool. So once the engine is ready, its shared-memory segment must exist
and be as large as the pool that was ordered; if not, the engine is ended (``ElasticUnavailable``).
Each start begins with the smallest budget. The guard sends the present one with ``LimitMemory``; it
stays across restarts.

kvcached obeys a lower limit at the next allocation, of which an idle engine makes none. Such an
engine is asked by its own route to forget finished turns. Next step: ``rose_core.devices.elastic``
decides what to do, ``rose_agent.devices.elastic`` reads and writes the segment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine

import aiohttp

from rose_agent.devices.elastic import ElasticMemory
from rose_agent.errors import BrokenEngine, QueryFailed
from rose_agent.host import metrics
from rose_core.devices.elastic import (
    FIRST_PERMILLE,
    ElasticLimits,
    ElasticPool,
    OrderEffect,
    PoolSeen,
    judge,
)
from rose_core.host_reasons import HostReason

_log = logging.getLogger(__name__)
# kvcached's pages; a bundle is one of them per layer, for keys and for values.
PAGE_BYTES = 2 << 20
_APPEAR_SECONDS, _APPEAR_LOOKS = 5.0, 100
_FLUSH_SECONDS = aiohttp.ClientTimeout(total=2.0)


def environment(name: str) -> dict[str, str]:
    """What switches kvcached on in SGLang and vLLM.

    Args:
        name: of the engine's segment.
    """
    return {
        "ENABLE_KVCACHED": "true",
        "KVCACHED_AUTOPATCH": "1",
        "KVCACHED_IPC_NAME": name,
        # Without its thread for pages ahead of need it never looks at its limit; few are enough.
        "KVCACHED_PAGE_PREALLOC_ENABLED": "true",
        "KVCACHED_MIN_RESERVED_PAGES": "1",
        "KVCACHED_MAX_RESERVED_PAGES": "1",
    }


async def flush(url: str, key: str) -> None:
    """Ask an engine to forget finished turns; 400 while others run, and its memory will tell."""
    headers = {"Authorization": f"Bearer {key}"}
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with (
            aiohttp.ClientSession(timeout=_FLUSH_SECONDS) as session,
            session.post(f"{url}/flush_cache", headers=headers) as reply,
        ):
            await reply.read()


class Elastic:
    """The elastic memory of one engine.

    Args:
        open_memory: its memory, when it runs as this user.
        door: where it listens, and the key that its port asks for.
        flush: asks it to forget finished turns.
        limits: deadlines.
    """

    def __init__(
        self,
        open_memory: Callable[[int], ElasticMemory],
        door: Callable[[], tuple[str, str]],
        flush: Callable[[str, str], Coroutine[None, None, None]] = flush,
        limits: ElasticLimits | None = None,
    ) -> None:
        self.permille = FIRST_PERMILLE
        self.held_bytes: int | None = None
        self._open_memory = open_memory
        self._door = door
        self._flush = flush
        self._limits = limits or ElasticLimits()
        self._memory: ElasticMemory | None = None
        self._pool: ElasticPool | None = None
        self._effect = OrderEffect()
        self._flushing: asyncio.Task[None] | None = None

    def prepare(self, uid: int) -> None:
        """Before the start: remove what an earlier engine left, which is not the new one's."""
        self._memory = self._open_memory(uid)
        self._memory.forget()
        self._pool, self._effect = None, OrderEffect()

    async def verify(self, least_bytes: int, bundle: int) -> None:
        """Check, once the engine is ready, that its pool is elastic.

        Args:
            least_bytes: the KV pool that it was ordered with.
            bundle: bytes of a page of every layer.

        Raises:
            BrokenEngine: it is not.
        """
        seen = await self._wait_for_segment()
        if seen is None:
            text = (
                "the engine runs without kvcached: it has made no segment, so its KV memory is of "
                "one piece; its log says which patches were not applied"
            )
            raise BrokenEngine(text, HostReason.ELASTIC_UNAVAILABLE)
        if seen.limit < least_bytes // 2:
            text = (
                f"kvcached's pool of {seen.limit >> 20} MiB is not the one that was ordered "
                f"({least_bytes >> 20} MiB); a part of the cache is of one piece"
            )
            raise BrokenEngine(text, HostReason.ELASTIC_UNAVAILABLE)
        self._pool = ElasticPool(seen.limit, min(bundle, seen.limit // 2))
        self._write(self._pool.limit(self.permille))

    async def _wait_for_segment(self) -> PoolSeen | None:
        for _ in range(_APPEAR_LOOKS):
            if (seen := self._read()) is not None:
                return seen
            await asyncio.sleep(_APPEAR_SECONDS / _APPEAR_LOOKS)
        return None

    def order(self, permille: int) -> None:
        """Take a new budget from the guard; it is written at once."""
        self.permille = permille
        if self._pool is not None:
            self._write(self._pool.limit(permille))

    def check(self, *, running: bool) -> None:
        """Check, while the engine serves, that it keeps to its budget.

        Args:
            running: the engine is free to run.

        Raises:
            BrokenEngine: it does not give memory back, or its memory cannot be read.
        """
        if self._pool is None:
            return
        wanted = self._pool.limit(self.permille)
        self._effect, orders = judge(
            self._effect,
            self._read(),
            wanted,
            time.monotonic(),
            running=running,
            limits=self._limits,
        )
        if orders.write is not None:
            self._write(orders.write)
        if orders.flush and (self._flushing is None or self._flushing.done()):
            self._flushing = asyncio.create_task(self._flush(*self._door()))
        if self._effect.reason:
            metrics.count_kill(self._effect.reason)
            raise BrokenEngine(self._effect.message, self._effect.reason)

    def remove_segment(self) -> None:
        """Remove the segment of an engine that has ended."""
        if self._memory is not None:
            self._memory.forget()
        self._pool, self.held_bytes = None, None

    def _read(self) -> PoolSeen | None:
        seen = self._memory.read() if self._memory is not None else None
        self.held_bytes = seen.held if seen is not None else None
        return seen

    def _write(self, size: int) -> None:
        """Write a limit; where that fails (lock held, no segment) the next check tries again."""
        if self._memory is not None:
            with contextlib.suppress(QueryFailed):
                self._memory.limit(size)
