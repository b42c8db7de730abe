"""No policy is implemented twice: what production's shells decide with, the simulator imports.

The shells' imports are read from their source, so a decision that a shell begins to call and the
simulator does not know of fails here until it is used, or its absence is explained below.
"""

import ast
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rose_core.guard.gate
import rose_core.guard.slot
import rose_core.lending
import rose_core.rollouts.placement.dispatch
import rose_core.rollouts.placement.selection
import rose_core.rollouts.placement.watch
import rose_core.rollouts.training.rounds
from rose_core.lending import LendingPlan, Snapshot, plan
from rose_core.rollouts.placement.warming import Warm, WarmOutcome, to_warm
from rose_simulate.model.clock import SECOND
from rose_simulate.model.cluster import planner
from rose_simulate.model.gpus import gates, guarded
from rose_simulate.model.jobs import job
from rose_simulate.model.jobs.workload import PlannedTurn
from rose_simulate.model.regimes import RULES
from rose_simulate.model.routing import router, warming
from rose_simulate.model.run import run
from rose_simulate.model.scenarios.scenario import Regime
from rose_simulate.model.simulation import Simulation
from tests.simulate.worlds import MATERIAL, scenario

ROOT = Path(__file__).parents[2]
SIMULATOR = ("simulate/rose_simulate/model",)
ROOMS = ("rose_core.guard", "rose_core.lending", "rose_core.rollouts", "rose_core.sandboxes")
SHELLS = {
    "agent/rose_agent/guard": ("rose_core.guard",),
    "operator/rose_operator": ("rose_core.lending",),
    "router/rose_router": ("rose_core.rollouts",),
    "sandbox/rose_sandbox": ("rose_core.sandboxes",),
    "trainer/rose_trainer/rounds.py": ("rose_core.rollouts.training.rounds",),
}
NOT_SIMULATED = {
    "rose_core.guard.crossover": "serving alone is a run of its own here, no window is withheld",
    "rose_core.guard.freezing": "an engine stops in the given time, and holds no driver's lock",
    "rose_core.guard.grants": "leader terms: one planner, no network in between",
    "rose_core.guard.lanes": "a slot has one engine here; two shares are for MPS",
    "rose_core.guard.trial": "no window is withheld, so there is nothing to compare with",
    "rose_core.guard.whole": "no replica is put to sleep here; a lent one shares its GPUs",
    "rose_core.lending.autoscalers": "scenarios have no autoscaler",
    "rose_core.lending.forecast": "the planner's forecast needs days of load",
    "rose_core.lending.groups": "a replica is of one node here",
    "rose_core.lending.tenancy": "scenarios have one team, and no policy",
    "rose_core.rollouts.transcripts.detokenize": "tokens have no text here",
    "rose_core.rollouts.engines.drafts": "a scenario says how many tokens a step gives",
    "rose_core.rollouts.errors": "requests are well-formed here",
    "rose_core.rollouts.capacity.fairness": "a lease serves one job here",
    "rose_core.rollouts.requests.fields": "requests are well-formed here",
    "rose_core.rollouts.trajectories.inclusion": "counted from fates, in bench/rollouts",
    "rose_core.rollouts.requests.logprobs": "tokens have no content here",
    "rose_core.rollouts.conversations.message_tree": "turns have no messages here",
    "rose_core.rollouts.conversations.prefixes": "trajectories have names here",
    "rose_core.rollouts.training.quorum": "dedicated engines take a version after link.dedicated_s",
    "rose_core.rollouts.capacity.replicas": "one router per job",
    "rose_core.rollouts.capacity.router_size": "a router here has no memory to run out of",
    "rose_core.rollouts.conversations.saved_turns": "turns have no messages here",
    "rose_core.rollouts.requests.shown": "nobody asks for what would be complained of",
    "rose_core.rollouts.transcripts.spans": "tokens have no content here",
    "rose_core.rollouts.requests.splice": "no request has parameters",
    "rose_core.rollouts.requests.stops": "tokens have no text here",
    "rose_core.rollouts.engines.suspects": "no request ends an engine here",
    "rose_core.rollouts.transcripts.transcript": "tokens have no content here",
    "rose_core.rollouts.versions": "no turn is pinned",
    "rose_core.sandboxes.conversations": "no server in a sandbox is talked to",
    "rose_core.sandboxes.heartbeats": "no host falls silent here",
    "rose_core.sandboxes.networks": "sandboxes call nobody here",
    "rose_core.sandboxes.outside": "no sandbox reaches out, or goes back",
    "rose_core.sandboxes.pages": "what is saved has a time and no bytes here",
    "rose_core.sandboxes.templates": "agents are given their costs, not an image",
    "rose_core.sandboxes.tunnels": "nobody connects to a sandbox",
}


def _sources(place: str) -> Iterator[Path]:
    path = ROOT / place
    yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def _modules(place: str) -> set[str]:
    """Modules of the rooms that the sources import something from."""
    found: set[str] = set()
    for path in _sources(place):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ROOMS):
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                own = {name for name in inside if _is_module(name)}
                found |= own or {str(node.module)}
    return found


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def _reached(modules: set[str]) -> set[str]:
    """The modules, and what they import of the rooms in turn."""
    todo, found = list(modules), set[str]()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            path = name.replace(".", "/")
            file = f"{path}.py" if (ROOT / f"{path}.py").exists() else f"{path}/__init__.py"
            todo += _modules(file)
    return found


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_what_a_shell_decides_with_the_simulator_decides_with_too(shell: str) -> None:
    wanted = {name for name in _modules(shell) if name.startswith(SHELLS[shell])}
    assert wanted, f"{shell} imports no decisions; has it moved?"
    ours = _reached(_modules(SIMULATOR[0]))
    ours |= {name.rpartition(".")[0] for name in ours}  # a package by any of its modules
    missing = wanted - ours - set(NOT_SIMULATED)
    assert not missing, f"{shell} decides with {sorted(missing)}; the simulator does not"


def test_every_explained_absence_is_one() -> None:
    direct = _modules(SIMULATOR[0])
    for name in NOT_SIMULATED:
        assert _is_module(name), f"{name} is gone; take it off the list"
        assert name not in direct, f"{name} is simulated now; take it off the list"


def test_the_simulator_holds_productions_own_functions() -> None:
    assert vars(guarded)["judge"] is rose_core.guard.gate.judge
    assert vars(guarded)["decide"] is rose_core.guard.slot.decide
    assert vars(guarded)["Experience"].__module__ == "rose_core.guard.experience"
    assert vars(guarded)["Gaps"].__module__ == "rose_core.guard.regime"
    assert vars(planner)["plan"] is rose_core.lending.plan
    assert vars(router)["place"] is rose_core.rollouts.placement.selection.place
    assert vars(router)["next_turn"] is rose_core.rollouts.placement.dispatch.next_turn
    assert vars(router)["queues"] is rose_core.rollouts.placement.watch.queues
    assert vars(job)["Rounds"] is rose_core.rollouts.training.rounds.Rounds
    assert not hasattr(gates, "judge")


def test_without_productions_plan_nothing_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(snapshot: Snapshot, now: float) -> LendingPlan:
        return replace(plan(snapshot, now), lends=())

    monkeypatch.setattr(planner, "plan", nothing)
    outcome, _ = run(scenario(), Regime.OURS, 1, MATERIAL, {})
    assert outcome.borrowed_held_ms == 0


def test_without_productions_dispatch_no_turn_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "next_turn", lambda _waiting, _scene: (None, None))
    outcome, _ = run(scenario(), Regime.OURS, 1, MATERIAL, {})
    assert outcome.jobs[0].tokens == 0


def test_what_is_warmed_in_gaps_is_productions_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Warm] = []

    def noted(*given: Any, **more: Any) -> tuple[Warm, ...]:  # noqa: ANN401  # of to_warm
        found = to_warm(*given, **more)
        asked.extend(found)
        return found

    monkeypatch.setattr(warming, "to_warm", noted)
    # Long gaps and quick publishes, so that keys are lost while tools run.
    turns = tuple(PlannedTurn(900, 40, gap) for gap in (0.0, 4.0, 4.0, 4.0, 4.0, 4.0))
    material = replace(MATERIAL, episodes=(turns,))
    setup = scenario(regimes=(Regime.OURS,))
    job = setup.jobs[0].model_copy(update={"staleness": 4, "train_s": 1.0, "batch_groups": 1})
    world = Simulation(setup.model_copy(update={"jobs": (job,)}), RULES[Regime.OURS], 1, material)
    world.clock.run(90 * SECOND)
    ended = world.routers["grpo"].warmer.ended
    assert ended[WarmOutcome.USED] > 0
    assert sum(ended.values()) <= len(asked)
