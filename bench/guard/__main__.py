"""Serving beside rollouts, under six conditions, on one pair of real engines pinned to one core.

Per round and load every condition meets the same arrivals, in an order that a seed draws; ratios
compare request by request with serving alone. Two engines on one core stand in for two processes
on one GPU: that proves the control path (signal, decision, stop), not GPU interference.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.guard.analysis import Window
from bench.guard.load import LOADS, Load
from bench.guard.node import running
from bench.guard.picture import picture
from bench.guard.report import MANY, MANY_AT_TAIL, Results, figures, table
from bench.guard.rollouts import Rollouts
from bench.guard.serving import SERVING, Serving
from bench.guard.windows import CONDITIONS, GUARDED, SHARES, Goal, Runner, Solo
from bench.record import FOLDER, record
from rose_core.guard.crossover import quantile

_PROBE_SECONDS = 2.5


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        seconds: measured seconds of a window.
        oracle: also search the best fixed share on steady loads.
    """

    model: str
    seconds: float
    rounds: int
    loads: tuple[Load, ...]
    conditions: tuple[str, ...]
    seed: int
    oracle: bool
    serving: Serving = SERVING["sglang"]

    def order(self, load: Load, number: int) -> list[str]:
        """Conditions of one round: those with guard and tap together, everything else drawn.

        Guard and tap are started and ended between the two groups, so that nothing of them runs
        beside the others.
        """
        draw = random.Random(f"{self.seed} {load.name} {number}")
        chosen = list(self.conditions)
        if load.steady and self.oracle and not number:
            chosen += [share for share in SHARES if share not in chosen]
        groups = [
            [c for c in chosen if c in GUARDED],
            [c for c in chosen if c not in GUARDED],
        ]
        for group in groups:
            draw.shuffle(group)
        draw.shuffle(groups)
        return [condition for group in groups for condition in group]


def goal_of(window: Window) -> Goal | None:
    """The SLO that twice the solo latency makes; None when the window had no request."""
    ttft, tpot = window.values("TTFT"), window.values("TPOT")
    return Goal(2 * quantile(ttft, 0.99), 2 * quantile(tpot, 0.99)) if ttft and tpot else None


async def measure(plan: Plan) -> Results:
    """Probe, warm up, then every round."""
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with running(Path(folder), plan.model, plan.serving) as bench:
            rollouts = Rollouts(await bench.rollouts_ready())
            task = asyncio.create_task(rollouts.run())
            try:
                return await _rounds(Runner(bench, rollouts), plan)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _rounds(runner: Runner, plan: Plan) -> Results:
    await runner.bench.guarded(up=False)
    solo = await runner.solo(_PROBE_SECONDS)
    results = Results([], await _warm_up(runner, plan, solo), solo)
    for number in range(plan.rounds):
        for load in plan.loads:
            for condition in plan.order(load, number):
                goal = results.goals.get(load.name)
                window = await runner.window(
                    load, condition, number, seconds=plan.seconds, solo=solo, goal=goal
                )
                results.windows.append(window)
                _say(f"round {number + 1} {load.name} {condition}: {len(window.measured)} requests")
                if condition == "ours":
                    await keep_trace(runner, FOLDER / "guard-trace.json")
                results.ended += await _replaced(runner)
    return results


async def _replaced(runner: Runner) -> int:
    """Follow the rollout engine when it has ended and another has come; 1 when it had."""
    rollouts = runner.rollouts
    file = runner.bench.engine()
    if file is not None and file.url == rollouts.url:
        return 0
    _say("the rollout engine has ended in this window; waiting for the next")
    rollouts.url = await runner.bench.rollouts_ready()
    return 1


async def _warm_up(runner: Runner, plan: Plan, solo: Solo) -> dict[str, Goal]:
    """Every load once, served alone and not counted; its latencies make the SLO."""
    goals = {}
    for load in plan.loads:
        window = await runner.window(
            load, "alone", plan.rounds, seconds=plan.seconds, solo=solo, goal=None
        )
        goal = goal_of(window)
        if goal is not None:
            goals[load.name] = goal
    _say(f"rollouts alone {solo.rollout_rate:.0f} tokens/s, saturated {solo.serving_rate:.0f}")
    return goals


async def keep_trace(runner: Runner, target: Path) -> None:
    """Leave the flight recorder's content beside the report, for a look in Perfetto."""
    target.parent.mkdir(parents=True, exist_ok=True)
    dump = await runner.bench.page("trace?perfetto")
    await asyncio.to_thread(target.write_text, json.dumps(dump))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def arguments() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="bench.guard", description=__doc__)
    add = parser.add_argument
    add("--model", default="mid")
    add("--serving", choices=list(SERVING), default="sglang", help="the engine that serves")
    add("--seconds", type=float, default=8.0, help="measured seconds of a window, at most 60")
    add("--rounds", type=int, default=2)
    add("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    add("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    add("--seed", type=int, default=7, help="of the order of conditions")
    add("--no-oracle", action="store_true", help="no search for the best fixed share")
    add("--quick", action="store_true", help="one round of two loads, alone and ours")
    return parser


def planned(argv: Sequence[str] | None) -> Plan:
    """The plan that the arguments ask for."""
    options = arguments().parse_args(argv)
    if options.quick:
        loads, conditions, rounds = ["conv", "steady-40"], ["alone", "ours"], 1
    else:
        loads, conditions, rounds = options.loads, options.conditions, options.rounds
    return Plan(
        options.model,
        min(60.0, options.seconds),
        rounds,
        tuple(LOADS[name] for name in loads),
        tuple(conditions),
        options.seed,
        not (options.no_oracle or options.quick),
        SERVING[options.serving],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    # An end from outside must end the engines too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan = planned(argv)
    missing = plan.serving.missing()
    if missing:
        _say(f"bench.guard: skipped, {missing}")
        return 0
    results = asyncio.run(measure(plan))
    _say("\n" + table(results))
    name = "guard" if plan.serving.name == "sglang" else f"guard-{plan.serving.name}"
    record(name, figures(results), notes=notes(plan))
    (FOLDER / f"{name}.svg").write_text(picture(results))
    (FOLDER / f"{name}.txt").write_text(table(results))
    _say(f"written to {FOLDER}/{name}.svg, {name}.txt, guard-trace.json")
    return 0


def notes(plan: Plan) -> list[str]:
    """What a reader of the figures must know."""
    return [
        "two real engines on one CPU core: the control path, not GPU interference",
        f"serving engine {plan.serving.engine} {plan.serving.version}, rollouts on SGLang",
        f"{plan.rounds} rounds of {plan.seconds:g} s per load and condition, the same arrivals in "
        f"each, order drawn with seed {plan.seed}; ratios are paired, intervals 95 % (bootstrap)",
        f"a ratio decides from {MANY} pairs on, at the 99th percentile from {MANY_AT_TAIL} on",
        "alone, unguarded, static duty and rose-paper run without guard and tap on the node",
        "harvest of idle time: rollout tokens / (their solo rate x time without a request, alone)",
        "SLO of steady loads: twice the 99th percentile of serving alone; best fixed share: the "
        "largest of 50, 75, 100 % that added no violation on the same arrivals",
        "threads stand still only when they get the shared core; they compute nothing before",
    ]


if __name__ == "__main__":
    sys.exit(main())
