"""``python -m rose_demo.span_receiver``: takes routers' spans by OTLP and gives them back as JSON.

What a user's collector would be. The demo runs it as a pod: routers export to its gRPC port, and
the report is drawn from what ``GET /spans`` says at the end.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from rose_demo.spans import SpanRecord, read

GRPC_PORT, HTTP_PORT = 4317, 4318
MOST_SPANS = 50_000
"""Kept; of more the first are forgotten. A run of the demo has some ten thousand."""


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that are exported to it."""

    def __init__(self) -> None:
        self.spans: deque[SpanRecord] = deque(maxlen=MOST_SPANS)

    async def Export(  # noqa: N802  # gRPC's
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: Any,  # noqa: ANN401  # gRPC's
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """OTLP's method."""
        del context
        self.spans.extend(read(request))
        return trace_service_pb2.ExportTraceServiceResponse()

    async def page(self, _: web.Request) -> web.Response:
        """``GET /spans``."""
        body = msgspec.json.encode(list(self.spans))
        return web.Response(body=body, content_type="application/json")

    async def health(self, _: web.Request) -> web.Response:
        """``GET /healthz``, for a probe: the spans of a whole run take long to encode."""
        return web.Response(text="ok")


@asynccontextmanager
async def receiving(
    receiver: Receiver, grpc_address: str, http_address: str
) -> AsyncIterator[tuple[int, int]]:
    """Take spans until the block ends.

    Args:
        receiver: keeps them.
        grpc_address: ``host:port``; port 0 picks one.
        http_address: likewise.

    Yields:
        Both ports.
    """
    server = grpc.aio.server()
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(receiver, server)  # type: ignore[no-untyped-call]  # generated
    grpc_port = server.add_insecure_port(grpc_address)
    app = web.Application()
    app.router.add_get("/spans", receiver.page)
    app.router.add_get("/healthz", receiver.health)
    runner = web.AppRunner(app, access_log=None)
    host, port = http_address.rsplit(":", 1)
    try:
        await server.start()
        await runner.setup()
        await web.TCPSite(runner, host, int(port)).start()
        yield grpc_port, int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
        await server.stop(None)


async def _forever(host: str) -> None:
    async with receiving(Receiver(), f"{host}:{GRPC_PORT}", f"{host}:{HTTP_PORT}"):
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    asyncio.run(_forever(parser.parse_args().host))
