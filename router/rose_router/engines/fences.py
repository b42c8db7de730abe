"""Delivers the aborts of legs that were left behind.

A leg that ended without its last event may still run on its engine, frozen or unreachable. Its
abort is tried at once, and again whenever the engine's gate is open; until it is taken, the engine
gets no new turn.
"""

from __future__ import annotations

import asyncio

from rose_router import metrics
from rose_router.engines.engine_client import EngineClient, Target
from rose_router.engines.fleet import Engine, Fleet


class Fences:
    """Aborts on their way.

    Args:
        fleet: the engines.
        client: reaches them.
    """

    def __init__(self, fleet: Fleet, client: EngineClient) -> None:
        self._fleet = fleet
        self._client = client
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def raise_for(self, engine: Engine, rid: str) -> None:
        """End the leg ``rid`` for good; no turn goes to the engine before it has obeyed."""
        engine.fences.add(rid)
        self._deliver_soon(engine)

    def deliver(self) -> None:
        """Try every abort that is due; called whenever something changed."""
        waiting = 0
        for engine in self._fleet:
            waiting += len(engine.fences)
            if engine.fences and engine.gate_open:
                self._deliver_soon(engine)
        metrics.FENCES.set(waiting)

    async def close(self) -> None:
        """Give up."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _deliver_soon(self, engine: Engine) -> None:
        if engine.name not in self._tasks:
            task = asyncio.create_task(self._deliver(engine))
            self._tasks[engine.name] = task
            task.add_done_callback(lambda _: self._tasks.pop(engine.name, None))

    async def _deliver(self, engine: Engine) -> None:
        target = Target.of(engine.update)
        for rid in list(engine.fences):
            if not await self._client.abort(target, rid):
                return
            engine.fences.discard(rid)
        if not engine.fences:
            self._fleet.changed.fire()
