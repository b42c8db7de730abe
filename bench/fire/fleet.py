"""One lease: its router as a process, its engines, and who speaks for them."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.fire.engines import Bundles, Engine, Start, version_of
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.owners import owner
from rose_wire.ports import free_ports

_READY_SECONDS = 60
_HEARD_SECONDS = 1.0
"""Within which a router hears that an engine is gone: turns that begin meanwhile are hit, too."""


@dataclass(eq=False)
class Lease:
    """A lease with everything that belongs to it.

    Attributes:
        secret: bearer token of its callers; another lease has another.
        head: number of the newest version.
        vocabulary: of its engines' model; 0 = stubs, which take any id.
        reference: what an undisturbed engine answers to each prompt; empty for stubs.
    """

    name: str
    url: str
    attach_port: int
    secret: str
    pid: int
    bundles: Bundles
    http: aiohttp.ClientSession
    stack: AsyncExitStack
    engines: list[Engine] = field(default_factory=list)
    head: int = 0
    vocabulary: int = 0
    reference: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """The run whose versions its engines hold."""
        return self.name.replace("/", "-")

    async def attach(self, engine: Engine) -> None:
        """Bring an engine to the newest version and let its owner dial the router."""
        await self.catch_up(engine)
        update = EngineUpdate(
            engine=engine.name,
            kind=engine.kind,
            lease=self.name,
            url=engine.url,
            gate_open=True,
            cap=engine.cap,
            vocabulary=self.vocabulary,
            version=version_of(self.run, self.head),
            head=version_of(self.run, self.head),
        )
        holding = AsyncExitStack()
        engine.owner = await holding.enter_async_context(
            owner(self.attach_port, update, self.secret)
        )
        self._owners[engine.name] = holding

    async def detach(self, engine: Engine) -> None:
        """The owner hangs up."""
        engine.owner = None
        holding = self._owners.pop(engine.name, None)
        if holding is not None:
            await holding.aclose()

    async def catch_up(self, engine: Engine) -> None:
        """Commit the newest version.

        Raises:
            EngineError: the engine refused, or died.
        """
        if self.head:
            await engine.commit(await self.bundles.of(self.head), version_of(self.run, self.head))

    async def page(self, path: str) -> Any:  # noqa: ANN401  # JSON
        """A page of the router."""
        headers = {"Authorization": f"Bearer {self.secret}"}
        async with self.http.get(self.url + path, headers=headers) as reply:
            reply.raise_for_status()
            return await reply.json()

    def ended(self) -> list[str]:
        """Names of the engines whose process is gone, and nobody has ended it here."""
        made = [(one.name, one.process) for one in self.engines if one.process is not None]
        return [name for name, process in made if process.process.poll() is not None]

    def killed(self, names: Sequence[str], since: float) -> bool:
        """Whether each of these deaths since then was a kill of this run's; a name stands for one.

        Args:
            names: engines, once for each death.
            since: monotonic seconds.
        """
        kills = Counter(
            engine.name
            for engine in self.engines
            for at in engine.kills
            if at >= since - _HEARD_SECONDS
        )
        return bool(names) and not Counter(names) - kills

    def resident_bytes(self) -> int:
        """Memory of the router."""
        return int(psutil.Process(self.pid).memory_info().rss)

    async def files(self) -> int:
        """Files and sockets that the router has open, callers' connections aside."""
        async with self.http.get(f"{self.url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        name = "rose_router_connections "
        callers = next(float(line.split()[1]) for line in lines if line.startswith(name))
        return int(psutil.Process(self.pid).num_fds() - callers)

    def __post_init__(self) -> None:
        self._owners: dict[str, AsyncExitStack] = {}

    async def close(self) -> None:
        """End owners and engines."""
        for engine in self.engines:
            await self.detach(engine)
            await engine.kill()


def _written(folder: Path, secret: str) -> Path:
    folder.mkdir(parents=True)
    token = folder / "token"
    token.write_text(secret)
    return token


@asynccontextmanager
async def lease(
    name: str,
    folder: Path,
    start: Start,
    engines: int,
    *,
    vocabulary: int = 0,
    options: Sequence[str] = (),
) -> AsyncIterator[Lease]:
    """Start a router and its engines, the first of them dedicated; all are gone afterwards.

    Args:
        name: ``namespace/name`` of the lease.
        folder: of tokens, logs and engines; made here.
        start: starts an engine.
        engines: how many.
        vocabulary: of the engines' model; 0 = stubs, which take any id.
        options: further ones of ``rose router``.
    """
    secret = f"word-of-{name}"
    token = _written(folder, secret)
    http, attach = free_ports(2)
    command = [sys.executable, "-m", "rose_cli.main", "router", "--lease", name]
    command += ["--http-address", f"127.0.0.1:{http}", "--attach-address", f"127.0.0.1:{attach}"]
    command += ["--token-file", str(token), "--turn-token-file", str(token)]
    command += ["--max-losses", "1000", "--queue-seconds", "1000", "--queue-limit", "100000"]
    command += ["--max-staleness", "3", "--pause-seconds", "1", "--drain-seconds", "0"]
    command += options
    with (folder / "router.log").open("wb") as log:
        router = await asyncio.create_subprocess_exec(
            *command, "--log-level", "WARNING", stdout=log, stderr=log
        )
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            made = Lease(
                name,
                f"http://127.0.0.1:{http}",
                attach,
                secret,
                router.pid,
                Bundles(folder / "bundles", name.replace("/", "-")),
                session,
                AsyncExitStack(),
                vocabulary=vocabulary,
            )
            try:
                await _fill(made, folder, start, engines)
                yield made
            finally:
                await made.close()
    finally:
        router.terminate()
        await router.wait()


async def _fill(made: Lease, folder: Path, start: Start, count: int) -> None:
    for number in range(count):
        kind = EngineKind.DEDICATED if number == 0 else EngineKind.BORROWED
        name = f"{made.name.split('/')[1]}-e{number}"
        made.engines.append(Engine(name, kind, folder, start, made.run, cap=16))
    await asyncio.gather(*(engine.begin() for engine in made.engines))
    await _up(made)
    for engine in made.engines:
        await made.attach(engine)
    async with asyncio.timeout(_READY_SECONDS):
        while (await made.page("/engines"))["unready"]:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.05)


async def _up(made: Lease) -> None:
    async with asyncio.timeout(_READY_SECONDS):
        while True:
            try:
                await made.page("/engines")
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
            else:
                return
