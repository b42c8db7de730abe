"""Runs in a network namespace of its own: streams tokens to itself and measures as a client.

Says ``ready PORT``, then obeys one order per line (JSON) and prints what the client saw. The path
of a request carries its number, so that every request can be found again in what the tap said.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass

from rose_agent.os import kernel
from tests.tap.inside import loopback_up

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = b'data: {"text":"' + b"x" * 120 + b'"}\n\n'
CHUNK = b"%x\r\n" % len(_EVENT) + _EVENT + b"\r\n"
_PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
BODY = b'{"text":"' + b"y" * 400 + b'"}'


def post(path: str) -> bytes:
    """A request."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n"
    return head.encode() + BODY


@dataclass
class Order:
    """What to do.

    Attributes:
        streams: at the same time, each over one kept connection.
        tokens: per request.
        interval_s: between two tokens of a stream.
        requests: one after the other on each stream.
        short: connections for one plain request each; then nothing is streamed.
    """

    streams: int
    tokens: int = 0
    interval_s: float = 0.0
    requests: int = 1
    short: int = 0


@dataclass
class Seen:
    """One request as the client saw it, CLOCK_MONOTONIC nanoseconds."""

    path: str
    sent: int
    first: int
    last: int
    tokens: int


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(BODY))
            _, kind, _, tokens, micros = head.split(b" ", 2)[1].decode().split("/")
            if kind == "plain":
                writer.write(_PLAIN)
                break
            writer.write(HEAD)
            due = time.monotonic()
            for _ in range(int(tokens)):
                due += int(micros) / 1e6
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                writer.write(CHUNK)
            writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, end: bytes
) -> Seen:
    seen = Seen(path, time.monotonic_ns(), 0, 0, 0)
    writer.write(post(path))
    tail = b""
    while not tail.endswith(end):
        data = await reader.read(65536)
        now = time.monotonic_ns()
        tokens = data.count(b"data: ")
        if tokens:
            seen.first = seen.first or now
            seen.last = now
            seen.tokens += tokens
        tail = (tail + data)[-8:]
    return seen


async def _stream(port: int, number: int, order: Order) -> list[Seen]:
    await asyncio.sleep(order.interval_s * number / order.streams)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    seen = []
    for turn in range(order.requests):
        path = f"/stream/{number}-{turn}/{order.tokens}/{int(order.interval_s * 1e6)}"
        seen.append(await _ask(reader, writer, path, b"0\r\n\r\n"))
    writer.close()
    return seen


async def _short(port: int, order: Order) -> list[Seen]:
    seen: list[Seen] = []

    async def some(first: int) -> None:
        for number in range(first, order.short, order.streams):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            seen.append(await _ask(reader, writer, f"/plain/{number}/0/0", b"ok"))
            writer.close()

    await asyncio.gather(*(some(first) for first in range(order.streams)))
    return seen


async def obey(port: int, order: Order) -> list[Seen]:
    """Carry out one order."""
    if order.short:
        return await _short(port, order)
    found = await asyncio.gather(*(_stream(port, n, order) for n in range(order.streams)))
    return [seen for stream in found for seen in stream]


async def main() -> None:
    """Serve and obey until the input ends."""
    kernel.leave_network()
    loopback_up()
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    print("ready", port, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        seen = await obey(port, Order(**json.loads(line)))
        print(json.dumps([asdict(one) for one in seen]), flush=True)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
