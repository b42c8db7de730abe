"""A trainer that waits for its engines, and the orders in which the paper's rules may queue."""

import random
from dataclasses import asdict, dataclass

import pytest

from bench.simulate import STUDIES as JUDGED
from rose_core.rollouts.placement.selection import PolicyName
from rose_core.rollouts.terms import LeaseTerms, policies_of
from rose_core.wire.routing import EngineKind
from rose_simulate.files.reading import read_scenario
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.gpus.batch import BatchEngine
from rose_simulate.model.regimes import RULES
from rose_simulate.model.routing.router import Ends, Router, RouterOptions
from rose_simulate.model.routing.turns import AttachedEngine, RoutedTurn
from rose_simulate.model.scenarios.costs import costs
from rose_simulate.model.scenarios.possible import impossible
from rose_simulate.model.scenarios.scenario import Link, Regime, RolloutJob, Scenario
from rose_simulate.model.simulation import Simulation
from rose_simulate.verbs.studies import SCENARIOS, STUDIES
from tests.simulate.worlds import MATERIAL, scenario

END_S = 90
SLOW_S = 6  # from a publish to dedicated engines that have it


def waiting_setup(*, awaits: bool, **changes: object) -> Scenario:
    plain = scenario(seconds=END_S, link=Link(dedicated_s=SLOW_S))
    job = plain.jobs[0].model_copy(update={"awaits_weights": awaits} | changes)
    return plain.model_copy(update={"jobs": (job,)})


@dataclass
class Seen:
    """What a run showed at its looks: drawn while the engines had old weights, and with new."""

    behind: int = 0
    level: int = 0
    publishes: int = 0


def watched(one: Scenario) -> Seen:
    """Trajectories drawn, told apart by whether the dedicated engine had the trainer's version."""
    world, seen = Simulation(one, RULES[Regime.OURS], 1, MATERIAL), Seen()
    router, job = world.routers["grpo"], world.jobs["grpo"]
    before = 0
    for tenth in range(1, 10 * END_S):
        world.clock.run(tenth * SECOND // 10)
        own = [e for e in router.engines.values() if e.kind is EngineKind.DEDICATED]
        started, before = job.counts.started - before, job.counts.started
        if any(engine.version != job.version for engine in own):
            seen.behind += started
        else:
            seen.level += started
    seen.publishes = job.version
    return seen


def test_a_trainer_that_awaits_draws_nothing_while_its_engines_have_old_weights() -> None:
    seen = watched(waiting_setup(awaits=True))
    assert seen.publishes > 2
    assert seen.behind == 0
    assert seen.level > waiting_setup(awaits=True).jobs[0].group * 4, (
        "it goes on after each publish"
    )


def test_a_trainer_that_does_not_await_draws_in_the_second_of_the_publish() -> None:
    assert watched(waiting_setup(awaits=False)).behind > 0


def test_tail_batching_opens_its_rounds_when_the_engines_have_the_weights() -> None:
    rounds = {"staleness": 0, "batch_groups": 2, "surplus": 0.5}
    hasty, waiting = (watched(waiting_setup(awaits=awaits, **rounds)) for awaits in (False, True))
    assert hasty.behind > 0
    assert waiting.behind == 0
    assert waiting.publishes > 2


def test_the_papers_rules_drop_fewer_groups_where_the_trainer_awaits() -> None:
    def dropped(*, awaits: bool) -> int:
        world = Simulation(waiting_setup(awaits=awaits), RULES[Regime.ROSE_PAPER], 1, MATERIAL)
        world.clock.run(END_S * SECOND)
        return world.jobs["grpo"].counts.dropped

    assert dropped(awaits=True) < dropped(awaits=False)


def test_nobody_to_wait_for_is_refused() -> None:
    one = waiting_setup(awaits=True, dedicated=0).model_copy(update={"regimes": (Regime.OURS,)})
    assert (("jobs", 0, "awaits_weights"), "there are no dedicated engines to wait for") in list(
        impossible(one)
    )


def jobs(name: str) -> tuple[RolloutJob, ...]:
    """Of a scenario; none of a fleet, whose bins know no time between versions."""
    setup = read_scenario(SCENARIOS / f"{name}.yaml")
    return setup.jobs if isinstance(setup, Scenario) else ()


def test_studies_but_the_marked_ones_are_fair_to_rules_that_begin_groups_on_any_engine() -> None:
    names = {name for study in STUDIES.values() for name in study.scenarios}
    hasty = {name for name in names for job in jobs(name) if not job.awaits_weights}
    assert hasty == {"eager"}
    assert sum(map(len, map(jobs, names))) > len(hasty)


def test_the_aim_is_judged_only_where_the_trainer_waits() -> None:
    assert set(JUDGED) <= {path.stem for path in SCENARIOS.glob("*.yaml")} - {"eager"}


def test_the_contrast_differs_from_the_conversation_load_in_the_trainer_alone() -> None:
    usual, hasty = (read_scenario(SCENARIOS / f"{one}.yaml") for one in ("normal", "eager"))
    assert isinstance(usual, Scenario)
    job = usual.jobs[0].model_copy(update={"awaits_weights": False})
    assert usual.model_copy(update={"name": "eager", "jobs": (job,)}) == hasty


class Places:
    """A router of the paper's placement with one engine of one place; in which order turns go."""

    def __init__(self, *, oldest_first: bool) -> None:
        policies = policies_of(LeaseTerms(placement=PolicyName.ROSE_PAPER))
        manners = RouterOptions(waits=False, oldest_first=oldest_first)
        self.clock, self.ended = VirtualClock(), list[str]()
        self.router = Router(self.clock, "run", policies, manners, random.Random(0))
        batch = BatchEngine(self.clock, costs("H100", "Qwen3-8B", 0.5), 100_000, lambda: None)
        one = AttachedEngine("one", EngineKind.DEDICATED, batch, 0, gate_open=True, cap=1)
        self.router.attach(one)

    def come(self, session: str, *, born: int, number: int) -> None:
        turn = RoutedTurn(session, 100, 5, number, lambda: self.ended.append(session), born=born)
        self.router.submit(turn)


@pytest.mark.parametrize(
    ("oldest_first", "order"),
    [(False, ["first", "young", "old"]), (True, ["first", "old", "young"])],
)
def test_turns_of_old_trajectories_go_first_where_the_order_says_so(
    *, oldest_first: bool, order: list[str]
) -> None:
    places = Places(oldest_first=oldest_first)
    places.come("first", born=9, number=1)
    places.come("young", born=8, number=2)
    places.come("old", born=2, number=3)
    places.clock.run(10 * SECOND)
    assert places.ended == order


@pytest.mark.parametrize(
    ("ends", "inferred", "over"),
    [(Ends.REPORTED, 0, True), (Ends.INFERRED, 1, True), (Ends.UNKNOWN, 0, False)],
)
def test_siblings_learn_of_an_end_as_the_run_says(ends: Ends, inferred: int, *, over: bool) -> None:
    clock, finished = VirtualClock(), list[str]()
    router = Router(
        clock, "run", policies_of(LeaseTerms()), RouterOptions(ends=ends), random.Random(0)
    )
    batch = BatchEngine(clock, costs("H100", "Qwen3-8B", 0.5), 100_000, lambda: None)
    router.attach(AttachedEngine("one", EngineKind.DEDICATED, batch, 0, gate_open=True, cap=1))

    def end(session: str) -> None:
        finished.append(session)
        router.end_trajectory(session)

    router.submit(RoutedTurn("first", 100, 5, 1, lambda: end("first"), "group"))
    clock.run(200 * SECOND)
    assert finished == ["first"]
    router.submit(RoutedTurn("second", 100, 5, 2, lambda: end("second"), "group"))
    assert router.prospects.inferred_ends == inferred
    known = router.prospects.lengths.rest("group", 0)
    assert (known.median == 5) is over


@pytest.mark.parametrize(
    ("regime", "part"),
    [(Regime.ROSE_PAPER_OLDEST, "oldest_first"), (Regime.ROSE_PAPER_QUEUE, "waits")],
)
def test_the_queue_is_all_that_is_exchanged_of_the_papers_rules(regime: Regime, part: str) -> None:
    paper, other = asdict(RULES[Regime.ROSE_PAPER]), asdict(RULES[regime])
    assert {name for name in paper if paper[name] != other[name]} == {part}
