"""The turn clock of agents' sandboxes: their hosts are told of turns, and no turn waits for it.

| told | when | with |
|---|---|---|
| ``turn`` | a turn of the session came, and none ran | its prompt, and the expected wait |
| ``ready`` | the last of its turns ended, however | |
| ``ended`` | its caller or its trainer says that the session is over | all its tokens |

Each session has a line of what is still to be told, in order, and one call at a time. Before a turn
is told the host is asked for its moment (``etag``). If no reply was there yet when the answer came,
nothing that the agent does on one is in that moment, and the host takes the turn in no other one
(``If-Match``), however long the call is on its way. A turn whose reply was there is not told: what
it changed is saved with the next.

Next step: ``sandbox_hosts`` finds the host and calls it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
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
MOST_TOKENS = 1 << 25
"""Of all sessions with a sandbox, as they stood at the end of their last turns: 128 MiB. Of one
that is forgotten the record of its end is bound to no tokens."""


History = Callable[[str, str, Sequence[int]], bytes]
"""What is known of a job's session up to these tokens, for the record of its sandbox; ``branches``
reads it again."""
IsLate = Callable[[], bool]
Body = Callable[[], dict[str, Any]]
"""Of a step: made where there is a host to tell, for a session's history may have 16 MiB."""


class StepOutcome(StrEnum):
    """What became of a step that a session's host was to be told."""

    TOLD = "told"
    UNTOLD = "untold"
    LATE = "late"


class Hosts(Protocol):
    """The sandbox hosts that a router knows."""

    def serve(self, job: str) -> bool:
        """Whether turns of the job have hosts."""
        ...

    async def tell(
        self, job: str, session: str, step: str, body: Body, is_late: IsLate | None = None
    ) -> StepOutcome | None:
        """Tell the session's host a step. Never raises.

        Args:
            job: of the session.
            session: whose.
            step: what is told.
            body: of the step.
            is_late: asked when the host has named its present moment, in which alone it then takes
                the step; None: the moment does not matter.

        Returns:
            Whether it took it; None: no host has the session.
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


def _nothing(_job: str, _session: str, _ids: Sequence[int]) -> bytes:
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
    replies: int


@dataclass(frozen=True)
class _Over:
    body: Body


@dataclass(eq=False)
class _SessionSteps:
    """What a session's host is still to be told.

    Attributes:
        live: turns that run.
        replies: turns that have ended.
        begun: the host has taken the beginning of the turn that runs.
    """

    live: dict[Turn, None] = field(default_factory=dict)
    replies: int = 0
    begun: bool = False
    steps: deque[_Began | _Over | str] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None

    def may_act_on(self, began: _Began) -> bool:
        """Whether the agent may have a reply that was not there when the turn began."""
        return self.replies != began.replies or any(_has_answered(turn) for turn in self.live)


def _has_answered(turn: Turn) -> bool:
    watched = turn.interval == 1  # as it comes: its caller may act before its end
    return turn.is_over or bool(watched and turn.first_token_at)


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
        self._whole: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._held = 0

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
        line.live[turn] = None
        expected = self._turns[turn] = self._expected(turn)
        if len(line.live) == 1:  # a turn beside another is the same wait
            line.steps.append(_Began(turn, expected, line.replies))
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
        if line.begun or name in self._whole:
            self._note_tokens(name, turn)  # of one that failed: its prompt
        del line.live[turn]
        line.replies += 1
        if line.live:
            return
        if line.steps and isinstance(line.steps[-1], _Began):
            line.steps.pop()
            metrics.SANDBOX_STEPS.labels("turn", StepOutcome.LATE).inc()
        else:
            line.steps.append("ready")
        self._start_telling(name, line)

    def end_session(self, trajectory: str) -> None:
        """See ``Listener``."""
        name = self._name(trajectory)
        line = self._lines.get(name)
        if not name[1] or not self._hosts.serve(name[0]) or (line is not None and line.live):
            return
        if line is None and len(self._lines) >= MOST_LINES:
            metrics.SANDBOX_STEPS.labels("ended", "skipped").inc()
            return
        if line is None:
            line = self._lines[name] = _SessionSteps()
        line.steps.append(self._end(name))
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
                    body, is_late = self._body(name, step), partial(line.may_act_on, step)
                    told = await self._tell_host(name, "turn", body, is_late)
                    line.begun = told is StepOutcome.TOLD
                elif isinstance(step, _Over):
                    await self._tell_host(name, "ended", step.body)
                    line.begun = False
                elif line.begun:
                    await self._tell_host(name, step, dict)
                    line.begun = False
        finally:
            line.task = None
            self._drop_if_idle(name, line)

    async def _tell_host(
        self, name: tuple[str, str], step: str, body: Body, is_late: IsLate | None = None
    ) -> StepOutcome:
        tracing = self._tracing
        span = tracing.begin_step(named(*name), step) if tracing is not None else None
        found = await self._hosts.tell(*name, step, body, is_late)
        if span is not None and found is not None:
            # One that is never ended is never exported: most trajectories have no sandbox.
            span.set_attribute("rose.sandbox.took", found is StepOutcome.TOLD)
            span.end()
        outcome = found or StepOutcome.UNTOLD
        metrics.SANDBOX_STEPS.labels(step, outcome).inc()
        return outcome

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
            "history": self._history(*name, began.turn.request.prompt),
        }

    def _end(self, name: tuple[str, str]) -> _Over:
        """Forget a session, but for what its host is told at its end."""
        versions, ids = tuple(self._versions.pop(name, ())), self._whole.pop(name, None)
        if ids is None:
            return _Over(dict)
        self._held -= len(ids)
        return _Over(
            lambda: {
                "ids": ids.tolist(),
                "weight_versions": versions,
                "history": self._history(*name, ids),
            }
        )

    def _note_tokens(self, name: tuple[str, str], turn: Turn) -> None:
        made = array("I", turn.request.prompt)
        made.extend(turn.shown().tokens)
        self._held += len(made) - len(self._whole.pop(name, ()))
        self._whole[name] = made
        while self._held > MOST_TOKENS:
            _, old = self._whole.popitem(last=False)
            self._held -= len(old)

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
