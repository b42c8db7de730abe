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

from rose_simulate.model.errors import SimulationError
from rose_simulate.model.outcome import RunOutcome
from rose_simulate.model.scenario import Regime, Scenario
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.overrides import changed
from rose_simulate.reading import read_material, read_scenario
from rose_simulate.runner import Case, Runner
from rose_simulate.studies import SCENARIOS
from rose_simulate.study import worst_mean

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
        added: late under a rule and not with nothing lent, by rule.
        worst_ms: TTFT p50, p90 and P99 of the service whose P99 is worst, by rule; the fixed pool's
            is serving alone.
    """

    size: int
    prompt: int
    requests: int
    late: int
    added: dict[str, int]
    worst_ms: dict[str, tuple[float, float, float]]


class Loan(msgspec.Struct, frozen=True):
    """Replicas lent at most, and what came of it.

    Attributes:
        engines: useful tokens beyond those without a loan, in engines of the fixed pool.
        open_hours: GPU-hours in which rollouts might compute on lent GPUs, over all seeds.
        marginal: engines won per slot more than in the row before; None in the first.
        ttft_paired, slower_5: see ``ServingOutcome``; means over seeds, of the worst service. None
            without a loan.
    """

    slots: int
    useful_tokens_per_s: float
    engines: float
    open_hours: float
    marginal: float | None
    ttft_paired: float | None = None
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
        told = scenario.model_copy(update={"services": services})
        answers = runner.run([Case(told, seed) for seed in told.seeds], material, progress)
        alone = [ones[0].services for ones in answers]
        others = [one for ones in answers for one in ones[1:]]
        added = {
            regime.value: sum(one.added_violations for one in others if one.regime == regime)
            for regime in told.regimes
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
            for regime in (Regime.FIXED, *told.regimes)
        }
        found.append(
            Burst(
                size,
                prompt,
                sum(one.requests for services in alone for one in services),
                sum(one.violations for services in alone for one in services),
                added,
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
    base = 0.0
    for count in counts:
        lends = count > 0
        told = scenario.model_copy(
            update={
                "jobs": (job.model_copy(update={"borrowed": count}),),
                "regimes": (Regime.FIXED, Regime.OURS_HELD) if lends else (Regime.FIXED,),
            }
        )
        answers = runner.run([Case(told, seed) for seed in told.seeds], material, progress)
        base = sum(ones[0].useful_tokens_per_s for ones in answers) / len(answers)
        last = [ones[-1] for ones in answers]
        useful = sum(one.useful_tokens_per_s for one in last) / len(last)
        engines = job.dedicated * (useful / base - 1)
        hours = sum(one.borrowed_computing_ms for one in last) / 3_600_000
        before = found[-1] if found else None
        marginal = None
        if before is not None:
            marginal = (engines - before.engines) / (count - before.slots)
        felt = [worst_mean(last, name) for name in ("ttft_paired", "slower_5")]
        found.append(Loan(count, useful, engines, hours, marginal, *felt))
    return found


def frontier_table(found: Sequence[Burst]) -> str:
    """The bursts as a table in Markdown."""
    rules = list(found[0].added)
    head = "| burst per service | late alone | " + " | ".join(
        f"`{rule}` adds (TTFT p50, p90, P99)" for rule in rules
    )
    lines = [head + " |", "|---" * (2 + len(rules)) + "|"]
    for one in found:
        felt = {
            rule: ", ".join(f"{value:.0f}" for value in three)
            for rule, three in one.worst_ms.items()
        }
        cells = " | ".join(f"{one.added[rule]} ({felt[rule]} ms)" for rule in rules)
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
        more = "" if one.marginal is None else f"{one.marginal:.2f}"
        lines.append(
            f"| {one.slots} | {one.useful_tokens_per_s:.0f} | {one.engines:.2f} | {more} "
            f"| {one.open_hours:.2f} | {_felt(one.ttft_paired, '.2f')} "
            f"| {_felt(one.slower_5, '.0%')} |"
        )
    return "\n".join(lines) + "\n"


def _felt(value: float | None, shown: str) -> str:
    return "" if value is None else format(value, shown)


def parser(verb: str) -> argparse.ArgumentParser:
    """Arguments of either verb."""
    made = argparse.ArgumentParser(prog=f"rose simulate {verb}", description=__doc__)
    usual = "correlated" if verb == "frontier" else "normal"
    made.add_argument("scenario", type=Path, nargs="?", default=SCENARIOS / f"{usual}.yaml")
    made.add_argument("--seeds", type=int, nargs="+", help="instead of the scenario's")
    made.add_argument("--seconds", type=float, help="instead of the scenario's")
    made.add_argument("--derate", type=float, help="instead of the scenario's")
    made.add_argument("--keep", type=Path, help="folder of results that later calls need not redo")
    made.add_argument("--out", type=Path, default=Path("out") / "simulate")
    if verb == "frontier":
        made.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
        made.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS))
    else:
        made.add_argument("--slots", type=int, nargs="+", default=list(SLOTS))
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
        told = read_scenario(options.scenario)
        if not isinstance(told, Scenario):
            sys.stderr.write(f"{options.scenario}: is a fleet; give a scenario of single events\n")
            return 2
        told = changed(told, asked | {"regimes": RULES if verb == "frontier" else None})
        material = read_material(options.scenario, told)
        path, shown = _run(verb, told, material, options, runner)
    except SimulationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        runner.close()
    sys.stdout.write(f"{shown}\nwritten to {path}\n")
    return 0


def _run(
    verb: str,
    told: Scenario,
    material: SimulationInputs,
    options: argparse.Namespace,
    runner: Runner,
) -> tuple[Path, str]:
    """Run and write the result."""
    found: list[Burst] | list[Loan]
    if verb == "frontier":
        loads = [(size, prompt) for prompt in options.prompts for size in options.sizes]
        burst = bursts(told, material, loads, runner, _progress)
        found, shown = burst, frontier_table(burst)
    else:
        loan = loans(told, material, sorted(set(options.slots)), runner, _progress)
        found, shown = loan, slots_table(loan)
    options.out.mkdir(parents=True, exist_ok=True)
    path: Path = options.out / f"{verb}-{told.name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return path, shown


def _progress(one: RunOutcome) -> None:
    sys.stderr.write(f"seed {one.seed} {one.regime}: done\n")
