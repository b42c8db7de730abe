"""``python -m bench.sandboxes.waits``: agents beside each other, with waits of recorded ones.

Each agent has a sandbox and plays turns of ``mix`` in it. Between two of them it waits for a model,
as long as the recorded turns of a trace (``weka_episodes_400``: output tokens) take at
``TOKENS_A_SECOND``; a wait is cut at ``LONGEST_WAIT``. Nothing is compressed: a wait is slept.

| way | |
|---|---|
| fault-free | nobody is told of turns: nothing is saved |
| ours | the host is told of each turn, and may suspend |
| ours, one loss each | the same; every agent's sandbox is lost once, and restored |

All ways play the same turns with the same waits. A reply is held while its turn is being saved, so
``held`` is what saving cost the agents by itself; whole times have the work of others in them too.
After the last turn each agent's sandbox is suspended and resumed once, for the times that ``rose
simulate sandboxes`` takes.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.record import Figure, figure, record
from bench.sandboxes.__main__ import host_of, kill
from bench.sandboxes.mix import PROJECT, Turn, draw
from bench.sandboxes.own import own_runtime
from rose_core.sandboxes.policy import ModelWait
from rose_sandbox.box import key_of
from rose_sandbox.errors import Unavailable
from rose_sandbox.host import Host
from rose_sandbox.inspector.bpf import BpfInspector
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import Handle, SandboxSpec

TRACE = Path("simulate/scenarios/traces/weka_episodes_400.csv")
TOKENS_A_SECOND = 40.0
"""Of one reply: a step of 25 ms, as a model of 32B takes on an H200 beside others."""
LONGEST_WAIT = 40.0
"""One reply in 40 is longer. Longer waits only hide more."""
WAYS = ("fault-free", "ours", "ours, one loss each")
SECONDS = 120.0
CALLS = 2_000_000  # a second of them: the smallest difference seen is then some 5 ns
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


@dataclass(frozen=True)
class Script:
    """One agent's turns, each with the seconds until the next reply; ``lost``: after which one."""

    turns: tuple[tuple[Turn, float], ...]
    lost: int


@dataclass
class Tally:
    """What one way of saving sandboxes made agents wait.

    Attributes:
        seconds: of all agents.
        held: of these, until a reply might be acted on.
        restoring: of these, until a lost sandbox was there again.
        late: lost sandboxes that came back to an earlier turn than the last one.
        actions: what boundaries saved, by whether the command changes something.
        saving: seconds of each boundary, by what it saved.
        resuming: seconds of each resume.
    """

    seconds: float = 0.0
    held: float = 0.0
    restoring: list[float] = field(default_factory=list)
    late: int = 0
    actions: Counter[tuple[bool, str]] = field(default_factory=Counter)
    saving: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    resuming: list[float] = field(default_factory=list)


def scripts(agents: int, turns: int, seed: int) -> tuple[Script, ...]:
    """Of all agents: consecutive turns of as many recorded episodes."""
    recorded: dict[str, list[float]] = {}
    with TRACE.open() as rows:
        for row in csv.DictReader(rows):
            wait = int(row["out_tokens"]) / TOKENS_A_SECOND
            recorded.setdefault(row["episode"], []).append(min(LONGEST_WAIT, wait))
    dice = random.Random(seed)
    long_enough = [waits for waits in recorded.values() if len(waits) >= turns]
    return tuple(
        Script(
            tuple((draw(dice, number), waits[number]) for number in range(turns)),
            dice.randrange(1, turns),
        )
        for waits in dice.sample(long_enough, agents)
    )


def expected(written: Sequence[Script]) -> ModelWait:
    """What a router would say of each: it knows the last replies, and not this one's length."""
    waits = [wait for script in written for _, wait in script.turns]
    return ModelWait(statistics.median(waits), 0.5)


@dataclass
class Stage:
    """Where the agents of one way live.

    Attributes:
        wait: what a router would say of each reply.
    """

    host: Host
    runtime: RuncRuntime
    way: str
    wait: ModelWait
    tally: Tally = field(default_factory=Tally)

    async def live(self, name: str, script: Script) -> None:
        """One agent's life, from its first command to its last."""
        began = time.monotonic()
        ids: list[int] = []
        for number, (turn, seconds) in enumerate(script.turns):
            await self.host.exec(name, turn.command, SECONDS)
            if self.way == "fault-free":
                await asyncio.sleep(seconds)
                continue
            ids += range(50)
            await self.host.turn_began(name, ids, wait=self.wait)
            await asyncio.sleep(seconds)
            ready = time.monotonic()
            checked = await self.host.tokens_ready(name)
            self.tally.held += time.monotonic() - ready
            self.tally.actions[turn.changes, checked.action] += 1
            self.tally.saving[checked.action].append(checked.seconds)
            if self.way != "ours" and number == script.lost:
                await self._lose(name, checked.turn)
        self.tally.seconds += time.monotonic() - began

    async def suspend_and_resume(self, name: str) -> None:
        """As a host does where the model thinks for long."""
        self.tally.saving["suspend"].append((await self.host.suspend(name)).seconds)
        began = time.monotonic()
        await self.host.resume(name)
        self.tally.resuming.append(time.monotonic() - began)

    async def _lose(self, name: str, turn: int) -> None:
        began = time.monotonic()
        (box,) = [one for one in await self.runtime.sandboxes() if one.key == key_of(name)]
        await kill(self.runtime, box)
        restored = await self.host.restore(name)
        self.tally.restoring.append(time.monotonic() - began)
        self.tally.late += restored.told.turn < turn


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


async def play(written: Sequence[Script], root: Path) -> tuple[dict[str, Tally], float]:
    """Every way, one after another, and the nanoseconds of a traced call."""
    found = {way: Tally() for way in WAYS}
    async with own_runtime(root / "runc") as runtime:
        call = await traced_call(runtime)
        host = host_of(runtime, root)
        for way in WAYS:
            stage = Stage(host, runtime, way, expected(written), found[way])
            names = [f"agent{number}" for number in range(len(written))]
            for name in names:
                await host.create(name)
                await host.exec(name, PROJECT, SECONDS)
                if way != "fault-free":  # a trajectory's first record is of all there is
                    await host.checkpoint(name)
            await asyncio.gather(*map(stage.live, names, written))
            for name in names:
                if way == "ours":
                    await stage.suspend_and_resume(name)
                await host.end(name, forget=True)
            sys.stdout.write(f"{way}: {found[way].seconds:.0f} s of {len(names)} agents\n")
            sys.stdout.flush()
        await host.close()
    return found, call


def figures(found: dict[str, Tally], call: float, written: Sequence[Script]) -> list[Figure]:
    """What was measured, with the aims."""
    free, own, lost = (found[way] for way in WAYS)
    turns = sum(own.actions.values())
    idle = sum(count for (changes, _), count in own.actions.items() if not changes)
    checked = own.actions[False, "none"]
    missed = own.actions[True, "none"]
    restores = sorted(lost.restoring)
    return [
        figure("agents beside each other", len(written), "", at_least=16),
        figure("turns", turns, ""),
        figure("waiting, of the time", 100 * _waited(written) / free.seconds, "%"),
        figure("ours: held, of fault-free time", 100 * own.held / free.seconds, "%", at_most=2),
        figure(
            "ours: time over fault-free", 100 * (own.seconds / free.seconds - 1), "%", at_most=2
        ),
        figure("one loss each: time over fault-free", 100 * (lost.seconds / free.seconds - 1), "%"),
        figure("one loss each: restore, median", statistics.median(restores), "s"),
        figure("one loss each: restore, slowest", restores[-1], "s", at_most=1),
        figure("inspector: a traced call", call, "ns", at_most=1000),
        figure("turns whose command changes nothing", 100 * idle / turns, "%"),
        figure("of these, told so", 100 * checked / idle, "%", at_least=70),
        figure("turns that change something, told to change nothing", missed, "", at_most=0),
        figure("turns that were told to need no checkpoint", 100 * (checked + missed) / turns, "%"),
        *(
            figure(f"ours: a boundary that ends in {action}, median", statistics.median(took), "s")
            for action, took in sorted(own.saving.items())
        ),
        figure("ours: a resume, median", statistics.median(own.resuming), "s"),
    ]


def _waited(written: Sequence[Script]) -> float:
    return sum(wait for script in written for _, wait in script.turns)


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured; 1: this machine cannot run sandboxes."""
    flags = argparse.ArgumentParser(prog="python -m bench.sandboxes.waits")
    flags.add_argument("--agents", type=int, default=16)
    flags.add_argument("--turns", type=int, default=10, help="of each")
    flags.add_argument("--seed", type=int, default=1)
    given = flags.parse_args(argv)
    written = scripts(given.agents, given.turns, given.seed)
    with tempfile.TemporaryDirectory(prefix="rose-bench-sandboxes-") as root:
        try:
            found, call = asyncio.run(play(written, Path(root)))
        except Unavailable as error:
            sys.stderr.write(f"{error}\n")
            return 1
    notes = [f"{way}: saved by action: {_named(found[way])}" for way in WAYS[1:]]
    record("sandbox-waits", figures(found, call, written), notes=notes)
    return 0


def _named(tally: Tally) -> dict[str, int]:
    return {
        f"{action} ({'changes' if changes else 'reads'})": count
        for (changes, action), count in sorted(tally.actions.items())
    }


if __name__ == "__main__":
    sys.exit(main())
