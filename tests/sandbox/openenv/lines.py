# mypy: ignore-errors
"""A forwarder, the program beside a server, and a way between them that is cut."""

import asyncio
import json
import socket
import sys
from contextlib import suppress

from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from rose_sandbox.adapters import openenv_forward, openenv_inside
from rose_sandbox.adapters.openenv_forward import Forwarder, Way
from rose_sandbox.errors import HostAway
from rose_weights.errors import Fenced

received, hold = [], asyncio.Event()


async def server(line):
    async for message in line:
        received.append(message)
        if message == "slow":
            await hold.wait()
        if message == "die":
            line.transport.abort()
            return
        if message == "large":
            await line.send("x" * (openenv_forward.ANSWER_BYTES + 1))
        if message == "last":
            await hold.wait()
            await line.send("the last answer")
        if message in {"bye", "last"}:
            await line.close(4000, "as asked")
            return
        await line.send(f"{len(received)}:{message}" if isinstance(message, str) else message[::-1])


class Cut:
    """A way that can be cut, and lead to another program."""

    def __init__(self, port):
        self.port, self.away, self.sockets, self.steps = port, None, [], []

    async def dial(self):
        if self.away:
            raise self.away
        made = socket.create_connection(("127.0.0.1", self.port))
        made.setblocking(False)
        self.sockets.append(made.dup())
        return made

    def cut(self):
        for one in self.sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self.sockets.clear()

    async def step(self, name):
        self.steps.append(name)
        if self.away:
            raise self.away


async def beside(port):
    """A program, as a sandbox that is given back would have it."""
    ports = asyncio.Queue()

    async def run():
        switch = openenv_inside.Switch(port)
        async with serve(switch.take, "127.0.0.1", 0, close_timeout=1) as made:
            await ports.put(made.sockets[0].getsockname()[1])
            await asyncio.Future()

    task = asyncio.create_task(run())
    return task, await ports.get()


async def ended(line):
    with suppress(ConnectionClosed):
        raise AssertionError(await line.recv())
    return line.close_code, line.close_reason


async def taken_over(url, cut):
    """Another host has the session, which nobody knows where the client is."""
    async with connect(url) as line:
        await line.send("one")
        await line.recv()
        cut.away = Fenced("another host has it")
        cut.cut()
        await line.send("two")
        while cut.steps[-1] != "q":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.7)
        cut.away = None
        assert (await line.recv()).endswith(":two")


async def heard_by_a_way_that_is_lost(url, cut):
    """An answer that came by it is not said once more by the sandbox, which counts what is told."""
    usual, came = cut.step, asyncio.Event()

    async def step(name):
        await usual(name)
        if cut.steps[-2:] == ["q", "q"]:  # the second message, before the first answer
            came.set()
            hold.set()
            await asyncio.sleep(0.3)
            cut.cut()
            await asyncio.sleep(0.2)

    cut.step = step
    hold.clear()
    async with connect(url) as line:
        await line.send("slow")
        await line.send("after")
        await came.wait()
        assert [(await line.recv()).partition(":")[2] for _ in range(2)] == ["slow", "after"]
        await line.send("end")
        assert (await line.recv()).endswith(":end")
    cut.step = usual


async def ends_of_the_server(url, cut):
    """Each is told: what it said last, that it died, and that it says too much."""
    hold.set()
    inside = f"ws://127.0.0.1:{cut.port}/?line=name&given=0"
    async with connect(inside + "&target=/") as first:
        await first.recv()
        await first.send('{"given": 0, "then": true}')
        await first.send("last")
        while "closed" not in await first.recv():
            pass
        first.transport.abort()  # before its client was given anything
    async with connect(inside) as second:
        found = [await second.recv() for _ in range(4)]
        assert found[2] == "the last answer", found
        assert json.loads(found[3])["closed"] == [4000, "as asked"], found
        await second.send('{"given": 1, "close": true}')
    async with connect(url) as line:
        await line.send("die")
        assert await ended(line) == (1011, "the server has ended")
    openenv_forward.ANSWER_BYTES = 1 << 20
    async with connect(url, max_size=None) as line:
        await line.send("large")
        assert await ended(line) == (1011, "an answer has over 1048576 bytes")


async def speaks_otherwise(url, cut):
    """Whoever is in the sandbox may be at that port."""

    async def another(line):
        await line.send('{"took": "many"}')

    async with serve(another, "127.0.0.1", 0) as made:
        cut.port = made.sockets[0].getsockname()[1]
        async with connect(url) as line:
            code, reason = await ended(line)
            assert code == 1011
            assert reason.startswith("what stands beside the server speaks otherwise"), reason


async def main():
    async with serve(server, "127.0.0.1", 0) as real:
        task, port = await beside(real.sockets[0].getsockname()[1])
        cut = Cut(port)
        way = Way(cut.dial, cut.dial, lambda: cut.step("a"), lambda: cut.step("q"), 20.0)
        forwarder = Forwarder(way)
        url = f"ws://127.0.0.1:{await forwarder.open(0)}/ws"
        async with connect(url) as line:
            await line.send("one")
            assert await line.recv() == "1:one"
            cut.cut()  # while nobody waits: it is looked for by who speaks next
            await asyncio.sleep(0.2)
            assert not cut.sockets
            await line.send(b"two")
            assert await line.recv() == b"owt"
            await line.send("slow")  # while an answer is owed: at once, and it is given once
            while received[-1] != "slow":
                await asyncio.sleep(0.01)
            cut.away = HostAway("away")
            cut.cut()
            hold.set()
            await asyncio.sleep(0.2)
            cut.away = None
            assert await line.recv() == "3:slow"
            assert received == ["one", b"two", "slow"], received
            assert cut.steps == ["q", "a"] * 3, cut.steps
            await line.send("bye")
            with suppress(ConnectionClosed):
                raise AssertionError(await line.recv())
            assert (line.close_code, line.close_reason) == (4000, "as asked")
        await taken_over(url, cut)
        await heard_by_a_way_that_is_lost(url, cut)
        await ends_of_the_server(url, cut)
        async with connect(url) as line:
            await line.send("one")
            await line.recv()
            cut.cut()
            task.cancel()  # the sandbox is given back as it was before
            other, cut.port = await beside(real.sockets[0].getsockname()[1])
            await line.send("two")
            with suppress(ConnectionClosed):
                raise AssertionError(await line.recv())
            assert line.close_code == 1011
            assert "given back as it was before it began" in line.close_reason
            other.cancel()
        await speaks_otherwise(url, cut)
        await forwarder.close()
        await asyncio.gather(task, other, return_exceptions=True)


asyncio.run(asyncio.wait_for(main(), 60))
sys.exit(0)
