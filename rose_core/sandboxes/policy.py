"""What a host does with a sandbox whose agent waits for the model: one pure function.

The router knows how long the wait will be, the inspector what the turn changed, the host what its
checkpoints cost. A checkpoint that ends before the reply costs the agent nothing. What is not known
counts as changed, and a wait that is not known as none at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

SUSPEND_FACTOR = 10.0
"""A wait this many times longer than leaving and coming back is worth it for memory alone: the
sandbox stands still for a tenth of a wait that nobody feels."""
PRESSED_FACTOR = 2.0
"""The same where the host's memory is short: others could not begin at all."""
LEARNT = 0.2
"""Weight of the newest suspend or resume in what the next one is expected to take: a busy disk is
believed after some ten of them (exponential smoothing)."""


class BoundaryAction(StrEnum):
    """What a host does at a boundary."""

    NONE = "none"
    FILES = "files"
    PROCESSES = "processes"
    FULL = "full"
    SUSPEND = "suspend"


class SaveReason(StrEnum):
    """Why, for metrics and people."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    UNKNOWN = "unknown changes"
    LONG_WAIT = "long wait"
    SERVING = "serving burns its budget"
    SAVED = "this turn is saved"
    LOST = "an earlier record is lost"
    LATE = "the look outlasted the reply"


class SandboxChanges(Protocol):
    """Since the last record; what an inspector says (``unknown``: why it cannot vouch)."""

    @property
    def files(self) -> bool:
        """Whether files may differ from those saved last."""
        ...

    @property
    def processes(self) -> bool:
        """Its processes, or their memory, may differ."""
        ...

    @property
    def unknown(self) -> tuple[str, ...]:
        """Reasons for which the two are no more than a guess."""
        ...


@dataclass(frozen=True)
class ModelWait:
    """Until the model answers, as the router expects it.

    Attributes:
        seconds: expected.
        confidence: 0 to 1, that it takes at least this long.
    """

    seconds: float
    confidence: float

    @property
    def sure(self) -> float:
        """Seconds that may be planned with."""
        return max(0.0, self.seconds) * min(1.0, max(0.0, self.confidence))


@dataclass(frozen=True)
class SaveCosts:
    """Seconds that this host needs: the likes of all its sandboxes, once it has suspended one.

    Attributes:
        suspend: save all and free its memory.
        resume: until it runs again.
    """

    suspend: float = 0.6
    resume: float = 0.4

    def suspended(self, seconds: float) -> SaveCosts:
        """A sandbox has been suspended, which took so long."""
        return replace(self, suspend=self.suspend + LEARNT * (seconds - self.suspend))

    def resumed(self, seconds: float) -> SaveCosts:
        """A sandbox has been resumed, which took so long."""
        return replace(self, resume=self.resume + LEARNT * (seconds - self.resume))


@dataclass(frozen=True)
class TurnBoundary:
    """The boundary that is decided about.

    Attributes:
        number: counted from 1.
        saved: the newest turn with a record; 0: none.
    """

    number: int
    saved: int = 0

    @property
    def first(self) -> bool:
        """Nothing to save differences against."""
        return self.saved == 0


@dataclass(frozen=True)
class HostPressure:
    """What presses on a host beside its turns, so that saving costs others more than usual.

    Attributes:
        serving_burns: a serving replica of the node burns its latency budget.
        memory_short: sandboxes wait for memory.
    """

    serving_burns: bool = False
    memory_short: bool = False


@dataclass(frozen=True)
class Decision:
    """What ``decide`` says should be saved now, and why.

    Attributes:
        action: what is saved; NONE may still publish a record that points to the parts before.
        reason: why.
        deferred: asked again when the pressure has changed; the turn is not recoverable until then.
    """

    action: BoundaryAction
    reason: SaveReason
    deferred: bool = field(default=False)


def needed(effects: SandboxChanges, *, first: bool) -> tuple[BoundaryAction, SaveReason]:
    """What must be saved for the turn to be recoverable."""
    if first:
        return BoundaryAction.FULL, SaveReason.CHANGED
    if effects.unknown:
        return BoundaryAction.FULL, SaveReason.UNKNOWN
    if effects.files and effects.processes:
        return BoundaryAction.FULL, SaveReason.CHANGED
    if effects.files:
        return BoundaryAction.FILES, SaveReason.CHANGED
    if effects.processes:
        return BoundaryAction.PROCESSES, SaveReason.CHANGED
    return BoundaryAction.NONE, SaveReason.UNCHANGED


def decide(
    turn: TurnBoundary,
    effects: SandboxChanges,
    wait: ModelWait | None,
    costs: SaveCosts,
    pressure: HostPressure,
) -> Decision:
    """What a host does at the boundary of a turn.

    Args:
        turn: the boundary.
        effects: since the newest record.
        wait: until the reply; None: not known.
        costs: of this host.
        pressure: what else happens on it.
    """
    action, reason = needed(effects, first=turn.first)
    if pressure.serving_burns:
        # Unchanged: a record that only points costs serving nothing.
        pays = action is not BoundaryAction.NONE
        return Decision(BoundaryAction.NONE, SaveReason.SERVING if pays else reason, deferred=pays)
    if turn.saved >= turn.number:
        action, reason = BoundaryAction.NONE, SaveReason.SAVED
    factor = PRESSED_FACTOR if pressure.memory_short else SUSPEND_FACTOR
    if wait is not None and wait.sure > factor * (costs.suspend + costs.resume):
        return Decision(BoundaryAction.SUSPEND, SaveReason.LONG_WAIT)
    return Decision(action, reason)
