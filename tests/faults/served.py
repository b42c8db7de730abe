"""``python -m tests.faults.served FILE VERB ...``: ``rose VERB``, and a file of all that it serves.

A list of routes by hand is what a new route is missing from. So the real servers tell: aiohttp's
routers as they begin to listen, ours of gRPC as methods are bound, and the plain pages.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from rose_cli.main import main
from rose_wire import plainpages, serving


def routes_of(app: web.Application) -> list[str]:
    """``METHOD /path/{with}/names`` of every route; HEAD comes with GET."""
    return [
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    ]


def record_all(file: Path) -> None:
    """Whatever this process begins to serve is a line of the file."""

    def write(*lines: str) -> None:
        with file.open("a") as reported:
            reported.writelines(f"{line}\n" for line in lines)

    add, freeze, serve = serving.Server._add, web.Application.pre_freeze, plainpages.serve

    def bound(server: serving.Server, method: Any, handler: Any) -> None:  # noqa: ANN401  # theirs
        write(method.path)
        add(server, method, handler)

    def frozen(app: web.Application) -> None:
        write(*routes_of(app))
        freeze(app)

    async def plain(listener: socket.socket, registry: CollectorRegistry) -> object:
        write(*(f"GET {path}" for path in plainpages.PATHS))
        return await serve(listener, registry)

    serving.Server._add = bound  # type: ignore[method-assign,assignment]
    web.Application.pre_freeze = frozen  # type: ignore[method-assign,assignment]
    plainpages.serve = plain  # type: ignore[assignment]


if __name__ == "__main__":
    record_all(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
