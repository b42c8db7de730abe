"""When a leg that is running must end, so that its turn goes on elsewhere.

| seen | patience | then |
|---|---|---|
| the owner says the engine leaves | none | Revoked |
| the engine is forgotten (its owner never came back) | none | Gone |
| gate closed, no event | ``pause_seconds`` | queues for another engine, stays until then: Paused |
| gate open, no event | ``stall_seconds`` | Stalled |
| more legs than the cap, which was cut; room elsewhere | none | CapCut |

A turn that queues from a closed gate has the rank that it would have if it were cut
(``admission.rank``), and ``dispatch`` gives it its place as it gives everybody theirs. If it had to
find a place free it would find none: whoever waits takes each one as it becomes free. Meanwhile its
keys are kept where it stands, and it goes on there if the gate opens first. The gate of an engine
whose owner is away counts as closed; a leg that still speaks there needs no other.

Loss of the connection is not here: it ends the leg by itself (``Lost``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MoveReason(StrEnum):
    """Why a turn left an engine; also the metric's label."""

    REVOKED = "Revoked"
    GONE = "Gone"
    PAUSED = "Paused"
    STALLED = "Stalled"
    CAP_CUT = "CapCut"
    LOST = "Lost"
    REFUSED = "Refused"
    ABORTED = "Aborted"
    UNPLACED = "Unplaced"


@dataclass(frozen=True, slots=True)
class LegPatience:
    """How long a leg may stand still, in seconds.

    Attributes:
        pause_seconds: with its gate closed and no event, before it queues for another engine;
            bursts under about 2 s are not worth a move.
        stall_seconds: with its gate open; longer than the longest prefill.
    """

    pause_seconds: float = 5.0
    stall_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class LegView:
    """A running leg and its engine, times in seconds of the router's clock.

    Attributes:
        known: the engine is (still) in the router's fleet.
        gate_since: when the gate last opened or closed.
        last_event: when the leg began or last said something.
        excess: the engine has more legs than its cap and this is one of the youngest.
    """

    known: bool
    leaving: bool
    gate_open: bool
    gate_since: float
    last_event: float
    excess: bool = False


def judge(leg: LegView, patience: LegPatience, elsewhere: bool, now: float) -> MoveReason | None:
    """Why the leg must end now, or ``None``.

    Args:
        leg: what is known.
        patience: how long it may stand still.
        elsewhere: some other engine could take the turn now.
        now: seconds of the router's clock.
    """
    if not leg.known:
        return MoveReason.GONE
    if leg.leaving:
        return MoveReason.REVOKED
    if not leg.gate_open:
        return None  # see ``queues``
    if leg.excess and elsewhere:
        return MoveReason.CAP_CUT
    stalled = now - max(leg.last_event, leg.gate_since) >= patience.stall_seconds
    return MoveReason.STALLED if stalled else None


def queues(leg: LegView, patience: LegPatience, now: float) -> bool:
    """Whether the leg's turn waits for another engine while it stands where it is.

    Args:
        leg: what is known.
        patience: how long it may stand still.
        now: seconds of the router's clock.
    """
    if not leg.known or leg.leaving or leg.gate_open:
        return False
    return now - max(leg.last_event, leg.gate_since) >= patience.pause_seconds
