"""A host that hangs with its connections open is left, and writes into nothing when it wakes up.

Real hosts, processes of their own on runc and CRIU, and SIGSTOP: the kernel goes on to take what is
sent to it, and it is read when SIGCONT comes.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rose_sandbox.client import RemoteHost, Sandbox
from rose_sandbox.errors import HostAway, NotListening, UnknownSandbox
from rose_sandbox.runtimes.parts import Parts
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_weights.errors import Fenced
from tests.sandbox.hosts import Running, two_hosts

pytestmark = pytest.mark.sandbox


@pytest.fixture
async def hosts(parts: Parts, tmp_path: Path) -> AsyncIterator[list[Running]]:
    async with two_hosts(tmp_path, parts, RuncRuntime) as made:
        yield made


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def sent(url: str, method: str, path: str, body: object) -> Streams:
    """A request that nobody reads yet."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    data = json.dumps(body).encode()
    head = (
        *(f"{method} {path} HTTP/1.1", "Host: host", "Authorization: Bearer word"),
        *("Connection: close", f"Content-Length: {len(data)}", "", ""),
    )
    writer.write("\r\n".join(head).encode() + data)
    await writer.drain()
    return reader, writer


async def answered(asked: Streams) -> int:
    """The status, once it is read."""
    reader, writer = asked
    output = await reader.read()
    writer.close()
    return int(output.split()[1])


async def test_a_host_that_hangs_is_left_and_takes_nothing_back(hosts: list[Running]) -> None:
    first, second = hosts
    one, two = RemoteHost(first.url, "word"), RemoteHost(second.url, "word")
    box = await Sandbox(session="s", host=one).__aenter__()
    await box.run("export STEPS=1; echo one > /home/log; sleep 4000 &")
    await box.checkpoint([1, 2])
    fence = (await one._call("GET", "/s/fence", None))["fence"]
    reader, writer = await asyncio.open_connection(sock=await _connected(box))

    first.process.send_signal(signal.SIGSTOP)
    try:
        ended = asyncio.create_task(reader.read())
        with pytest.raises(HostAway, match="does not say that it lives"):
            await box.run("echo never >> /home/log", 600)
        assert await ended == b"", "a tunnel ends too"
        writer.close()
        with pytest.raises(HostAway):
            await one.restore("s")
        # What callers sent before they gave up, and it reads when it wakes up: each would have
        # taken the session from the second host.
        late = [
            await sent(first.url, "POST", "/sessions/s/restore", {"over": fence}),
            await sent(first.url, "POST", "/sessions/s/checkpoint", {"ids": [1, 2, 3]}),
            await sent(first.url, "DELETE", "/sessions/s?forget=true", {}),
        ]
        assert (await two.restore("s"))["ids"] == [1, 2]
        there = Sandbox(session="s", host=two, existing=True)
        await there.run("STEPS=$((STEPS + 1)); echo $STEPS >> /home/log")
        assert (await there.checkpoint([1, 2, 3, 4])).turn == 2
    finally:
        first.process.send_signal(signal.SIGCONT)

    statuses = [await answered(one) for one in late]
    assert set(statuses) <= {404, 410}, statuses

    async def is_gone() -> bool:
        try:
            await one.state("s")
        except (Fenced, UnknownSandbox):
            return True
        return False

    while not await is_gone():  # noqa: ASYNC110 - another process knows
        await asyncio.sleep(0.1)
    assert (await two.state("s")).recoverable_to == 2
    assert (await there.run("echo $STEPS; cat /home/log; pgrep -cx sleep")).stdout == (
        b"2\none\n2\n1\n"
    )
    assert (await there.checkpoint([1, 2, 3, 4, 5])).turn == 3, "its fence is the newest still"
    await two.end("s", forget=True)
    await one.close()
    await two.close()


async def _connected(box: Sandbox) -> socket.socket:
    """To a server of the sandbox that says nothing."""
    await box.run("python3 -m http.server 8000 >/dev/null 2>&1 &")
    while True:
        try:
            return await box.connect(8000)
        except NotListening:  # it does in a moment
            await asyncio.sleep(0.05)
