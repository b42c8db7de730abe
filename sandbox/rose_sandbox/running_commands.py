"""Commands with a name: each runs once, and to its end, whether its caller waits for it or not.

Next step: ``host`` keeps how they ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rose_sandbox.runtimes.runtime import ExecResult


class RunningCommands:
    """Those of a host that run now."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[ExecResult]] = set()

    async def run(self, doing: Coroutine[Any, Any, ExecResult]) -> ExecResult:
        """Wait for one, which a cancelled call leaves running."""
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._has_run)
        return await asyncio.shield(task)

    def _has_run(self, task: asyncio.Task[ExecResult]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have gone, and who asks again is told anew

    async def close(self) -> None:
        """Kill them."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
