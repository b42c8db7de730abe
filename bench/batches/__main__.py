"""``python -m bench.batches``: serving beside the lines of a batch, on real engines.

A lease of frozen weights runs an OpenAI batch file on a lent SGLang, while a stock SGLang serves
bursts of a conversation trace; both are pinned to one core, as in ``bench.guard``. In each round
serving meets the same arrivals alone, alone once more, and beside lines, in an order that a seed
draws; latencies are compared request by request. Between two windows the lent engine is killed.

Ends with 1 when a line was lost, doubled or of another length.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.batches.lease import Ended, Lease, lent
from bench.guard import analysis
from bench.guard.load import LOADS, Load, Served, schedule, serve
from bench.guard.measured import Window, cpu_usage, strangers
from bench.guard.report import LATENCIES, MANY, MANY_AT_TAIL, QUIET, compared
from bench.record import Figure, figure, log, record
from rose_core.stats import quantile
from rose_core.wire.sync import SignalSource
from rose_dev import engine_environment

CONDITIONS = ("alone", "control", "beside")
"""``control`` is serving alone once more: what differs from ``alone`` there is chance."""
_LEARNING_SECONDS, _LEARNING_ROUND = 6.0, 500
_REST_SECONDS = 1.0


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.batches", description=__doc__)
    add = parser.add_argument
    add("--model", default="mid")
    add("--load", choices=[one.name for one in LOADS.values() if not one.steady], default="conv")
    add("--rounds", type=int, default=8)
    add("--seconds", type=float, default=8.0, help="measured seconds of a window")
    add(
        "--lines",
        type=int,
        default=10_000,
        help="of the batch; too few end before the windows do: 150 a round and more",
    )
    add("--seed", type=int, default=7, help="of the order of conditions")
    return parser


async def _play(lease: Lease, load: Load, condition: str, number: int, seconds: float) -> Window:
    """One window; lines flow in ``beside`` alone, because no guard opens their gate otherwise."""
    node, served = lease.node, Served()
    seed = f"{load.name} {condition} {number} {time.monotonic_ns()}"
    if condition == "beside":
        await node.guarded_anew(tuple(SignalSource), (0, 0))
        await lease.flowing()
        # A guard lives for days: what it learns at first is not measured.
        learning = schedule(load, _LEARNING_SECONDS, _LEARNING_ROUND + number, 0.0)
        await serve(
            node.serving_url,
            learning,
            Served(),
            seed=f"learning {seed}",
            seconds=_LEARNING_SECONDS,
        )
    else:
        await node.guarded(up=False)
        await asyncio.sleep(_REST_SECONDS)
    before, machine = await lease.tokens(), cpu_usage()
    arrivals = schedule(load, seconds, number, 0.0)
    await serve(node.serving_url, arrivals, served, seed=seed, seconds=seconds)
    made = round(await lease.tokens() - before)
    window = Window(
        load.name, condition, number, seconds, served.began_s, served.answers, served.failed, made
    )
    window.strangers = strangers(machine, cpu_usage())
    return window


async def measure(
    options: argparse.Namespace, load: Load
) -> tuple[list[Window], Ended, list[int], int]:
    """All windows, what came of the batch, lines left after each window beside it, and kills."""
    windows: list[Window] = []
    left: list[int] = []
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with lent(Path(folder), options.model, options.lines) as lease:
            await _play(lease, load, "alone", options.rounds, options.seconds)  # to warm up
            for number in range(options.rounds):
                order = list(CONDITIONS)
                random.Random(f"{options.seed} {number}").shuffle(order)
                for condition in order:
                    window = await _play(lease, load, condition, number, options.seconds)
                    windows.append(window)
                    log(f"round {number + 1} {condition}: {len(window.measured)} requests")
                    if condition == "beside":
                        left.append(options.lines - await lease.done())
                        if not lease.kills:
                            await lease.kill()
                            log("killed the lent engine; another one works")
            await lease.node.guarded_anew(tuple(SignalSource), (0, 0))
            return windows, await lease.ended(), left, lease.kills


def figures(
    windows: Sequence[Window], ended: Ended, left: Sequence[int], kills: int
) -> list[Figure]:
    """What is recorded."""
    of = {one: [w for w in windows if w.condition == one] for one in CONDITIONS}
    others = statistics.fmean(window.strangers for window in windows)
    requests = sum(len(window.measured) for window in of["beside"])
    rows = [
        figure("machine: share used by other processes", others, "share", at_most=QUIET),
        figure("serving: requests beside lines", requests, "requests"),
        figure("lines: asked", ended.asked, "lines"),
        *(figure(f"lines: {how}", n, "lines", at_most=0) for how, n in ended.wrong.items()),
        figure("lines: lent engine killed", kills, "times", at_least=1),
        figure("lines: left after the last window", min(left), "lines", at_least=1),
        figure("lines: tokens beside serving", analysis.harvest(of["beside"]), "tokens/s"),
    ]
    for name, what, q, aim in LATENCIES:
        for condition, found in of.items():
            values = [value for window in found for value in window.values(what)]
            rows.append(figure(f"{condition}: {name}", 1e3 * quantile(values, q), "ms"))
            if condition != "alone":
                ratio = analysis.ratio(analysis.pairs(of["alone"], found, what), q)
                limit = aim if condition == "beside" and others <= QUIET else None
                rows += compared(f"{condition} / alone: {name}", ratio, q, limit)
    failed = sum(window.failed for window in windows)
    rows.append(figure("serving: failed requests", failed, "requests", at_most=0))
    return rows


def notes(options: argparse.Namespace) -> list[str]:
    """What a reader of the figures must know."""
    return [
        "two real engines on one CPU core: the control path, not GPU interference",
        f"SGLang {engine_environment.SGLANG_VERSION}; load {options.load}, {options.rounds} rounds "
        f"of {options.seconds:g} s",
        "ratios are paired by request, intervals 95 % (bootstrap); one decides from "
        f"{MANY} pairs on, at the 99th percentile from {MANY_AT_TAIL} on",
        "control: serving alone once more; what it adds or spares is chance",
        f"where others use more than {QUIET:.0%} of the machine, latencies are held against no aim",
        "the kill comes between two windows: what an engine's start costs serving is not in them",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when a line has not its one answer."""
    options = flags().parse_args(argv)
    if not engine_environment.is_ready():
        log("bench.batches: skipped, SGLang is not installed here: run `make engine`")
        return 0
    windows, ended, left, kills = asyncio.run(measure(options, LOADS[options.load]))
    record("batches", figures(windows, ended, left, kills), notes=notes(options))
    return int(bool(ended.wrong.total()))


if __name__ == "__main__":
    sys.exit(main())
