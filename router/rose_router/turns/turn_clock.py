"""The turn clock of agents' sandboxes: their hosts are told of turns, and no turn waits for it.

| told | when | with |
|---|---|---|
| ``turn`` | a turn of the session came, and none ran | its prompt, and the expected wait |
| ``ready`` | the last of its turns ended, however | |
| ``ended`` | its caller or its trainer says that the session is over | |

Each session has a line of what is still to be told, in order, and one call at a time. A turn that
has ended before its beginning was told is not told at all: what it changed is saved with the next.

Next step: ``sandbox_hosts`` finds the host and calls it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rose_core.rollouts.capacity.reply_time import Trust
from rose_router import metrics
from rose_router.turns.request import named
from rose_router.turns.turn import Turn

if TYPE_CHECKING:
    from rose_router.turns.tracing import Tracing

MOST_LINES = 1024
"""Sessions with something to tell, at a time: beyond that hosts do not keep up."""
MOST_SESSIONS = 65536
"""Whose versions are remembered; of one forgotten a record names those since."""


History = Callable[[Turn], bytes]
"""A turn's session up to its prompt, for the record of its sandbox; ``branches`` reads it again."""
Body = Callable[[], dict[str, Any]]
"""Of a step: made where there is a host to tell, for a session's history may have 16 MiB."""


class Hosts(Protocol):
    """The sandbox hosts that a router knows."""

    def serve(self, job: str) -> bool:
        """Whether turns of the job have hosts."""
        ...

    async def tell(self, job: str, session: str, step: str, body: Body) -> bool | None:
        """Tell the session's host a step: whether it took it, None where no host has it.

        Never raises.
        """
        ...


class Listener(Protocol):
    """Hears of turns; returns at once."""

    def begin_turn(self, turn: Turn) -> None:
        """A turn has come."""
        ...

    def end_turn(self, turn: Turn) -> None:
        """A turn has ended."""
        ...

    def end_session(self, trajectory: str) -> None:
        """A trajectory is over: its session's name, within its job."""
        ...

    def remember(self, history: History) -> None:
        """From now on tell what is known of a turn's session, too."""
        ...

    async def close(self) -> None:
        """Tell nobody any more."""
        ...


def _nothing(_turn: Turn) -> bytes:
    return b""


class Nobody:
    """There are no sandbox hosts."""

    def begin_turn(self, turn: Turn) -> None:
        """See ``Listener``; so for all of these."""

    def end_turn(self, turn: Turn) -> None:
        """See ``Listener``."""

    def end_session(self, trajectory: str) -> None:
        """See ``Listener``."""

    def remember(self, history: History) -> None:
        """See ``Listener``."""

    async def close(self) -> None:
        """See ``Listener``."""


@dataclass(frozen=True)
class _Began:
    turn: Turn
    seconds: float | None


@dataclass(eq=False)
class _SessionSteps:
    """What a session's host is still to be told.

    Attributes:
        live: turns that run.
        begun: the host has taken the beginning of the turn that runs.
    """

    live: int = 0
    begun: bool = False
    steps: deque[_Began | str] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None


class TurnClock:
    """Tells hosts of turns.

    Args:
        hosts: whom.
        expected: seconds until a turn's reply; None: not known.
        clock: monotonic seconds.
        tracing: makes spans of what hosts are told; ``None`` = nobody wants them.
    """

    def __init__(
        self,
        hosts: Hosts,
        expected: Callable[[Turn], float | None],
        clock: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        self._hosts, self._expected, self._clock = hosts, expected, clock
        self._tracing = tracing
        self._history: History = _nothing
        self.trust = Trust()
        self._lines: dict[tuple[str, str], _SessionSteps] = {}
        self._turns: dict[Turn, float | None] = {}
        self._versions: OrderedDict[tuple[str, str], dict[str, None]] = OrderedDict()

    def begin_turn(self, turn: Turn) -> None:
        """See ``Listener``."""
        name = _session_name(turn)
        if not name[1] or not self._hosts.serve(name[0]):
            return
        line = self._lines.get(name)
        if line is None and len(self._lines) >= MOST_LINES:
            metrics.SANDBOX_STEPS.labels("turn", "skipped").inc()
            return
        if line is None:
            line = self._lines[name] = _SessionSteps()
        line.live += 1
        expected = self._turns[turn] = self._expected(turn)
        if line.live == 1:  # a turn beside another is the same wait
            line.steps.append(_Began(turn, expected))
            self._start_telling(name, line)

    def end_turn(self, turn: Turn) -> None:
        """See ``Listener``."""
        if turn not in self._turns:
            return
        expected, name = self._turns.pop(turn), _session_name(turn)
        if expected is not None:
            self.trust.note(expected, self._clock() - turn.began)
        self._note_versions(name, turn)
        line = self._lines[name]
        line.live -= 1
        if line.live:
            return
        if line.steps and isinstance(line.steps[-1], _Began):
            line.steps.pop()
            metrics.SANDBOX_STEPS.labels("turn", "late").inc()
        else:
            line.steps.append("ready")
        self._start_telling(name, line)

    def end_session(self, trajectory: str) -> None:
        """See ``Listener``."""
        name = self._name(trajectory)
        self._versions.pop(name, None)
        line = self._lines.get(name)
        if not name[1] or not self._hosts.serve(name[0]) or (line is not None and line.live):
            return
        if line is None and len(self._lines) >= MOST_LINES:
            metrics.SANDBOX_STEPS.labels("ended", "skipped").inc()
            return
        if line is None:
            line = self._lines[name] = _SessionSteps()
        line.steps.append("ended")
        self._start_telling(name, line)

    def remember(self, history: History) -> None:
        """See ``Listener``."""
        self._history = history

    async def close(self) -> None:
        """Tell nobody any more."""
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lines.clear()

    def _name(self, trajectory: str) -> tuple[str, str]:
        job, mark, session = trajectory.partition("/")
        return (job, session) if mark and self._hosts.serve(job) else ("", trajectory)

    def _start_telling(self, name: tuple[str, str], line: _SessionSteps) -> None:
        if line.task is None and line.steps:
            line.task = asyncio.create_task(self._tell(name, line))
        self._drop_if_idle(name, line)

    async def _tell(self, name: tuple[str, str], line: _SessionSteps) -> None:
        try:
            while line.steps:
                step = line.steps.popleft()
                if isinstance(step, _Began):
                    line.begun = await self._tell_host(name, "turn", self._body(name, step))
                elif step == "ended" or line.begun:
                    await self._tell_host(name, step, dict)
                    line.begun = False
        finally:
            line.task = None
            self._drop_if_idle(name, line)

    async def _tell_host(self, name: tuple[str, str], step: str, body: Body) -> bool:
        tracing = self._tracing
        span = tracing.begin_step(named(*name), step) if tracing is not None else None
        took = await self._hosts.tell(*name, step, body)
        if span is not None and took is not None:
            # One that is never ended is never exported: most trajectories have no sandbox.
            span.set_attribute("rose.sandbox.took", took)
            span.end()
        metrics.SANDBOX_STEPS.labels(step, "told" if took else "untold").inc()
        return bool(took)

    def _drop_if_idle(self, name: tuple[str, str], line: _SessionSteps) -> None:
        idle = not line.live and not line.steps and line.task is None
        if idle and self._lines.get(name) is line:
            del self._lines[name]

    def _body(self, name: tuple[str, str], began: _Began) -> Body:
        seconds, wait = began.seconds, None
        if seconds is not None:
            wait = {"seconds": round(seconds, 3), "confidence": round(self.trust.confidence, 3)}
        versions = tuple(self._versions.get(name, ()))  # before this turn's own
        return lambda: {
            "ids": began.turn.request.prompt,
            "weight_versions": versions,
            "wait": wait,
            "history": self._history(began.turn),
        }

    def _note_versions(self, name: tuple[str, str], turn: Turn) -> None:
        known = self._versions.setdefault(name, {})
        known.update((span.version, None) for span in turn.transcript.spans)
        self._versions.move_to_end(name)
        if len(self._versions) > MOST_SESSIONS:
            self._versions.popitem(last=False)


def _session_name(turn: Turn) -> tuple[str, str]:
    """Job and session by its caller's name."""
    job, session = turn.request.job, turn.request.session
    return job, session.removeprefix(f"{job}/") if job else session
