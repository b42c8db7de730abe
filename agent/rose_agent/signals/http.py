"""``/metrics`` and the load page of a serving engine, read within bounds of size, time and type.

The page is a pod owner's: it may be endless, slow, compressed a thousandfold, or no page at all. So
nothing is unpacked, no byte past the limit is read, and what cannot be read is unknown, never zero.
Each scrape costs the serving engine CPU (about 12 ms for ``/metrics``, 2 ms for a load page), so
callers poll slowly while the tap is healthy. Next step: ``reader`` runs this in a process of its
own for each replica.
"""

from __future__ import annotations

import aiohttp

from rose_core.telemetry.dialects import LOADS, METRICS, Figures

TIMEOUT_SECONDS = 2.0
# SGLang's page of 32 ranks is 0.6 MB; a page beyond this is not an engine's.
LARGEST_PAGE = 4 * 1024 * 1024
_PLAIN = {"Accept-Encoding": "identity"}


class EngineReader:
    """Reads one engine.

    Args:
        session: HTTP session of the reader; ``session_of`` makes one that unpacks nothing.
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
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        try:
            async with self._session.get(
                self._base + path, timeout=timeout, headers=_PLAIN, allow_redirects=False
            ) as answer:
                if answer.status != 200 or answer.headers.get("Content-Encoding"):
                    return None
                return await _read(answer.content)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None


async def _read(content: aiohttp.StreamReader) -> bytes | None:
    """The whole body, None when it is longer than a page may be."""
    body = bytearray()
    async for piece in content.iter_any():
        body += piece
        if len(body) > LARGEST_PAGE:
            return None
    return bytes(body)


def session_of() -> aiohttp.ClientSession:
    """A session for reading serving pods: nothing is unpacked, no cookie kept, no proxy used."""
    return aiohttp.ClientSession(
        auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
    )
