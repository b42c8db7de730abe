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
        met: None without an aim.
    """

    name: str
    value: float
    unit: str
    aim: str = ""
    met: bool | None = None


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
) -> Figure:
    """A figure, with its aim when there is one."""
    if at_most is not None:
        return Figure(name, value, unit, f"<= {at_most:g}", value <= at_most)
    if at_least is not None:
        return Figure(name, value, unit, f">= {at_least:g}", value >= at_least)
    return Figure(name, value, unit)


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


def table(figures: Sequence[Figure]) -> str:
    """The figures as lines of text."""
    width = max((len(one.name) for one in figures), default=0)
    lines = []
    for one in figures:
        verdict = "" if one.met is None else ("met" if one.met else "NOT MET")
        line = f"{one.name:<{width}}  {one.value:>12.4g} {one.unit:<14} {one.aim:<10} {verdict}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def record(
    name: str,
    figures: Sequence[Figure],
    *,
    notes: Sequence[str] = (),
    folder: Path = FOLDER,
) -> Report:
    """Print the figures and the machine, and write ``folder/NAME.json``."""
    report = Report(name, machine(), tuple(figures), tuple(notes))
    here = report.machine
    sys.stdout.write(
        f"{name}: {here.processor}, {here.cores} cores, {here.memory_bytes / 2**30:.0f} GiB, "
        f"{here.system}, Python {here.python}, load {here.load:.1f}\n{table(figures)}\n"
    )
    for note in notes:
        sys.stdout.write(f"note: {note}\n")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    sys.stdout.write(f"written to {path}\n")
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
