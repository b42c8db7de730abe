"""The reclaim ladder: rungs, what proves each one, and how long it may take.

| rung | order | proof | deadline | then |
|---|---|---|---|---|
| 1 Unroute | permit closed, routers told | none needed: the permit is ours | 0 | rung 2 at once |
| 2 Stop | hold at the engine host | host says held | 250 ms | the guard freezes the cgroup itself |
| 2 Stop | freeze by the guard | cgroup reads frozen | 5 s (``standstill``) | rung 5 by the guard |
| 3 Retract | the router's own: it holds the tokens and continues elsewhere | | | |
| 4 Dormant | release weights and KV | host says Dormant | 5 s | rung 5 |
| 5 Terminate | stop at the engine host | engine gone | 6 s | the guard kills the cgroup, cordon |

Memory pressure goes straight to 4 (5 where the engine cannot); a serving process that exits, a
lapsed grant, the stop button go straight to 5. Next step: ``slot`` climbs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from rose_core.guard.reasons import GateReason


class Rung(IntEnum):
    """How far an engine has been taken back; 0 = it may compute."""

    NONE = 0
    UNROUTE = 1
    STOP = 2
    RETRACT = 3
    DORMANT = 4
    TERMINATE = 5


class SlotOrder(Enum):
    """What the shell is told to do for one slot."""

    ENSURE = auto()
    EXTEND = auto()
    CLOSE = auto()
    HOLD = auto()
    LET_GO = auto()
    FREEZE = auto()
    DORMANT = auto()
    ACTIVATE = auto()
    STOP = auto()
    KILL = auto()


@dataclass(frozen=True)
class SlotAction:
    """One order; ``until_ns`` and ``chunk_divisor`` with EXTEND."""

    order: SlotOrder
    reason: GateReason
    until_ns: int = 0
    chunk_divisor: int = 1


@dataclass(frozen=True)
class LadderLimits:
    """Deadlines and repeats, nanoseconds.

    Attributes:
        permit_ns: length of a permit; everything has stopped this long after the guard's death.
        host_stale_ns: age of the host's heartbeat from which the guard stops the tree itself.
        host_dead_ns: the host does not come back; the guard ends the tree.
        repeat_ns: an order without proof is sent again after this.
        freeze_ns: from here on the guard's own freeze is late, and ``standstill`` decides.
        unready_ns: serving may be unready this long before its GPU is vacated.
        cordon_ns: no new engine after one had to be killed; doubles per failure.
    """

    permit_ns: int = 140_000_000
    hold_ns: int = 250_000_000
    freeze_ns: int = 5_000_000_000
    dormant_ns: int = 5_000_000_000
    terminate_ns: int = 6_000_000_000
    host_stale_ns: int = 150_000_000
    host_dead_ns: int = 15_000_000_000
    repeat_ns: int = 100_000_000
    stop_repeat_ns: int = 1_000_000_000
    ensure_repeat_ns: int = 2_000_000_000
    unready_ns: int = 3_000_000_000
    cordon_ns: int = 30_000_000_000
    longest_cordon_ns: int = 600_000_000_000
