"""The fake's engine loop on an elastic KV pool: who finds no room waits, and one is retracted.

Not in ``kvcached``, which is a process of its own and needs no server to be one.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rose_engines.fake.kvcached import TokenPool
from rose_engines.fake.scheduler import FakeRequest, FakeScheduler


class ElasticScheduler(FakeScheduler):
    """A scheduler whose requests take their room from a pool.

    Args:
        pool: the room.
        arguments: of ``FakeScheduler``.
    """

    def __init__(self, pool: TokenPool, *arguments: Any, **named: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **named)
        self._pool = pool

    def _admit(self) -> bool:
        for request in (*self.running, *self.waiting):
            if request.finish is not None:
                self._pool.finish(request.rid)
        return super()._admit()

    def _step(self) -> None:
        every = self.running
        self.running = [one for one in every if one.finish is None and self._roomy(one)]
        super()._step()
        if not self.running:
            self._retract(every)
        self.running = every

    def _retract(self, every: list[FakeRequest]) -> None:
        """Nobody finds room: the youngest that has some gives it up and waits."""
        for place in reversed(range(len(every))):
            if self._pool.finish(every[place].rid):
                self.waiting.append(every.pop(place))
                return

    def _roomy(self, request: FakeRequest) -> bool:
        return self._pool.hold(request.rid, len(request.prompt) + len(request.output) + 1)


def add_flush(app: web.Application, pool: TokenPool) -> None:
    """SGLang's route that forgets finished turns; 400 while others run."""

    async def flush(_: web.Request) -> web.Response:
        return web.Response(status=200 if pool.flush() else 400)

    app.router.add_post("/flush_cache", flush)
