"""Many streams of one replica, in a network namespace of its own, for as little CPU as can be.

``python -m bench.tap.blast STREAMS INTERVAL_MS TOKENS``: says ``ready PORT``, then for each line
``SECONDS`` streams that long (a token of every stream in each interval, as an engine's step makes
them, requests of so many tokens on kept connections) and says ``sent TOKENS REQUESTS``.
"""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import dataclass

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


def _step(stream: _Stream, tokens: int) -> None:
    if stream.token == 0:
        stream.client.sendall(_REQUEST)
        stream.server.recv(65536)
        stream.server.sendall(HEAD)
    stream.server.sendall(CHUNK)
    stream.token += 1
    if stream.token == tokens:
        stream.server.sendall(_END)
        stream.token = 0
    if stream.token % _DRAIN_EVERY == 0:
        stream.client.recv(1 << 20)


def main() -> None:
    """Stream when told to, until the input ends."""
    number, interval_ms, tokens = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    kernel.leave_network()
    loopback_up()
    listener = socket.create_server(("127.0.0.1", 0))
    streams = [_Stream(*_connected(listener), 0) for _ in range(number)]
    print("ready", listener.getsockname()[1], flush=True)
    for line in sys.stdin:
        steps = round(float(line) * 1e3 / interval_ms)
        due, sent, requests = time.monotonic(), 0, 0
        for step in range(steps):
            for place, stream in enumerate(streams):
                # They begin one after the other, so that requests come evenly.
                if stream.token or step >= place * min(tokens, steps) // number:
                    requests += stream.token == 0
                    _step(stream, tokens)
                    sent += 1
            due += interval_ms / 1e3
            time.sleep(max(0.0, due - time.monotonic()))
        print("sent", sent, requests, flush=True)


if __name__ == "__main__":
    main()
