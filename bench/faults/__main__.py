"""``python -m bench.faults``: every fault of guard, host, tap, serving and engine as a matrix.

Fake engines on real cgroups, namespaces and file systems; needs root. About five minutes on a
quiet machine. Exit code 1 when a case is not as it must be. ``bench.deaths`` has the same deaths
with real engines.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.faults.cases import CASES, Case
from bench.faults.fault_node import FaultNode, world
from bench.record import Figure, figure, record

GRACE_SECONDS = 1.0
WATCH_SECONDS = 1.0
_ANSWER_SECONDS = 30.0
_ANSWER_TOKENS = 20
_OPEN = {"Idle", "Slack", "CoolDown"}
PROMISE_MS = 250.0


@dataclass(frozen=True)
class CaseOutcome:
    """One line of the matrix.

    Attributes:
        stopped_ms: from the fault to the last rollout token; None where rollouts go on.
        recovered_s: from the mending to the first token; None = never.
        reasons: what the flight recorder has of it, in order.
        note: what was wrong; empty when the case is good.
    """

    case: str
    stopped_ms: float | None = None
    recovered_s: float | None = None
    reasons: tuple[str, ...] = ()
    note: str = ""

    @property
    def line(self) -> str:
        """The line for people."""
        stopped = "goes on" if self.stopped_ms is None else f"{self.stopped_ms:.1f} ms"
        back = "never" if self.recovered_s is None else f"{self.recovered_s:.1f} s"
        verdict = f"WRONG: {self.note}" if self.note else "good"
        listed = " ".join(self.reasons) or "-"
        return f"{self.case:<32} {stopped:>10} {back:>8}  {listed:<44} {verdict}"


HEADER = f"{'fault':<32} {'stopped':>10} {'back':>8}  {'reasons in the flight recorder':<44}"


def run(folder: Path, cases: Iterable[Case]) -> list[CaseOutcome]:
    """Run every case in one world, judge it, and print its line as soon as it is known.

    A case is good when all of this is so: the rollouts stopped (no token later than the grace,
    which a busy machine's client needs; how soon they did is a figure, with the promise of 250 ms
    as its aim), or went on where they must; serving answered all along; tokens came again after the
    mending without anybody's help; and the flight recorder has the reason.
    """
    return asyncio.run(_run(folder, tuple(cases)))


async def _run(folder: Path, cases: tuple[Case, ...]) -> list[CaseOutcome]:
    outcomes: list[CaseOutcome] = []
    rest = list(cases)
    while rest:
        # After a case that went wrong the next one deserves a world that works.
        place = folder / str(len(outcomes))
        place.mkdir()
        async with world(place) as here:
            while rest:
                outcomes.append(await attempt(here, rest.pop(0)))
                sys.stdout.write(f"{outcomes[-1].line}\n")
                sys.stdout.flush()
                if outcomes[-1].note:
                    break
    return outcomes


async def attempt(here: FaultNode, case: Case) -> CaseOutcome:
    """Strike, look, mend, look again."""
    try:
        await _engine_with(here, dict(case.arguments))
        return await _attempt(here, case)
    except (AssertionError, TimeoutError, OSError, subprocess.CalledProcessError) as error:
        return CaseOutcome(case.name, note=str(error).partition("\n")[0] or type(error).__name__)
    finally:
        if case.arguments:
            here.operator.arguments = {"token-seconds": "0.002"}
            here.operator.generation += 1


async def _engine_with(here: FaultNode, arguments: dict[str, str]) -> None:
    if arguments:
        here.operator.arguments = {"token-seconds": "0.002", **arguments}
        here.operator.generation += 1
        await here.until(
            lambda: (
                here.operator.slot
                and here.operator.slot.slot.generation == here.operator.generation
            ),
            "the engine is replaced",
        )
    await here.flowing(time.monotonic())


async def _attempt(here: FaultNode, case: Case) -> CaseOutcome:
    since = time.monotonic()
    struck = await case.strike(here)
    await asyncio.sleep(max(0.0, struck + GRACE_SECONDS + WATCH_SECONDS - time.monotonic()))
    late = here.tokens_seen.between(struck + GRACE_SECONDS, struck + GRACE_SECONDS + WATCH_SECONDS)
    last = here.tokens_seen.last_before(struck, struck + GRACE_SECONDS + WATCH_SECONDS)
    served = await _serves(here) if case.serves else ""
    await case.mend(here)
    mended = time.monotonic()
    back = await here.flowing(mended)
    reasons = await _reasons(here, since)
    note = _judge(case, late, served, reasons)
    stopped = 1e3 * ((last or struck) - struck) if case.stops else None
    return CaseOutcome(case.name, stopped, back - mended, reasons, note)


def _judge(case: Case, late: int, served: str, reasons: tuple[str, ...]) -> str:
    if case.stops and late:
        return f"{late} tokens later than {GRACE_SECONDS:g} s"
    if not case.stops and not late:
        return "the rollouts stopped"
    if case.reasons and not case.reasons & set(reasons):
        return f"the flight recorder has none of {sorted(case.reasons)}"
    return served


async def _serves(here: FaultNode) -> str:
    """What is wrong with serving while the fault lasts; empty when it answers in full."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            made = await here.generate(_ANSWER_TOKENS)
    except (TimeoutError, OSError, aiohttp.ClientError) as error:
        return f"serving does not answer: {type(error).__name__}"
    return "" if made == _ANSWER_TOKENS else f"serving made {made} tokens of {_ANSWER_TOKENS}"


async def _reasons(here: FaultNode, since_s: float) -> tuple[str, ...]:
    """Distinct reasons for which something was closed, ordered or ended since then."""
    found: dict[str, None] = {}
    for entry in await here.trace():
        reason = str(entry.get("reason", ""))
        if entry["t"] >= since_s * 1e9 and reason and reason not in _OPEN:
            found.setdefault(reason)
    return tuple(found)


def figures(outcomes: list[CaseOutcome]) -> list[Figure]:
    """What was measured, case by case."""
    found = []
    for outcome in outcomes:
        if outcome.stopped_ms is not None:
            name = f"{outcome.case}: last token"
            found.append(figure(name, outcome.stopped_ms, "ms", at_most=PROMISE_MS))
        if outcome.recovered_s is not None:
            found.append(figure(f"{outcome.case}: back", outcome.recovered_s, "s"))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the cases and print the matrix."""
    parser = argparse.ArgumentParser(prog="bench.faults", description=__doc__)
    parser.add_argument("--only", type=re.compile, default="", help="cases that match the pattern")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    options = parser.parse_args(argv)
    cases = [case for case in CASES if re.search(options.only, case.name)]
    if options.list:
        sys.stdout.write("".join(f"{case.name}\n" for case in cases))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="rose", dir="/tmp"))
    sys.stdout.write(f"{HEADER}\n")
    try:
        outcomes = run(folder, cases)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bad = [outcome for outcome in outcomes if outcome.note]
    sys.stdout.write(f"{len(outcomes)} cases, {len(outcomes) - len(bad)} as they must be\n")
    notes = ["fake engines: the path of the stop, not a GPU", *(f"{b.case}: {b.note}" for b in bad)]
    record("faults", figures(outcomes), notes=notes)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
