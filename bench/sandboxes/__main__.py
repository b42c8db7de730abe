"""``python -m bench.sandboxes``: tasks whose sandbox is killed after every turn, way by way.

| way | after a loss the agent has |
|---|---|
| chat only | its conversation and a fresh sandbox |
| chat + files | its files, and no process |
| restart | a fresh sandbox in which all turns so far are played again |
| full every turn | all, from a checkpoint of everything at each turn |
| ours | all, from records of what each turn changed |

The kill is SIGKILL to every process of the sandbox, and its files are removed: what comes back came
from what was saved. All ways run on the same machine, one after another, task by task.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.record import Figure, figure, record
from bench.sandboxes.own import own_gvisor, own_runtime
from bench.sandboxes.tasks import TASKS, Task
from rose_sandbox.box import key_of
from rose_sandbox.errors import SandboxError, Unavailable
from rose_sandbox.host import Host
from rose_sandbox.inspector.bpf import BpfInspector
from rose_sandbox.inspector.inspector import BlindInspector, Inspector
from rose_sandbox.main import RUNTIMES
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runsc import RunscRuntime
from rose_sandbox.runtimes.runtime import CheckpointParts, Handle, Kind, SandboxSpec
from rose_weights.errors import WeightsError
from rose_weights.store.records import Records
from rose_weights.store.store import Store

Real = RuncRuntime | RunscRuntime
WAYS = ("chat only", "chat + files", "restart", "full every turn", "ours")
TURN_SECONDS = 60.0
CHILDREN, FORKS = 8, 10


@dataclass
class Tally:
    """What one way of saving sandboxes gave over all tasks.

    Attributes:
        passed: tasks whose check passed at the end.
        failed: names of those whose did not, and why.
        bytes: saved at all boundaries.
        saving, restoring: seconds of each.
        actions: what each boundary saved.
    """

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    bytes: int = 0
    saving: list[float] = field(default_factory=list)
    restoring: list[float] = field(default_factory=list)
    actions: Counter[str] = field(default_factory=Counter)


async def kill(runtime: Real, handle: Handle) -> None:
    """Lose a sandbox: its processes by SIGKILL, then its files."""
    with suppress(SandboxError):
        for pid in (await runtime.facts(handle)).pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    await runtime.end(handle)


async def plain(runtime: Real, task: Task, way: str, tally: Tally, folder: Path) -> int:
    """Play a task a way that needs no host; returns the exit code of its check."""
    spec = SandboxSpec("plain")
    box = await runtime.create(spec)
    for number, turn in enumerate(task.turns):
        await runtime.exec(box, turn, TURN_SECONDS, session=task.session)
        parts = CheckpointParts(spec)
        if way in {"chat + files", "full every turn"}:
            into = folder / f"{number}"
            into.mkdir()
            began = time.monotonic()
            kind = Kind.FULL if way == "full every turn" else Kind.FILES
            parts = await runtime.checkpoint(box, kind, into)
            tally.saving.append(time.monotonic() - began)
            tally.bytes += parts.bytes
        await kill(runtime, box)
        began = time.monotonic()
        if parts.bytes:
            box = await runtime.restore(parts, spec)
        else:
            box = await runtime.create(spec)
            for again in task.turns[: number + 1] if way == "restart" else ():
                await runtime.exec(box, again, TURN_SECONDS, session=task.session)
        tally.restoring.append(time.monotonic() - began)
    code = (await runtime.exec(box, task.verify, TURN_SECONDS)).exit_code
    await runtime.end(box)
    return code


async def ours(host: Host, runtime: Real, task: Task, tally: Tally) -> int:
    """Play a task on a host; returns the exit code of its check."""
    name = task.name
    await host.create(name)
    ids: list[int] = []
    status = await host.state(name)
    try:
        for number, turn in enumerate(task.turns):
            await host.exec(name, turn, TURN_SECONDS, name=f"{number}", shell=task.session)
            ids += range(50)
            before = status.bytes
            status = await host.checkpoint(name, ids)
            tally.bytes += status.bytes - before
            tally.saving.append(status.seconds)
            tally.actions[status.action] += 1
            (box,) = [one for one in await runtime.sandboxes() if one.key == key_of(name)]
            await kill(runtime, box)
            began = time.monotonic()
            status = (await host.restore(name)).told
            tally.restoring.append(time.monotonic() - began)
        return (await host.exec(name, task.verify, TURN_SECONDS, shell=None)).exit_code
    finally:
        await host.end(name, forget=True)


async def forked(host: Host) -> list[float]:
    """Seconds of each of ``FORKS`` forks of ``CHILDREN``."""
    await host.create("parent")
    await host.exec("parent", "export A=1; sleep 1000 & echo 1 > /home/a")
    await host.checkpoint("parent", [1, 2, 3])
    seconds = []
    for _ in range(FORKS):
        began = time.monotonic()
        children = (await host.fork("parent", CHILDREN)).sessions
        seconds.append(time.monotonic() - began)
        for one in children:
            await host.end(one, forget=True)
    await host.end("parent", forget=True)
    return seconds


def host_of(runtime: Real, root: Path) -> Host:
    """A host over a runtime, with its records beside it."""
    inspector: Inspector = BlindInspector("gVisor shows its host no process")
    if runtime.name == RuncRuntime.name:
        inspector = BpfInspector(runtime.parts.folder / "bpf")
    return Host(
        runtime,
        inspector,
        Records(Store(root / "store"), "bench"),
        owner="bench",
        scratch=root / "scratch",
    )


async def play(
    tasks: Sequence[Task], root: Path, name: str = RuncRuntime.name
) -> tuple[dict[str, Tally], list[float]]:
    """Every way through every task on a runtime, and the seconds of forks."""
    owned = own_runtime if name == RuncRuntime.name else own_gvisor
    async with owned(root / name) as runtime:
        return await _play(tasks, root, runtime)


async def _play(
    tasks: Sequence[Task], root: Path, runtime: Real
) -> tuple[dict[str, Tally], list[float]]:
    host = host_of(runtime, root)
    found: dict[str, Tally] = defaultdict(Tally)
    try:
        for task in tasks:
            for way in WAYS:
                tally = found[way]
                try:
                    if way == "ours":
                        code = await ours(host, runtime, task, tally)
                    else:
                        folder = Path(tempfile.mkdtemp(dir=root))
                        code = await plain(runtime, task, way, tally, folder)
                    why = "" if code == 0 else f"check exits {code}"
                except (SandboxError, WeightsError) as error:
                    why = f"{type(error).__name__}: {error}"
                    await runtime.end(Handle("plain"))
                if why:
                    tally.failed.append(f"{task.name} ({why:.100})")
                else:
                    tally.passed += 1
                sys.stdout.write(f"{task.name:<28} {way:<16} {why or 'passed'}\n")
                sys.stdout.flush()
        return found, await forked(host)
    finally:
        for left in await runtime.sandboxes():
            await runtime.end(left)
        await host.close()


def figures(found: dict[str, Tally], tasks: int, fork_seconds: list[float]) -> list[Figure]:
    """What was measured, with the aims; what no task came to has no figure."""
    made = []
    for way in WAYS:
        share = 100 * found[way].passed / tasks
        least = 100.0 if way == "ours" else None
        most = 60.0 if way == "chat + files" else None
        name = f"{way}: tasks that pass"
        made.append(figure(name, share, "%", at_least=least, at_most=most))
    own, full = found["ours"], found["full every turn"]
    restores = sorted(own.restoring)
    turns = sum(own.actions.values())
    made += [
        figure("tasks", tasks, "", at_least=30),
        figure("turns, each with a kill", turns, ""),
    ]
    if full.bytes:
        share = 100 * own.bytes / full.bytes
        made.append(figure("bytes against full every turn", share, "%", at_most=15))
    if turns:
        made.append(figure("turns that save nothing", 100 * own.actions["none"] / turns, "%"))
    for name, seconds in (
        ("ours: checkpoint, median", own.saving),
        ("full: checkpoint, median", full.saving),
        ("ours: restore, median", restores),
    ):
        if seconds:
            made.append(figure(name, statistics.median(seconds), "s"))
    if restores:
        p99 = restores[min(len(restores) - 1, int(0.99 * len(restores)))]
        made.append(figure("ours: restore, p99", p99, "s", at_most=1.0))
    if again := found["restart"].restoring:
        made.append(figure("restart: played again, mean", statistics.mean(again), "s"))
    return [
        *made,
        figure(f"fork of {CHILDREN}, in all, median", statistics.median(fork_seconds), "s"),
        figure(
            f"fork of {CHILDREN}, in all, slowest of {FORKS}", max(fork_seconds), "s", at_most=1.0
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured; 1: this machine cannot run sandboxes."""
    flags = argparse.ArgumentParser(prog="python -m bench.sandboxes", description=__doc__)
    flags.add_argument("--tasks", type=int, default=len(TASKS), help="as many, drawn at random")
    flags.add_argument("--seed", type=int, default=1, help="of the draw")
    flags.add_argument("--runtime", choices=sorted(RUNTIMES), default=RuncRuntime.name)
    given = flags.parse_args(argv)
    drawn = random.Random(given.seed).sample(TASKS, min(given.tasks, len(TASKS)))
    with tempfile.TemporaryDirectory(prefix="rose-bench-sandboxes-") as root:
        try:
            found, fork_seconds = asyncio.run(play(drawn, Path(root), given.runtime))
        except Unavailable as error:
            sys.stderr.write(f"{error}\n")
            return 1
    notes = [f"{way}: {failed}" for way in WAYS for failed in found[way].failed]
    notes.append("saved by action: " + str(dict(found["ours"].actions)))
    name = "sandboxes" if given.runtime == RuncRuntime.name else f"sandboxes-{given.runtime}"
    record(name, figures(found, len(drawn), fork_seconds), notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
