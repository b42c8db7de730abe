"""The simulator's own figures, and the studies' headlines: throughput and harm, by derate.

Interference and saturation are modelled; what was measured is in ``docs/simulator.md``.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from bench.record import Figure, figure, log, record
from bench.scenarios import scenario
from rose_simulate.files.reading import read_material, read_scenario
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.fleets.curves import Curve
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.outcome import Interval
from rose_simulate.model.run import run
from rose_simulate.model.scenarios.costs import costs, kv_tokens
from rose_simulate.model.scenarios.fleet_scenario import FleetScenario
from rose_simulate.model.scenarios.scenario import Regime, Scenario
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.runs.fleets import alone_of, curves_of, run_bins
from rose_simulate.runs.study import StudyRow, study
from rose_simulate.verbs.studies import SCENARIOS

DERATES = (0.4, 0.5, 0.7)
MODEL = "Qwen3-14B"
SATURATED = ((4000, 200, 9218), (32_000, 100, 8299))
"""Tokens of prompts and of answers, and all of them per second, as published for ``MODEL``."""
STUDIES = ("normal", "stress", "correlated", "storm")
"""Where the aims are judged; their trainers wait for their engines."""
AIM = 1.15
"""Of production's useful tokens over the paper's."""
LIMIT_S: Final = 120.0
LIMIT_MIB: Final = 2048.0
_SEED: Final = 1


def calibration() -> list[Figure]:
    """Predictions beside figures published for one H100 (gpustack performance lab)."""
    step = costs("H100", "Qwen3-8B", 0.5).step(4, 4000)[0]
    rows = [figure("Qwen3-8B, 4 streams: step / published 7.38 ms", step / 7.38e-3, "ratio")]
    forward = costs("H100", "Qwen3-8B", 0.5).prefill(2048, 0.0)
    name = "Qwen3-8B, forward of 2048 tokens / published 59 ms of Llama-3.1-8B"
    rows.append(figure(name, forward / 59e-3, "ratio"))
    for prompt, output, published in SATURATED:
        for attention in (False, True):
            for derate in DERATES:
                found = saturated(derate, prompt, output, attention=attention)
                name = f"{MODEL} {prompt}/{output} saturated, derate {derate:g}"
                name += ", attention paid for" if attention else ""
                name += f" / published {published} tokens/s"
                rows.append(figure(name, found / published, "ratio"))
    return rows


def saturated(derate: float, prompt: int, output: int, *, attention: bool) -> float:
    """Prompt and output tokens per second of one H100 that never lacks requests."""
    clock = VirtualClock()
    pool = kv_tokens("H100", MODEL, 0.9)
    own = costs("H100", MODEL, derate, attention=attention)
    engine = BatchEngine(clock, own, pool, lambda: None)

    def feed() -> None:
        engine.submit(Sequence("", prompt, output, lambda: None, feed))

    for _ in range(64):
        feed()
    clock.run(120 * SECOND)
    return (engine.tokens + engine.prefilled) / 120


def speed(setup: Scenario, material: SimulationInputs) -> list[Figure]:
    """Virtual GPU-seconds per second, and whether equal seeds give equal bytes."""
    short = setup.model_copy(update={"seconds": 200.0})
    began = time.process_time()
    first = run(short, Regime.OURS, 1, material, {})[0]
    spent = time.process_time() - began
    again = run(short, Regime.OURS, 1, material, {})[0]
    same = msgspec.json.encode(first) == msgspec.json.encode(again)
    gpus = sum(one.replicas * one.gpus_per_replica for one in setup.services)
    gpus += sum(one.dedicated * one.gpus_per_engine for one in setup.jobs)
    return [
        figure("event level: virtual GPU-seconds per CPU second", 200 * gpus / spent, "1"),
        figure("event level: events per CPU second", first.events / spent, "1/s"),
        figure("same seed, same bytes", float(same), "1 = yes", at_least=1),
    ]


def headline(name: str, row: StudyRow) -> list[Figure]:
    """One regime of one study at one derate; the aims are ours to meet, not the baselines'."""
    head, ours = f"{name}, derate {row.derate:g}, {row.regime}", row.regime == Regime.OURS
    most = 0.0 if ours else None
    rows = [figure(f"{head}: added violations", row.added_violations, "requests", at_most=most)]
    rows += _ratio(f"{head}: x fixed pool", row.throughput, None)
    best = row.against_best or row.against_paper
    rows += _ratio(f"{head}: x rose-paper at its best", best, AIM if ours else None)
    if row.ttft_paired is not None:
        rows.append(figure(f"{head}: TTFT x alone, median over requests", row.ttft_paired, "ratio"))
    if row.recovery_s is not None:
        rows.append(figure(f"{head}: median time to recover", row.recovery_s, "s"))
    return rows


def _ratio(name: str, ratio: Interval | None, aim: float | None) -> list[Figure]:
    """Met or missed only where the whole interval says so."""
    if ratio is None:
        return []
    ends = None
    if ratio.low is not None and ratio.high is not None:
        ends = ratio.low, ratio.high
    return [figure(name, ratio.mean, "ratio", at_least=aim, interval=ends)]


def studies(names: list[str], options: argparse.Namespace) -> list[Figure]:
    """Headlines of every study at every derate."""
    rows: list[Figure] = []
    for name in names:
        log(f"study {name}")
        setup, material = scenario(name)
        changes: dict[str, object] = {"regimes": tuple(Regime(one) for one in options.regimes)}
        if options.seconds:
            changes["seconds"] = options.seconds
        if options.seeds:
            changes["seeds"] = tuple(options.seeds)
        found = study(
            setup.model_copy(update=changes), material, options.derate, lambda _outcome: None
        )
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
    rows = calibration() + speed(*scenario("normal"))
    rows += growth(SCENARIOS / "fleet.yaml")
    notes = ["interference between serving and rollouts is modelled, not measured"]
    record("simulate", rows + studies(options.studies, options), notes=notes)
    return 0


@dataclass(frozen=True)
class Size:
    """A fleet's size: services of each kind, replicas of each; jobs, engines of each."""

    services: int
    replicas: int
    jobs: int
    dedicated: int
    borrowed: int

    @property
    def gpus(self) -> int:
        """GPUs of two kinds of services and of the jobs."""
        return 2 * self.services * self.replicas + self.jobs * self.dedicated


SIZES: Final = (
    Size(1, 40, 1, 20, 25),
    Size(5, 80, 4, 50, 60),
    Size(25, 160, 20, 100, 100),
)


def growth(path: Path) -> list[Figure]:
    """CPU time and memory of one hour of 100, 1,000 and 10,000 GPUs, and how both grow.

    Curves depend on the kinds of services and on no number of GPUs, so they are made once; what
    grows with a fleet is the work in its bins. A fleet's own time is the sum of both. Sizes ascend,
    so that the peak memory of the process after each is that size's.

    Args:
        path: a fleet scenario with two kinds of services, one GPU to a replica and an engine.
    """
    whole = read_scenario(path)
    if not isinstance(whole, FleetScenario):
        message = f"{path} is no fleet"
        raise SystemExit(message)
    material = read_material(path, whole)
    began = time.process_time()
    alone = alone_of(whole, material, _SEED)
    curves = curves_of(whole, Regime.OURS, material, _SEED, alone=alone)
    once_s = time.process_time() - began
    rows = [figure("fleet: curves of one gate, whatever its size", once_s, "CPU s")]
    spent: list[float] = []
    for size in SIZES:
        spent.append(_bins_s(sized(whole, size), material, curves))
        rows += _one(size, spent[-1], once_s)
    for before, after, less, more in zip(SIZES, SIZES[1:], spent, spent[1:], strict=False):
        name = f"fleet: bins of {after.gpus} GPUs / of {before.gpus}; linear"
        rows.append(figure(name, more / less, "ratio", at_most=after.gpus / before.gpus))
    return rows


def _one(size: Size, bins_s: float, once_s: float) -> list[Figure]:
    largest = size is SIZES[-1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    head = f"fleet of {size.gpus} GPUs, one hour"
    return [
        figure(f"{head}: bins alone", bins_s, "CPU s"),
        figure(head, bins_s + once_s, "CPU s", at_most=LIMIT_S if largest else None),
        figure(f"{head}: peak memory", peak, "MiB", at_most=LIMIT_MIB if largest else None),
    ]


def _bins_s(setup: FleetScenario, material: SimulationInputs, curves: tuple[Curve, ...]) -> float:
    began = time.process_time()
    run_bins(setup, Regime.OURS, _SEED, material, curves)
    return time.process_time() - began


def sized(whole: FleetScenario, size: Size) -> FleetScenario:
    """The fleet with other numbers; the load per replica stays."""
    kinds = []
    for kind in whole.services:
        mean = (kind.service.load.requests_per_s or 0.0) * size.replicas / kind.service.replicas
        load = kind.service.load.model_copy(update={"requests_per_s": mean})
        service = kind.service.model_copy(update={"replicas": size.replicas, "load": load})
        kinds.append(kind.model_copy(update={"count": size.services, "service": service}))
    job = whole.jobs.job
    groups = max(1, job.batch_groups * size.dedicated // job.dedicated)
    changes: dict[str, object] = {"dedicated": size.dedicated, "borrowed": size.borrowed}
    job = job.model_copy(update=changes | {"batch_groups": groups})
    jobs = whole.jobs.model_copy(update={"count": size.jobs, "job": job})
    return whole.model_copy(update={"services": tuple(kinds), "jobs": jobs})


if __name__ == "__main__":
    sys.exit(main())
