"""A slot's calls to the engine host, and whether it holds the engine: asked, confirmed, corrected.

The guard repeats an order until it sees the effect. A repetition that comes while the call before
it is still unanswered starts nothing. A hold is the one kind of call that a change of mind cancels:
the host answers a hold only once every thread stands still, which may take long on a busy core. The
guard does not wait for that. A stop that takes longer than the request it was for counts all the
same, as long as it was waited for: those are the longest ones, and the certificate learns of them.

| state | seen | next | call |
|---|---|---|---|
| any | an order for the other side | Asked | the unanswered call is cancelled, a new one made |
| the same, of a hold for a request | | | its stop is reported as not answered |
| Asked | the answer to what is wanted now | Confirmed | |
| Asked | the call failed | Asked | made again at the next order |
| any, no call under way | the host's list, newer than the last answer | Confirmed: as listed | |
| any | ``forget``: another permit, an engine ordered anew | Asked | made again at the next order |

Should an answer cross a change of mind, the host's list puts it right. Next step: ``slot`` orders,
``hostlink`` makes the call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rose_core.guard.ladder import LadderLimits
from rose_core.wire.host import Accepted
from rose_wire.errors import WireError

_KIND = "hold"


class Calls:
    """The calls of one slot.

    Args:
        on_end: called after every call that has ended, with what went wrong; empty if nothing.
    """

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
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
        self._on_end(problem)


@dataclass(frozen=True)
class ConfirmedHold:
    """A hold that the host has confirmed; nanoseconds of CLOCK_MONOTONIC.

    Attributes:
        arrival_ns: first segment of the request that it was ordered for.
        confirmed_ns: when the answer came.
        paused_us: how long the host took until every thread stood still, microseconds.
        turns: of the engine, under way when the hold was asked for; None = the host did not say.
        answered: False: the gate opened again at ``confirmed_ns``, and no answer had come. Of a
            hold that was late for the guard (``LadderLimits.hold_ns``) it is that much: by then
            the guard has frozen the engine itself.
    """

    arrival_ns: int
    confirmed_ns: int
    paused_us: int
    turns: int | None = None
    answered: bool = True

    @property
    def after_ns(self) -> int:
        """From the arrival to the answer."""
        return self.confirmed_ns - self.arrival_ns


class Hold:
    """The guard's hold on one slot's engine; single-threaded.

    Args:
        calls: the slot's calls.
        ask: asks the host to hold (True) or to let go. Raises ``WireError``.
        on_stop: called when a hold that a request has caused is confirmed, or given up.

    Attributes:
        confirmed: the host holds the engine (True) or does not (False); None = not known.
    """

    def __init__(
        self,
        calls: Calls,
        ask: Callable[[bool], Awaitable[Accepted]],
        on_stop: Callable[[ConfirmedHold], None],
    ) -> None:
        self.confirmed: bool | None = None
        self._calls, self._ask, self._on_stop = calls, ask, on_stop
        self._wanted: bool | None = None
        self._arrival_ns = 0
        self._answered_ns = 0

    @property
    def is_pending(self) -> bool:
        """Whether the host was asked to hold and has not answered: it may hold by now."""
        return self.confirmed is None and self._wanted is True

    def order(self, *, hold: bool, arrival_ns: int = 0) -> None:
        """Hold the engine, or let go; ``arrival_ns`` is the request that caused it, 0 = none."""
        if self._wanted is not hold:
            self._give_up()
            self._wanted, self._arrival_ns, self.confirmed = hold, arrival_ns, None
            self._calls.cancel(_KIND)
        self._calls.start(_KIND, self._until_confirmed)

    def believe(self, *, held: bool, asked_ns: int) -> None:
        """Take the state in the host's list, if it was asked for after the last answer."""
        if not self._calls.is_under_way(_KIND) and asked_ns > self._answered_ns:
            self.confirmed = self._wanted = held
            self._arrival_ns = 0  # whenever it came to that, it was before the list

    def forget(self) -> None:
        """Ask again before believing anything: the host may be another one."""
        self.confirmed = None

    def _give_up(self) -> None:
        """Report the stop that was ordered for a request, where no answer has come of it."""
        if self._wanted and self._arrival_ns:
            latest_ns = self._arrival_ns + LadderLimits().hold_ns
            until_ns = min(time.monotonic_ns(), latest_ns)
            self._on_stop(ConfirmedHold(self._arrival_ns, until_ns, 0, answered=False))

    async def _until_confirmed(self) -> None:
        while self._wanted is not None and self.confirmed is not self._wanted:
            wanted, arrival_ns = self._wanted, self._arrival_ns
            answer = await self._ask(wanted)
            now_ns = time.monotonic_ns()
            if wanted is self._wanted:
                self.confirmed, self._answered_ns = wanted, now_ns
            if wanted and arrival_ns:
                self._arrival_ns = 0  # a new host's answer says nothing of how soon this one was
                paused_us, turns = answer.paused_microseconds, answer.turns
                self._on_stop(ConfirmedHold(arrival_ns, now_ns, paused_us, turns))
