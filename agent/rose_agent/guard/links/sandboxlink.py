"""Tells the node's sandbox host while serving burns its budget: no checkpoint begins then.

A report is good for ``GOOD_SECONDS`` and is repeated every second, so that a guard that dies
stops no checkpoint for long. A host that is dead or slow costs the guard nothing: this is a task of
its own, and one call at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp

_log = logging.getLogger(__name__)
REPORT_SECONDS = 1.0
GOOD_SECONDS = 5.0
CALL_SECONDS = 2.0


class SandboxLink:
    """The guard's end of a sandbox host's ``POST /traffic``.

    Args:
        url: of the host.
        token: reads what it asks for, at each call: its Secret may come late, or change.
        burns: whether a serving replica of the node burns its budget now.
    """

    def __init__(self, url: str, token: Callable[[], str], burns: Callable[[], bool]) -> None:
        self._url, self._burns = url.rstrip("/"), burns
        self._token = token
        self._reported = False
        self._away = ""

    async def run(self) -> None:
        """Say it until cancelled."""
        limit = aiohttp.ClientTimeout(total=CALL_SECONDS)
        async with aiohttp.ClientSession(timeout=limit) as http:
            while True:
                await self.report(http)
                await asyncio.sleep(REPORT_SECONDS)

    def _headers(self) -> dict[str, str]:
        token = self._token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def report(self, http: aiohttp.ClientSession) -> None:
        """Report that serving burns its budget, and once that it no longer does."""
        burns = self._burns()
        if not burns and not self._reported:
            return
        body = {"serving_burns": burns, "seconds": GOOD_SECONDS}
        try:
            url, headers = f"{self._url}/traffic", self._headers()
            async with http.post(url, json=body, headers=headers) as answer:
                away = "" if answer.ok else f"it answered {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            away = f"{type(error).__name__} {error}"
        if away and not self._away:
            _log.warning("sandbox host %s does not hear of serving: %s", self._url, away)
        self._away = away
        if not away:
            self._reported = burns
