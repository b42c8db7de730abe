"""Makespan by policy and where it went, distance to a bound, inclusion, all borrowed gone."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from bench.record import Figure, figure, record
from bench.rollouts import spent
from bench.rollouts.steps import (
    POLICIES,
    RunResult,
    Strata,
    gaps,
    simulate,
    strata,
    taking_the_oldest,
    vanishing,
)
from bench.scenarios import scenario
from rose_simulate.model.outcome import paired_ratio
from rose_simulate.model.scenarios.scenario import Scenario
from rose_simulate.model.simulation import SimulationInputs

FOLDER = Path(__file__).parent
TAKEN_APART = ("joint", "rose-paper", "rose-paper + keeping", "rose-paper-dedicated")
DEGENERATE = ("long-to-borrowed", "late-to-borrowed")
_PATIENCE = 6.0  # the slowest pool may take so many times as long for the same steps
NOTES = (
    "virtual time, measured cost model, modelled interference; "
    "requests, episodes and gates are the same for every policy",
    "rose-paper, rose-paper-dedicated: two readings of the paper's order, cut turns begun anew "
    "after 2 s; where each parameter is from: simulate/rose_simulate/model/gpus/paper.py",
    "bound: the longest trajectory of each step, were it alone on an engine that is never shut; "
    "the parts of a step are of the trajectory that ends it",
    "reward (drawn): right or wrong by a draw with a chance of 0.8 less a twentieth per thousand "
    "tokens, at least 0.2, not by any answer: the traces hold none",
    "inclusion: both pools run for as many steps of training, because in equal time the slower one "
    "makes too few for anything to grow too old; alone = production's policy, nothing borrowed",
)


def makespans(seeds: list[int], names: list[str], steps: int) -> list[Figure]:
    """Mean makespan by policy, and the paper's over ours, paired by seed.

    Args:
        seeds: of requests, episodes and prompts.
        names: of the policies.
        steps: the first so many, the same for every policy: in equal time a faster one would be
            judged by steps that a slower one never comes to, and long steps by none.

    Raises:
        SystemExit: a policy does not make so many steps in the scenario's time.
    """
    setup, material = scenario("step", FOLDER)
    means: dict[str, list[float]] = {}
    rows: list[Figure] = []
    for name in names:
        found = [simulate(setup, POLICIES[name], seed, material, steps) for seed in seeds]
        if any(len(one.makespans) < steps for one in found):
            sys.exit(f"{name} makes fewer than {steps} steps in {setup.seconds:.0f} s")
        means[name] = [statistics.fmean(one.makespans[:steps]) for one in found]
        apart = [_steps(setup, one, steps) for one in found]
        bound = [statistics.fmean(step.bound for step in one) for one in apart]
        redone = statistics.fmean(one.redone_share for one in found)
        rows.append(figure(f"makespan, {name}", statistics.fmean(means[name]), "s"))
        rows.append(figure(f"redone tokens, {name}", 100 * redone, "%"))
        rows += _parts(name, apart) if name in TAKEN_APART else []
        if name == "joint":
            rows.append(figure("makespan, bound", statistics.fmean(bound), "s"))
            rows.append(figure("joint / bound", paired_ratio(means[name], bound).mean, "ratio"))
        sys.stderr.write(f"{name}: done\n")
    for name in names:
        if name == "joint":
            continue
        ratio = paired_ratio(means[name], means["joint"])
        aim = 1.15 if name in {"rose-paper", "rose-paper-dedicated"} else None
        rows.append(figure(f"{name} / joint", ratio.mean, "ratio", at_least=aim))
        if ratio.low is not None and ratio.high is not None:
            rows.append(figure(f"{name} / joint, low", ratio.low, "ratio"))
            rows.append(figure(f"{name} / joint, high", ratio.high, "ratio"))
    return rows


def _steps(setup: Scenario, one: RunResult, steps: int) -> list[spent.Step]:
    return spent.steps(one.lives, one.makespans[:steps], setup.jobs[0].train_s)


def _parts(name: str, apart: list[list[spent.Step]]) -> list[Figure]:
    lasts = [step.last for steps in apart for step in steps]
    return [
        figure(f"of it, {name}: {part}", statistics.fmean(getattr(one, part) for one in lasts), "s")
        for part in spent.PARTS
    ]


def drafts(seeds: list[int], steps: int, nodes: int, per_step: list[float]) -> list[Figure]:
    """Steps with drafts beside one without, as production places turns.

    Args:
        seeds: of requests, episodes and prompts.
        steps: the first so many.
        nodes: tokens that a step verifies for each trajectory.
        per_step: tokens that it gives, one case each; how many they are depends on the task.
    """
    setup, material = scenario("step", FOLDER)

    def means(one: Scenario) -> list[float]:
        found = (simulate(one, POLICIES["joint"], seed, material, steps) for seed in seeds)
        return [statistics.fmean(run.makespans[:steps]) for run in found]

    without = means(setup)
    rows = [figure("makespan, no drafts", statistics.fmean(without), "s")]
    for tokens in per_step:
        job = setup.jobs[0].model_copy(update={"draft_nodes": nodes, "tokens_per_step": tokens})
        found = means(setup.model_copy(update={"jobs": (job,)}))
        head = f"drafts, {nodes} nodes, {tokens:g} tokens a step"
        ratio = paired_ratio(found, without)
        rows.append(figure(f"makespan, {head}", statistics.fmean(found), "s"))
        rows.append(figure(f"with / without, {head}", ratio.mean, "ratio"))
        if ratio.low is not None and ratio.high is not None:
            rows.append(figure(f"with / without, {head}, low", ratio.low, "ratio"))
            rows.append(figure(f"with / without, {head}, high", ratio.high, "ratio"))
    return rows


def inclusion(seeds: list[int], few: list[int]) -> list[Figure]:
    """Difference to dedicated-only of the share trained, by stratum and order of the trainer.

    Args:
        seeds: for the aim; the rarest stratum needs many.
        few: for what is shown beside it.
    """
    setup, material = scenario("stream", FOLDER)
    oldest = taking_the_oldest(setup)
    rows = _inclusion("oldest first", oldest, ("joint",), seeds, material)
    rows += _inclusion("oldest first", oldest, DEGENERATE, few, material)
    return rows + _inclusion("as finished", setup, ("joint", *DEGENERATE), few, material)


def _inclusion(
    order: str,
    setup: Scenario,
    names: tuple[str, ...],
    seeds: list[int],
    material: SimulationInputs,
) -> list[Figure]:
    joint = [simulate(setup, POLICIES["joint"], seed, material) for seed in seeds]
    steps = [len(one.makespans) for one in joint]
    long = setup.model_copy(update={"seconds": _PATIENCE * setup.seconds})
    cases = list(zip(seeds, steps, strict=True))
    alone = _counted(_runs(long, "alone", cases, material), seeds)
    rows: list[Figure] = []
    for name in names:
        runs = joint if name == "joint" else _runs(long, name, cases, material)
        ours = _counted(runs, seeds)
        found = gaps(ours, alone)
        for (dimension, stratum), gap in found.items():
            head = f"inclusion, {order}: {name} - alone, {dimension} {stratum}"
            rows.append(figure(head, 100 * gap.value, "points"))
            rows.append(figure(f"{head}, low", 100 * gap.low, "points"))
            rows.append(figure(f"{head}, high", 100 * gap.high, "points"))
            rows.append(figure(f"{head}, trajectories", ours[dimension, stratum].count, ""))
            rows.append(figure(f"{head}, groups", ours[dimension, stratum].groups, ""))
        worst = max(max(abs(gap.low), abs(gap.high)) for gap in found.values())
        aim = 2.0 if (name, order) == ("joint", "oldest first") else None
        title = f"inclusion, {order}: {name}, farthest end"
        rows.append(figure(title, 100 * worst, "points", at_most=aim))
        rows += _correlations(f"pool correlation, {order}: {name}", runs)
        sys.stderr.write(f"inclusion, {order}, {name}: done\n")
    return rows


def _correlations(title: str, runs: list[RunResult]) -> list[Figure]:
    """Means over the seeds: a diagnostic beside the inclusion, without an aim."""
    dimensions = sorted({dimension for one in runs for dimension in one.correlations})
    return [
        figure(
            f"{title}, {dimension}",
            statistics.fmean(one.correlations.get(dimension, 0.0) for one in runs),
            "",
        )
        for dimension in dimensions
    ]


def _runs(
    setup: Scenario, name: str, cases: list[tuple[int, int]], material: SimulationInputs
) -> list[RunResult]:
    return [simulate(setup, POLICIES[name], seed, material, steps) for seed, steps in cases]


def _counted(found: list[RunResult], seeds: list[int]) -> Strata:
    counts: Strata = {}
    for one, seed in zip(found, seeds, strict=True):
        strata(one, seed, counts)
    return counts


def vanish(seeds: list[int]) -> list[Figure]:
    """What is lost when every borrowed engine vanishes in the middle."""
    streaming, material = scenario("stream", FOLDER)
    setup = taking_the_oldest(streaming)
    gone = vanishing(setup, setup.warmup_s + setup.seconds / 3)
    found = [simulate(gone, POLICIES["joint"], seed, material) for seed in seeds]
    kept = [simulate(setup, POLICIES["joint"], seed, material) for seed in seeds]
    paper = [simulate(gone, POLICIES["rose-paper"], seed, material) for seed in seeds]
    members = setup.jobs[0].group
    return [
        figure("all borrowed vanish: trajectories lost", _sum(found, "lost"), "", at_most=0),
        figure(
            "all borrowed vanish: groups dropped",
            _sum(found, "dropped") / members,
            "groups",
            at_most=0,
        ),
        figure("all borrowed vanish: redone tokens, joint", _redone(found), "%", at_most=2),
        figure("all borrowed vanish: redone tokens, rose-paper", _redone(paper), "%"),
        figure("none vanishes: groups dropped", _sum(kept, "dropped") / members, "groups"),
    ]


def _redone(found: list[RunResult]) -> float:
    return 100 * statistics.fmean(one.redone_share for one in found)


def _sum(found: list[RunResult], field: str) -> float:
    return float(sum(getattr(one, field) for one in found))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="bench.rollouts", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=3, help="of each seed, for the makespan")
    parser.add_argument("--inclusion-seeds", type=int, nargs="+", default=list(range(1, 31)))
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--only", choices=["makespan", "inclusion", "vanish", "drafts"])
    parser.add_argument("--draft-nodes", type=int, default=8)
    parser.add_argument(
        "--tokens-per-step", type=float, nargs="+", default=[], help="what `bench.drafts` measured"
    )
    options = parser.parse_args(argv)
    if options.only == "drafts" and not options.tokens_per_step:
        parser.error("--only drafts: give --tokens-per-step what `bench.drafts` measured")
    if options.draft_nodes < 1 or any(one < 1 for one in options.tokens_per_step):
        parser.error("--draft-nodes, --tokens-per-step: a step with drafts has 1 or more of each")
    names = list(dict.fromkeys(["joint", *options.policies]))
    rows: list[Figure] = []
    if options.only in {None, "makespan"}:
        rows += makespans(options.seeds, names, options.steps)
    if options.only in {None, "inclusion"}:
        rows += inclusion(options.inclusion_seeds, options.seeds)
    if options.only in {None, "vanish"}:
        rows += vanish(options.seeds)
    if options.tokens_per_step and options.only in {None, "drafts"}:
        rows += drafts(options.seeds, options.steps, options.draft_nodes, options.tokens_per_step)
    record("rollouts", rows, notes=NOTES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
