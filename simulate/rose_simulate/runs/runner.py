"""Runs the cases of studies, in several processes if asked, and none of them twice.

Studies overlap: the same scenario under the same regime and seed is part of several. A run's result
depends on nothing else, so it is kept by what it depends on: while the process lives, and with a
folder from one process to the next, until a line of the decisions or of the simulator changes. A
study that was interrupted goes on where it was.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

import rose_core
import rose_simulate.model
from rose_simulate.model.outcome import RunOutcome
from rose_simulate.model.regimes import RULES, LendingMode
from rose_simulate.model.run import Alone, run
from rose_simulate.model.scenarios.scenario import Regime, Scenario
from rose_simulate.model.simulation import SimulationInputs

_NOT_OF_A_RUN: Final = {"name", "seeds", "regimes"}

Found = tuple[RunOutcome, Alone]


@dataclass(frozen=True)
class Case:
    """A scenario with one seed; its regimes are compared with the fixed pool's run."""

    scenario: Scenario
    seed: int

    @property
    def regimes(self) -> tuple[Regime, ...]:
        """The fixed pool first, because the others compare with it."""
        others = [one for one in self.scenario.regimes if one is not Regime.FIXED]
        return (Regime.FIXED, *others)

    def key(self, regime: Regime) -> str:
        """What the result depends on: what co-running costs is nothing to who never co-runs."""
        idle = {"interference"} if RULES[regime].lends is LendingMode.NOTHING else set[str]()
        document = self.scenario.model_dump_json(exclude=_NOT_OF_A_RUN | idle)
        return f"{self.seed}/{regime}/{document}"


class Runner:
    """Runs cases.

    Args:
        processes: 1 = in this one.
        kept: where results are kept from one process to the next; None = nowhere.
    """

    def __init__(self, processes: int = 1, kept: Path | None = None) -> None:
        # Spawned: a fork of a process with threads (gRPC, numba) may wait forever for a lock.
        fresh = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, fresh) if processes > 1 else None
        self._kept = kept
        self._known: dict[str, Found] = {}

    def run(
        self,
        cases: Sequence[Case],
        material: SimulationInputs,
        progress: Callable[[RunOutcome], None],
    ) -> list[list[RunOutcome]]:
        """The outcomes of every case, in the order of its regimes."""
        asked = [self._ask(case, material) for case in cases]
        answers: list[list[RunOutcome]] = []
        for case, future in zip(cases, asked, strict=True):
            for key, found in (future.result() if future is not None else {}).items():
                self._known[key] = found
                progress(found[0])
            if future is None:
                self._known |= _run(case, material, self._part(case), progress, self._kept)
            slowdown = case.scenario.interference.serving_slowdown
            answers.append(
                [
                    msgspec.structs.replace(self._known[case.key(regime)][0], slowdown=slowdown)
                    for regime in case.regimes
                ]
            )
        return answers

    def _part(self, case: Case) -> dict[str, Found]:
        """What is known of the case already."""
        keys = (case.key(regime) for regime in case.regimes)
        return {key: self._known[key] for key in keys if key in self._known}

    def _ask(self, case: Case, material: SimulationInputs) -> Future[dict[str, Found]] | None:
        if self._pool is None:
            return None
        return self._pool.submit(_run, case, material, self._part(case), None, self._kept)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown()


def _run(
    case: Case,
    material: SimulationInputs,
    known: dict[str, Found],
    progress: Callable[[RunOutcome], None] | None,
    kept: Path | None,
) -> dict[str, Found]:
    """What is not known of the case."""
    alone: Alone = {}
    made: dict[str, Found] = {}
    for regime in case.regimes:
        key = case.key(regime)
        found = known.get(key)
        if found is None:
            found = made[key] = _read(kept, key, material) or run(
                case.scenario, regime, case.seed, material, alone
            )
            _write(kept, key, material, found)
            if progress is not None:
                progress(found[0])
        if regime is Regime.FIXED:
            alone = found[1]
    return made


def _read(kept: Path | None, key: str, material: SimulationInputs) -> Found | None:
    path = _path(kept, key, material)
    if path is None or not path.exists():
        return None
    found: Found = msgspec.json.decode(path.read_bytes(), type=Found)
    return found


def _write(kept: Path | None, key: str, material: SimulationInputs, found: Found) -> None:
    path = _path(kept, key, material)
    if path is not None and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(found))
        part.replace(path)


def _path(kept: Path | None, key: str, material: SimulationInputs) -> Path | None:
    if kept is None:
        return None
    digest = hashlib.sha256(f"{_code()}/{_of(material)}/{key}".encode())
    return kept / f"{digest.hexdigest()}.json"


@cache
def _code() -> str:
    """Digest of every line that could change a result."""
    digest = hashlib.sha256()
    for folder in (*rose_core.__path__, *rose_simulate.model.__path__):
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _of(material: SimulationInputs) -> str:
    """Digest of the traces."""
    rows = repr((material.episodes, material.traces, material.shapes))
    return hashlib.sha256(rows.encode()).hexdigest()
