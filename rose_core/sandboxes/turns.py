"""The turn clock of a sandbox, and the states that its turns lead through.

| state | by | next |
|---|---|---|
| Acting | ``began`` (the agent waits for the model) | Waiting |
| Waiting | ``saving`` | Saving |
| Waiting | ``ready`` (tokens are there) | Acting |
| Saving | ``stored`` | Waiting; Acting where ``ready`` came meanwhile |
| Saving | ``ready`` | Saving: the reply is held, ``HOLD_SECONDS`` at most |
| Saving | ``failed`` | as ``stored``, with no new record |
| Waiting, Saving | ``suspended`` | Suspended |
| Waiting, Saving | ``died`` | as ``failed``; what was being suspended and may be gone: Suspended |
| Suspended | ``resumed`` | Waiting; Acting where ``ready`` came meanwhile |
| any | ``ended`` | Ended |

A reply that was not held long enough says so: ``recoverable_to`` stays at the turn before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from rose_core.sandboxes.policy import Wait

HOLD_SECONDS = 2.0
"""A reply is held this long at most: twice the slowest tenth of full checkpoints of 100 MB."""


class Phase(StrEnum):
    """What a sandbox is doing, as the clock of its turns sees it."""

    ACTING = "acting"
    WAITING = "waiting"
    SAVING = "saving"
    SUSPENDED = "suspended"
    ENDED = "ended"


class OutOfTurn(Exception):
    """A step that the present state does not have; the text says both."""


@dataclass(frozen=True)
class Clock:
    """Where a sandbox stands in its trajectory.

    Attributes:
        phase: its state.
        turn: boundaries so far.
        saved: the newest turn with a durable record.
        expected: when the reply is expected, on the caller's clock; None: not known.
        wait: as told when the turn began.
        ready_at: when tokens were there while the sandbox was not; None: they are not.
    """

    phase: Phase = Phase.ACTING
    turn: int = 0
    saved: int = 0
    expected: float | None = None
    wait: Wait | None = None
    ready_at: float | None = None

    def begin_wait(self, now: float, wait: Wait | None = None) -> Clock:
        """Begin to wait for the model, which the agent has asked: a boundary."""
        self._must(Phase.ACTING)
        expected = now + wait.seconds if wait is not None else None
        return replace(
            self,
            phase=Phase.WAITING,
            turn=self.turn + 1,
            expected=expected,
            wait=wait,
            ready_at=None,
        )

    def ready(self, now: float) -> Clock:
        """The model has answered."""
        self._must(Phase.WAITING, Phase.SAVING, Phase.SUSPENDED)
        if self.phase is Phase.WAITING:
            return replace(self, phase=Phase.ACTING, expected=None)
        return replace(self, ready_at=now if self.ready_at is None else self.ready_at)

    def saving(self) -> Clock:
        """A checkpoint of this boundary begins."""
        self._must(Phase.WAITING)
        return replace(self, phase=Phase.SAVING)

    def stored(self) -> Clock:
        """The record of this boundary is durable."""
        self._must(Phase.SAVING, Phase.WAITING)
        return self._on(replace(self, saved=self.turn))

    def failed(self) -> Clock:
        """There is no record of this boundary."""
        self._must(Phase.SAVING)
        return self._on(self)

    def abandon(self, *, suspending: bool = False) -> Clock:
        """Give a boundary up that ended by an unforeseen error; there is no record of it.

        Args:
            suspending: its processes may be gone: whoever needs it brings it back first.
        """
        if self.phase not in {Phase.WAITING, Phase.SAVING}:
            return self
        return replace(self, phase=Phase.SUSPENDED) if suspending else self._on(self)

    def suspended(self) -> Clock:
        """Its memory is free; the record of this boundary is durable."""
        self._must(Phase.WAITING, Phase.SAVING)
        return replace(self, phase=Phase.SUSPENDED, saved=self.turn)

    def resumed(self) -> Clock:
        """It runs again."""
        self._must(Phase.SUSPENDED)
        return self._on(self)

    def ended(self) -> Clock:
        """It is gone, and may be from any state."""
        return replace(self, phase=Phase.ENDED)

    def released(self, now: float) -> bool:
        """Whether a reply may go to the agent now."""
        if self.phase is Phase.ACTING:
            return True
        late = self.ready_at is not None and now - self.ready_at >= HOLD_SECONDS
        return self.phase is Phase.SAVING and late

    @property
    def recoverable_to(self) -> int:
        """The newest turn that survives the loss of the host."""
        return self.saved

    def _on(self, clock: Clock) -> Clock:
        if clock.ready_at is not None:
            return replace(clock, phase=Phase.ACTING, expected=None, ready_at=None)
        return replace(clock, phase=Phase.WAITING)

    def _must(self, *phases: Phase) -> None:
        if self.phase not in phases:
            wanted = " or ".join(phases)
            raise OutOfTurn(f"turn {self.turn} is {self.phase}; this step needs {wanted}")
