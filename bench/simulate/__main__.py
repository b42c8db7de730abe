"""The simulator's own figures, and the studies' headlines: throughput and harm, by derate.

Interference and saturation are modelled; what was measured is in ``docs/simulator.md``.
"""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from bench.record import Figure, figure, record
from bench.scenarios import scenario
from bench.simulate.growth import growth
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.outcome import Interval
from rose_simulate.model.run import run
from rose_simulate.model.scenarios.costs import costs, kv_tokens
from rose_simulate.model.scenarios.scenario import Regime, Scenario
from rose_simulate.model.simulation import SimulationInputs
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


def speed(told: Scenario, material: SimulationInputs) -> list[Figure]:
    """Virtual GPU-seconds per second, and whether equal seeds give equal bytes."""
    short = told.model_copy(update={"seconds": 200.0})
    began = time.process_time()
    first = run(short, Regime.OURS, 1, material, {})[0]
    spent = time.process_time() - began
    again = run(short, Regime.OURS, 1, material, {})[0]
    same = msgspec.json.encode(first) == msgspec.json.encode(again)
    gpus = sum(one.replicas * one.gpus_per_replica for one in told.services)
    gpus += sum(one.dedicated * one.gpus_per_engine for one in told.jobs)
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
        told, material = scenario(name)
        changes: dict[str, object] = {"regimes": tuple(Regime(one) for one in options.regimes)}
        if options.seconds:
            changes["seconds"] = options.seconds
        if options.seeds:
            changes["seeds"] = tuple(options.seeds)
        found = study(
            told.model_copy(update=changes), material, options.derate, lambda _outcome: None
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


if __name__ == "__main__":
    sys.exit(main())
