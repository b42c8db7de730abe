"""A slot's calls to the engine host: at most one of each kind is under way.

The guard repeats an order until it sees the effect. A repetition that comes while the call before
it is still unanswered starts nothing. Next step: ``slot`` starts calls, ``hostlink`` makes them,
``hold`` has the one kind that a change of mind cancels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rose_wire.errors import WireError


class Calls:
    """The calls of one slot.

    Args:
        ended: called after every call that came to its end, with what went wrong; empty if nothing.
    """

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """The last call of each kind, whether it is under way or not."""
        return tuple(self._tasks.values())

    def is_under_way(self, kind: str) -> bool:
        """A call of this kind has not been answered yet."""
        task = self._tasks.get(kind)
        return task is not None and not task.done()

    def start(self, kind: str, work: Callable[[], Awaitable[None]]) -> None:
        """Start a call, unless one of its kind is under way; returns at once."""
        if not self.is_under_way(kind):
            self._tasks[kind] = asyncio.create_task(self._run(kind, work))

    def cancel(self, kind: str) -> None:
        """Stop waiting for the answer; the host may carry the call out all the same."""
        task = self._tasks.pop(kind, None)
        if task is not None:
            task.cancel()

    async def _run(self, kind: str, work: Callable[[], Awaitable[None]]) -> None:
        problem = ""
        try:
            await work()
        except WireError as error:
            problem = f"{kind}: {error}"
        self._ended(problem)
