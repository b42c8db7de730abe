"""Which replicas lend to which lease: ``plan(snapshot, now) -> LendingPlan``, a pure function.

- ``facts``, ``answers``: what the planner sees and answers.
- ``qualify``: may this replica be lent, and if not, why.
- ``limits``: how many replicas of a pool, and when; ``forecast``: its load over the day.
- ``radius``: limits per node, zone, lease and minute; ``gate``: is a loan worth its cost.
- ``room``: does a lease's engine fit into what may be lent.
- ``whole``: replicas that are put to sleep for a loan.
- ``shares``: how leases share what may be lent; ``gain``: what a slot more would bring one.
- ``autoscalers``: which of a cluster's autoscalers would react to borrowed load.
- ``planning_pass``: one pass's working state; ``release``, ``loan``, ``explain``: its steps.
- ``plan``: the steps in order; read this first.
"""

from rose_core.lending.answers import (
    LeaseDecision,
    Lend,
    LendingPlan,
    Misfit,
    Release,
    ReplicaDecision,
)
from rose_core.lending.facts import (
    Breaker,
    Demand,
    EngineNeeds,
    Lease,
    LoadOutlook,
    Memory,
    Policy,
    Pool,
    Replica,
    Slot,
    Snapshot,
    WholeTerms,
    Window,
)
from rose_core.lending.plan import plan

__all__ = [
    "Breaker",
    "Demand",
    "EngineNeeds",
    "Lease",
    "LeaseDecision",
    "Lend",
    "LendingPlan",
    "LoadOutlook",
    "Memory",
    "Misfit",
    "Policy",
    "Pool",
    "Release",
    "Replica",
    "ReplicaDecision",
    "Slot",
    "Snapshot",
    "WholeTerms",
    "Window",
    "plan",
]
