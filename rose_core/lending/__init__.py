"""Which serving replicas lend to which lease: ``plan(snapshot, now) -> Plan``, a pure function.

- ``facts``, ``answers``: what the planner sees and answers.
- ``qualify``: may this replica be lent, and if not, why.
- ``limits``: how many replicas of a pool, and when; ``forecast``: its load over the day.
- ``radius``: limits per node, zone, lease and minute; ``gate``: is a loan worth its cost.
- ``whole``: replicas that are put to sleep for a loan.
- ``shares``: how leases share what may be lent.
- ``autoscalers``: which of a cluster's autoscalers would react to borrowed load.
- ``world``: one pass's working state; ``release``, ``loan``, ``explain``: its steps.
- ``plan``: the steps in order; read this first.
"""

from rose_core.lending.answers import Lend, Outcome, Plan, Release, Verdict
from rose_core.lending.facts import (
    Breaker,
    Demand,
    Lease,
    Memory,
    Outlook,
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
    "Lease",
    "Lend",
    "Memory",
    "Outcome",
    "Outlook",
    "Plan",
    "Policy",
    "Pool",
    "Release",
    "Replica",
    "Slot",
    "Snapshot",
    "Verdict",
    "WholeTerms",
    "Window",
    "plan",
]
