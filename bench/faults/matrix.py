"""Runs faults one after the other in one world, judges each, and makes the lines of the matrix.

A case is good when all of this is so: the rollouts stopped (no token later than the grace, which a
busy machine's client needs; how soon they did is a figure, with the promise of 250 ms as its aim),
or went on where they must; serving answered all along; tokens came again after the mending without
anybody's help; and the flight recorder has the reason.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.faults.cases import Case
from bench.faults.fault_node import FaultNode, world

GRACE_SECONDS = 1.0
WATCH_SECONDS = 1.0
_ANSWER_SECONDS = 30.0
_ANSWER_TOKENS = 20
_OPEN = {"Idle", "Slack", "CoolDown"}


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
        words = " ".join(self.reasons) or "-"
        return f"{self.case:<32} {stopped:>10} {back:>8}  {words:<44} {verdict}"


HEADER = f"{'fault':<32} {'stopped':>10} {'back':>8}  {'reasons in the flight recorder':<44}"


def run(folder: Path, cases: Iterable[Case]) -> list[CaseOutcome]:
    """Every case, and its line on the terminal as soon as it is known."""
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
