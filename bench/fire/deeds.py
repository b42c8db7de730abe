"""What happens to engines: every moment something bad to one of them, repaired a little later.

| deed | the engine | its owner says |
|---|---|---|
| kill | SIGKILL; a new process with base weights, which catches up | gate closed, no version |
| pause | permit withdrawn | gate closed |
| revoke | killed | leaving, then hangs up; later a new stream |
| commit | new weights between two tokens | the version |
| cut_cap | | a cap of one |
| hold | | (a trainer's pause with mode ``keep`` at the router) |
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from bench.fire.engines import Engine, version_of
from bench.fire.fleet import Lease
from rose_core.wire.routing import EngineKind
from rose_engines.errors import EngineError

LOG = logging.getLogger(__name__)

Deed = Callable[[Engine], Awaitable[None]]


class Fire:
    """Burns one lease.

    Args:
        chance: seeded.
        gap: shortest and longest time between two deeds, in seconds.
        kills: weight of the deeds that end a process; starting a real engine takes long.
    """

    def __init__(
        self, lease: Lease, chance: random.Random, gap: tuple[float, float], kills: float
    ) -> None:
        self._lease = lease
        self._chance = chance
        self._gap = gap
        self._under_way: set[asyncio.Task[None]] = set()
        self.deeds: Counter[str] = Counter()
        self._choices: Sequence[tuple[Deed, float]] = (
            (self.kill, kills),
            (self.revoke, kills),
            (self.pause, 1.0),
            (self.commit, 1.5),
            (self.cut_cap, 1.0),
            (self.hold, 0.3),
        )

    async def run(self, done: asyncio.Event) -> None:
        """Burn until done, then repair everything."""
        while not done.is_set():
            await asyncio.sleep(self._chance.uniform(*self._gap))
            whole = [engine for engine in self._lease.engines if engine.alive]
            if not whole:
                continue
            deeds, weights = zip(*self._choices, strict=True)
            self._begin(self._chance.choices(deeds, weights)[0], self._chance.choice(whole))
        await asyncio.gather(*self._under_way)

    def _begin(self, deed: Deed, engine: Engine) -> None:
        task = asyncio.create_task(self._do(deed, engine))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _do(self, deed: Deed, engine: Engine) -> None:
        engine.busy = True
        self.deeds[getattr(deed, "__name__", "deed")] += 1
        try:
            await deed(engine)
        finally:
            engine.busy = False

    async def kill(self, engine: Engine) -> None:
        """The process dies; its owner notices a moment later."""
        await engine.kill()
        await asyncio.sleep(self._chance.uniform(0, 0.5))
        if engine.owner:
            engine.owner.send(gate_open=False, version="")
        await self._back(engine)

    async def _back(self, engine: Engine) -> None:
        await asyncio.sleep(self._chance.uniform(0.2, 1.5))
        await engine.begin()
        await self._lease.detach(engine)
        await self._lease.attach(engine)

    async def pause(self, engine: Engine) -> None:
        """Serving needs the device."""
        if engine.process is None or engine.owner is None:
            return
        engine.process.holder.close()
        engine.owner.send(gate_open=False)
        await asyncio.sleep(self._chance.choice([0.1, 0.5, 2.5]))
        engine.process.holder.open()
        engine.owner.send(gate_open=True)

    async def revoke(self, engine: Engine) -> None:
        """The engine is taken back for good; later there is another in its place."""
        if engine.owner is None or engine.kind is EngineKind.DEDICATED:
            return
        engine.owner.send(gate_open=False, leaving=True)
        await asyncio.sleep(0.2)
        await self._lease.detach(engine)
        await engine.kill()
        await self._back(engine)

    async def commit(self, engine: Engine) -> None:
        """New weights, or those that others have already."""
        self._lease.head += self._chance.random() < 0.4
        version = version_of(self._lease.run, self._lease.head)
        try:
            await self._lease.catch_up(engine)
        except EngineError as error:
            LOG.info("%s did not take %s: %s", engine.name, version, error)
            return
        if engine.owner:
            engine.owner.send(version=version, head=version)

    async def cut_cap(self, engine: Engine) -> None:
        """The engine may hold fewer turns for a while."""
        if engine.owner:
            engine.owner.send(cap=1)
            await asyncio.sleep(0.7)
            engine.owner.send(cap=engine.cap)

    async def hold(self, _engine: Engine) -> None:
        """A trainer pauses its lease, and goes on."""
        lease = self._lease
        headers = {"Authorization": f"Bearer {lease.secret}"}
        body = {"mode": "keep"}
        for path, seconds in (("/pause_generation", 0.3), ("/continue_generation", 0.0)):
            async with lease.http.post(lease.url + path, json=body, headers=headers) as reply:
                reply.raise_for_status()
            await asyncio.sleep(seconds)
