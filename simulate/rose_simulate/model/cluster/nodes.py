"""The nodes of a world and their failures: everything on a machine goes together and comes back.

| on the node | when it goes | when it is back |
|---|---|---|
| serving replica | empty; its requests begin anew at others | takes requests |
| borrowed engine | lost with its turns, which go on elsewhere | starts cold if its slot stands |
| guard | shuts; what it has learned is gone | begins from the profile |
| dedicated engine | lost with its turns | serves, with the newest weights |

The balancer knows at once; the planner hears of silence alone, as production's does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rose_core.wire.routing import EngineKind
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.cluster.lent import LentReplica
from rose_simulate.model.gpus.batch import BatchEngine
from rose_simulate.model.gpus.gates import ServingRequest
from rose_simulate.model.routing.router import Router
from rose_simulate.model.routing.turns import AttachedEngine
from rose_simulate.model.scenarios.machines import Machine, fill, sizes
from rose_simulate.model.scenarios.scenario import Scenario


@dataclass(frozen=True)
class Dedicated:
    """A dedicated engine; ``newest`` says which version its trainer has."""

    name: str
    batch: BatchEngine
    cap: int
    router: Router
    newest: Callable[[], int]

    def attach(self, now_ns: int) -> None:
        """It serves, with the newest weights."""
        self.router.attach(
            AttachedEngine(
                self.name,
                EngineKind.DEDICATED,
                self.batch,
                self.newest(),
                gate_open=True,
                cap=self.cap,
                gate_ns=now_ns,
            )
        )

    def fail(self) -> None:
        """Fail with everything in it."""
        self.batch.clear()
        self.router.on_engine_loss(self.name)


@dataclass(eq=False)
class _Node:
    machine: Machine
    replicas: list[LentReplica] = field(default_factory=list)
    engines: list[Dedicated] = field(default_factory=list)


class WorldNodes:
    """Every node of a world.

    Args:
        again: told of a request whose replica is gone.
        back: told that replicas take requests again.
    """

    def __init__(
        self,
        clock: VirtualClock,
        scenario: Scenario,
        seed: int,
        again: Callable[[ServingRequest, LentReplica], None],
        back: Callable[[], None],
    ) -> None:
        self._clock, self._settings, self._seed = clock, scenario.nodes, seed
        self._again, self._on_back = again, back
        serving, dedicated = (fill(one, scenario.nodes.gpus) for one in sizes(scenario))
        self._nodes = [_Node(Machine(f"node-{n}")) for n in range(len(serving) + len(dedicated))]
        self._of_replica = _placed(serving, self._nodes)
        self._of_engine = _placed(dedicated, self._nodes[len(serving) :])
        self._engines = 0
        self.down = self.failed = self.restarted = 0

    def under(self, replica: int) -> Machine:
        """The machine that a replica stands on."""
        return self._of_replica[replica].machine

    def put(self, one: LentReplica | Dedicated) -> None:
        """Note a replica, or the next dedicated engine, as built."""
        if isinstance(one, LentReplica):
            self._of_replica[one.number].replicas.append(one)
        else:
            self._of_engine[self._engines].engines.append(one)
            self._engines += 1

    def start(self) -> None:
        """Draw the failures that nobody named."""
        if self._settings.fail_every_s is not None:
            for number in range(len(self._nodes)):
                draw = random.Random(f"{self._seed}/node-{number}")  # noqa: S311  # a model's
                self._next(number, draw, 1 / self._settings.fail_every_s)

    def _next(self, number: int, draw: random.Random, rate: float) -> None:
        def fails() -> None:
            self.fail(number, self._settings.back_s)
            self._clock.after(self._settings.back_s, partial(self._next, number, draw, rate))

        self._clock.after(draw.expovariate(rate), fails)

    def fail(self, number: int, seconds: float) -> None:
        """A node is off for so long; one that is off already stays as it is."""
        node = self._nodes[number]
        if not node.machine.up:
            return
        node.machine.silent_ns = self._clock.now_ns
        self.down += 1
        self.failed += 1
        for engine in node.engines:
            engine.fail()
        lost = [(request, one) for one in node.replicas for request in one.lose()]
        self.restarted += len(lost)
        for request, one in lost:
            self._again(request, one)
        self._clock.after(seconds, partial(self._back, node))

    def _back(self, node: _Node) -> None:
        node.machine.boot()
        self.down -= 1
        for engine in node.engines:
            engine.attach(self._clock.now_ns)
        for one in node.replicas:
            one.gate.on_node_return()
        self._on_back()

    def silence(self) -> dict[str, float]:
        """Seconds since each node that is off was heard."""
        now = self._clock.now_ns
        return {
            node.machine.name: (now - node.machine.silent_ns) / SECOND
            for node in self._nodes
            if node.machine.silent_ns is not None
        }


def _placed(filled: list[list[int]], nodes: list[_Node]) -> dict[int, _Node]:
    return {number: nodes[n] for n, numbers in enumerate(filled) for number in numbers}
