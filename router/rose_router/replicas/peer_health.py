"""Whether the other replicas answer: a replica that hangs keeps its connections and says nothing.

    answers --``MISSES`` questions in a row without an answer--> silent --one answer--> answers

Each replica is asked every ``BEAT_SECONDS`` and has ``ANSWER_SECONDS``; an answer is written by the
same loop that runs its turns. What waits for one that goes silent ends with ``TimeoutError``, as if
the connection had broken. Questions are counted, not seconds: a replica that was itself held up
must not take all the others for gone.

When this replica ends, so does what waits for the others: its callers are told to ask again.

Next: ``relay`` waits inside ``awaiting``; ``peers`` gives trajectories of silent ones to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from rose_router.errors import draining

LOG = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
ANSWER_SECONDS = 2.0
MISSES = 2

Ask = Callable[[str], Awaitable[bool]]


class PeerHealth:
    """Who answers.

    Args:
        ask: whether the replica of that name answers; it is given ``ANSWER_SECONDS``.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._misses: dict[str, int] = {}
        self._waiting: dict[str, set[asyncio.Timeout]] = {}
        self._over = False

    def silent(self, name: str) -> bool:
        """Whether it has left too many questions in a row without an answer."""
        return self._misses.get(name, 0) >= MISSES

    @contextlib.asynccontextmanager
    async def awaiting(self, name: str) -> AsyncIterator[None]:
        """Wait for that replica in here.

        Raises:
            TimeoutError: it is silent, or went silent meanwhile.
            Overloaded: this replica ends.
        """
        try:
            async with asyncio.timeout(0 if self._over or self.silent(name) else None) as scope:
                waiting = self._waiting.setdefault(name, set())
                waiting.add(scope)
                try:
                    yield
                finally:
                    waiting.discard(scope)
        except TimeoutError:
            if self._over:
                raise draining() from None
            raise

    def end(self) -> None:
        """Wait for nobody any more."""
        self._over = True
        for name in self._waiting:
            self._end_waiting(name)

    async def beat(self, names: Iterable[str]) -> None:
        """Ask each of them once; those not named are forgotten."""
        asked = list(names)
        for gone in self._misses.keys() - set(asked):
            del self._misses[gone]
        await asyncio.gather(*(self._question(name) for name in asked))

    async def _question(self, name: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answered = await self._ask(name)
        except TimeoutError:
            answered = False
        before = self.silent(name)
        self._misses[name] = 0 if answered else self._misses.get(name, 0) + 1
        if self.silent(name) == before:
            return
        LOG.warning("replica %s %s", name, "answers again" if before else "does not answer")
        if not before:
            self._end_waiting(name)

    def _end_waiting(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        for scope in self._waiting.get(name, ()):
            scope.reschedule(now)
