"""Which serving replicas lend to which lease: ``plan(snapshot, now) -> Plan``, a pure function.

- ``facts``: what the planner sees and answers.
- ``qualify``: may this replica be lent, and if not, why.
- ``limits``: how many replicas of a pool, and when.
- ``world``: one pass's working state; ``release``, ``loan``, ``explain``: its steps.
- ``plan``: the steps in order; read this first.
"""

from rose_core.lending.facts import (
    Lease,
    Lend,
    Memory,
    Outcome,
    Plan,
    Policy,
    Pool,
    Release,
    Replica,
    Slot,
    Snapshot,
    Verdict,
    Window,
)
from rose_core.lending.plan import plan

__all__ = [
    "Lease",
    "Lend",
    "Memory",
    "Outcome",
    "Plan",
    "Policy",
    "Pool",
    "Release",
    "Replica",
    "Slot",
    "Snapshot",
    "Verdict",
    "Window",
    "plan",
]
