"""Runs a plan's windows, whatever happens to one of them.

| happens | then |
|---|---|
| a window raises, or outlasts its patience | recorded; engines and guard are started anew |
| the engines do not start | the run ends with what it has; ``--resume`` goes on from there |
| the budget of minutes is used up | no further load of a later round is begun |

After each window everything measured so far is on disk. Next step: ``run_record`` writes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

from bench.guard.measured import Window
from bench.guard.node import running
from bench.guard.pace import Cell, Pace, Plan, clock, hopeless
from bench.guard.results import Crash, Results
from bench.guard.rollouts import Rollouts
from bench.guard.windows import Goal, Runner
from bench.record import FOLDER, log
from rose_core.stats import quantile

_PROBE_SECONDS = 2.5
_PATIENCE_SECONDS = 180.0
_START_SECONDS = 600.0

Keep = Callable[[Results], None]
"""Called after each window."""


class Crashed(Exception):
    """A window came to no end; the engines are to be started anew."""


def goal_of(window: Window) -> Goal | None:
    """The SLO that twice the solo latency makes; None when the window had no request."""
    ttft, tpot = window.values("TTFT"), window.values("TPOT")
    return Goal(2 * quantile(ttft, 0.99), 2 * quantile(tpot, 0.99)) if ttft and tpot else None


@contextlib.asynccontextmanager
async def bench(plan: Plan) -> AsyncIterator[Runner]:
    """Engines with rollouts under way."""
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with running(Path(folder), plan.model, plan.serving) as node:
            async with asyncio.timeout(_START_SECONDS):
                rollouts = Rollouts(await node.rollouts_ready())
            task = asyncio.create_task(rollouts.run())
            try:
                yield Runner(node, rollouts)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def measure(plan: Plan, before: Results | None, keep: Keep) -> Results:
    """Every window that is not measured yet; engines are started anew after a crash."""
    pace = Pace(plan.seconds, time.monotonic(), plan.minutes)
    results = before
    while True:
        async with bench(plan) as runner:
            await runner.bench.guarded(up=False)
            if results is None:
                solo = await runner.solo(_PROBE_SECONDS)
                results = Results([], {}, solo)
                log(
                    f"rollouts alone {solo.rollout_rate:.0f} tokens/s, serving saturated "
                    f"{solo.serving_rate:.0f}"
                )
            with contextlib.suppress(Crashed):
                await _warm_up(runner, plan, results)
                await _rounds(runner, plan, results, pace, keep)
                return results
        log("starting the engines anew")


async def _warm_up(runner: Runner, plan: Plan, results: Results) -> None:
    """Every load once, served alone and not counted; its latencies make the SLO."""
    for load in plan.loads:
        cell = Cell(load, "alone", plan.rounds)
        if load.name not in results.goals and not results.knows(cell.key):
            log(f"warm-up {load.name}")
            window = _window(runner, plan, results, cell)
            goal = goal_of(await _patiently(plan, results, cell, window))
            if goal is not None:
                results.goals[load.name] = goal


async def _rounds(runner: Runner, plan: Plan, results: Results, pace: Pace, keep: Keep) -> None:
    for number in range(plan.rounds):
        left = plan.groups(number)
        while left:
            group = left.pop(0)
            cells = [cell for cell in group if not results.knows(cell.key)]
            if number and not pace.fits(cells, time.monotonic()):
                name = group[0].load.name
                log(f"round {number + 1}, {name}, would not end within {plan.minutes:g} min")
                return
            later = [cell for one in left for cell in one]
            while cells:
                try:
                    await _cell(runner, plan, results, pace, cells.pop(0))
                finally:
                    keep(results)
                time_left = clock(pace.left_s(plan, number, cells + later, time.monotonic()))
                log(f"  {time_left} left")


async def _cell(runner: Runner, plan: Plan, results: Results, pace: Pace, cell: Cell) -> None:
    if hopeless(cell.condition, results.harmless(cell.load.name)):
        return
    began = time.monotonic()
    try:
        window = await _patiently(plan, results, cell, _window(runner, plan, results, cell))
    except Crashed:
        await _keep_logs(runner)
        raise
    results.windows.append(window)
    pace.took(cell, time.monotonic() - began)
    log(f"{cell.name}: {len(window.measured)} requests")


async def _keep_logs(runner: Runner) -> None:
    """What the node's processes said, before their folder goes."""
    target = FOLDER / "guard-crash.log"
    output = await asyncio.to_thread(runner.bench.last_output)
    await asyncio.to_thread(target.write_text, output)
    log(f"what the node's processes said: {target}")


async def _window(runner: Runner, plan: Plan, results: Results, cell: Cell) -> Window:
    """One window, and what must be looked after before the next."""
    window = await runner.window(
        *(cell.load, cell.condition, cell.round),
        seconds=plan.seconds,
        solo=results.solo,
        goal=results.goals.get(cell.load.name),
    )
    if cell.condition == "ours":
        await keep_trace(runner, FOLDER / "guard-trace.json")
    rollouts, file = runner.rollouts, runner.bench.engine()
    if file is None or file.url != rollouts.url:
        log("the rollout engine has ended in this window; waiting for the next")
        rollouts.url = await runner.bench.rollouts_ready()
        results.ended += 1
    return window


async def _patiently(
    plan: Plan, results: Results, cell: Cell, window: Coroutine[None, None, Window]
) -> Window:
    """Wait for a window, but not for ever.

    Raises:
        Crashed: it raised or came to no end, which is recorded.
    """
    limit = plan.seconds + cell.load.lead_s + _PATIENCE_SECONDS
    try:
        async with asyncio.timeout(limit):
            return await window
    except Exception as error:  # whatever one window meets must not cost the others: it is told
        what = repr(error) if str(error) else f"{type(error).__name__} within {limit:g} s"
        results.crashes.append(Crash(*cell.key, what))
        log(f"{cell.name}: CRASHED, {what}")
        raise Crashed(what) from error


async def keep_trace(runner: Runner, target: Path) -> None:
    """Leave the flight recorder's content beside the report, for a look in Perfetto."""
    target.parent.mkdir(parents=True, exist_ok=True)
    dump = await runner.bench.page("trace?perfetto")
    await asyncio.to_thread(target.write_text, json.dumps(dump))
