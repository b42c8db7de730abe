"""The simulator's own figures, and the studies' headlines: throughput and harm, by derate.

Interference and saturation are modelled; what was measured is in ``docs/simulator.md``.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import msgspec

from bench.record import Figure, figure, record
from rose_core.simulate.batch import BatchEngine, Sequence
from rose_core.simulate.clock import SECOND, Clock
from rose_core.simulate.costs import costs, kv_tokens
from rose_core.simulate.fleet_scenario import FleetScenario
from rose_core.simulate.outcome import Interval
from rose_core.simulate.run import run
from rose_core.simulate.scenario import Regime, Scenario
from rose_core.simulate.world import Material
from rose_simulate.fleets import run_fleet
from rose_simulate.reading import read_material, read_scenario
from rose_simulate.study import Row, study

SCENARIOS = Path(__file__).parents[2] / "simulate" / "scenarios"
DERATES = (0.4, 0.5, 0.7)
STUDIES = ("normal", "stress", "correlated", "storm")


def calibration() -> list[Figure]:
    """Predictions beside figures published for one H100 (gpustack performance lab)."""
    step = costs("H100", "Qwen3-8B", 0.5).step(4, 4000)[0]
    rows = [figure("Qwen3-8B, 4 streams: step / published 7.38 ms", step / 7.38e-3, "ratio")]
    for derate in DERATES:
        found = saturated("Qwen3-14B", derate, 4000, 200)
        name = f"Qwen3-14B 4000/200 saturated, derate {derate:g} / published 9218 tokens/s"
        rows.append(figure(name, found / 9218, "ratio"))
    return rows


def saturated(model: str, derate: float, prompt: int, output: int) -> float:
    """Prompt and output tokens per second of one H100 that never lacks requests."""
    clock = Clock()
    pool = kv_tokens("H100", model, 0.9)
    engine = BatchEngine(clock, costs("H100", model, derate), pool, lambda: None)

    def feed() -> None:
        engine.submit(Sequence("", prompt, output, lambda: None, feed))

    for _ in range(64):
        feed()
    clock.run(120 * SECOND)
    return (engine.tokens + engine.prefilled) / 120


def speed(scenario: Scenario, material: Material) -> list[Figure]:
    """Virtual GPU-seconds per second, and whether equal seeds give equal bytes."""
    short = scenario.model_copy(update={"seconds": 200.0})
    began = time.process_time()
    first = run(short, Regime.OURS, 1, material, {})[0]
    spent = time.process_time() - began
    again = run(short, Regime.OURS, 1, material, {})[0]
    same = msgspec.json.encode(first) == msgspec.json.encode(again)
    gpus = sum(one.replicas * one.gpus_per_replica for one in scenario.services)
    gpus += sum(one.dedicated * one.gpus_per_engine for one in scenario.jobs)
    return [
        figure("event level: virtual GPU-seconds per CPU second", 200 * gpus / spent, "1"),
        figure("event level: events per CPU second", first.events / spent, "1/s"),
        figure("same seed, same bytes", float(same), "1 = yes", at_least=1),
    ]


def growth() -> list[Figure]:
    """CPU seconds for one hour of 100, 1,000 and 10,000 GPUs, each with its curves; memory."""
    path = SCENARIOS / "fleet.yaml"
    whole = read_scenario(path)
    if not isinstance(whole, FleetScenario):
        message = f"{path} is no fleet"
        raise SystemExit(message)
    material = read_material(path, whole)
    rows: list[Figure] = []
    # Services of each kind, replicas each, jobs, dedicated and borrowed engines of each.
    sizes = ((1, 40, 1, 20, 25), (5, 80, 4, 50, 60), (25, 160, 20, 100, 100))
    for size in sizes:
        told = sized(whole, *size)
        began = time.process_time()
        outcome = run_fleet(told, material, lambda _outcome: None).outcomes[0]
        spent = time.process_time() - began
        aim = 120.0 if outcome.gpus == 10_000 else None
        rows.append(figure(f"fleet of {outcome.gpus} GPUs, one hour", spent, "CPU s", at_most=aim))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(figure("fleet: peak memory of the process", peak, "MiB", at_most=2048.0))
    return rows


def sized(  # noqa: PLR0917  # one number per dimension, named at the only call
    whole: FleetScenario, count: int, replicas: int, jobs: int, dedicated: int, borrowed: int
) -> FleetScenario:
    """The fleet with other numbers; the load per replica stays."""
    kinds = []
    for kind in whole.services:
        mean = (kind.service.load.requests_per_s or 0.0) * replicas / kind.service.replicas
        load = kind.service.load.model_copy(update={"requests_per_s": mean})
        service = kind.service.model_copy(update={"replicas": replicas, "load": load})
        kinds.append(kind.model_copy(update={"count": count, "service": service}))
    groups = max(1, whole.jobs.job.batch_groups * dedicated // whole.jobs.job.dedicated)
    job = whole.jobs.job.model_copy(
        update={"dedicated": dedicated, "borrowed": borrowed, "batch_groups": groups}
    )
    changes: dict[str, object] = {
        "services": tuple(kinds),
        "jobs": whole.jobs.model_copy(update={"count": jobs, "job": job}),
        "regimes": (Regime.OURS,),
    }
    return whole.model_copy(update=changes)


def headline(name: str, row: Row) -> list[Figure]:
    """One regime of one study at one derate; the aims are ours to meet, not the baselines'."""
    head, ours = f"{name}, derate {row.derate:g}, {row.regime}", row.regime == Regime.OURS
    most = 0.0 if ours else None
    rows = [figure(f"{head}: added violations", row.added_violations, "requests", at_most=most)]
    rows += _ratio(f"{head}: x fixed pool", row.throughput, None)
    rows += _ratio(f"{head}: x rose-paper", row.against_paper, 1.15 if ours else None)
    if row.recovery_s is not None:
        rows.append(figure(f"{head}: median time to recover", row.recovery_s, "s"))
    return rows


def _ratio(name: str, ratio: Interval | None, aim: float | None) -> list[Figure]:
    if ratio is None:
        return []
    rows = [figure(name, ratio.mean, "ratio", at_least=aim)]
    if ratio.low is not None and ratio.high is not None:
        rows.append(figure(f"{name}, low", ratio.low, "ratio"))
        rows.append(figure(f"{name}, high", ratio.high, "ratio"))
    return rows


def events_scenario(path: Path) -> Scenario:
    """A scenario of the event level."""
    found = read_scenario(path)
    if not isinstance(found, Scenario):
        message = f"{path} is a fleet; run it with rose simulate"
        raise SystemExit(message)
    return found


def studies(names: list[str], options: argparse.Namespace) -> list[Figure]:
    """Headlines of every study at every derate."""
    rows: list[Figure] = []
    for name in names:
        path = SCENARIOS / f"{name}.yaml"
        scenario = events_scenario(path)
        changes: dict[str, object] = {"regimes": tuple(Regime(one) for one in options.regimes)}
        if options.seconds:
            changes["seconds"] = options.seconds
        if options.seeds:
            changes["seeds"] = tuple(options.seeds)
        changed = scenario.model_copy(update=changes)
        material = read_material(path, scenario)
        found = study(changed, material, options.derate, lambda _outcome: None)
        for row in found.rows:
            if row.regime != Regime.FIXED:
                rows += headline(name, row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="bench.simulate", description=__doc__)
    fleets = {"fleet", "fortnight"}
    known = sorted({path.stem for path in SCENARIOS.glob("*.yaml")} - fleets)
    parser.add_argument("--studies", nargs="*", choices=known, default=list(STUDIES))
    parser.add_argument("--regimes", nargs="+", default=["fixed", "rose-paper", "ours"])
    parser.add_argument("--derate", type=float, nargs="+", default=list(DERATES))
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args(argv)
    normal = SCENARIOS / "normal.yaml"
    scenario = events_scenario(normal)
    rows = calibration() + speed(scenario, read_material(normal, scenario)) + growth()
    notes = ["interference between serving and rollouts is modelled, not measured"]
    record("simulate", rows + studies(options.studies, options), notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
