"""Which replicas lend to which lease: ``plan(snapshot, now) -> LendingPlan``, a pure function.

- ``facts``, ``answers``: what the planner sees and answers.
- ``qualify``: may this replica be lent, and if not, why.
- ``limits``: how many replicas of a pool, and when; ``forecast``: its load over the day.
- ``radius``: limits per node, zone, lease and minute; ``gate``: is a loan worth its cost.
- ``room``: does a lease's engine fit into what may be lent.
- ``whole``: replicas that are put to sleep for a loan.
- ``shares``: how leases share what may be lent, and what a slot more would bring one.
- ``autoscalers``: which of a cluster's autoscalers would react to borrowed load.
- ``planning_pass``: one pass's working state; ``release``, ``loan``, ``explain``: its steps.
- ``plan``: the steps in order; read this first.
"""

from rose_core.lending.answers import (
    LeaseDecision,
    Lend,
    LendingPlan,
    Misfit,
    ReplicaDecision,
    SlotRelease,
)
from rose_core.lending.facts import (
    BreakerTerms,
    DailyWindow,
    Demand,
    EngineNeeds,
    Lease,
    LoadOutlook,
    PlannerMemory,
    PlannerPolicy,
    PoolTerms,
    Replica,
    Slot,
    Snapshot,
    WholeTerms,
)
from rose_core.lending.plan import plan

__all__ = [
    "BreakerTerms",
    "DailyWindow",
    "Demand",
    "EngineNeeds",
    "Lease",
    "LeaseDecision",
    "Lend",
    "LendingPlan",
    "LoadOutlook",
    "Misfit",
    "PlannerMemory",
    "PlannerPolicy",
    "PoolTerms",
    "Replica",
    "ReplicaDecision",
    "Slot",
    "SlotRelease",
    "Snapshot",
    "WholeTerms",
    "plan",
]
