"""What a replica of the benchmark answers to a guard: a real server's pages, with its own counts.

A guard's readers come from outside of the pod, and the replica has a network of its own. So it has
a proxy, as a pod of a mesh has: that listens outside, at the port which the engine has inside, and
passes each question on over the pod's own loopback, where the tap sees it. The rest of a page is as
SGLang 0.5.23 gave it (``tests/telemetry/recordings``), so that reading one costs what it costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

_RECORDED = Path(__file__).parents[2] / "tests/telemetry/recordings/sglang-0.5.23/busy"
_COUNTED = re.compile(r'sglang:http_requests_total{endpoint="/generate".*|.*num_running_reqs{.*')
_ANSWER = "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n"


@dataclass
class Counts:
    """What the replica says of itself, written by the thread that streams.

    Attributes:
        arrived: requests, from before their first byte is sent.
        running: requests under way.
    """

    arrived: int = 0
    running: int = 0
    _page: str = field(default_factory=(_RECORDED / "metrics.txt").read_text)
    _loads: str = field(default_factory=(_RECORDED / "loads.json").read_text)

    def answer(self, path: str) -> bytes:
        """The page at ``path`` now, as an HTTP response."""
        if path == "/metrics":
            kept = _COUNTED.sub("", self._page)
            body = (
                f'{kept}sglang:http_requests_total{{endpoint="/generate",method="POST"}} '
                f'{self.arrived}\nsglang:num_running_reqs{{model_name="serving"}} {self.running}\n'
            )
            return _response("200 OK", "text/plain", body)
        if path == "/v1/loads":
            running = f'"num_running_reqs":{self.running}'
            body = re.sub(r'"num_running_reqs":\d+', running, self._loads)
            return _response("200 OK", "application/json", body)
        return _response("404 Not Found", "text/plain", "")


def _response(status: str, kind: str, body: str) -> bytes:
    return (_ANSWER.format(status=status, kind=kind, size=len(body)) + body).encode()


async def answer(outside: socket.socket, inside: socket.socket, counts: Counts) -> None:
    """Answer until cancelled, on a loop of a thread that lives in the pod's network.

    Args:
        outside: listens where the guard's readers are.
        inside: listens in the pod's network, at the same port.
        counts: what is said.
    """
    port = inside.getsockname()[1]

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(counts.answer(head.split(b" ", 2)[1].decode()))
        writer.close()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    async with (
        await asyncio.start_server(engine, sock=inside),
        await asyncio.start_server(proxy, sock=outside),
    ):
        await asyncio.Event().wait()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()
