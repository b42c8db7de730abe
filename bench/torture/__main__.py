"""``make torture``: runs the cases one after the other and prints the matrix.

One world lives through all cases; only the process that a case is about is started anew, armed,
and after its end started again as it was.

A case arms one process to fail, makes it pass the step, and looks twice: while it is down (no
engine may serve mixed or unattested weights, the old version goes on) and after it is back (the
engine serves the head, with the head's digest and bits).
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.torture import contention, damage
from bench.torture.process import Violation, until
from bench.torture.rig import RUN, TortureRig, encode
from rose_core.delta.faults import STEPS
from rose_weights.receive.client import WeightsClient

PROCESSES = {
    "publisher": "publisher",
    "store": "store",
    "relay": "relay",
    "sync": "weight-sync",
    "engine": "engine",
}
"""First word of a step -> process that passes it."""

# Passages before the fault acts: so that some blocks, pieces or tiles are done and some are not.
_LATER = {
    "store.block": 3,
    "relay.block": 3,
    "sync.block": 3,
    "engine.stage.tile": 3,
    "engine.commit.scatter": 1,
}
_FULL_DISK = (
    "store.opened",
    "store.block",
    "store.commit.blocks",
    "store.commit.manifest",
    "store.commit.head",
    "store.fold.manifest",
    "store.fold.list",
    "relay.block",
    "relay.merged",
    "sync.block",
    "sync.fetched",
    "sync.bundle",
)
"""Every step at which something has just been written, or is about to be."""

_STANDS_STILL = ("engine.commit.begin", "engine.commit.scatter", "engine.commit.checked")


@dataclass(frozen=True)
class Case:
    """One thing that goes wrong.

    Attributes:
        name: unique, what ``--only`` matches.
        process: the one that fails; empty when the case is a script of ``main``.
        fault: for ``ROSE_FAULT``.
        about: for people.
    """

    name: str
    process: str = ""
    fault: str = ""
    about: str = ""


def enumerated() -> list[Case]:
    """Every step as a ``kill -9``, then full disks, then processes that stand still."""
    found = [_case(step, "kill") for step in STEPS]
    found += [_case(step, "full") for step in _FULL_DISK]
    found += [_case(step, "stop") for step in (*_STANDS_STILL, "store.piece")]
    return found


SCRIPTED = (
    Case("store: flipped bits", about="every block of the head is damaged on the store's disk"),
    Case("relay: flipped bits", about="every block of the head is damaged on the relay's disk"),
    Case("relay: missing blocks", about="every block of the head is gone from the relay"),
    Case("store: flipped manifest", about="the head's manifest is damaged on the store's disk"),
    Case("store: flipped state", about="the run's list of versions is damaged at the store"),
    Case(
        "bundle: torn and reordered", about="half-written blocks and a manifest lie in the bundle"
    ),
    Case("bundle: flipped bits", about="blocks of a whole bundle are damaged before it is staged"),
    Case("engine: flipped weight", about="a bit of a live weight flips in the engine's memory"),
    Case("two publishers", about="a second one takes the run over; the first must stop"),
    Case("trainer rewound", about="the trainer starts again from an older step"),
    Case("gate closed", about="the gate closes before the commit and stays closed"),
    Case("clock jumps", about="wall clocks of store, relay and weight-sync jump by a day and back"),
    Case("second hand", about="somebody else stages and aborts on the same control socket"),
    Case("partition in mid-block", about="the link from relay to store breaks inside a block"),
    Case("rank votes late", about="one of two ranks stops in mid-swap, longer than the vote lasts"),
    Case("rank never answers", about="one of two ranks stops in mid-swap for ever"),
    Case("rank dies while staging", about="one of two ranks is killed between two tiles"),
    Case("everything at once", about="store, relay and weight-sync are killed in mid-transfer"),
)


GATES = tuple(
    Case(
        f"gate closes at {step}",
        PROCESSES[step.partition(".")[0]],
        f"{step}#{_LATER.get(step, 1)}=stop",
        f"the gate closes: {STEPS[step]}",
    )
    for step in ("sync.staged", "engine.stage.tile", *_STANDS_STILL, "sync.committed")
)
"""The gate closes while a process stands at a step of the commit, and opens later."""


def _case(step: str, action: str) -> Case:
    process = PROCESSES[step.partition(".")[0]]
    fault = f"{step}#{_LATER.get(step, 1)}={action}"
    return Case(f"{action} {step}", process, fault, STEPS[step])


class CaseOutcome(msgspec.Struct, frozen=True):
    """One line of the matrix.

    Attributes:
        during: what was served while the process was down.
        good: nothing was violated.
        note: what was, otherwise.
    """

    case: str
    about: str
    during: str
    good: bool
    seconds: float
    note: str = ""


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = argparse.ArgumentParser(prog="python -m bench.torture", description=__doc__)
    made.add_argument(
        "--only", type=_pattern, default="", help="cases whose name this pattern matches"
    )
    made.add_argument("--list", action="store_true", help="print the cases and end")
    made.add_argument("--json", type=Path, help="write the matrix here too")
    made.add_argument("--keep", action="store_true", help="leave the folder with logs behind")
    return made


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        message = f"{text!r} is no regular expression ({error}); '.*' stands for anything"
        raise argparse.ArgumentTypeError(message) from error


def main(argv: list[str]) -> int:
    """Entry of the verb.

    Returns:
        0 nothing was violated, 1 something was.
    """
    arguments = parser().parse_args(argv)
    cases = [
        case for case in (*enumerated(), *SCRIPTED, *GATES) if arguments.only.search(case.name)
    ]
    if arguments.list or not cases:
        sys.stdout.write("".join(f"{case.name:<32} {case.about}\n" for case in cases))
        return 0 if cases else 1
    folder = Path(tempfile.mkdtemp(prefix="rose"))
    try:
        outcomes = torture(folder, cases)
    finally:
        if arguments.keep:
            sys.stdout.write(f"logs and state are in {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    bad = [outcome for outcome in outcomes if not outcome.good]
    sys.stdout.write(f"{len(outcomes)} cases, {len(outcomes) - len(bad)} as they must be\n")
    if arguments.json:
        arguments.json.write_bytes(encode(outcomes))
    return 1 if bad else 0


def torture(folder: Path, cases: Sequence[Case]) -> list[CaseOutcome]:
    """Run the cases in one world.

    Raises:
        Violation: not even the undisturbed world works.
    """
    world = TortureRig(folder)
    outcomes = []
    try:
        world.start()
        for case in cases:
            outcome = attempt(world, case)
            outcomes.append(outcome)
            verdict = "good" if outcome.good else f"VIOLATED: {outcome.note}"
            sys.stdout.write(
                f"{outcome.case:<32} {outcome.during:<36} {outcome.seconds:5.1f} s  {verdict}\n"
            )
            sys.stdout.flush()
            if not outcome.good:  # the next case deserves a world that works
                world.end()
                shutil.rmtree(folder)
                folder.mkdir()
                world = TortureRig(folder)
                world.start()
    finally:
        world.end()
    return outcomes


def attempt(world: TortureRig, case: Case) -> CaseOutcome:
    """Run one case and judge it."""
    began = time.monotonic()
    during, note = "", ""
    try:
        during = SCRIPTS[case.name](world) if case.name in SCRIPTS else _fail(world, case)
        world.settle()
    except Violation as violation:
        note = str(violation)
    return CaseOutcome(case.name, case.about, during, not note, time.monotonic() - began, note)


def _fail(world: TortureRig, case: Case) -> str:
    """Arm the process, make it pass the step, look, and bring it back."""
    before = world.weights.version
    _pass_step(world, case)
    if case.fault.endswith("=full"):
        return "goes on by itself"
    process, step = world[case.process], case.fault.partition("#")[0]
    until(lambda: not process.alive or process.stopped, f"{case.process} passes {step}")
    served = world.look()
    allowed = served in {before, *world.newest()} or world.same_step(served, before)
    if case.process != "engine" and not allowed:
        raise Violation(f"{served or 'nothing'} is served instead of {before}")
    if process.stopped:
        _stand(world, case, before)
        process.send(signal.SIGCONT)
    else:
        world.restart(case.process)
    if case.process == "store" and not world["publisher"].alive:
        world.restart("publisher")
    return f"served {served}" if served else "engine down, nothing served"


def _pass_step(world: TortureRig, case: Case) -> None:
    """Start the process with its fault, and have something done that takes it past the step."""
    step = case.fault.partition("#")[0]
    if step == "relay.merged":
        _fall_behind(world)
    process = world[case.process]
    world.restart(case.process, case.fault)
    if process.alive and not process.stopped and step != "relay.merged":
        world.publish()
    if step == "store.opened":
        world["publisher"].kill()
        world["publisher"].start()
        world.asked = False
    if step == "relay.merged":
        world.restart("weight-sync")


def _stand(world: TortureRig, case: Case, before: str) -> None:
    """While an engine stands still in mid-commit, nobody may vouch for the version it makes."""
    file = world.weights  # its process is another one than ``before`` was served by: base weights
    if case.process == "engine" and file.attested and file.version != before:
        raise Violation(f"{world.weights.version} was vouched for before it was committed")


def _fall_behind(world: TortureRig) -> None:
    """The engine misses two versions whose single deltas the relay comes to hold."""
    world["weight-sync"].kill()

    async def follow() -> None:
        async with WeightsClient(world.relay_address) as client:
            versions = (await client.describe(RUN)).versions
            for before, after in zip(versions[-3:], versions[-2:], strict=False):
                folder = world.folder / "follower"
                await client.pull(
                    RUN, folder, have=before.version, digest=before.digest, want=after.version
                )
                shutil.rmtree(folder)

    for _ in range(2):
        world.publish()
        world.durable()
    asyncio.run(follow())


def _two_publishers(world: TortureRig) -> str:
    first = world["publisher"]
    second = TortureRig._process(world, "publisher", " ".join(first.command))  # noqa: SLF001
    second.start()
    until(lambda: second.has_printed("opened"), "the second publisher takes the run over")
    world.publish()
    until(lambda: first.has_printed("failed"), "the first publisher is told")
    if not any(
        "Fenced" in line["failed"] or "refused" in line["failed"]
        for line in first.lines
        if "failed" in line
    ):
        raise Violation(f"the first publisher heard {first.lines[-1]}")
    first.kill()
    world.processes["publisher"] = second
    second.write(str(world.step))
    return "the first one was fenced"


def _rewound(world: TortureRig) -> str:
    world.restart("publisher")
    world.publish(max(1, world.step - 3))
    return "an older step is the head"


def _gate(world: TortureRig) -> str:
    before = world.weights.version
    world.close_gate()
    world.publish()
    world.durable()
    until(lambda: world.weights.head in world.newest(), "weight-sync hears of it")
    time.sleep(1.0)  # nothing may happen, and there is nothing to wait for
    if world.weights.version != before:
        raise Violation(f"{world.weights.version} was committed under a closed gate")
    world.gate_open = True
    return f"served {before} until it opened"


def _everything(world: TortureRig) -> str:
    world.publish()
    for name in ("store", "relay", "weight-sync"):
        world[name].kill()
    served = world.look()
    for name in ("store", "relay", "weight-sync"):
        world.restart(name)
    return f"served {served}"


SCRIPTS: dict[str, Callable[[TortureRig], str]] = {
    "store: flipped bits": lambda world: damage.blocks(world, "store", damage.flip),
    "relay: flipped bits": lambda world: damage.blocks(world, "relay", damage.flip),
    "relay: missing blocks": lambda world: damage.blocks(world, "relay", Path.unlink),
    "store: flipped manifest": damage.manifest,
    "store: flipped state": damage.state,
    "bundle: torn and reordered": damage.torn_bundle,
    "bundle: flipped bits": damage.flipped_bundle,
    "engine: flipped weight": damage.rotten,
    "two publishers": _two_publishers,
    "trainer rewound": _rewound,
    "gate closed": _gate,
    "everything at once": _everything,
    "clock jumps": contention.clock_jumps,
    "second hand": contention.second_hand,
    "partition in mid-block": contention.partition,
    "rank votes late": contention.rank_late,
    "rank never answers": contention.rank_never,
    "rank dies while staging": contention.rank_dies,
    **{
        case.name: functools.partial(
            contention.gate_closes_at, process=case.process, fault=case.fault
        )
        for case in GATES
    },
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
