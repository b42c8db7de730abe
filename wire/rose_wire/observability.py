"""``/metrics`` and ``/healthz``, the same in every process.

A package declares its metrics once, in its own ``metrics.py``, on a registry of its own; the list
in ``docs/metrics.md`` is generated from those registries.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

Health = Callable[[], str]
"""Returns why the process is not healthy, or an empty string."""


def healthy() -> str:
    """For processes that are healthy whenever they answer."""
    return ""


def pages(registry: CollectorRegistry, health: Health = healthy) -> list[web.RouteDef]:
    """Routes for a process that has a web application already."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def healthz(_request: web.Request) -> web.Response:
        reason = health()
        return web.Response(text=(reason or "ok") + "\n", status=503 if reason else 200)

    return [web.get("/metrics", metrics), web.get("/healthz", healthz)]


async def serve(
    registry: CollectorRegistry, *, host: str, port: int, health: Health = healthy
) -> tuple[web.AppRunner, int]:
    """Serve both pages.

    Returns:
        The runner, whose ``cleanup()`` ends it, and the port (port 0 picks one).

    Raises:
        OSError: the address is taken.
    """
    app = web.Application()
    app.add_routes(pages(registry, health))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    # aiohttp has no public way to ask for the port it was given.
    bound = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]  # noqa: SLF001
    return runner, bound
