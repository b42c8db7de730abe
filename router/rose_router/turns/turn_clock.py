"""The turn clock of agents' sandboxes: their hosts are notified of turns, and no turn waits for it.

| told | when | with |
|---|---|---|
| ``turn`` | a turn of the session came, and none ran | its prompt, and the expected wait |
| ``ready`` | the last of its turns ended, however | |
| ``ended`` | its caller or its trainer says that the session is over | all its tokens |

Each session has a line of what is still to be told, in order, and one call at a time. Before a turn
is told the host is asked for its moment (``etag``), and how long its agent has done nothing. If no
reply was there yet when the answer came, or the agent has done nothing since the first one was
there, nothing that it does on one is in that moment, and the host takes the turn in no other one
(``If-Match``), however long the call is on its way. Of any other turn the host only hears that it
was: what it changed is saved with the next, and no older tokens are those of the session any more.

Several replicas of a router tell one host, each what it knows. So with the tokens of a session's
end goes which of them were its last prompt, by which the host sees who missed a later turn.

Next step: ``sandbox_hosts`` finds the host and calls it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
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
Body = Callable[[], dict[str, Any]]
"""Of a step: made where there is a host to tell, for a session's history may have 16 MiB."""
_RATE = 0.999
"""Clocks of two machines run as fast as each other, to a thousandth: NTP sets by half of that."""
_STEP = 0.001
"""Seconds between a reply that is there and the time that is noted for it, amply."""


@dataclass(frozen=True)
class TurnLateness:
    """When a turn can have no record any more.

    Attributes:
        judge: asked when the host has named its present moment, in which alone it then takes the
            turn, with the seconds since the last act of its agent began; None: it does not say.
        body: of the turn, if it can have none.
    """

    judge: Callable[[float | None], bool]
    body: Body


class StepOutcome(StrEnum):
    """What became of a step that a session's host was to be told."""

    DELIVERED = "told"
    UNDELIVERED = "untold"
    LATE = "late"


class NotifiedHosts(Protocol):
    """The sandbox hosts that a router knows."""

    def serves(self, job: str) -> bool:
        """Whether turns of the job have hosts."""
        ...

    async def notify(
        self,
        job: str,
        session: str,
        step: str,
        body: Body,
        *,
        lateness: TurnLateness | None = None,
        prompt: int | None = None,
    ) -> StepOutcome | None:
        """Tell the session's host a step. Never raises.

        Args:
            job: of the session.
            session: whose.
            step: that is delivered.
            body: of the step.
            lateness: of a turn; None: the moment does not matter.
            prompt: how many of the ids of a session's end were its last prompt.

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

    def forget(self, trajectory: str) -> None:
        """A trajectory goes on from an earlier turn: the tokens of its last one are not its own."""
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

    def forget(self, trajectory: str) -> None:
        """See ``Listener``."""

    def remember(self, history: History) -> None:
        """See ``Listener``."""

    async def close(self) -> None:
        """See ``Listener``."""


@dataclass(eq=False)
class _Began:
    """A turn whose beginning is to be told; ``replied_at`` is when a reply was first there."""

    turn: Turn
    seconds: float | None
    versions: tuple[str, ...]
    replied_at: float | None = None


@dataclass(frozen=True)
class _Over:
    whole: _Whole | None
    body: Body


@dataclass(eq=False)
class _Whole:
    """All tokens of a session, as its last turn here left them.

    Attributes:
        ids: of the turn's prompt and what it made.
        prompt: how many of them are its prompt.
        is_delivered: a host has been notified of the turn.
    """

    ids: array[int]
    prompt: int
    is_delivered: bool = True


@dataclass(eq=False)
class _SessionSteps:
    """What a session's host is still to be told.

    Attributes:
        live: turns that run.
        begun: the host has taken the beginning of the turn that runs.
        delivering: the beginning that is on its way.
        last: as the last turn that has ended left the session.
        is_delivered: a host has been notified of the turn that began last.
    """

    live: dict[Turn, None] = field(default_factory=dict)
    begun: bool = False
    steps: deque[_Began | _Over | str] = field(default_factory=deque)
    delivering: _Began | None = None
    last: _Whole | None = None
    is_delivered: bool = False
    task: asyncio.Task[None] | None = None

    def note_reply(self, at: float | None) -> None:
        """A turn has ended: of all that began before, this may be the first reply."""
        began = [self.delivering, *(one for one in self.steps if isinstance(one, _Began))]
        for one in began:
            if one is not None and one.replied_at is None:
                one.replied_at = at

    def replied_at(self, began: _Began) -> float | None:
        """When the agent may first have had a reply that was not there when the turn began."""
        times = [_replied_at(turn) for turn in self.live]
        return min((at for at in (began.replied_at, *times) if at is not None), default=None)


def _replied_at(turn: Turn) -> float | None:
    """When a turn's reply was there; of one that its caller reads as it comes, its beginning."""
    if turn.interval == 1 and turn.first_token_at:
        return turn.first_token_at
    return turn.ended if turn.is_over else None


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
        hosts: NotifiedHosts,
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
        self._whole: OrderedDict[tuple[str, str], _Whole] = OrderedDict()
        self._held = 0

    def begin_turn(self, turn: Turn) -> None:
        """See ``Listener``."""
        name = _session_name(turn)
        if not name[1] or not self._hosts.serves(name[0]):
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
            self._leave_out(line)
            versions = tuple(self._versions.get(name, ()))  # before this turn's own
            line.steps.append(_Began(turn, expected, versions))
            self._start_delivery(name, line)

    def _leave_out(self, line: _SessionSteps) -> None:
        """A turn that nobody has heard of, when the next one comes, is saved with that."""
        if len(line.steps) > 1 and line.steps[-1] == "ready" and isinstance(line.steps[-2], _Began):
            line.steps.pop()
            line.steps.pop()
            metrics.SANDBOX_STEPS.labels("turn", StepOutcome.LATE).inc()

    def end_turn(self, turn: Turn) -> None:
        """See ``Listener``."""
        if turn not in self._turns:
            return
        expected, name = self._turns.pop(turn), _session_name(turn)
        if expected is not None:
            self.trust.note(expected, self._clock() - turn.began)
        self._note_versions(name, turn)
        line = self._lines[name]
        ids = array("I", turn.request.prompt)
        ids.extend(turn.shown().tokens)  # of one that failed: its prompt
        line.last = _Whole(ids, len(turn.request.prompt), line.is_delivered)
        if line.begun or name in self._whole:
            self._note_tokens(name, line.last)
        line.note_reply(_replied_at(turn))
        del line.live[turn]
        if line.live:
            return
        line.steps.append("ready")
        self._start_delivery(name, line)

    def end_session(self, trajectory: str) -> None:
        """See ``Listener``."""
        name = self._name(trajectory)
        line = self._lines.get(name)
        if not name[1] or not self._hosts.serves(name[0]) or (line is not None and line.live):
            return
        if line is None and len(self._lines) >= MOST_LINES:
            metrics.SANDBOX_STEPS.labels("ended", "skipped").inc()
            return
        if line is None:
            line = self._lines[name] = _SessionSteps()
        line.steps.append(self._end(name, line))
        self._start_delivery(name, line)

    def forget(self, trajectory: str) -> None:
        """See ``Listener``."""
        name = self._name(trajectory)
        if (line := self._lines.get(name)) is not None:
            line.last = None
        if (whole := self._whole.pop(name, None)) is not None:
            self._held -= len(whole.ids)

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
        return (job, session) if mark and self._hosts.serves(job) else ("", trajectory)

    def _start_delivery(self, name: tuple[str, str], line: _SessionSteps) -> None:
        if line.task is None and line.steps:
            line.task = asyncio.create_task(self._deliver(name, line))
        self._drop_if_idle(name, line)

    async def _deliver(self, name: tuple[str, str], line: _SessionSteps) -> None:
        try:
            while line.steps:
                step = line.steps.popleft()
                if isinstance(step, _Began):
                    await self._deliver_beginning(name, line, step)
                elif isinstance(step, _Over):
                    await self._deliver_end(name, step)
                    line.begun = False
                elif line.begun:
                    await self._notify(name, step, dict)
                    line.begun = False
        finally:
            line.task = None
            self._drop_if_idle(name, line)

    async def _deliver_beginning(
        self, name: tuple[str, str], line: _SessionSteps, began: _Began
    ) -> None:
        def is_late(still: float | None) -> bool:
            at = line.replied_at(began)
            if at is None:
                return False
            # By durations alone: when on this clock the agent's last act began at the latest.
            return still is None or still * _RATE - _STEP <= self._clock() - at

        line.delivering = began
        prompt = began.turn.request.prompt
        lateness = TurnLateness(is_late, lambda: {"ids": prompt})
        try:
            found = await self._notify(name, "turn", self._body(name, line, began), lateness)
        finally:
            line.delivering = None
        line.begun = found is StepOutcome.DELIVERED
        line.is_delivered = found in {StepOutcome.DELIVERED, StepOutcome.LATE}
        if found is not None and (last := line.last or self._whole.get(name)) is not None:
            last.is_delivered = line.is_delivered
            self._note_tokens(name, last)

    async def _deliver_end(self, name: tuple[str, str], over: _Over) -> None:
        whole = over.whole
        if whole is not None and not whole.is_delivered:
            # Or the host would take these for tokens of a turn that another one came after.
            prompt = whole.ids[: whole.prompt].tolist()
            lateness = TurnLateness(lambda _: True, lambda: {"ids": prompt})
            await self._hosts.notify(*name, "turn", dict, lateness=lateness)
        prompt_length = None if whole is None else whole.prompt
        await self._notify(name, "ended", over.body, prompt=prompt_length)

    async def _notify(
        self,
        name: tuple[str, str],
        step: str,
        body: Body,
        lateness: TurnLateness | None = None,
        prompt: int | None = None,
    ) -> StepOutcome | None:
        tracing = self._tracing
        span = tracing.begin_step(named(*name), step) if tracing is not None else None
        found = await self._hosts.notify(*name, step, body, lateness=lateness, prompt=prompt)
        if span is not None and found is not None:
            # One that is never ended is never exported: most trajectories have no sandbox.
            span.set_attribute("rose.sandbox.took", found is StepOutcome.DELIVERED)
            span.end()
        metrics.SANDBOX_STEPS.labels(step, found or StepOutcome.UNDELIVERED).inc()
        return found

    def _drop_if_idle(self, name: tuple[str, str], line: _SessionSteps) -> None:
        idle = not line.live and not line.steps and line.task is None
        if idle and self._lines.get(name) is line:
            del self._lines[name]

    def _body(self, name: tuple[str, str], line: _SessionSteps, began: _Began) -> Body:
        seconds, wait = began.seconds, None
        if seconds is not None:
            wait = {"seconds": round(seconds, 3), "confidence": round(self.trust.confidence, 3)}
        return lambda: {
            "ids": began.turn.request.prompt,
            "weight_versions": began.versions,
            "wait": wait if line.replied_at(began) is None else None,  # there is none any more
            "history": self._history(*name, began.turn.request.prompt),
        }

    def _end(self, name: tuple[str, str], line: _SessionSteps) -> _Over:
        """Forget a session, but for what its host is told at its end."""
        versions, whole = tuple(self._versions.pop(name, ())), self._whole.pop(name, None)
        if whole is not None:
            self._held -= len(whole.ids)
        whole, line.last = line.last or whole, None
        if whole is None:
            return _Over(None, dict)
        ids = whole.ids
        return _Over(
            whole,
            lambda: {
                "ids": ids.tolist(),
                "weight_versions": versions,
                "history": self._history(*name, ids),
            },
        )

    def _note_tokens(self, name: tuple[str, str], whole: _Whole) -> None:
        before = self._whole.pop(name, None)
        self._held += len(whole.ids) - (len(before.ids) if before is not None else 0)
        self._whole[name] = whole
        while self._held > MOST_TOKENS:
            _, old = self._whole.popitem(last=False)
            self._held -= len(old.ids)

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
