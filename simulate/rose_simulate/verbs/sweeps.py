"""``rose simulate frontier`` and ``rose simulate slots``: one load or loan after another.

| verb | varies | shows |
|---|---|---|
| ``frontier`` | requests of a burst, tokens of a prompt | what each rule makes late |
| ``slots`` | replicas lent at most | what one slot more brings, and what serving feels of it |

A burst is worth asking about up to where serving alone breaks; beyond that lending has no harm left
to add, and the row says so. Equal seeds give equal bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rose_core.stats import Interval, mean_of
from rose_simulate.files.overrides import changed
from rose_simulate.files.reading import read_material, read_scenario
from rose_simulate.model.errors import SimulationError
from rose_simulate.model.outcome import RunOutcome
from rose_simulate.model.scenarios.scenario import Regime, Scenario
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.runs.runner import Case, Runner
from rose_simulate.runs.study import worst_mean
from rose_simulate.verbs.studies import SCENARIOS
from rose_wire.flags import VerbParser

RULES = (
    Regime.FIXED,
    Regime.OURS,
    Regime.ROSE_PAPER,
    Regime.ROSE_PAPER_DEDICATED,
    Regime.UNGUARDED,
)
SIZES = (64, 96, 128, 160, 192)
PROMPTS = (1500, 3000)
SLOTS = (0, 4, 8, 12, 16)


class Burst(msgspec.Struct, frozen=True):
    """One load: requests of a burst of each service, and tokens of a prompt.

    Attributes:
        late: with nothing lent.
        added: late under a rule and not with nothing lent, by rule; ``a_seed``: mean over seeds.
        worst_ms: TTFT p50, p90 and P99 of the service whose P99 is worst, by rule; the fixed pool's
            is serving alone.
    """

    size: int
    prompt: int
    requests: int
    late: int
    added: dict[str, int]
    a_seed: dict[str, Interval]
    worst_ms: dict[str, tuple[float, float, float]]


class Loan(msgspec.Struct, frozen=True):
    """Replicas lent at most, and what came of it.

    Attributes:
        engines: useful tokens beyond those without a loan, in engines of the fixed pool.
        open_hours: GPU-hours in which rollouts might compute on lent GPUs, over all seeds.
        marginal: engines won per slot more than in the row before; None in the first.
        ttft_paired, slower_5: see ``ServingOutcome``; means over seeds, of the worst service. None
            without a loan.

    Intervals are over seeds, each beside its own fixed pool.
    """

    slots: int
    useful_tokens_per_s: float
    engines: Interval
    open_hours: float
    marginal: Interval | None
    ttft_paired: Interval | None = None
    slower_5: float | None = None


def bursts(
    scenario: Scenario,
    material: SimulationInputs,
    loads: Sequence[tuple[int, int]],
    runner: Runner,
    progress: Callable[[RunOutcome], None],
) -> list[Burst]:
    """Every load (size, prompt) under every regime of the scenario."""
    found: list[Burst] = []
    for size, prompt in loads:
        services = tuple(
            one.model_copy(
                update={
                    "load": one.load.model_copy(update={"burst_size": size, "burst_prompt": prompt})
                }
            )
            for one in scenario.services
        )
        chosen = scenario.model_copy(update={"services": services})
        answers = runner.run([Case(chosen, seed) for seed in chosen.seeds], material, progress)
        alone = [ones[0].services for ones in answers]
        others = [one for ones in answers for one in ones[1:]]
        by_seed = {
            regime.value: [one.added_violations for one in others if one.regime == regime]
            for regime in chosen.regimes
            if regime is not Regime.FIXED
        }
        worst = {
            regime.value: max(
                (
                    (service.ttft_p50, service.ttft_p90, service.ttft_p99)
                    for ones in answers
                    for one in ones
                    if one.regime == regime
                    for service in one.services
                ),
                key=lambda three: three[-1],
            )
            for regime in (Regime.FIXED, *chosen.regimes)
        }
        found.append(
            Burst(
                size,
                prompt,
                sum(one.requests for services in alone for one in services),
                sum(one.violations for services in alone for one in services),
                {rule: sum(counts) for rule, counts in by_seed.items()},
                {rule: mean_of(counts) for rule, counts in by_seed.items()},
                worst,
            )
        )
    return found


def loans(
    scenario: Scenario,
    material: SimulationInputs,
    counts: Sequence[int],
    runner: Runner,
    progress: Callable[[RunOutcome], None],
) -> list[Loan]:
    """Production with at most so many replicas lent to the scenario's only job, ascending."""
    (job,) = scenario.jobs
    found: list[Loan] = []
    before: list[float] = []
    for count in counts:
        lends = count > 0
        chosen = scenario.model_copy(
            update={
                "jobs": (job.model_copy(update={"borrowed": count}),),
                "regimes": (Regime.FIXED, Regime.OURS_HELD) if lends else (Regime.FIXED,),
            }
        )
        answers = runner.run([Case(chosen, seed) for seed in chosen.seeds], material, progress)
        last = [ones[-1] for ones in answers]
        useful = sum(one.useful_tokens_per_s for one in last) / len(last)
        won = [
            job.dedicated * (ones[-1].useful_tokens_per_s / ones[0].useful_tokens_per_s - 1)
            for ones in answers
        ]
        hours = sum(one.borrowed_computing_ms for one in last) / 3_600_000
        marginal = None
        if found:
            more = count - found[-1].slots
            marginal = mean_of([(a - b) / more for a, b in zip(won, before, strict=True)])
        before = won
        paired = [worst for one in last if (worst := worst_mean([one], "ttft_paired")) is not None]
        found.append(
            Loan(
                *(count, useful, mean_of(won), hours, marginal),
                mean_of(paired) if paired else None,
                worst_mean(last, "slower_5"),
            )
        )
    return found


def frontier_table(found: Sequence[Burst]) -> str:
    """The bursts as a table in Markdown."""
    rules = list(found[0].added)
    head = "| burst per service | late alone | " + " | ".join(
        f"`{rule}` adds [a seed, 95 %] (TTFT p50, p90, P99)" for rule in rules
    )
    lines = [head + " |", "|---" * (2 + len(rules)) + "|"]
    for one in found:
        felt = {
            rule: ", ".join(f"{value:.0f}" for value in three)
            for rule, three in one.worst_ms.items()
        }
        cells = " | ".join(
            f"{one.added[rule]}{_bounds(one.a_seed[rule], '.0f')} ({felt[rule]} ms)"
            for rule in rules
        )
        alone = f"{one.late} of {one.requests} ({felt[Regime.FIXED.value]} ms)"
        lines.append(f"| {one.size} x {one.prompt} | {alone} | {cells} |")
    return "\n".join(lines) + "\n"


def slots_table(found: Sequence[Loan]) -> str:
    """The loans as a table in Markdown."""
    lines = [
        "| slots at most | useful tok/s | won, in dedicated engines | per slot more | open GPU-h "
        "| median of paired TTFT | slower by > 5 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        slower = "" if one.slower_5 is None else f"{one.slower_5:.0%}"
        lines.append(
            f"| {one.slots} | {one.useful_tokens_per_s:.0f} | {_cell(one.engines)} "
            f"| {_cell(one.marginal)} | {one.open_hours:.2f} | {_cell(one.ttft_paired)} "
            f"| {slower} |"
        )
    return "\n".join(lines) + "\n"


def _cell(value: Interval | None) -> str:
    return "" if value is None else f"{value.mean:.2f}{_bounds(value, '.2f')}"


def _bounds(value: Interval, shown: str) -> str:
    if value.low is None or value.high is None:
        return ""
    return f" [{value.low:{shown}}, {value.high:{shown}}]"


def parser(verb: str) -> argparse.ArgumentParser:
    """Arguments of either verb."""
    made = VerbParser(prog=f"rose simulate {verb}", description=__doc__)
    usual = "correlated" if verb == "frontier" else "normal"
    made.add_argument(
        "scenario",
        type=Path,
        nargs="?",
        default=SCENARIOS / f"{usual}.yaml",
        help="file of the scenario",
    )
    made.add_argument("--seeds", type=int, nargs="+", help="instead of the scenario's")
    made.add_argument("--seconds", type=float, help="instead of the scenario's")
    made.add_argument("--derate", type=float, help="instead of the scenario's")
    made.add_argument("--keep", type=Path, help="folder of results that later calls need not redo")
    made.add_argument(
        "--out", type=Path, default=Path("out") / "simulate", help="folder for what it writes"
    )
    if verb == "frontier":
        made.add_argument(
            "--sizes", type=int, nargs="+", default=list(SIZES), help="of bursts, in requests"
        )
        made.add_argument(
            "--prompts",
            type=int,
            nargs="+",
            default=list(PROMPTS),
            help="of their requests, in tokens",
        )
    else:
        made.add_argument(
            "--slots", type=int, nargs="+", default=list(SLOTS), help="how many are lent"
        )
    return made


def frontier(argv: list[str]) -> int:
    """Run ``frontier``."""
    return _main("frontier", argv)


def slots(argv: list[str]) -> int:
    """Run ``slots``."""
    return _main("slots", argv)


def _main(verb: str, argv: list[str]) -> int:
    options = parser(verb).parse_args(argv)
    asked = {name: getattr(options, name) for name in ("seeds", "seconds", "derate")}
    runner = Runner(1, options.keep)
    try:
        chosen = read_scenario(options.scenario)
        if not isinstance(chosen, Scenario):
            sys.stderr.write(f"{options.scenario}: is a fleet; give a scenario of single events\n")
            return 2
        chosen = changed(chosen, asked | {"regimes": RULES if verb == "frontier" else None})
        material = read_material(options.scenario, chosen)
        path, shown = _run(verb, chosen, material, options, runner)
    except SimulationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        runner.close()
    sys.stdout.write(f"{shown}\nwritten to {path}\n")
    return 0


def _run(
    verb: str,
    chosen: Scenario,
    material: SimulationInputs,
    options: argparse.Namespace,
    runner: Runner,
) -> tuple[Path, str]:
    """Run and write the result."""
    found: list[Burst] | list[Loan]
    if verb == "frontier":
        loads = [(size, prompt) for prompt in options.prompts for size in options.sizes]
        burst = bursts(chosen, material, loads, runner, _progress)
        found, shown = burst, frontier_table(burst)
    else:
        loan = loans(chosen, material, sorted(set(options.slots)), runner, _progress)
        found, shown = loan, slots_table(loan)
    options.out.mkdir(parents=True, exist_ok=True)
    path: Path = options.out / f"{verb}-{chosen.name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return path, shown


def _progress(one: RunOutcome) -> None:
    sys.stderr.write(f"seed {one.seed} {one.regime}: done\n")
