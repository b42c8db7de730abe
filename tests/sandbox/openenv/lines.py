# mypy: ignore-errors
"""A forwarder, the program beside a server, and a way between them that is cut."""

import asyncio
import socket
import sys
from contextlib import suppress

from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from rose_sandbox.adapters import openenv_inside
from rose_sandbox.adapters.openenv_forward import Forwarder, Way
from rose_sandbox.errors import HostAway

heard, hold = [], asyncio.Event()


async def server(line):
    async for message in line:
        heard.append(message)
        if message == "slow":
            await hold.wait()
        if message == "bye":
            await line.close(4000, "as asked")
            return
        await line.send(f"{len(heard)}:{message}" if isinstance(message, str) else message[::-1])


class Cut:
    """A way that can be cut, and lead to another program."""

    def __init__(self, port):
        self.port, self.away, self.sockets, self.steps = port, False, [], []

    async def dial(self):
        if self.away:
            raise HostAway("away")
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
            while heard[-1] != "slow":
                await asyncio.sleep(0.01)
            cut.away = True
            cut.cut()
            hold.set()
            await asyncio.sleep(0.2)
            cut.away = False
            assert await line.recv() == "3:slow"
            assert heard == ["one", b"two", "slow"], heard
            assert cut.steps == ["q", "a"] * 3, cut.steps
            await line.send("bye")
            with suppress(ConnectionClosed):
                raise AssertionError(await line.recv())
            assert (line.close_code, line.close_reason) == (4000, "as asked")
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
        await forwarder.close()
        await asyncio.gather(task, other, return_exceptions=True)


asyncio.run(asyncio.wait_for(main(), 60))
sys.exit(0)
