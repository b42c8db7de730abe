"""One comparison of counts, in its order: heartbeat, engine's page, heartbeat."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose_agent.signals import verify
from rose_agent.signals.http import EngineReader
from rose_core.identity import PodUid
from rose_core.telemetry.book import Book
from rose_core.telemetry.dialects import Figures
from rose_core.telemetry.events import Health
from rose_core.telemetry.verify import SignalVerification

MS = 1_000_000


def beat(seen: int, scrapes: int, *, ago_ms: int = 0) -> Health:
    now = time.monotonic_ns() - ago_ms * MS
    return Health(PodUid("r"), now, "", 0, False, 0, {"/metrics": scrapes}, 0, seen, seen)


class Page:
    """An engine whose page says what the test sets, and does what the test wants meanwhile."""

    def __init__(self) -> None:
        self.text = ""
        self.status = 200
        self.requests = 10
        self.book = Book(0)
        self.scrapes = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.scrapes += 1
        line = 'sglang:http_requests_total{endpoint="/generate",method="POST"}'
        return web.Response(text=self.text or f"{line} {self.requests}\n", status=self.status)


async def compared(
    page: Page, before: SignalVerification, *, beats: bool = True
) -> tuple[SignalVerification, Figures | None] | None:
    """Compare with a tap whose heartbeats come late, and tell the truth when they come."""
    app = web.Application()
    app.router.add_get("/metrics", page.answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        reader = EngineReader(http, str(server.make_url("")).rstrip("/"), "SGLang")
        reader.scrapes = page.scrapes

        async def late() -> None:
            scraped = page.scrapes
            while page.scrapes == scraped:  # noqa: ASYNC110  # what is waited for knows no events
                await asyncio.sleep(0.01)
            if beats:
                # A heartbeat that was made before the page and is told after it proves nothing.
                page.book.apply(beat(0, 0, ago_ms=50), 0)
                await asyncio.sleep(0.1)
                page.book.apply(beat(page.requests, page.scrapes), 0)

        publishing = asyncio.create_task(late())
        made = await verify.compare(reader, page.book, before)
        await publishing
        return made


async def agreed(page: Page) -> SignalVerification:
    state = SignalVerification()
    for _ in range(2):
        page.book.apply(beat(page.requests, page.scrapes, ago_ms=200), 0)
        made = await compared(page, state)
        assert made is not None
        state = made[0]
    return state


async def test_a_tap_that_is_told_late_is_waited_for() -> None:
    assert (await agreed(Page())).verified is True


async def test_a_request_between_the_heartbeats_contradicts_nothing() -> None:
    page = Page()
    state = await agreed(page)
    page.book.apply(beat(page.requests, page.scrapes, ago_ms=200), 0)
    page.requests += 1
    made = await compared(page, state)
    assert made is not None
    assert made[0].verified is True


async def test_an_engine_that_does_not_answer_takes_nothing_back() -> None:
    page = Page()
    state = await agreed(page)
    page.status = 503
    made = await compared(page, state)
    assert made == (state, None)


async def test_a_page_without_a_count_verifies_nothing() -> None:
    page = Page()
    state = await agreed(page)
    page.text = "sglang:num_running_reqs 0\n"
    made = await compared(page, state)
    assert made is not None
    assert made[0].verified is None


async def test_nothing_is_compared_with_a_tap_that_is_not_heard() -> None:
    page = Page()
    reader = EngineReader(None, "", "SGLang")  # type: ignore[arg-type]
    assert await verify.compare(reader, page.book, SignalVerification()) is None
    page.book.apply(beat(10, 0, ago_ms=200), 0)
    assert await compared(page, SignalVerification(), beats=False) is None
