"""What listens, and what a stranger gets there: every route and every method of ROSE."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import grpc
import psutil

from rose_weights import methods as weight_plane
from rose_wire import services
from rose_wire.rpc import Method

ROOT = Path(__file__).parents[2]
_ROUTE = re.compile(r"(?:web\.|add_)(?:get|post|put|delete|route)\(\s*f?\"(/[^\"]*)\"")
_SECONDS = 20.0

# Counts, times and states, no content: docs/threat-model.md names each.
OPEN = frozenset(
    {"/metrics", "/healthz", "/readyz", "/vacated"}
    | {"/health", "/health_generate", "/ready", "/ping", "/liveness", "/readiness"}
)
METHODS = [
    found
    for module in (services, weight_plane)
    for found in vars(module).values()
    if isinstance(found, Method)
]


def routes() -> list[str]:
    """Every path that some process of ROSE answers, from the sources; a new one is in by itself."""
    folders = ("agent", "operator", "router", "weights", "wire", "trainer")
    texts = (path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    found = {route for text in texts for route in _ROUTE.findall(text)}
    filled = {re.sub(r"\{+[^}]*\}+", "generate", route) for route in found}
    return sorted({"/", "/debug", "/slots/x/generate", *filled})


def listeners(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Address and port of every TCP socket on which these processes listen."""
    found = set()
    for pid in pids:
        for one in psutil.Process(pid).net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN:
                found.add((one.laddr.ip, one.laddr.port))
    return sorted(found)


@dataclass
class Knocked:
    """What one port answered a caller.

    Attributes:
        pages: path -> status, for a port that speaks HTTP.
        bodies: path -> text of those that answered 200.
        calls: gRPC method -> status code, for a port that speaks gRPC.
    """

    pages: dict[str, int] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)
    calls: dict[str, grpc.StatusCode] = field(default_factory=dict)

    @property
    def heard(self) -> set[str]:
        """Pages and methods that did more than refuse."""
        refused = {401, 403, 404, 405}
        pages = {path for path, status in self.pages.items() if status not in refused}
        closed = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
        return pages | {path for path, code in self.calls.items() if code not in closed}


async def knock(port: int, token: str = "") -> Knocked:
    """Try everything at a port, with this bearer token or none."""
    found = Knocked()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers) as http:
        for path in routes():
            await _pages(http, port, path, found)
    if not found.pages:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in METHODS:
                found.calls[method.path] = await _call(channel, method.path, token)
    return found


async def _pages(http: aiohttp.ClientSession, port: int, path: str, found: Knocked) -> None:
    for verb in ("POST", "GET"):
        try:
            async with asyncio.timeout(_SECONDS):
                url = f"http://127.0.0.1:{port}{path}"
                async with http.request(verb, url, json={} if verb == "POST" else None) as answer:
                    text = await answer.text()
        except aiohttp.ClientError:
            continue  # it speaks something else
        worst = found.pages.get(path, 404)
        if answer.status not in {401, 403, 404, 405} or worst in {404, 405}:
            found.pages[path] = answer.status
        if answer.status == 200:
            found.bodies[path] = text


async def _call(channel: grpc.aio.Channel, path: str, token: str) -> grpc.StatusCode:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    call = channel.unary_unary(path)(b"\x80", metadata=metadata, timeout=_SECONDS)
    return await call.code()
