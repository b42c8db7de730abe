"""Takes one pair of counts for ``rose_core.telemetry.verify``: the engine's and the tap's.

The order of things is the point: a heartbeat of the tap that is old enough for the engine to have
counted everything in it, then the engine's page, then a heartbeat that was made after the page. The
tap empties its sockets before each heartbeat, so what the engine had counted is in the second one,
however late this process learns of it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from rose_core.telemetry.book import Book
from rose_core.telemetry.dialects import Figures
from rose_core.telemetry.events import Health
from rose_core.telemetry.verify import SignalVerification, counted

# Engines count a request a little after the wire has it, or after its end.
_SETTLED_NS = 150_000_000
_PATIENCE_SECONDS = 1.0
_LOOK_SECONDS = 0.02
_SCRAPE = "/metrics"


class Scraper(Protocol):
    """Reads an engine's ``/metrics``, and counts how often it was answered."""

    scrapes: int

    async def metrics(self) -> Figures | None:
        """Figures of the page, None when nobody answered."""


async def compare(
    reader: Scraper, book: Book, before: SignalVerification
) -> tuple[SignalVerification, Figures | None] | None:
    """Compare once.

    Returns:
        The new state and the page's figures, if there was a page; None when the tap could not be
        heard before and after.
    """
    first = book.beat_before(time.monotonic_ns() - _SETTLED_NS)
    if first is None:
        return None
    figures = await reader.metrics()
    if figures is None:
        return before.unanswered(time.monotonic_ns()), None
    if figures.requests is None:
        return SignalVerification(), figures
    second = await _beat_after(book, time.monotonic_ns())
    if second is None:
        return None
    after = before.compare(
        sum(figures.requests.values()),
        counted(first, second, at_arrival=figures.at_arrival),
        reader.scrapes,
        second.counts.get(_SCRAPE, 0),
        time.monotonic_ns(),
    )
    return after, figures


async def _beat_after(book: Book, time_ns: int) -> Health | None:
    """The next heartbeat made after this time; None when none comes."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until:
        health = book.health
        if health is not None and health.time_ns > time_ns:
            return health
        await asyncio.sleep(_LOOK_SECONDS)
    return None
