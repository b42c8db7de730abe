"""``/metrics`` and the load page of a serving engine.

Each scrape costs the serving engine CPU (about 12 ms for ``/metrics``, 2 ms for a load page), so
callers poll slowly while the tap is healthy. What cannot be read is unknown, never zero.
"""

from __future__ import annotations

import aiohttp

from rose_core.telemetry.dialects import LOADS, METRICS, Figures

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_LARGEST = 8 * 1024 * 1024


class EngineReader:
    """Reads one engine.

    Args:
        session: shared HTTP session.
        base: ``http://host:port``.
        engine: the pool's engine kind, selects the dialect.
    """

    def __init__(self, session: aiohttp.ClientSession, base: str, engine: str) -> None:
        self._session = session
        self._base = base
        self._engine = engine
        self.scrapes = 0

    def aim(self, base: str, engine: str) -> None:
        """Read another address from now on (a pod gets its own only after it was scheduled)."""
        self._base, self._engine = base, engine

    async def metrics(self) -> Figures | None:
        """Figures from ``/metrics``, None when nobody answered; ``scrapes`` counts the others."""
        body = await self._get("/metrics")
        if body is None:
            return None
        self.scrapes += 1
        return METRICS[self._engine](body.decode("utf-8", "replace"))

    async def loads(self) -> Figures:
        """Figures from the engine's load page."""
        path, dialect = LOADS[self._engine]
        body = await self._get(path)
        return Figures() if body is None else dialect(body)

    async def _get(self, path: str) -> bytes | None:
        try:
            async with self._session.get(self._base + path, timeout=_TIMEOUT) as answer:
                if answer.status != 200:
                    return None
                body = await answer.read()
                return body if len(body) <= _LARGEST else None
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
