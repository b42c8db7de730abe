"""How every benchmark reports: a table on the terminal and ``out/bench/NAME.json``.

A figure has a value, a unit and, where one was set, an aim; whether it was met is computed here and
nowhere else. The machine is recorded beside the figures, because most of them mean nothing without.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

FOLDER = Path("out") / "bench"


class Figure(msgspec.Struct, frozen=True):
    """One measured number.

    Attributes:
        name: what was measured, unique inside the benchmark.
        aim: for example ``<= 1.4``; empty when none was set.
        met: None without an aim, and where the interval lies on both sides of it.
        low, high: interval of the value, where one was computed.
    """

    name: str
    value: float
    unit: str
    aim: str = ""
    met: bool | None = None
    low: float | None = None
    high: float | None = None


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured.

    Attributes:
        load: one-minute load average at the end, over all cores.
    """

    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    load: float


class Report(msgspec.Struct, frozen=True):
    """A benchmark's result."""

    name: str
    machine: Machine
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()


def figure(
    name: str,
    value: float,
    unit: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    interval: tuple[float, float] | None = None,
) -> Figure:
    """A figure, with its aim and its interval when there are such.

    An aim counts as met or missed only when the whole interval says so.
    """
    low, high = interval or (value, value)
    ends = interval or (None, None)
    if at_most is not None:
        met = _agreed(low <= at_most, high <= at_most)
        return Figure(name, value, unit, f"<= {at_most:g}", met, *ends)
    if at_least is not None:
        met = _agreed(low >= at_least, high >= at_least)
        return Figure(name, value, unit, f">= {at_least:g}", met, *ends)
    return Figure(name, value, unit, "", None, *ends)


def _agreed(one: bool, other: bool) -> bool | None:
    return one if one == other else None


def machine() -> Machine:
    """This machine."""
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        load=os.getloadavg()[0],
    )


def log(text: str) -> None:
    """Tell whoever waits how far it is: most benchmarks take minutes."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def table(figures: Sequence[Figure]) -> str:
    """The figures as lines of text."""
    width = max((len(one.name) for one in figures), default=0)
    lines = []
    for one in figures:
        verdict = "undecided" if one.aim else ""
        if one.met is not None:
            verdict = "met" if one.met else "NOT MET"
        interval = f"[{one.low:.4g}, {one.high:.4g}]" if one.low is not None else ""
        line = (
            f"{one.name:<{width}}  {one.value:>10.4g} {interval:<18} {one.unit:<12} "
            f"{one.aim:<8} {verdict}"
        )
        lines.append(line.rstrip())
    return "\n".join(lines)


def save(
    name: str, figures: Sequence[Figure], *, notes: Sequence[str] = (), folder: Path = FOLDER
) -> Report:
    """Write ``folder/NAME.json``."""
    report = Report(name, machine(), tuple(figures), tuple(notes))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return report


def record(
    name: str,
    figures: Sequence[Figure],
    *,
    notes: Sequence[str] = (),
    folder: Path = FOLDER,
) -> Report:
    """Print the figures and the machine, and write ``folder/NAME.json``."""
    report = save(name, figures, notes=notes, folder=folder)
    here = report.machine
    sys.stdout.write(
        f"{name}: {here.processor}, {here.cores} cores, {here.memory_bytes / 2**30:.0f} GiB, "
        f"{here.system}, Python {here.python}, load {here.load:.1f}\n{table(figures)}\n"
    )
    for note in notes:
        sys.stdout.write(f"note: {note}\n")
    sys.stdout.write(f"written to {folder / name}.json\n")
    return report


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
