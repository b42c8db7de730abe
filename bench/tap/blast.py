"""Many streams of one replica, in a network namespace of its own, for as little CPU as can be.

``python -m bench.tap.blast STREAMS INTERVAL_MS TOKENS [silent]``: says ``ready PORT``, then for
each line ``SECONDS`` streams that long (a token of every stream in each interval, as an engine's
step makes them, requests of so many tokens on kept connections) and says ``sent TOKENS REQUESTS``.
Unless it is silent it answers the pages by which a guard verifies its tap (``pages``).
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from dataclasses import dataclass

from bench.tap.pages import Counts, answer
from bench.tap.traffic import CHUNK, HEAD, post
from rose_agent.os import kernel
from tests.tap.inside import loopback_up

_REQUEST = post("/generate")
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_DRAIN_EVERY = 20  # tokens: less than the buffers hold


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
