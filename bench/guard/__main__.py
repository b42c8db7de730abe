"""Serving beside rollouts, under six conditions, on one pair of real engines pinned to one core.

Per round and load every condition meets the same arrivals, in an order that a seed draws; ratios
compare request by request with serving alone. Two engines on one core stand in for two processes
on one GPU: that proves the control path (signal, decision, stop), not GPU interference.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

from bench.guard import run_record
from bench.guard.load import LOADS
from bench.guard.pace import Plan
from bench.guard.report import MANY, MANY_AT_TAIL, figures, table
from bench.guard.run import measure
from bench.guard.serving import SERVING
from bench.guard.windows import CONDITIONS
from bench.record import FOLDER, log, record

_ENDLESS = 1000


def arguments() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="bench.guard", description=__doc__)
    add = parser.add_argument
    add("--model", default="mid")
    add("--serving", choices=list(SERVING), default="sglang", help="the engine that serves")
    add("--seconds", type=float, default=8.0, help="measured seconds of a window, at most 60")
    add("--rounds", type=int, help="2; with --minutes as many as end within them")
    add(
        "--minutes",
        type=float,
        default=0.0,
        help="begin nothing of a later round that would end later",
    )
    add("--resume", action="store_true", help="go on with the windows that are on disk")
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
        rounds = options.rounds or (_ENDLESS if options.minutes else 2)
        loads, conditions = options.loads, options.conditions
    return Plan(
        options.model,
        min(60.0, options.seconds),
        rounds,
        tuple(LOADS[name] for name in loads),
        tuple(conditions),
        options.seed,
        not (options.no_oracle or options.quick),
        SERVING[options.serving],
        options.minutes,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    # An end from outside must end the engines too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan = planned(argv)
    missing = plan.serving.missing()
    if missing:
        log(f"bench.guard: skipped, {missing}")
        return 0
    try:
        before = run_record.again(plan) if arguments().parse_args(argv).resume else None
    except run_record.NotTheSame as error:
        log(f"bench.guard: {error}")
        return 2
    results = asyncio.run(
        measure(plan, before, lambda now: run_record.keep(plan, now, notes(plan)))
    )
    log("\n" + table(results))
    name = run_record.name_of(plan)
    record(name, figures(results), notes=notes(plan))
    log(f"written to {FOLDER}/{name}.svg, {name}.txt, {name}-windows.json, guard-trace.json")
    return 1 if results.crashes else 0


def notes(plan: Plan) -> list[str]:
    """What a reader of the figures must know."""
    return [
        "two real engines on one CPU core: the control path, not GPU interference",
        f"serving engine {plan.serving.engine} {plan.serving.version}, rollouts on SGLang",
        f"windows of {plan.seconds:g} s per load and condition, in each round the same arrivals, "
        f"order drawn with seed {plan.seed}; ratios are paired, intervals 95 % (bootstrap)",
        f"a ratio decides from {MANY} pairs on, at the 99th percentile from {MANY_AT_TAIL} on",
        "guard and tap run on the node in the conditions polled and ours only, begin anew in each "
        "of their windows and learn for 6 s before it",
        "harvest of idle time: rollout tokens / (their solo rate x time without a request, alone)",
        "rate while no request is under way, unguarded: the most any gate gets of idle time here",
        "control: serving alone once more; what it adds or spares is chance",
        "SLO of steady loads: twice the 99th percentile of serving alone (warm-up window); added "
        "violations: requests over it less the same requests when alone, drawn in blocks of five",
        "best fixed share: of 12, 25, 37, 50, 75, 100 % of each 100 ms the one with most tokens "
        "that brought no request over the SLO which kept it alone; chosen in hindsight, same "
        "round, same arrivals",
        "threads stand still only when they get the shared core; they compute nothing before",
    ]


if __name__ == "__main__":
    sys.exit(main())
