"""What each regime is made of, so that a difference between two can be put down to one thing.

| regime | lends | gate | placement | a cut turn | queue |
|---|---|---|---|---|---|
| ``fixed`` | nothing | | ours | | ours |
| ``fixed-ladder`` | nothing | | paper's | | fifo |
| ``full-memory`` | nothing; serving has the memory kept for rollouts too | | ours | | ours |
| ``unguarded`` | planner | always open | ours | continued | ours |
| ``static-split`` | once | always open; memory is divided | paper's | begun anew | fifo |
| ``on-off`` | planner | polled; open after seconds of idleness | ours | continued | ours |
| ``whole-replica`` | whole replicas (Lyra) | open while lent | paper's | begun anew | fifo |
| ``spot`` | whole replicas (RLBoost) | open while lent | least loaded | continued | fifo |
| ``polled`` | planner | ours, fed by polls alone | ours | continued | ours |
| ``rose-paper`` | once | the paper's slack rule | paper's | begun anew | fifo |
| ``rose-paper-dedicated`` | once | the paper's slack rule | dedicated first | begun anew | fifo |
| ``rose-paper-tap`` | once | ours | paper's | begun anew | fifo |
| ``rose-paper-keep`` | once | the paper's slack rule | paper's | continued | fifo |
| ``rose-paper-oldest`` | once | the paper's slack rule | paper's | begun anew | oldest first |
| ``rose-paper-queue`` | once | the paper's slack rule | paper's | begun anew | ours |
| ``ours-ladder`` | planner | ours | paper's | continued | fifo |
| ``ours-held`` | planner, ``slots.max`` whatever the turns say | ours | ours | continued | ours |
| ``ours-kept`` | planner | ours | ours | continued, its keys too (``kept``) | ours |
| ``ours-node`` | planner | ours | ours | continued, its keys too on its node (``kept``) | ours |
| ``ours-gain`` | planner, slots where they bring most | ours | ours | continued | ours |
| ``ours`` | planner | ours | ours | continued | ours |
| ``clairvoyant`` | planner | stops at once, traceless | ours, true lengths | continued | ours |

The planner hears every job's turns (``demand``) but under ``ours-held``, which shows what that
brings and costs. *Ours* in the queue is ``rollouts.placement.dispatch``: a full home is waited for,
KV pools are not overflowed, and old trajectories go first. *Oldest first* takes over the last of
these alone. ``whole.py`` has the loans of whole replicas, ``paper.py`` the paper's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from rose_core.rollouts.placement.selection import PolicyName
from rose_simulate.model.gpus.paper import STALL_S
from rose_simulate.model.routing.router import Ends
from rose_simulate.model.scenarios.scenario import Regime


class LendingMode(Enum):
    """Who chooses the replicas."""

    NOTHING = auto()
    PLANNER = auto()
    ONCE = auto()
    WHOLE = auto()

    @property
    def keeps_memory_back(self) -> bool:
        """Whether serving does without memory for it; a replica that sleeps misses none."""
        return self in {LendingMode.PLANNER, LendingMode.ONCE}


class KeysKept(Enum):
    """Where keys outlive the engine that made them."""

    NOWHERE = auto()
    NODE = auto()
    POOL = auto()


class GateKind(Enum):
    """Who decides when rollouts may compute."""

    OPEN = auto()
    GUARD = auto()
    POLLED = auto()
    PAPER = auto()
    ON_OFF = auto()


@dataclass(frozen=True)
class RegimeRules:
    """One regime.

    Attributes:
        keeps: the tokens of a cut turn are kept.
        waits: turns wait for a full home, old trajectories first; otherwise first come, first
            served.
        oldest_first: without ``waits``, old trajectories go first.
        stall_s: a turn leaves an engine that was shut for so long; None = production's patience.
        whole_memory: serving has the rollouts' share of the memory too.
        by_demand: the planner hears of turns; otherwise leases hold all that they may.
        least_loan_s: a whole replica is not called back earlier, unless serving is in need.
        ends: how the router learns that a trajectory is over.
        keeps_keys: engines of a job can fetch keys that others of it, or of their node, made.
        by_gain: the planner lends where a slot brings most (``lending.shares.gain``).
    """

    lends: LendingMode = LendingMode.PLANNER
    gate: GateKind = GateKind.GUARD
    placement: PolicyName = PolicyName.JOINT
    keeps: bool = True
    waits: bool = True
    stall_s: float | None = None
    knows_lengths: bool = False
    yielding: bool = False
    newest_only: bool = False
    least_loan_s: float = 0.0
    oldest_first: bool = False
    whole_memory: bool = False
    by_demand: bool = True
    ends: Ends = Ends.INFERRED
    keeps_keys: KeysKept = KeysKept.NOWHERE
    by_gain: bool = False


_LADDER = PolicyName.ROSE_PAPER
# Nobody asks about an engine that never comes.
_ALONE = RegimeRules(lends=LendingMode.NOTHING, gate=GateKind.OPEN)


def _paper(gate: GateKind, *, keeps: bool, lends: LendingMode = LendingMode.ONCE) -> RegimeRules:
    return RegimeRules(lends, gate, _LADDER, keeps=keeps, waits=False, stall_s=STALL_S)


RULES: Mapping[Regime, RegimeRules] = {
    Regime.FIXED: _ALONE,
    Regime.FIXED_LADDER: replace(_ALONE, placement=_LADDER, waits=False),
    Regime.FULL_MEMORY: replace(_ALONE, whole_memory=True),
    Regime.UNGUARDED: RegimeRules(gate=GateKind.OPEN),
    Regime.STATIC_SPLIT: _paper(GateKind.OPEN, keeps=False),
    Regime.ON_OFF: RegimeRules(gate=GateKind.ON_OFF),
    Regime.WHOLE_REPLICA: RegimeRules(
        LendingMode.WHOLE, GateKind.OPEN, _LADDER, keeps=False, waits=False, least_loan_s=300.0
    ),
    Regime.SPOT: RegimeRules(
        LendingMode.WHOLE, GateKind.OPEN, PolicyName.LEAST_LOADED, waits=False, newest_only=True
    ),
    Regime.POLLED: RegimeRules(gate=GateKind.POLLED),
    Regime.ROSE_PAPER: _paper(GateKind.PAPER, keeps=False),
    Regime.ROSE_PAPER_DEDICATED: replace(
        _paper(GateKind.PAPER, keeps=False), placement=PolicyName.ROSE_PAPER_DEDICATED
    ),
    Regime.ROSE_PAPER_TAP: _paper(GateKind.GUARD, keeps=False),
    Regime.ROSE_PAPER_KEEP: _paper(GateKind.PAPER, keeps=True),
    Regime.ROSE_PAPER_OLDEST: replace(_paper(GateKind.PAPER, keeps=False), oldest_first=True),
    Regime.ROSE_PAPER_QUEUE: replace(_paper(GateKind.PAPER, keeps=False), waits=True),
    Regime.OURS_LADDER: RegimeRules(placement=_LADDER, waits=False),
    Regime.OURS_HELD: RegimeRules(by_demand=False),
    Regime.OURS_KEPT: RegimeRules(keeps_keys=KeysKept.POOL),
    Regime.OURS_NODE: RegimeRules(keeps_keys=KeysKept.NODE),
    Regime.OURS_GAIN: RegimeRules(by_gain=True),
    Regime.OURS: RegimeRules(),
    Regime.CLAIRVOYANT: RegimeRules(gate=GateKind.OPEN, knows_lengths=True, yielding=True),
}
