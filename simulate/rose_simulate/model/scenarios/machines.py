"""Machines: which replicas and dedicated engines stand together, and what their agent remembers.

Production's agent is one process per node, so what requests have taught (``guard.experience``) and
the error budget are shared by a pool's replicas of one node, and begin anew when the node does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rose_core.guard.budget import ErrorBudget
from rose_core.guard.experience import Lessons
from rose_core.guard.predictor import CostProfile, Predictor
from rose_simulate.model.scenarios.scenario import Scenario


@dataclass
class NodePoolState:
    """What replicas of one pool share on one node; ``guards`` look again when the breaker opens."""

    lessons: Lessons
    budget: ErrorBudget = field(default_factory=ErrorBudget)
    guards: dict[str, Callable[[], None]] = field(default_factory=dict)


@dataclass(eq=False)
class Machine:
    """One node; ``silent_ns`` is since when it has been off, None while it is on."""

    name: str = ""
    silent_ns: int | None = None
    _pools: dict[str, NodePoolState] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        """It is on."""
        return self.silent_ns is None

    def pool(self, name: str, profile: CostProfile) -> NodePoolState:
        """What its agent knows of a pool; a fresh agent begins with the profile."""
        if name not in self._pools:
            self._pools[name] = NodePoolState(Lessons(Predictor(profile)))
        return self._pools[name]

    def boot(self) -> None:
        """On again, with an agent that has seen nothing."""
        self.silent_ns = None
        self._pools.clear()


def sizes(scenario: Scenario) -> tuple[list[int], list[int]]:
    """GPUs of each replica and of each dedicated engine, in the scenario's order."""
    serving = [one.gpus_per_replica for one in scenario.services for _ in range(one.replicas)]
    dedicated = [one.gpus_per_engine for one in scenario.jobs for _ in range(one.dedicated)]
    return serving, dedicated


def fill(widths: Iterable[int], gpus: int) -> list[list[int]]:
    """Numbers of things by node: one after the other, a new node where the next does not fit."""
    nodes: list[list[int]] = []
    free = 0
    for number, width in enumerate(widths):
        if width > free:
            nodes.append([])
            free = gpus
        nodes[-1].append(number)
        free -= width
    return nodes
