"""``python -m bench.sandboxes.recall``: which turns need no checkpoint, and which of them are told.

Two kinds of turns are played on real sandboxes: those in the shares of recorded agents (``mix``),
and those of the recovery tasks. After each the inspector says what changed, and so does a diff of
all there is, byte for byte (``full_diff``).

| figure | of |
|---|---|
| turns that need no checkpoint | all turns: the diff finds nothing. No inspector can tell more |
| of these, told so | those turns: what the aim of 70 % is about |
| told to change nothing, and changed | all turns: must be none |

Those that were not told are listed by what the inspector took for a change.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.record import Figure, figure, record
from bench.sandboxes.full_diff import full_state, surely_changed, surely_same
from bench.sandboxes.mix import PROJECT, draw
from bench.sandboxes.own import own_runtime
from bench.sandboxes.tasks import TASKS
from rose_sandbox.errors import Unavailable
from rose_sandbox.inspector.bpf import BpfInspector
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import SandboxSpec

SECONDS = 60.0


@dataclass(frozen=True)
class Script:
    """Turns of one sandbox; what comes before them is not counted."""

    name: str
    turns: tuple[str, ...]
    session: str | None = "main"
    before: str = "true"


@dataclass
class Tally:
    """Of one kind of turns.

    Attributes:
        turns, idle, unchanged: all; those that the diff finds nothing in; those of them told so.
        missed: commands that changed something and were told not to, with both words.
        unclear: what the inspector took for a change where there was none, with one command of
            each.
    """

    turns: int = 0
    idle: int = 0
    unchanged: int = 0
    missed: list[str] = field(default_factory=list)
    unclear: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


def mixed(sandboxes: int, turns: int, seed: int) -> Iterator[Script]:
    """Turns in the shares of recorded agents'."""
    dice = random.Random(seed)
    for number in range(sandboxes):
        commands = tuple(draw(dice, turn).command for turn in range(turns))
        yield Script(f"mix{number}", commands, before=PROJECT)


async def play(runtime: RuncRuntime, inspector: BpfInspector, script: Script, tally: Tally) -> None:
    """One sandbox's turns."""
    box = await runtime.create(SandboxSpec(script.name))
    await runtime.exec(box, script.before, SECONDS, session=script.session)
    facts = await runtime.facts(box)
    first = await asyncio.to_thread(full_state, facts)
    await inspector.watch(script.name, facts)
    before = first, await asyncio.to_thread(full_state, facts)
    for command in script.turns:
        await runtime.exec(box, command, SECONDS, session=script.session)
        facts = await runtime.facts(box)
        first = await asyncio.to_thread(full_state, facts)
        verdict = await inspector.effects(script.name, facts)
        now = first, await asyncio.to_thread(full_state, await runtime.facts(box))
        await inspector.saved(script.name)
        files, processes = surely_changed(before, now)
        nothing = surely_same(before, now)
        tally.turns += 1
        tally.idle += nothing
        wrong = (files and not verdict.files) or (processes and not verdict.processes)
        if wrong and not verdict.unknown:
            tally.missed.append(f"{command} ({files=}, {processes=}, {verdict.kind.value})")
        if nothing:
            tally.unchanged += verdict.kind.value == "none"
            if verdict.kind.value != "none":
                why = "; ".join((verdict.kind.value, *verdict.unknown, *verdict.why))
                tally.unclear[why] += 1
                tally.examples.setdefault(why, command)
        before = now
    await inspector.forget(script.name)
    await runtime.end(box)


async def measure(root: Path, scripts: dict[str, Sequence[Script]]) -> dict[str, Tally]:
    """Every kind."""
    found = {kind: Tally() for kind in scripts}
    async with own_runtime(root / "runc") as runtime:
        inspector = BpfInspector(runtime.parts.folder / "bpf")
        try:
            for kind, several in scripts.items():
                for script in several:
                    await play(runtime, inspector, script, found[kind])
                tally = found[kind]
                sys.stdout.write(f"{kind}: {tally.unchanged} of {tally.idle} of {tally.turns}\n")
                sys.stdout.flush()
        finally:
            await inspector.close()
    return found


def figures(found: dict[str, Tally]) -> list[Figure]:
    """What was measured, with the aims."""
    made = []
    for kind, tally in found.items():
        made += [
            figure(f"{kind}: turns", tally.turns, ""),
            figure(f"{kind}: need no checkpoint", 100 * tally.idle / max(1, tally.turns), "%"),
            figure(
                f"{kind}: of these, told so",
                100 * tally.unchanged / max(1, tally.idle),
                "%",
                at_least=70,
            ),
            figure(f"{kind}: changed, told none", len(tally.missed), "", at_most=0),
        ]
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured; 1: this machine cannot run sandboxes."""
    flags = argparse.ArgumentParser(prog="python -m bench.sandboxes.recall")
    flags.add_argument("--sandboxes", type=int, default=20, help="of the mix")
    flags.add_argument("--turns", type=int, default=25, help="of each")
    flags.add_argument("--tasks", type=int, default=len(TASKS), help="only the first of them")
    flags.add_argument("--seed", type=int, default=1)
    given = flags.parse_args(argv)
    scripts: dict[str, Sequence[Script]] = {
        "mix": tuple(mixed(given.sandboxes, given.turns, given.seed)),
        "tasks": tuple(
            Script(task.name, task.turns, task.session) for task in TASKS[: given.tasks]
        ),
    }
    with tempfile.TemporaryDirectory(prefix="rose-bench-recall-") as root:
        try:
            found = asyncio.run(measure(Path(root), scripts))
        except Unavailable as error:
            sys.stderr.write(f"{error}\n")
            return 1
    notes = []
    for kind, tally in found.items():
        notes += [f"{kind}: changed, told none: {command}" for command in tally.missed]
        notes += [
            f"{kind}: nothing changed, told otherwise {count} times ({why}): {tally.examples[why]}"
            for why, count in tally.unclear.most_common()
        ]
    record("sandbox-recall", figures(found), notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
