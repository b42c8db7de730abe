"""What the guard is told at its start; ``rose_agent.guard.main`` makes it from the flags."""

from __future__ import annotations

from dataclasses import dataclass, field

from rose_core.devices.memory import BudgetLimits
from rose_core.guard.gate import GateLimits


@dataclass(frozen=True)
class Settings:
    """What the guard is told at its start.

    Attributes:
        settle_seconds: Ready and stable for this long after a restart before lending resumes.
        crossover_seconds: length of alternating lent and withheld windows; 0 = always lend.
    """

    node: str
    token: str
    settle_seconds: float = 60.0
    crossover_seconds: float = 0.0
    gate: GateLimits = field(default_factory=GateLimits)
    budget: BudgetLimits = field(default_factory=BudgetLimits)
