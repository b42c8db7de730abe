"""Which of a slot's two engines may compute: the wide one or the one for busy serving.

A process's share of the multiprocessors is fixed when it starts, so a slot may keep two engines,
one of which is parked at its permit. To move the right to compute cuts the turns under way, so a
single burst is not enough: serving must have been busy, or calm, for a while.

| verdicts, without one of another kind between them | for | engine |
|---|---|---|
| ample: idle, or slack for at least ``wide_duty`` of the time | ``widen_ns`` | wide |
| scarce: slack for less than ``busy_duty`` | ``narrow_ns`` | busy |
| between the two | | stays |
| gate closed | does not count | stays |

An engine that does not serve is passed over for one that does. Experimental: no GPU has run it.
Pure; only a slot with two engines asks, at every step of the guard. Next step:
``rose_agent.guard.slots.slot`` moves the permit.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_core.guard.gate import GateVerdict
from rose_core.guard.reasons import GateReason

WIDE, BUSY = 0, 1


@dataclass(frozen=True)
class LaneLimits:
    """When the engine changes.

    Attributes:
        busy_duty: with a smaller share of time to lend, less of the GPU for all of the time is
            gentler on serving than all of the share for some of it.
        narrow_ns: how long it must be so; short, because serving pays meanwhile.
        widen_ns: how long there must be plenty; long, because only rollouts pay.
    """

    busy_duty: float = 0.5
    wide_duty: float = 0.9
    narrow_ns: int = 1_000_000_000
    widen_ns: int = 10_000_000_000


@dataclass(frozen=True)
class LaneChoice:
    """The engine chosen, and since when verdicts have been ample or scarce; 0 = they are not."""

    chosen: int = WIDE
    ample_ns: int = 0
    scarce_ns: int = 0


def choose(lane: LaneChoice, verdict: GateVerdict, limits: LaneLimits, now_ns: int) -> LaneChoice:
    """The next state, from the gate's verdict."""
    ample, scarce = _kind(verdict, limits)
    if ample is None:
        return lane
    ample_ns = (lane.ample_ns or now_ns) if ample else 0
    scarce_ns = (lane.scarce_ns or now_ns) if scarce else 0
    chosen = lane.chosen
    if scarce and now_ns - scarce_ns >= limits.narrow_ns:
        chosen = BUSY
    elif ample and now_ns - ample_ns >= limits.widen_ns:
        chosen = WIDE
    return LaneChoice(chosen, ample_ns, scarce_ns)


def _kind(verdict: GateVerdict, limits: LaneLimits) -> tuple[bool | None, bool]:
    """Whether the verdict is ample, and whether scarce; None, False = it does not count."""
    if verdict.reason is GateReason.IDLE:
        return True, False
    if verdict.reason is not GateReason.SLACK:
        return None, False
    return verdict.duty >= limits.wide_duty, verdict.duty < limits.busy_duty


def permitted(chosen: int, serving: tuple[int, ...] | None) -> int:
    """The engine to permit.

    Args:
        chosen: by ``choose``.
        serving: engines that serve; None = the slot has one engine.
    """
    if serving is None:
        return WIDE
    return serving[0] if serving and chosen not in serving else chosen
