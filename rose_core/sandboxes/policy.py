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
"""Weight of the newest save, suspend or resume in what the next one is expected to take: a busy
disk is believed after some ten of them (exponential smoothing)."""
FORGOTTEN = 0.005
"""Of what suspending and resuming were found to take above the usual, at each wait that is too
short for it: one resume of 100 s is tried again after 600 waits of 20 s, a share of 1 % if it is as
slow again."""
STARVED_FACTOR = 10.0
"""Turns without a record that took this many times as long as a save are worth one that no wait
hides: the agent stands still for a tenth of what it would lose."""


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
    """Seconds that this host needs: the likes of all its sandboxes, once it has saved one.

    Attributes:
        suspend: save all and free its memory.
        resume: until it runs again.
        save: what a turn changed, once that is known; as long as a suspend before the first.
    """

    suspend: float = 0.6
    resume: float = 0.4
    save: float = 0.6

    def saved(self, seconds: float) -> SaveCosts:
        """A turn has been saved, which took so long."""
        return replace(self, save=self.save + LEARNT * (seconds - self.save))

    def suspended(self, seconds: float) -> SaveCosts:
        """A sandbox has been suspended, which took so long."""
        return replace(self, suspend=self.suspend + LEARNT * (seconds - self.suspend))

    def resumed(self, seconds: float) -> SaveCosts:
        """A sandbox has been resumed, which took so long."""
        return replace(self, resume=self.resume + LEARNT * (seconds - self.resume))

    def forgotten(self) -> SaveCosts:
        """What was slow counts a little less: it may be quick by now, and nobody has looked."""
        usual = SaveCosts()
        return replace(
            self,
            suspend=_nearer(self.suspend, usual.suspend),
            resume=_nearer(self.resume, usual.resume),
        )


def _nearer(seconds: float, usual: float) -> float:
    # What is quicker than usual stays: nothing needs to be tried again for its sake.
    return min(seconds, (1 - FORGOTTEN) * seconds + FORGOTTEN * usual)


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
    if suspending_pays(wait, costs, pressure):
        return Decision(BoundaryAction.SUSPEND, SaveReason.LONG_WAIT)
    return Decision(action, reason)


def suspending_pays(wait: ModelWait | None, costs: SaveCosts, pressure: HostPressure) -> bool:
    """Whether a wait is so long that a sandbox leaves its memory to others."""
    factor = PRESSED_FACTOR if pressure.memory_short else SUSPEND_FACTOR
    return wait is not None and wait.sure > factor * (costs.suspend + costs.resume)


def learn_from(
    made: Decision, wait: ModelWait | None, costs: SaveCosts, pressure: HostPressure
) -> SaveCosts:
    """What a host counts with after a decision.

    What suspending takes is learned from suspends alone. So a host that found it slow, and suspends
    nothing for it, forgets it by the waits in which it would usually have done so.
    """
    if made.action is BoundaryAction.SUSPEND or not suspending_pays(wait, SaveCosts(), pressure):
        return costs
    return costs.forgotten()


def is_starved(unsaved: float, costs: SaveCosts) -> bool:
    """Whether a turn is saved although its look may outlast the reply, whose agent then waits.

    Args:
        unsaved: seconds since the first turn without a record began (``SandboxClock.unsaved``).
        costs: of this host.
    """
    return unsaved >= STARVED_FACTOR * costs.save
