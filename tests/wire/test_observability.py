"""Every process serves the same two pages."""

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from rose_wire import observability, plainpages


async def _get(port: int, path: str, token: str = "") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as response,
    ):
        return response.status, await response.text()


async def test_metrics_and_health_follow_the_process() -> None:
    registry = CollectorRegistry()
    Counter("rose_test_turns", "Turns of the test.", registry=registry).inc(3)
    trouble = [""]
    runner, port = await observability.serve(
        registry, host="127.0.0.1", port=0, health=lambda: trouble[0]
    )
    try:
        status, text = await _get(port, "/metrics")
        assert status == 200
        assert "rose_test_turns_total 3.0" in text
        assert await _get(port, "/healthz") == (200, "ok\n")
        trouble[0] = "no reconcile for 60 s"
        assert await _get(port, "/healthz") == (503, "no reconcile for 60 s\n")
    finally:
        await runner.cleanup()


async def test_a_metrics_page_may_ask_for_a_token_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(plainpages.METRICS_TOKEN, "scrape")
    runner, port = await observability.serve(CollectorRegistry(), host="127.0.0.1", port=0)
    try:
        status, text = await _get(port, "/metrics")
        assert (status, "Authorization: Bearer TOKEN" in text) == (401, True)
        assert (await _get(port, "/metrics", "scrape"))[0] == 200
        assert (await _get(port, "/healthz"))[0] == 200
    finally:
        await runner.cleanup()
