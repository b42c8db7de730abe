"""Tasks whose first step is taken at once, and not when all that is ready before it has been done.

Engines send the tokens of a batch together. A request that comes beside them would wait for the
whole batch at each task that is made for it, before its engine hears of it. asyncio has such tasks
from Python 3.12 on (``eager_start``), but not for every loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import copy_context
from typing import Any, TypeVar

Made = TypeVar("Made")

PRIVATE_NAMES = ("_enter_task", "_leave_task")
"""What asyncio keeps for loops, and its own eager tasks use."""


def lacking() -> list[str]:
    """Names of ``PRIVATE_NAMES`` that this asyncio has not: first steps are then taken later."""
    return [name for name in PRIVATE_NAMES if not hasattr(asyncio.tasks, name)]


_AT_ONCE = not lacking()


class BegunTask(Coroutine[Any, Any, Made]):
    """A coroutine whose first step is taken by ``begin``; its task goes on from there by itself.

    Whoever looks at the task in that step finds it: it is made before. In its own first step it is
    given what the coroutine has waited for since, or how that has ended.

    Args:
        loop: runs it.
        coroutine: is run.

    Attributes:
        task: runs it.
    """

    __slots__ = ("_context", "_coroutine", "_ended", "_given", "_loop", "_taken", "task")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Made]
    ) -> None:
        self._loop, self._coroutine, self._context = loop, coroutine, copy_context()
        self._taken = False
        self._given: object = None
        self._ended: BaseException | None = None
        self.task: asyncio.Task[Made] = loop.create_task(self, context=self._context)

    def begin(self) -> None:
        """Take the first step; what it raises or returns is the task's."""
        if not _AT_ONCE:
            return
        loop, task, outer = self._loop, self.task, asyncio.current_task()
        if outer is not None:
            asyncio.tasks._leave_task(loop, outer)  # noqa: SLF001  # as asyncio's own begin
        asyncio.tasks._enter_task(loop, task)  # noqa: SLF001
        self._taken = True
        try:
            self._given = self._context.run(self._coroutine.send, None)
        except BaseException as error:  # noqa: BLE001  # the task's; its end is one of them
            self._ended = error
        finally:
            asyncio.tasks._leave_task(loop, task)  # noqa: SLF001
            if outer is not None:
                asyncio.tasks._enter_task(loop, outer)  # noqa: SLF001

    def send(self, value: Any) -> Any:  # noqa: ANN401  # as a coroutine's
        """The task's next step."""
        if not self._taken:
            return self._coroutine.send(value)
        self._taken, given, self._given = False, self._given, None
        if self._ended is not None:
            raise self._ended
        return given

    def throw(self, *error: Any) -> Any:  # noqa: ANN401  # as a coroutine's
        """The same with an error; who has ended in the first step has ended.

        Of a task that is cancelled what it waits for is cancelled, and it hears of it from there.
        """
        given, self._taken, self._given = self._given, False, None
        if self._ended is not None:
            raise self._ended
        cancelled = isinstance(error[0], asyncio.CancelledError)
        if cancelled and isinstance(given, asyncio.Future) and given.cancel():
            return given
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """It is wanted no more."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Made]:
        """What a coroutine has, and no task asks for."""
        return self._coroutine.__await__()
