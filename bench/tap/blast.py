"""Many streams of one replica, in a network namespace of its own, for as little CPU as can be.

``python -m bench.tap.blast STREAMS INTERVAL_MS TOKENS [silent]``: says ``ready PORT``, then for
each line ``SECONDS`` streams that long (a token of every stream in each interval, as an engine's
step makes them, requests of so many tokens on kept connections) and says ``sent TOKENS REQUESTS``.
Unless it is silent it answers the pages by which a guard verifies its tap.

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
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.tap.traffic import CHUNK, HEAD, post
from rose_agent.os import kernel
from tests.tap.inside import loopback_up

_REQUEST = post("/generate")
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_DRAIN_EVERY = 20  # tokens: less than the buffers hold
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


@dataclass
class _Stream:
    client: socket.socket
    server: socket.socket
    token: int


def _connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    for one in (client, server):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client, server


def _step(stream: _Stream, tokens: int, counts: Counts) -> None:
    if stream.token == 0:
        counts.arrived += 1
        counts.running += 1
        stream.client.sendall(_REQUEST)
        stream.server.recv(65536)
        stream.server.sendall(HEAD)
    stream.server.sendall(CHUNK)
    stream.token += 1
    if stream.token == tokens:
        stream.server.sendall(_END)
        counts.running -= 1
        stream.token = 0
    if stream.token % _DRAIN_EVERY == 0:
        stream.client.recv(1 << 20)


def _stream_for(seconds: float, streams: list[_Stream], counts: Counts) -> tuple[int, int]:
    """Stream; returns tokens and requests. Requests under way stand still until the next time."""
    interval_s, tokens = float(sys.argv[2]) / 1e3, int(sys.argv[3])
    steps = round(seconds / interval_s)
    due, sent, requests = time.monotonic(), 0, 0
    for step in range(steps):
        for place, stream in enumerate(streams):
            # They begin one after the other, so that requests come evenly.
            if stream.token or step >= place * min(tokens, steps) // len(streams):
                requests += stream.token == 0
                _step(stream, tokens, counts)
                sent += 1
        due += interval_s
        time.sleep(max(0.0, due - time.monotonic()))
    return sent, requests


def main() -> None:
    """Stream when told to, until the input ends."""
    # The port is one that is free outside: in a new network all are.
    outside = socket.create_server(("127.0.0.1", 0))
    kernel.leave_network()
    loopback_up()
    inside = socket.create_server(outside.getsockname())
    streams = [_Stream(*_connected(inside), 0) for _ in range(int(sys.argv[1]))]
    counts = Counts()
    if sys.argv[4:] == ["silent"]:
        outside.close()
    else:
        pages = threading.Thread(
            target=lambda: asyncio.run(answer(outside, inside, counts)), daemon=True
        )
        pages.start()
    print("ready", inside.getsockname()[1], flush=True)
    for line in sys.stdin:
        sent, requests = _stream_for(float(line), streams, counts)
        print("sent", sent, requests, flush=True)


if __name__ == "__main__":
    main()
