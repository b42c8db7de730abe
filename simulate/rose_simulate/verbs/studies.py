"""``rose simulate study NAME``: the studies of the documentation, each with one command.

A study is one or more scenarios and what is compared in them. It writes ``study-NAME.json`` and,
with ``--pages``, a page and its plots, which is how ``docs/studies`` was made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rose_simulate.files.overrides import changed
from rose_simulate.files.reading import read_material, read_scenario
from rose_simulate.model.errors import SimulationError
from rose_simulate.model.fleets.fleet import FleetOutcome
from rose_simulate.model.outcome import RunOutcome
from rose_simulate.model.scenarios.fleet_scenario import FleetScenario
from rose_simulate.model.scenarios.scenario import Interference, Regime
from rose_simulate.pages.study_page import page
from rose_simulate.runs.fleets import FleetResult, run_fleet
from rose_simulate.runs.runner import Runner
from rose_simulate.runs.study import Result, study
from rose_wire.flags import VerbParser, amount

SCENARIOS = Path(__file__).parents[2] / "scenarios"
DERATES = (0.4, 0.5, 0.7)
BAND = (
    Interference(serving_slowdown=1.15, rollout_slowdown=1.3),
    Interference(serving_slowdown=1.4, rollout_slowdown=1.4),
    Interference(serving_slowdown=2.0, rollout_slowdown=2.0),
)
"""What co-running costs has not been measured on a GPU: from near the paper's own Table 1 to taking
turns. Headlines hold where they hold over all of it."""
MAIN = (Regime.FIXED, Regime.ROSE_PAPER, Regime.ROSE_PAPER_DEDICATED, Regime.OURS)
ATTRIBUTION = (
    Regime.ROSE_PAPER,
    Regime.ROSE_PAPER_DEDICATED,
    Regime.ROSE_PAPER_TAP,
    Regime.ROSE_PAPER_KEEP,
    Regime.ROSE_PAPER_OLDEST,
    Regime.ROSE_PAPER_QUEUE,
    Regime.OURS_LADDER,
    Regime.OURS,
    Regime.CLAIRVOYANT,
)
PEERS = (
    Regime.UNGUARDED,
    Regime.STATIC_SPLIT,
    Regime.ON_OFF,
    Regime.WHOLE_REPLICA,
    Regime.SPOT,
    Regime.POLLED,
    Regime.ROSE_PAPER,
    Regime.ROSE_PAPER_DEDICATED,
    Regime.OURS,
)


@dataclass(frozen=True)
class Study:
    """One study.

    Attributes:
        scenarios: names of files.
        regimes: empty = those of the scenario.
        derates: what is shown at one may not hold at another; empty = the scenario's alone.
        band: what co-running costs; empty = the scenario's alone.
        summary: what the study is for, for the page.
    """

    title: str
    scenarios: tuple[str, ...]
    summary: str
    regimes: tuple[Regime, ...] = ()
    derates: tuple[float, ...] = DERATES
    band: tuple[Interference, ...] = BAND


STUDIES: Mapping[str, Study] = {
    "normal": Study("(a) conversation load", ("normal",), "A usual day's load, one job.", MAIN),
    "fortnight": Study(
        "(a) fourteen days",
        ("fortnight",),
        "The slow trend of two weeks times the fast part of the conversation trace, in bins.",
    ),
    "stress": Study("(b) code load", ("stress",), "Bursts of 26 times the mean.", MAIN),
    "correlated": Study(
        "(c) every service bursts in the same second",
        ("correlated",),
        "The worst case, once a minute, with the time until rollouts are back.",
        (*MAIN, Regime.UNGUARDED),
    ),
    "tight": Study(
        "a tight SLO",
        ("tight",),
        "The conversation load, whose SLO is 1.5 times what serving alone takes at its 99th "
        "percentile.",
        (*MAIN, Regime.UNGUARDED),
    ),
    "tight-spread": Study(
        "a tight SLO, and prompts of other lengths in each seed",
        ("tight-spread",),
        "`tight` with each prompt a fifth shorter to a fifth longer than its row's, drawn by seed. "
        "The trace is played in a loop, so in `tight` the requests near the SLO are always the "
        "same row; here they are others in each seed and lap.",
        (Regime.FIXED, Regime.OURS),
        derates=(0.5,),
        band=(Interference(serving_slowdown=1.15, rollout_slowdown=1.3),),
    ),
    "capacity": Study(
        "capacity binds",
        ("capacity",),
        "The conversation load and a batch of 1,024 trajectories, so that every engine always has "
        "work: elsewhere the trainer's supply binds, and no rule of placement can show a "
        "difference.",
        MAIN,
    ),
    "kept": Study(
        "keys that outlive an engine",
        ("normal",),
        "Production beside production whose engines fetch the keys that others of their job made "
        "(`ours-kept`), over a link of 100 Gb/s. The product does so where its platform has a pool "
        "(`engineHost.kvPool`): its engines measure what comes of it and how quickly they prefill, "
        "and pull what comes sooner. With a store on each node and no pool (`kvStoreGiB`) it is "
        "`ours-node`, of 256 GB for the job on a node. With neither, which is the default, it is "
        "`ours`.",
        (Regime.FIXED, Regime.OURS, Regime.OURS_NODE, Regime.OURS_KEPT),
        derates=(0.5,),
        band=(Interference(serving_slowdown=2.0, rollout_slowdown=2.0),),
    ),
    "storm": Study(
        "(d) engines die inside a long tail",
        ("storm",),
        "A synchronous step; borrowed engines, a guard and the link of the weights fail again and "
        "again while its tail runs.",
        MAIN,
    ),
    "nodes": Study(
        "whole machines fail",
        ("nodes",),
        "Nodes of four GPUs go off with everything on them, each once in twenty minutes on "
        "average, and are back after three. Serving alone loses the same ones at the same moments.",
        MAIN,
    ),
    "mps": Study(
        "MPS beside time-slicing",
        ("normal", "normal-mps"),
        "The conversation load with both engines on half of the multiprocessors, against taking "
        "turns. What either costs is modelled from figures of another device, not measured.",
        (*MAIN, Regime.UNGUARDED),
    ),
    "attention": Study(
        "prefill that does not pay for attention",
        ("normal", "normal-no-attention"),
        "The conversation load when prefill pays nothing for attention to what is before it, as "
        "the default was before; published speeds of long prompts show that it does.",
        MAIN,
    ),
    "agents": Study(
        "environments that take seconds",
        ("normal", "agents"),
        "The conversation load with the episodes' own gaps between turns: a coding agent's tools "
        "instead of games.",
        MAIN,
    ),
    "tail": Study(
        "(g) tail batching",
        ("tail-off", "tail-on", "tail-whole"),
        "Synchronous steps. `tail-on`: short rounds start a quarter more prompts than they train "
        "on, and what is late waits for a long round. `tail-whole` is RollPacker's rule: a quarter "
        "more responses of each prompt too, of which the first are kept; long rounds start no more "
        "than they train on. What is put off is sampled anew; that and what is cut count as "
        "discarded.",
        (Regime.FIXED, Regime.OURS),
    ),
    "widths": Study(
        "how wide a job's own engines are",
        ("widths-1", "widths-2", "widths-4", "widths-8", "widths-elastic"),
        "RollPacker's rounds (`tail-whole`) on eight GPUs of the job's own, as engines of 1, 2, 4 "
        "or 8 GPUs, and as engines whose width is chosen for every round (`model.jobs.widths`). "
        "Nothing is lent. Tensor parallelism over n GPUs is 0.8 n times as fast as one (assumed); "
        "a switch takes an engine's start, which begins with the trainer's step.",
        (Regime.FIXED,),
        band=(),
    ),
    "rewards": Study(
        "rewards that take time, and a trainer that streams",
        tuple(
            f"rewards-{takes}{how}"
            for takes in ("tenth", "1", "10", "60")
            for how in ("", "-streams")
        ),
        "`tail-whole` with rewards of 0.1, 1, 10 and 60 s, once more for each with a trainer that "
        "adds a group's gradients as soon as the group is ready (`Batches(stream=True)`). As many "
        "rewards as there are run at a time.",
        MAIN,
        band=(Interference(serving_slowdown=2.0, rollout_slowdown=2.0),),
    ),
    "freshness": Study(
        "(e) bounds of staleness",
        ("freshness-0", "freshness-1", "freshness-4", "freshness-8"),
        "How old a trajectory may be when it is trained on.",
        MAIN,
    ),
    "mixed": Study(
        "(f) H100 and H200 in one job",
        ("mixed",),
        "Dedicated H200, borrowed H100: same compute, less bandwidth.",
        (
            Regime.FIXED,
            Regime.ROSE_PAPER,
            Regime.ROSE_PAPER_DEDICATED,
            Regime.OURS_LADDER,
            Regime.OURS,
        ),
    ),
    "fleet": Study(
        "(h) 10,000 GPUs",
        ("fleet",),
        "50 services, 20 jobs, one hour, in bins. The jobs are starved: what is lent has too few "
        "trajectories, as `full` says.",
    ),
    "fleet-capacity": Study(
        "(h) a fleet where capacity binds",
        ("fleet-capacity",),
        "A fifth of study `fleet`, whose jobs have as much work per dedicated GPU as that of study "
        "`capacity`, and borrow what their turns ask for and services lend. No turn is placed in "
        "bins, so both readings of the paper's rules are one here. Their turns go as they came, "
        "whose cost in keys is left out; that flatters them.",
    ),
    "shared": Study(
        "jobs that share pools",
        ("shared",),
        "The same 10,000 GPUs with 40 synchronous jobs whose leases share what 50 services lend. "
        "Under `ours-held` each lease holds its fair share for as long as it lives; under `ours` "
        "the planner hears of turns.",
    ),
    "supply": Study(
        "slots where they bring most",
        ("unequal",),
        "Two jobs of equal weight and unequal work share what one service lends: by weight "
        "(`ours`) and by what a slot more would bring each (`ours-gain`, `Policy.by_gain`, off in "
        "production).",
        (Regime.FIXED, Regime.OURS, Regime.OURS_GAIN),
        derates=(0.5,),
        band=(Interference(serving_slowdown=2.0, rollout_slowdown=2.0),),
    ),
    "attribution": Study(
        "what the difference to the paper's rules is made of",
        ("normal",),
        "The paper's rules with one part exchanged at a time, the order of the queue among them.",
        ATTRIBUTION,
    ),
    "eager": Study(
        "a trainer that does not wait for its engines",
        ("normal", "eager"),
        "The conversation load when new groups begin in the second of a publish, two seconds "
        "before the dedicated engines have the weights, in place of when they have them. It "
        "flatters production against rules that begin groups on any engine.",
        MAIN,
    ),
    "memory": Study(
        "a cap that fits the borrowed memory",
        ("normal-kv",),
        "The conversation load when no borrowed engine takes more turns than its KV pool holds; "
        "added after the others were seen.",
        MAIN,
    ),
    "peers": Study(
        "other ways to use the same GPUs",
        ("normal",),
        "Baselines in the same run.",
        PEERS,
    ),
    "table1": Study(
        "the paper's Table 1 set-ups",
        ("table1-8b", "table1-32b", "table1-8b-kv", "table1-8b-short"),
        "Pool sizes, models, cap and SLOs of the paper, fixed before any run. Added afterwards: "
        "`table1-8b-kv`, no more turns on a borrowed engine than its KV pool holds, and "
        "`table1-8b-short`, contexts a quarter as long, as a game's are shorter than an agent's.",
        (
            Regime.FIXED_LADDER,
            Regime.STATIC_SPLIT,
            Regime.ROSE_PAPER,
            Regime.ROSE_PAPER_DEDICATED,
            Regime.OURS,
        ),
    ),
}

Results = tuple[Result | FleetResult, ...]


def run_study(chosen: Study, folder: Path, options: argparse.Namespace, runner: Runner) -> Results:
    """Run every scenario of a study.

    Raises:
        SimulationError: a scenario or trace is missing or wrong.
    """
    paths = (folder / f"{name}.yaml" for name in chosen.scenarios)
    return tuple(_run(chosen, path, options, runner) for path in paths)


def _run(
    chosen: Study, path: Path, options: argparse.Namespace, runner: Runner
) -> Result | FleetResult:
    setup = read_scenario(path)
    changes = {"seeds": options.seeds, "seconds": options.seconds}
    setup = changed(setup, changes | {"regimes": options.regimes or chosen.regimes or None})
    material = read_material(path, setup)
    derates: Sequence[float] = options.derate or chosen.derates or (setup.derate,)
    if isinstance(setup, FleetScenario):
        loads = sorted(options.loads or ())
        return run_fleet(setup, material, lambda one: _progress(setup.name, one), derates, loads)
    name = setup.name
    asked = [
        Interference(serving_slowdown=serving, rollout_slowdown=rollout)
        for serving, rollout in options.slower or ()
    ]
    band = asked or (chosen.band if setup.interference == Interference() else ())
    return study(setup, material, derates, lambda one: _progress(name, one), runner, band=band)


def _flags(options: argparse.Namespace) -> str:
    """What was asked for beside the study's own, as it is typed."""
    asked = {"derate": options.derate or (), "seeds": options.seeds or ()}
    asked["seconds"] = (options.seconds,) if options.seconds else ()
    asked["loads"] = options.loads or ()
    shown = "".join(f" --slower {s:g} {r:g}" for s, r in options.slower or ())
    shown += f" --regimes {' '.join(options.regimes)}" if options.regimes else ""
    return shown + "".join(
        f" --{name} {' '.join(f'{value:g}' for value in values)}"
        for name, values in asked.items()
        if values
    )


def _progress(name: str, one: RunOutcome | FleetOutcome) -> None:
    sys.stderr.write(f"{name}: derate {one.derate:g}, seed {one.seed}, {one.regime}: done\n")


def parser() -> argparse.ArgumentParser:
    """Arguments of ``study``."""
    made = VerbParser(prog="rose simulate study", description=__doc__)
    made.add_argument(
        "names",
        nargs="+",
        choices=[*STUDIES, "all"],
        metavar="NAME",
        help="studies of docs/studies.md, or all",
    )
    made.add_argument("--processes", type=int, default=1, help="runs side by side")
    made.add_argument("--keep", type=Path, help="folder of results that later calls need not redo")
    made.add_argument("--seeds", type=int, nargs="+", help="instead of the scenario's")
    made.add_argument("--derate", type=float, nargs="+", help="instead of the study's")
    made.add_argument("--seconds", type=float, help="instead of the scenario's")
    made.add_argument(
        "--regimes",
        nargs="+",
        choices=[one.value for one in Regime],
        metavar="REGIME",
        help="instead of the study's; fixed, which all are compared with, runs as well, but of"
        " fleets where it is named",
    )
    made.add_argument(
        "--loads",
        type=amount,
        nargs="+",
        help="fleets: requests per second at which a replica is simulated by events; fewer are "
        "quicker, and bursts above the last one count as it",
    )
    made.add_argument(
        "--slower",
        type=float,
        nargs=2,
        action="append",
        metavar=("SERVING", "ROLLOUTS"),
        help="factors of time while both compute, instead of the study's; may be repeated",
    )
    made.add_argument("--scenarios", type=Path, default=SCENARIOS, help="folder of the scenarios")
    made.add_argument(
        "--out", type=Path, default=Path("out") / "simulate", help="folder for NAME.json"
    )
    made.add_argument("--pages", type=Path, help="write the page and its plots there")
    return made


def main(argv: list[str]) -> int:
    """Run studies."""
    options = parser().parse_args(argv)
    if options.processes < 1:
        sys.stderr.write("rose simulate study: --processes must be at least 1\n")
        return 2
    names = list(STUDIES) if "all" in options.names else options.names
    runner = Runner(options.processes, options.keep)
    try:
        for name in names:
            _one(name, options, runner)
    except SimulationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        runner.close()
    return 0


def _one(name: str, options: argparse.Namespace, runner: Runner) -> None:
    """Run a study and write what it gives."""
    chosen = STUDIES[name]
    found = run_study(chosen, options.scenarios, options, runner)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"study-{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    made = page(name, chosen.title, chosen.summary, found, _flags(options))
    sys.stdout.write(f"{made.text}\nwritten to {path}\n")
    if options.pages:
        options.pages.mkdir(parents=True, exist_ok=True)
        (options.pages / f"{name}.md").write_text(made.text)
        for plot, svg in made.plots.items():
            (options.pages / plot).write_text(svg)
