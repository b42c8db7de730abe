"""SGLang's load feed over ZeroMQ: a real publisher, and peers that are none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from rose_agent.pods.model import ServingPod
from rose_agent.signals.feed import Feed
from rose_agent.signals.zmtp import Subscription
from rose_core.identity import PodUid
from rose_core.telemetry.dialects import Figures
from rose_dev.engine_environment import engine_python, is_ready
from rose_dev.waiting import until

_PUBLISHER = """
import sys, time, msgspec, zmq
socket = zmq.Context.instance().socket(zmq.PUB)
port = socket.bind_to_random_port("tcp://127.0.0.1")
print(port, flush=True)
running = 3
for line in sys.stdin:
    running = int(line)
    load = msgspec.msgpack.encode(["LoadStat", running, 0, 512, 4096, None, 0, 512, 16, 9000, 1])
    socket.send_multipart([b"kv-events", b"0", b"not ours"])
    socket.send_multipart([b"load", b"0", load])
"""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


@contextlib.asynccontextmanager
async def speaking(*pieces: bytes, hang_up: bool = True) -> AsyncIterator[int]:
    """A peer that says this, whatever it hears."""

    open_ones: list[asyncio.StreamWriter] = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.append(writer)
        writer.writelines(pieces)
        if hang_up:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for writer in open_ones:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def pod(feed_port: int = 0) -> ServingPod:
    return ServingPod(
        PodUid("uid"), "chat", "serving", "chat/pool", "127.0.0.1", 30000, feed_port=feed_port
    )


@pytest.mark.engine
@pytest.mark.skipif(not is_ready(), reason="make engine brings a real ZeroMQ")
async def test_a_real_publisher_is_heard() -> None:
    publisher = await asyncio.create_subprocess_exec(
        str(engine_python()),
        *("-c", _PUBLISHER),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert publisher.stdout is not None
    assert publisher.stdin is not None
    port = int(await publisher.stdout.readline())
    feed = Feed("127.0.0.1", port)
    assert feed.read() == Figures()

    def received(running: int) -> bool:
        # Asked again and again: what is published before the subscription arrives is lost.
        assert publisher.stdin is not None
        publisher.stdin.write(b"%d\n" % running)
        return feed.read().running == running

    for running in (3, 0):
        await until(lambda running=running: received(running))  # type: ignore[misc]
    assert (feed.read().waiting, feed.read().kv_permille) == (0, 125)
    publisher.kill()
    await publisher.wait()
    await until(lambda: feed.read() == Figures())
    feed.close()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" + bytes(64), "does not speak"),
        (GREETING.replace(b"NULL ", b"PLAIN").replace(b"NULL\0", b"PLAIN"), "credentials"),
        (GREETING + b"\x04\x06\x05ERROR", "refused"),
        (GREETING + b"\x04\x06\x05READY" + b"\x40\x01x", "unknown flags"),
        (GREETING + b"\x04\x06\x05READY" + b"\x02" + (1 << 40).to_bytes(8), "at most"),
    ],
)
async def test_a_peer_that_is_no_publisher_is_told_apart(text: bytes, complaint: str) -> None:
    async with speaking(text) as port:
        with pytest.raises(ValueError, match=complaint):
            await (await Subscription.connect("127.0.0.1", port, b"load")).receive()


async def test_garbage_in_the_feed_is_unknown() -> None:
    message = b"\x01\x04load\x01\x010\x00\x03???"
    async with speaking(GREETING + b"\x04\x06\x05READY" + message, hang_up=False) as port:
        subscription = await Subscription.connect("127.0.0.1", port, b"load")
        assert await subscription.receive() == [b"load", b"0", b"???"]
        subscription.close()
        feed = Feed("127.0.0.1", port)
        await until(lambda: feed._received_s > 0)
        assert feed.read() == Figures()
        feed.close()


async def test_a_feed_that_fell_silent_is_unknown() -> None:
    async with speaking(GREETING + b"\x04\x06\x05READY", hang_up=False) as port:
        feed = Feed("127.0.0.1", port)
        feed._figures, feed._received_s = Figures(running=0, waiting=0), -10.0
        assert feed.read() == Figures()
        feed.close()
