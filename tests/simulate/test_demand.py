"""The simulated planner is fed demand as production's is, and acts on it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import yaml

from rose_core.api import RolloutLease
from rose_core.lending import Demand, PlannerPolicy
from rose_core.lending.demand import ReceivedNote, together, want
from rose_core.wire.routing import EngineKind
from rose_operator.plan.snapshot import lease_of as snapshot_lease
from rose_router.turns.demand import DemandFeed
from rose_router.turns.ledger import Totals
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.cluster.planner import lease_of
from rose_simulate.model.regimes import RULES
from rose_simulate.model.routing.demand import SimulatedDemands
from rose_simulate.model.routing.router import Router
from rose_simulate.model.scenarios.scenario import Regime, RolloutJob, Scenario
from rose_simulate.model.simulation import Simulation
from tests.simulate.worlds import MATERIAL, scenario

SAMPLE = Path(__file__).parents[2] / "crds" / "samples" / "rolloutlease.yaml"
STEP, TRAIN = 60, 300


@dataclass
class Engine:
    """What demand looks at of one."""

    kind: EngineKind = EngineKind.DEDICATED
    gate_open: bool = True
    cap: int = 16


@dataclass
class Turn:
    """One that waits."""

    context: int = 900
    output: int = 100


class Fleet(list[Engine]):
    """Engines and the newest version."""

    head = ""


@dataclass
class Room:
    """Turns that wait."""

    waiting: tuple[Turn, ...] = ()

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def waiting_tokens(self) -> int:
        return sum(turn.context + turn.output for turn in self.waiting)


@dataclass
class Ledger:
    """So many turns, of which none has been reported."""

    turns: int = 0
    totals: Totals = field(default_factory=Totals)

    def __len__(self) -> int:
        return self.turns


@dataclass
class Same:
    """One router's turns, as production's router and the simulator's each name them."""

    moment: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    room: Room = field(default_factory=Room)
    fleet: Fleet = field(default_factory=lambda: Fleet([Engine(), Engine(gate_open=False)]))
    on_turn: object = None

    def clock(self) -> float:
        return self.moment

    @property
    def inside(self) -> int:
        return len(self.ledger)

    @property
    def waiting(self) -> tuple[Turn, ...]:
        return self.queue.waiting

    @property
    def engines(self) -> dict[str, Engine]:
        return {str(number): engine for number, engine in enumerate(self.fleet)}

    @property
    def newest(self) -> str:
        return self.fleet.head

    def goes_on(self, second: int) -> None:
        """Steps of a minute, five of training, a publish before the next; the third is late."""
        late = 2 * TRAIN if second > 2 * (STEP + TRAIN) else 0
        step, within = divmod(max(0, second - late), STEP + TRAIN)
        turns = 60 + 7 * step - within // 3 if within < STEP else 0
        self.moment, self.ledger = float(second), Ledger(turns)
        self.queue = Room((Turn(),) * min(4, turns))
        self.fleet.head = str(step + (within >= STEP + TRAIN - 2))


def both_demands(seconds: int) -> Iterator[tuple[Demand | None, Demand | None]]:
    """What the operator's planner and the simulator's hear, second by second."""
    same, clock = Same(), VirtualClock()
    asked = DemandFeed(cast("Any", same))
    simulated = SimulatedDemands(clock, {"job": cast("Router", same)})
    clock.after(0.0, lambda: simulated.run(lambda: None))
    for second in range(seconds):
        same.goes_on(second)
        asked.look()
        clock.run(second * SECOND)
        yield together([ReceivedNote(asked.note(), float(second))], second), simulated.of("job")


def test_the_simulators_planner_hears_what_the_operators_does() -> None:
    """Equal when said anew, and never older than the ten seconds after which a note is repeated."""
    lease = replace(lease_of(scenario().jobs[0]), max_slots=8)
    wanted, anew = set[int](), 0
    for second, (production, simulated) in enumerate(both_demands(4 * (STEP + TRAIN))):
        assert production is not None
        assert simulated is not None
        assert simulated.age_seconds < 10
        if not simulated.age_seconds:
            anew += 1
            assert simulated == production
        found = want(replace(lease, demand=simulated), 4, PlannerPolicy(), second)
        assert found.slots <= lease.max_slots
        wanted.add(found.slots)
    assert anew > STEP
    assert {0, 8} < wanted, "it falls idle, wants all, and something between"


def test_a_lease_as_it_is_written_reaches_the_planner_as_it_is_simulated() -> None:
    """But for who it is, its model and how it ranks, which scenarios do not say."""
    written = yaml.safe_load(SAMPLE.read_text())
    written["metadata"]["creationTimestamp"] = "2026-11-25T00:00:00+00:00"
    reported = RolloutLease.model_validate(written)
    pool, spec = reported.spec.pool_ref.key, reported.spec
    simulated = lease_of(
        job(name="grpo", borrowed=spec.slots.max, borrows_from=pool, cap=16, staleness=1)
    )
    made = snapshot_lease(reported, None, None, (pool,), preempts=True)
    unsaid = {"key", "uid", "model", "priority", "created", "min_slots", "weight", "ends_at"}
    assert replace(made, **{name: getattr(simulated, name) for name in unsaid}) == simulated


def job(**changes: object) -> RolloutJob:
    """Synchronous steps with long training between them, so that there is something to give."""
    plain: dict[str, object] = {"staleness": 0, "train_s": 240, "awaits_weights": True, "cap": 4}
    return scenario().jobs[0].model_copy(update=plain | changes)


def lending(*jobs: RolloutJob, regime: Regime = Regime.OURS) -> Simulation:
    setup: Scenario = scenario(jobs=jobs, delays={"start_s": 20.0})
    return Simulation(setup, RULES[regime], 1, MATERIAL)


def steps_of(world: Simulation, seconds: int, name: str = "grpo") -> list[tuple[int, int, int]]:
    """By second: turns, slots held, borrowed engines that can take turns."""
    found = []
    assert world.planner is not None
    for second in range(1, seconds):
        world.clock.run(second * SECOND)
        router = world.routers[name]
        ready = [
            one
            for one in router.engines.values()
            if one.kind is EngineKind.BORROWED and one.version is not None
        ]
        found.append((router.inside, world.planner.held(name), len(ready)))
    return found


def test_an_idle_lease_gives_its_slots_back_and_has_them_when_the_next_step_begins() -> None:
    seen = steps_of(lending(job()), 1200)
    begins = [
        now
        for now in range(100, len(seen))
        if seen[now][0] and not any(turns for turns, _, _ in seen[now - 100 : now])
    ]
    assert len(begins) >= 3
    for before, after in pairwise(begins):
        assert min(held for _, held, _ in seen[before:after]) == 0, "given back while it trains"
        assert seen[after][2] > 0, "an engine has weights when the step begins"


def test_a_lease_that_holds_what_it_may_gives_nothing_back() -> None:
    seen = steps_of(lending(job(), regime=Regime.OURS_HELD), 900)
    assert {held for _, held, _ in seen[60:]} == {2}


def test_leases_that_share_a_pool_get_what_their_turns_need() -> None:
    """One has work for every replica, the other trains most of the time; both may have all."""
    busy = job(name="busy", borrowed=3, staleness=1, train_s=1, batch_groups=8)
    idle = job(name="idle", borrowed=3)
    world = lending(busy, idle)
    seen = steps_of(world, 240, "busy")
    assert max(held for _, held, _ in seen) == 3
    held = lending(busy, idle, regime=Regime.OURS_HELD)
    assert max(slots for _, slots, _ in steps_of(held, 240, "busy")) < 3


def test_the_planner_hears_of_the_regime_that_slots_go_where_they_bring_most() -> None:
    """By weight each has a part; by gain the one whose turns wait has all that there is."""
    found: dict[str, object] = {"borrowed": 3, "staleness": 1, "cap": 8}
    jobs = job(name="busy", batch_groups=24, **found), job(name="calm", batch_groups=1, **found)
    held = {
        regime: max(slots for _, slots, _ in steps_of(lending(*jobs, regime=regime), 60, "busy"))
        for regime in (Regime.OURS, Regime.OURS_GAIN)
    }
    assert held[Regime.OURS] < held[Regime.OURS_GAIN] == 3
