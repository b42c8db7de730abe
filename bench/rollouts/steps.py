"""One step of agent episodes on dedicated and borrowed engines, under every policy.

Every policy meets the same requests, episodes and gates (production's guard decides them from
serving alone); they differ in where a turn is placed, in what becomes of a cut turn, and, for
``joint``, in production's order of the queue. ``rose-paper`` is the paper's rules as published,
with its patience of 2 s, in both readings of its placement; ``... + keeping`` continues cut
turns, to tell the two apart.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from bench.rollouts.spent import Life, Observed
from rose_core.rollouts.placement.selection import PolicyName
from rose_core.rollouts.trajectories.shares import length_bucket
from rose_core.stats import Clustered, Share, newcombe
from rose_simulate.model.clock import SECOND
from rose_simulate.model.gpus.paper import STALL_S
from rose_simulate.model.jobs.job import TrajectoryFate
from rose_simulate.model.regimes import RULES, RegimeRules
from rose_simulate.model.routing.router import Ends
from rose_simulate.model.scenarios.costs import costs
from rose_simulate.model.scenarios.scenario import Failure, Regime, Scenario
from rose_simulate.model.simulation import Simulation, SimulationInputs

_LOOK_S = 10.0
_OURS = RULES[Regime.OURS]
_FIFO = replace(_OURS, waits=False)
_PAPER = replace(_FIFO, placement=PolicyName.ROSE_PAPER, stall_s=STALL_S)

POLICIES: Mapping[str, RegimeRules] = {
    "joint": _OURS,
    "joint, ends told": replace(_OURS, ends=Ends.REPORTED),
    "joint, ends unknown": replace(_OURS, ends=Ends.UNKNOWN),
    "rose-paper": replace(_PAPER, keeps=False),
    "rose-paper + keeping": _PAPER,
    "rose-paper-dedicated": replace(_PAPER, placement=PolicyName.ROSE_PAPER_DEDICATED, keeps=False),
    "rose-paper-dedicated + keeping": replace(_PAPER, placement=PolicyName.ROSE_PAPER_DEDICATED),
    "cache-aware": replace(_FIFO, placement=PolicyName.CACHE_AWARE),
    "least-loaded": replace(_FIFO, placement=PolicyName.LEAST_LOADED),
    "fixed": replace(_FIFO, placement=PolicyName.FIXED),
    "long-to-borrowed": replace(_FIFO, placement=PolicyName.LONG_TO_BORROWED),
    "late-to-borrowed": replace(_FIFO, placement=PolicyName.LATE_TO_BORROWED),
    "alone": RULES[Regime.FIXED],
    "clairvoyant": RULES[Regime.CLAIRVOYANT],
}


@dataclass(frozen=True)
class RunResult:
    """What one run gave.

    Attributes:
        makespans: of the synchronous steps that ended, seconds, training taken off.
        fates: of every trajectory that a trainer took or dropped.
        begun, ended, inside: trajectories; what is neither ended nor inside was lost.
        correlations: of pool and stratum, by dimension; empty for rules that remember nothing.
        lives: what became of the time of every trajectory (``spent``).
    """

    makespans: tuple[float, ...]
    fates: tuple[TrajectoryFate, ...]
    begun: int
    ended: int
    inside: int
    dropped: int
    redone_share: float
    correlations: Mapping[str, float]
    lives: Mapping[str, Life]

    @property
    def lost(self) -> int:
        """Trajectories that are nowhere any more."""
        return self.begun - self.ended - self.inside


def simulate(
    scenario: Scenario,
    rules: RegimeRules,
    seed: int,
    material: SimulationInputs,
    steps: int | None = None,
) -> RunResult:
    """One run of the scenario's only job.

    Args:
        scenario: whose seconds are the most that are run.
        rules: of the policy.
        seed: of everything that is drawn.
        material: traces.
        steps: stop once so many steps of training were made; None = at the scenario's end.
    """
    settings, lives = scenario.jobs[0], dict[str, Life]()
    alone = costs(
        settings.device, settings.model, scenario.derate, attention=scenario.prefill_attention
    )
    observed = partial(Observed, costs=alone, lives=lives)
    world = Simulation(scenario, rules, seed, material, observed)
    job, router = world.jobs[settings.name], world.routers[settings.name]
    counts = job.counts
    end = scenario.warmup_s + scenario.seconds
    now = end if steps is None else 0.0
    while steps is not None and now < end and counts.steps < steps:
        now = min(end, now + _LOOK_S)
        world.clock.run(round(now * SECOND))
    world.clock.run(round(now * SECOND))
    return RunResult(
        makespans=tuple(step - settings.train_s for step in counts.step_s),
        fates=tuple(counts.fates),
        begun=counts.started,
        ended=counts.finished,
        inside=job.inside,
        dropped=counts.dropped,
        redone_share=router.counts.redone_tokens / max(1, router.counts.tokens),
        correlations=router.prospects.inclusion.correlations(),
        lives=lives,
    )


def taking_the_oldest(scenario: Scenario) -> Scenario:
    """The same, but the trainer takes the oldest groups first instead of the first to finish."""
    job = scenario.jobs[0].model_copy(update={"oldest_first": True})
    return scenario.model_copy(update={"jobs": (job,)})


def vanishing(scenario: Scenario, at_s: float) -> Scenario:
    """The same, but every borrowed engine vanishes at once and none comes back."""
    replicas = sum(one.replicas for one in scenario.services)
    failures = tuple(Failure(kind="gone", at_s=at_s, target=n) for n in range(replicas))
    return scenario.model_copy(update={"failures": failures})


def reward(session: str, tokens: int, seed: int) -> bool:
    """Whether the trajectory was right, drawn by name; longer ones are right less often."""
    chance = max(0.2, 0.8 - tokens / 20_000)
    return random.Random(f"{seed}/{session}/reward").random() < chance


Strata = dict[tuple[str, str], Clustered]


def strata(found: RunResult, seed: int, into: Strata) -> None:
    """Count what was trained on by length, reward and staleness, by group."""
    for fate in found.fates:
        right = reward(fate.session, fate.tokens, seed)
        keys = (
            ("length", length_bucket(fate.tokens)),
            ("reward (drawn)", "right" if right else "wrong"),
            ("staleness", str(fate.stale)),
        )
        for key in keys:
            group = f"{seed}/{fate.session.partition('.')[0]}"
            into.setdefault(key, Clustered()).add(group, hit=fate.trained)


def gaps(ours: Strata, alone: Strata) -> dict[tuple[str, str], Share]:
    """Difference of the share trained, by stratum that both have, with its 95 % interval."""
    return {
        key: newcombe(ours[key].share(), alone[key].share())
        for key in sorted(ours.keys() & alone.keys())
    }
