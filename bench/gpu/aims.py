"""What each figure is held against, which promise it speaks for, and what would refute it (pure).

A figure that was not measured leaves its promise unknown; it is never taken for one that was met.

| promise | kept when |
|---|---|
| serving first | every aim of it is met |
| exact and honest | every aim of it is met |
| useful | every aim of it is met |

A promise is refuted by one aim that is missed, and unknown when none is missed and one is not
measured. Next step: ``suite`` measures, ``__main__`` prints and keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Promise(StrEnum):
    """The three of the README, the first wins."""

    SERVING = "serving first"
    EXACT = "exact and honest"
    USEFUL = "useful"


class Verdict(StrEnum):
    """Of a promise."""

    KEPT = "kept"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Aim:
    """What a figure should be.

    Attributes:
        most: the aim is met up to here.
        refutes: what falls when it is missed.
    """

    check: str
    name: str
    unit: str
    most: float
    promise: Promise
    refutes: str


_STOPS = ("decode1", "decode32", "prefill512", "prefill512_32k")
AIMS: tuple[Aim, ...] = (
    Aim(
        *("nvml", "nvml.processes.p99", "ms", 0.2, Promise.SERVING),
        "NVML may be asked where arrivals wait; it must stay in a thread of its own",
    ),
    Aim(
        *("footprint", "footprint.beside_torch", "GiB", 3.0, Promise.SERVING),
        "3 GiB for context, graphs and workspaces (FIXED_BYTES)",
    ),
    Aim(
        *("resident", "resident.frozen_over_parked", "ratio", 1.01, Promise.SERVING),
        "an engine that is frozen costs serving nothing",
    ),
    *(
        Aim(
            *("stop", f"stop.{kind}.{how}.last_kernel_p99", "ms", 25.0, Promise.SERVING),
            "the GPU is serving's 25 ms after an arrival; the chunk must follow the context",
        )
        for kind in _STOPS
        for how in ("freeze", "pause")
    ),
    *(
        Aim(
            *("stop", f"stop.{kind}.grace.serving_pays_p99", "ms", 45.0, Promise.SERVING),
            "20 ms of grace for an iteration (rose_core.guard.freezing)",
        )
        for kind in _STOPS
    ),
    Aim(
        *("storm", "storm.serving_memory_max", "ms", 20.0, Promise.SERVING),
        "a frozen engine holds no lock of the driver: freezing must wait for driver calls",
    ),
    Aim(
        *("storm", "storm.newcomer_over_alone", "ratio", 2.0, Promise.SERVING),
        "processes start beside a frozen one as they do alone",
    ),
    Aim(
        *("killed", "killed.memory_free", "s", 6.0, Promise.SERVING),
        "rung 5 gives the GPU back in 6 s (LadderLimits.terminate_ns)",
    ),
    *(
        Aim(
            *("commit", f"commit.{model}.as_today", "ms", 50.0, Promise.USEFUL),
            "changes are staged on the host (decision 0014); see one_scatter and staged",
        )
        for model in ("8B", "30B-A3B")
    ),
    *(
        Aim(
            *("commit", f"commit.{model}.wrong", "tensors", 0.0, Promise.EXACT),
            "a commit leaves exactly the published bits",
        )
        for model in ("8B", "30B-A3B")
    ),
    *(
        Aim(
            *("digest", f"digest.{model}.whole", "s", 5.0, Promise.EXACT),
            "every commit can be confirmed by the digest of the whole state",
        )
        for model in ("8B", "30B-A3B")
    ),
    Aim(
        *("saver", "saver.pause_resume_p50", "s", 4.0, Promise.USEFUL),
        "rung 4 gives memory back and takes it again in 4 s",
    ),
    Aim(
        *("saver", "saver.changed", "results", 0.0, Promise.EXACT),
        "graphs that were captured before a pause compute the same after it",
    ),
)


@dataclass(frozen=True)
class Figure:
    """One measured number; None of ``aim`` and ``met`` means that it is for reading only."""

    name: str
    value: float
    unit: str
    aim: str | None = None
    met: bool | None = None

    def as_dict(self) -> dict[str, object]:
        """As it is kept."""
        return asdict(self)


def judged(measured: Sequence[tuple[str, float, str]]) -> list[Figure]:
    """Figures beside their aims."""
    known = {aim.name: aim for aim in AIMS}
    found = []
    for name, value, unit in measured:
        aim = known.get(name)
        if aim is None:
            found.append(Figure(name, value, unit))
        else:
            found.append(Figure(name, value, unit, f"<= {aim.most:g} {unit}", value <= aim.most))
    return found


def verdicts(figures: Sequence[Figure], checks: Sequence[str]) -> dict[str, dict[str, object]]:
    """For each promise its verdict, and what decided it.

    Args:
        figures: everything that was measured.
        checks: those that were to run; aims of others do not count.
    """
    by_name = {figure.name: figure for figure in figures}
    said: dict[str, dict[str, object]] = {}
    for promise in Promise:
        aims = [aim for aim in AIMS if aim.promise is promise and aim.check in checks]
        missed = [aim for aim in aims if aim.name in by_name and not by_name[aim.name].met]
        absent = [aim.name for aim in aims if aim.name not in by_name]
        unknown = bool(absent) or not aims
        verdict = Verdict.REFUTED if missed else Verdict.UNKNOWN if unknown else Verdict.KEPT
        said[promise.value] = {
            "verdict": verdict.value,
            "missed": {aim.name: aim.refutes for aim in missed},
            "not_measured": absent,
        }
    return said


def lines(figures: Sequence[Figure], said: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The result for people."""
    marks = {True: "met", False: "MISSED", None: ""}
    table = [
        f"{one.name:<44} {one.value:>12.4g} {one.unit:<8} {one.aim or '':<14} {marks[one.met]}"
        for one in figures
    ]
    return [*table, *(f"{name}: {one['verdict']}" for name, one in said.items())]
