"""``/metrics`` and ``/healthz``, the same in every process, and who may read what is beside them.

A package declares its metrics once, in its own ``metrics.py``, on a registry of its own; the list
in ``docs/metrics.md`` is generated from those registries.

``/healthz`` is open, as every ``probe`` is: the kubelet brings no token. ``/metrics`` is open too,
unless the environment has ``ROSE_METRICS_TOKEN``; then scrapers must bring that word (and no other
process's: it is none of the installation's own tokens). Every other page says more, and goes
through ``guarded``.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rose_wire.bearer import is_bearer
from rose_wire.plainpages import METRICS_TOKEN

Page = Callable[[web.Request], Awaitable[web.Response]]

Health = Callable[[], str]
"""Returns why the process is not healthy (or not ready), or an empty string."""


def healthy() -> str:
    """For processes that are healthy whenever they answer."""
    return ""


def brings(request: web.Request, token: str) -> bool:
    """Whether the caller's ``Authorization`` header carries this bearer token."""
    return is_bearer(request.headers.get("Authorization", ""), token)


def guarded(page: Page, token: str) -> Page:
    """The page, for callers who bring the token; without a token for nobody."""

    async def answer(request: web.Request) -> web.Response:
        if not token:
            text = "closed: this process has no token (--token-file); ask on its Unix socket\n"
            return web.Response(text=text, status=403)
        if not brings(request, token):
            text = "bearer token missing or wrong; send Authorization: Bearer TOKEN\n"
            return web.Response(text=text, status=401, headers={"WWW-Authenticate": "Bearer"})
        return await page(request)

    return answer


def pages(registry: CollectorRegistry, health: Health = healthy) -> list[web.RouteDef]:
    """Routes for a process that has a web application already."""
    token = os.environ.get(METRICS_TOKEN, "")

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    shown = guarded(metrics, token) if token else metrics
    return [web.get("/metrics", shown), probe("/healthz", health)]


def probe(path: str, health: Health) -> web.RouteDef:
    """A page for a probe of the kubelet's: 503 with the reason while there is one."""

    async def answer(_request: web.Request) -> web.Response:
        reason = health()
        return web.Response(text=(reason or "ok") + "\n", status=503 if reason else 200)

    return web.get(path, answer)


async def serve(
    registry: CollectorRegistry,
    *,
    host: str,
    port: int,
    health: Health = healthy,
    more: Sequence[web.RouteDef] = (),
) -> tuple[web.AppRunner, int]:
    """Serve both pages, and ``more`` of them.

    Returns:
        The runner, whose ``cleanup()`` ends it, and the port (port 0 picks one).

    Raises:
        OSError: the address is taken.
    """
    app = web.Application()
    app.add_routes([*pages(registry, health), *more])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    # aiohttp has no public way to ask for the port it was given.
    bound = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]  # noqa: SLF001
    return runner, bound
