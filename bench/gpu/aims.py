"""What each figure is held against, which promise it speaks for, and what would refute it (pure).

A figure that was not measured leaves its promise unknown; it is never taken for one that was met.

| promise | kept when |
|---|---|
| serving first | every aim of it is met |
| exact and honest | every aim of it is met |
| useful | every aim of it is met |

A promise is refuted by one aim that is missed, and unknown when none is missed and one is not
measured. Where a figure decides a constant of the product, ``settings`` says which value it asks
for, and where that stands. Next step: ``suite`` measures, ``__main__`` prints and keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rose_core.devices.dormancy import LEAST_SHARE
from rose_core.devices.footprint import estimate
from rose_core.devices.memory import CONTEXT_BYTES, GIB
from rose_core.guard.freezing import Grace
from rose_core.guard.ladder import LadderLimits


class Promise(StrEnum):
    """The three of the README, the first wins."""

    SERVING = "serving first"
    EXACT = "exact and honest"
    USEFUL = "useful"


class Verdict(StrEnum):
    """Whether a promise was kept, as far as the measurement tells."""

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


_STOPS = ("decode1", "decode32", "prefill", "prefill_32k")
_GRACE_MS = Grace().iteration_ns / 1e6
# After an arrival the GPU is serving's; what the guard's page promises.
_ARRIVAL_MS = 25.0
# What serving may wait for a call of the driver: an allocation alone takes 1 to 10 ms.
_DRIVER_MS = 20.0
# The promise of 250 ms, less a dead tap (200 ms) and the enforcer's look (20 ms): docs/guard.md.
_MOST_GRACE_MS = 30.0
_PAYS_MS = _ARRIVAL_MS + _GRACE_MS
# What the estimate of an engine has beside the activations of its chunk: context, constants,
# graphs. Those activations are what a chunk of twice the least adds to it.
_CHUNK = {"chunked-prefill-size": "4096"}
BESIDE_BYTES = 2 * estimate({}, 8, latent=False) - estimate(_CHUNK, 8, latent=False)
AIMS: tuple[Aim, ...] = (
    Aim(
        *("nvml", "nvml.processes.p99", "ms", 0.2, Promise.SERVING),
        "NVML may be asked where arrivals wait; it must stay in a thread of its own",
    ),
    Aim(
        *("footprint", "footprint.context", "GiB", CONTEXT_BYTES / GIB, Promise.SERVING),
        "a CUDA context takes 1 GiB at most (CONTEXT_BYTES): else fractions come out too small",
    ),
    Aim(
        *("footprint", "footprint.beside_torch", "GiB", BESIDE_BYTES / GIB, Promise.SERVING),
        "what an engine that was never measured is promised beside its activations (estimate)",
    ),
    Aim(
        *("resident", "resident.frozen_over_parked", "ratio", 1.01, Promise.SERVING),
        "an engine that is frozen costs serving nothing",
    ),
    *(
        Aim(
            *("stop", f"stop.{kind}.{how}.last_kernel_p99", "ms", _ARRIVAL_MS, Promise.SERVING),
            "the GPU is serving's 25 ms after an arrival; the chunk must follow the context",
        )
        for kind in _STOPS
        for how in ("freeze", "pause")
    ),
    *(
        Aim(
            *("stop", f"stop.{kind}.grace.serving_pays_p99", "ms", _PAYS_MS, Promise.SERVING),
            f"{_GRACE_MS:.0f} ms of grace for an iteration (rose_core.guard.freezing)",
        )
        for kind in _STOPS
    ),
    Aim(
        *("storm", "storm.boundary.serving_memory_max", "ms", _DRIVER_MS, Promise.SERVING),
        "an engine that is frozen at its boundary holds no lock of the driver (decision 0112)",
    ),
    Aim(
        *("storm", "storm.boundary.newcomer_over_alone", "ratio", 2.0, Promise.SERVING),
        "processes start beside an engine that is frozen at its boundary as they do alone",
    ),
    Aim(
        *("storm", "storm.boundary.reached_max", "ms", Grace().start_ns / 1e6, Promise.SERVING),
        "an engine that starts reaches a boundary in time (Grace.start_ns), else it is ended",
    ),
    Aim(
        *("killed", "killed.memory_free", "s", LadderLimits().terminate_ns / 1e9, Promise.SERVING),
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
        *("saver", "saver.kept_share", "share", 1 - LEAST_SHARE, Promise.USEFUL),
        "an engine that says it let go of its memory has (rose_core.devices.dormancy)",
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
        """The figure as it is written into the record."""
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
    verdict_of: dict[str, dict[str, object]] = {}
    for promise in Promise:
        aims = [aim for aim in AIMS if aim.promise is promise and aim.check in checks]
        missed = [aim for aim in aims if aim.name in by_name and not by_name[aim.name].met]
        absent = [aim.name for aim in aims if aim.name not in by_name]
        unknown = bool(absent) or not aims
        verdict = Verdict.REFUTED if missed else Verdict.UNKNOWN if unknown else Verdict.KEPT
        verdict_of[promise.value] = {
            "verdict": verdict.value,
            "missed": {aim.name: aim.refutes for aim in missed},
            "not_measured": absent,
        }
    return verdict_of


@dataclass(frozen=True)
class Setting:
    """A constant of the product that a figure decides.

    Attributes:
        name: of the constant; ``place``: its file.
        now: its value today.
        asks: the value that the figures ask for.
        why: the figures.
    """

    name: str
    place: str
    now: str
    asks: str
    why: str


def settings(figures: Sequence[Figure]) -> list[Setting]:
    """What the figures ask to be set; without those that were not measured."""
    by_name = {figure.name: figure.value for figure in figures}
    return [*_grace(by_name), *_start(by_name), *_context(by_name), *_terminate(by_name)]


_FREEZING = "rose_core/guard/freezing.py"


def _grace(figures: Mapping[str, float]) -> list[Setting]:
    """How long an iteration is waited for before its process is frozen.

    | a freeze at any moment | a freeze at the boundary | then |
    |---|---|---|
    | serving waits no longer than ``_DRIVER_MS`` | - | no grace is needed |
    | longer | no longer | as long as the longest step takes to end, 30 ms at most |
    | longer | longer | no grace helps: a frozen engine holds a lock wherever it stands |
    """
    at_once = figures.get("storm.freeze.serving_memory_max")
    at_boundary = figures.get("storm.boundary.serving_memory_max")
    ends = [
        figures[f"stop.{kind}.pause.last_kernel_p99"]
        for kind in _STOPS
        if f"stop.{kind}.pause.last_kernel_p99" in figures
    ]
    if at_once is None or at_boundary is None:
        return []
    waits = f"serving waits {at_once:.1f} ms for its memory beside a freeze at any moment"
    waits += f", {at_boundary:.1f} at a boundary"
    now = f"{_GRACE_MS:.0f} ms"
    if at_once <= _DRIVER_MS:
        return [Setting("Grace.iteration_ns", _FREEZING, now, "0 ms", waits)]
    if at_boundary > _DRIVER_MS:
        asks = "Step.END instead of Step.FREEZE for engines of a GPU"
        return [Setting("next_step", _FREEZING, "Step.FREEZE", asks, waits)]
    if not ends:
        return []
    longest = math.ceil(max(ends))
    asks = f"{min(longest, _MOST_GRACE_MS):.0f} ms"
    if longest > _MOST_GRACE_MS:
        asks += ", and shorter chunks: chunked-prefill-size of the leases"
    return [
        Setting("Grace.iteration_ns", _FREEZING, now, asks, f"{waits}; a step ends in {longest} ms")
    ]


def _start(figures: Mapping[str, float]) -> list[Setting]:
    reached = figures.get("storm.boundary.reached_max")
    if reached is None:
        return []
    # Twice what was seen, so that one slow call more ends no engine that starts well.
    asks = f"{max(1.0, math.ceil(2 * reached / 1e3)):.0f} s"
    why = f"work in the driver came to a boundary in {reached:.1f} ms at most"
    return [Setting("Grace.start_ns", _FREEZING, f"{Grace().start_ns / 1e9:.0f} s", asks, why)]


def _context(figures: Mapping[str, float]) -> list[Setting]:
    context = figures.get("footprint.context")
    if context is None:
        return []
    now, place = f"{CONTEXT_BYTES / GIB:.2f} GiB", "rose_core/devices/memory.py"
    asks = f"{max(0.25, math.ceil(4 * context) / 4):.2f} GiB"
    why = f"a process held {context:.2f} GiB before its first tensor"
    return [Setting("CONTEXT_BYTES", place, now, asks, why)]


def _terminate(figures: Mapping[str, float]) -> list[Setting]:
    free = figures.get("killed.memory_free")
    if free is None:
        return []
    now = f"{LadderLimits().terminate_ns / 1e9:.0f} s"
    asks = f"{max(2, math.ceil(2 * free))} s"
    why = f"the memory of a killed engine was free after {free:.2f} s"
    return [Setting("LadderLimits.terminate_ns", "rose_core/guard/ladder.py", now, asks, why)]


def table_of_aims(checks: Sequence[str]) -> list[str]:
    """For each aim of these checks the figure that would refute it, and what falls then."""
    return [
        f"{aim.name:<44} > {aim.most:g} {aim.unit:<8} refutes ({aim.promise.value}): {aim.refutes}"
        for aim in AIMS
        if aim.check in checks
    ]


def lines(figures: Sequence[Figure], verdict_of: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The result for people: figures, verdicts, what a missed aim refutes, what to set where."""
    marks = {True: "met", False: "MISSED", None: ""}
    falls = {aim.name: aim.refutes for aim in AIMS}
    table = [
        f"{one.name:<44} {one.value:>12.4g} {one.unit:<8} {one.aim or '':<14} {marks[one.met]}"
        for one in figures
    ]
    missed = [f"{one.name} refutes: {falls[one.name]}" for one in figures if one.met is False]
    asked = [
        f"set {one.name} ({one.place}) to {one.asks}; now {one.now}: {one.why}"
        for one in settings(figures)
        if one.asks != one.now
    ]
    verdict = [f"{name}: {one['verdict']}" for name, one in verdict_of.items()]
    return [*table, *verdict, *missed, *asked]
