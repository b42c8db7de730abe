"""Serving beside rollouts: alone, unguarded, polled gate, ours; interleaved on one pair of engines.

Two real SGLang engines pinned to one core stand in for two processes on one GPU. That proves the
control path (signal, decision, stop), not GPU interference.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

from bench.guard.load import Measured, roll_out, schedule, serve
from bench.guard.node import Bench, running
from bench.record import FOLDER, Figure, figure, record
from rose_core.guard.crossover import quantile
from rose_core.wire.sync import SignalSource

CONDITIONS = ("alone", "unguarded", "polled", "ours")
ROLLOUT_STREAMS = 4


async def under(bench: Bench, condition: str, seconds: float, keep: float) -> Measured:
    """One condition for ``seconds`` of the trace."""
    measured = Measured()
    url = await bench.rollouts_ready()
    async with contextlib.AsyncExitStack() as stack:
        if condition in {"alone", "unguarded"}:
            await bench.end("agent")
            if condition == "unguarded":
                await stack.enter_async_context(bench.unguarded())
        else:
            wanted = (SignalSource.LOADS,) if condition == "polled" else tuple(SignalSource)
            bench.signals = wanted
            await asyncio.sleep(2.0)
            await bench.settled()
        rollouts = None
        if condition != "alone":
            rollouts = asyncio.create_task(roll_out(url, ROLLOUT_STREAMS, measured))
            await asyncio.sleep(1.0)
            measured.rollout_stamps.clear()
        await serve(bench.serving_url, schedule(seconds, keep), seconds, measured)
        if rollouts is not None:
            rollouts.cancel()
    if "agent" not in bench.processes:
        await bench.start_agent()
        await bench.settled()
    return measured


async def latencies(bench: Bench, measured: Measured) -> dict[str, list[float]]:
    """From arrivals, in milliseconds.

    To the closed permit and to the host's word that every thread stands still from the flight
    recorder; to the last rollout token from the rollout client's own clock, which is the same.
    """
    entries = (await bench.page("trace"))["entries"]
    found: dict[str, list[float]] = {
        what: [entry["after_ns"] / 1e6 for entry in entries if entry["what"] == what]
        for what in ("closed", "stopped")
    }
    opened = [e["t"] / 1e9 for e in entries if e["what"] == "order" and e["order"] == "LET_GO"]
    found["token"] = []
    for arrival in (e["arrival"] / 1e9 for e in entries if e["what"] == "closed"):
        until = next((moment for moment in opened if moment > arrival), arrival + 1.0)
        late = [stamp for stamp in measured.rollout_stamps if arrival <= stamp < until]
        found["token"].append(1e3 * (late[-1] - arrival) if late else 0.0)
    return found


def figures(results: dict[str, Measured], seconds: float) -> list[Figure]:
    """The table's rows."""
    rows = []
    for name, measured in results.items():
        rows += [
            figure(f"{name}: TTFT p50", 1e3 * quantile(measured.ttft_s, 0.5), "ms"),
            figure(f"{name}: TTFT p90", 1e3 * quantile(measured.ttft_s, 0.9), "ms"),
            figure(f"{name}: TPOT p50", 1e3 * quantile(measured.tpot_s, 0.5), "ms"),
            figure(f"{name}: TPOT p90", 1e3 * quantile(measured.tpot_s, 0.9), "ms"),
            figure(f"{name}: rollout tokens", len(measured.rollout_stamps) / seconds, "tokens/s"),
        ]
    if {"alone", "ours"} <= set(results):
        for q in (0.5, 0.9):
            ratio = quantile(results["ours"].ttft_s, q) / quantile(results["alone"].ttft_s, q)
            rows.append(figure(f"ours / alone: TTFT p{q * 100:g}", ratio, "ratio", at_most=1.05))
    return rows


def stop_figures(found: dict[str, list[float]]) -> list[Figure]:
    """Distribution of the guard's reaction."""
    rows = []
    texts = {
        "closed": "permit closed",
        "token": "last rollout token",
        "stopped": "every thread stands still",
    }
    for what, text in texts.items():
        values = found[what]
        if values:
            at_most = (5.0, 25.0) if what == "token" else (None, None)
            rows += [
                figure(
                    f"arrival to {text}, p50", statistics.median(values), "ms", at_most=at_most[0]
                ),
                figure(f"arrival to {text}, p99", quantile(values, 0.99), "ms", at_most=at_most[1]),
                figure(f"arrival to {text}, samples", len(values), "count"),
            ]
    return rows


async def keep_trace(bench: Bench, target: Path) -> None:
    """Leave the flight recorder's content beside the report, for a look in Perfetto."""
    target.parent.mkdir(parents=True, exist_ok=True)
    dump = await bench.page("trace?perfetto")
    await asyncio.to_thread(target.write_text, json.dumps(dump))


async def measure(model: str, seconds: float, keep: float, conditions: list[str]) -> None:
    """Run the conditions and write the report."""
    results: dict[str, Measured] = {}
    found: dict[str, list[float]] = {"closed": [], "token": [], "stopped": []}
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with running(Path(folder), model) as bench:
            await bench.rollouts_ready()
            for condition in conditions:
                results[condition] = await under(bench, condition, seconds, keep)
                sys.stdout.write(f"{condition}: {len(results[condition].ttft_s)} requests\n")
                sys.stdout.flush()
                if condition == "ours":
                    found = await latencies(bench, results[condition])
                    await keep_trace(bench, FOLDER / "guard-trace.json")
    requests = len(schedule(seconds, keep))
    record(
        "guard",
        [*figures(results, seconds), *stop_figures(found)],
        notes=[
            "two real SGLang engines on one CPU core: the control path, not GPU interference",
            f"{requests} requests per condition, {seconds:g} s of azure2023_conv, one round",
            "p90 of so few requests is coarse; compare conditions, not decimals",
            "threads stand still only when they get the shared core; they compute nothing before",
        ],
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="bench.guard", description=__doc__)
    parser.add_argument("--model", default="mid")
    parser.add_argument("--seconds", type=float, default=40.0, help="per condition, at most 120")
    parser.add_argument("--keep", type=float, default=0.16, help="share of the trace's requests")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    options = parser.parse_args(argv)
    asyncio.run(measure(options.model, options.seconds, options.keep, options.conditions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
