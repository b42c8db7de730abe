"""``python -m bench.sandboxes.cost``: what inspector and runtime cost (root, ``make sandbox``).

| figure | how |
|---|---|
| a traced call | a loop of ``getppid`` in a watched sandbox, less the same before the hooks |
| a look | wall time of ``effects`` after each turn of the tasks |
| turns by class, turns that need nothing | of the tasks, undisturbed |
| tasks solved with a loss after every turn | full checkpoint, end, restore; then the verifier |
| checkpoint, standing still, restore | of the same turns |
| fork of 8 | of a sandbox with a shell and a job |
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench.record import Figure, figure, record
from bench.sandboxes.own import own_runtime
from bench.sandboxes.tasks import TASKS, Task
from rose_sandbox.inspector.bpf import BpfInspector
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import Handle, Kind, SandboxSpec

CALLS = 2_000_000  # a second of them: the smallest difference seen is then some 5 ns
FORKS = 8
_LOOP = f"""
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int main(void) {{
    struct timespec a, b;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    for (long n = 0; n < {CALLS}; n++) syscall(SYS_getppid);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    printf("%f", ((b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec)) / {CALLS}.0);
}}
"""


class _Times:
    def __init__(self) -> None:
        self.looks: list[float] = []
        self.checkpoints: list[float] = []
        self.frozen: list[float] = []
        self.restores: list[float] = []
        self.classes: Counter[str] = Counter()


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def _loop(runtime: RuncRuntime, box: Handle) -> float:
    rounds = [float((await runtime.exec(box, "/home/loop", 60)).stdout) for _ in range(3)]
    return min(rounds)  # what the machine's other work adds is no cost of the hook


async def traced_call(runtime: RuncRuntime) -> float:
    """Nanoseconds that the inspector adds to a system call of a sandbox."""
    box = await runtime.create(SandboxSpec("loop"))
    await runtime.write_file(box, "/home/loop.c", _LOOP.encode())
    await runtime.exec(box, "gcc -O2 /home/loop.c -o /home/loop", 60)
    before = await _loop(runtime, box)
    inspector = BpfInspector(runtime.parts.folder / "bpf")
    await inspector.watch("loop", await runtime.facts(box))
    hooked = await _loop(runtime, box)
    await inspector.close()
    await runtime.end(box)
    return hooked - before


async def _play(
    runtime: RuncRuntime, inspector: BpfInspector, task: Task, times: _Times, *, lose: bool
) -> bool:
    box = await runtime.create(SandboxSpec("task"))
    await inspector.watch("task", await runtime.facts(box))
    for turn in task.turns:
        await runtime.exec(box, turn, 60, session=task.session)
        if lose:
            with tempfile.TemporaryDirectory() as into:
                parts = await runtime.checkpoint(box, Kind.FULL, Path(into))
                times.checkpoints.append(parts.seconds)
                times.frozen.append(parts.frozen_seconds)
                await runtime.end(box)
                started = time.perf_counter()
                box = await runtime.restore(parts, parts.spec)
                times.restores.append(time.perf_counter() - started)
        else:
            facts = await runtime.facts(box)
            started = time.perf_counter()
            verdict = await inspector.effects("task", facts)
            times.looks.append(time.perf_counter() - started)
            await inspector.saved("task")
            times.classes[verdict.kind.value] += 1
    solved = (await runtime.exec(box, task.verify, 60)).exit_code == 0
    await runtime.end(box)
    return solved


async def _fork(runtime: RuncRuntime) -> float:
    box = await runtime.create(SandboxSpec("parent"))
    await runtime.exec(box, "X=1; sleep 9000 &", 20, session="main")
    started = time.perf_counter()
    children = await runtime.fork(box, [f"child{number}" for number in range(FORKS)])
    seconds = time.perf_counter() - started
    for one in (box, *children):
        await runtime.end(one)
    return seconds


async def measure(folder: Path, tasks: tuple[Task, ...]) -> list[Figure]:
    """All figures."""
    async with own_runtime(folder) as runtime:
        return await _measure(runtime, tasks)


async def _measure(runtime: RuncRuntime, tasks: tuple[Task, ...]) -> list[Figure]:
    call = await traced_call(runtime)
    forked = await _fork(runtime)
    inspector = BpfInspector(runtime.parts.folder / "bpf")
    times, solved, lost = _Times(), 0, 0
    for task in tasks:
        solved += await _play(runtime, inspector, task, times, lose=False)
        lost += await _play(runtime, inspector, task, times, lose=True)
    await inspector.close()
    turns = sum(times.classes.values())
    return [
        figure("a traced call", call, "ns", at_most=1000),
        figure("a look, median", 1e3 * _at(times.looks, 0.5), "ms", at_most=5),
        figure("a look, p99", 1e3 * _at(times.looks, 0.99), "ms"),
        *(
            figure(f"turns that are {name}", 100 * count / turns, "%")
            for name, count in sorted(times.classes.items())
        ),
        figure("tasks", len(tasks), "tasks"),
        figure("solved undisturbed", 100 * solved / len(tasks), "%", at_least=100),
        figure("solved, lost after every turn", 100 * lost / len(tasks), "%", at_least=100),
        figure("checkpoint, median", 1e3 * _at(times.checkpoints, 0.5), "ms"),
        figure("standing still, median", 1e3 * _at(times.frozen, 0.5), "ms"),
        figure("restore, median", 1e3 * _at(times.restores, 0.5), "ms"),
        figure("restore, p99", 1e3 * _at(times.restores, 0.99), "ms", at_most=1000),
        figure(f"fork of {FORKS}", 1e3 * forked, "ms", at_most=1000),
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=len(TASKS), help="only the first of them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), TASKS[: arguments.tasks]))
    record("sandbox-cost", figures)


if __name__ == "__main__":
    main()
