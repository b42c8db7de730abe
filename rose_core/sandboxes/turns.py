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

from rose_core.sandboxes.policy import ModelWait

HOLD_SECONDS = 2.0
"""A reply is held this long at most: twice the slowest tenth of full checkpoints of 100 MB."""


class SandboxPhase(StrEnum):
    """What a sandbox is doing, as the clock of its turns sees it."""

    ACTING = "acting"
    WAITING = "waiting"
    SAVING = "saving"
    SUSPENDED = "suspended"
    ENDED = "ended"


class OutOfTurn(Exception):
    """A step that the present state does not have; the text says both."""


@dataclass(frozen=True)
class SandboxClock:
    """Where a sandbox stands in its trajectory.

    Attributes:
        phase: its state.
        turn: boundaries so far.
        saved: the newest turn with a durable record.
        expected: when the reply is expected, on the caller's clock; None: not known.
        wait: as told when the turn began.
        ready_at: when tokens were there while the sandbox was not; None: they are not.
        unsaved_since: when the first turn without a record began; None: all have one.
    """

    phase: SandboxPhase = SandboxPhase.ACTING
    turn: int = 0
    saved: int = 0
    expected: float | None = None
    wait: ModelWait | None = None
    ready_at: float | None = None
    unsaved_since: float | None = None

    def begin_wait(self, now: float, wait: ModelWait | None = None) -> SandboxClock:
        """Begin to wait for the model, which the agent has asked: a boundary."""
        self._must(SandboxPhase.ACTING)
        expected = now + wait.seconds if wait is not None else None
        return replace(
            self,
            phase=SandboxPhase.WAITING,
            turn=self.turn + 1,
            expected=expected,
            wait=wait,
            ready_at=None,
            unsaved_since=now if self.unsaved_since is None else self.unsaved_since,
        )

    def ready(self, now: float) -> SandboxClock:
        """The model has answered."""
        self._must(SandboxPhase.WAITING, SandboxPhase.SAVING, SandboxPhase.SUSPENDED)
        if self.phase is SandboxPhase.WAITING:
            return replace(self, phase=SandboxPhase.ACTING, expected=None)
        return replace(self, ready_at=now if self.ready_at is None else self.ready_at)

    def saving(self) -> SandboxClock:
        """A checkpoint of this boundary begins."""
        self._must(SandboxPhase.WAITING)
        return replace(self, phase=SandboxPhase.SAVING)

    def stored(self) -> SandboxClock:
        """The record of this boundary is durable."""
        self._must(SandboxPhase.SAVING, SandboxPhase.WAITING)
        return self._on(replace(self, saved=self.turn, unsaved_since=None))

    def failed(self) -> SandboxClock:
        """There is no record of this boundary."""
        self._must(SandboxPhase.SAVING)
        return self._on(self)

    def abandon(self, *, suspending: bool = False) -> SandboxClock:
        """Give a boundary up that ended by an unforeseen error; there is no record of it.

        Args:
            suspending: its processes may be gone: whoever needs it brings it back first.
        """
        if self.phase not in {SandboxPhase.WAITING, SandboxPhase.SAVING}:
            return self
        return replace(self, phase=SandboxPhase.SUSPENDED) if suspending else self._on(self)

    def suspended(self) -> SandboxClock:
        """Its memory is free; the record of this boundary is durable."""
        self._must(SandboxPhase.WAITING, SandboxPhase.SAVING)
        return replace(self, phase=SandboxPhase.SUSPENDED, saved=self.turn, unsaved_since=None)

    def resumed(self) -> SandboxClock:
        """It runs again."""
        self._must(SandboxPhase.SUSPENDED)
        return self._on(self)

    def ended(self) -> SandboxClock:
        """It is gone, and may be from any state."""
        return replace(self, phase=SandboxPhase.ENDED)

    def released(self, now: float) -> bool:
        """Whether a reply may go to the agent now."""
        if self.phase is SandboxPhase.ACTING:
            return True
        late = self.ready_at is not None and now - self.ready_at >= HOLD_SECONDS
        return self.phase is SandboxPhase.SAVING and late

    @property
    def recoverable_to(self) -> int:
        """The newest turn that survives the loss of the host."""
        return self.saved

    def unsaved(self, now: float) -> float:
        """Seconds since the first turn without a record began; 0 where all have one."""
        return 0.0 if self.unsaved_since is None else now - self.unsaved_since

    def _on(self, clock: SandboxClock) -> SandboxClock:
        if clock.ready_at is not None:
            return replace(clock, phase=SandboxPhase.ACTING, expected=None, ready_at=None)
        return replace(clock, phase=SandboxPhase.WAITING)

    def _must(self, *phases: SandboxPhase) -> None:
        if self.phase not in phases:
            wanted = " or ".join(phases)
            raise OutOfTurn(f"turn {self.turn} is {self.phase}; this step needs {wanted}")
