"""Results and recordings of the guard's benchmark -> delays of the control path by load level.

| file | load levels in it |
|---|---|
| ``out/bench/guard-windows.json``, the recording of a run | every load of it |
| ``out/bench/guard.json`` of one load (``python -m bench.guard --loads conv``) | that one |
| the same of several loads | those that have figures of their own, ``conv, ours: arrival to ...`` |

A recording holds every reaction of every window of a run with its load, so one run with several
loads is enough to hold one of them out. Only the condition ``ours`` is read: the tap, guard and
engine host of production.

A delay with fewer than ``LEAST_SAMPLES`` reactions at a load of a recording is left out there, and
named. Next step: ``calibrate`` compares the levels.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rose_simulate.files import chance
from rose_simulate.files.timings import (
    CLOSED,
    MEDIANS,
    OPENED,
    QUIET,
    STOPPED,
    Figures,
    any_figures,
    refuse_busy,
)
from rose_simulate.model.errors import ScenarioError

# A figure of the benchmark, and the reactions of a window (seconds) that it is the median of.
FIELDS: Final = {CLOSED: "closed_s", STOPPED: "stopped_s", OPENED: "released_s"}
_CONDITION = "ours"

Windows = list[dict[str, Any]]

QUIET_SHARE = 0.05
"""As ``bench.guard``: above it the figures describe others' use of the machine."""
LEAST_SAMPLES = 20
_LOAD_OF = ", alone: time without a request"


@dataclass(frozen=True)
class Recorded:
    """One load level.

    Attributes:
        delays: reactions in milliseconds of each window that had any, by the name of the figure.
        others: mean share of the machine that others used.
    """

    delays: dict[str, tuple[tuple[float, ...], ...]]
    others: float


def is_recording(path: Path) -> bool:
    """Whether the file holds windows rather than figures; False also when it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "windows" in content


def delays_of(path: Path) -> dict[str, Recorded]:
    """The delays of every load level of a recording, in the order of the loads.

    Raises:
        ScenarioError: it is no recording of the guard's benchmark, or none of its condition
            ``ours``.
    """
    try:
        windows: Windows = json.loads(path.read_text())["windows"]
        ours = [one for one in windows if one["condition"] == _CONDITION]
        loads = dict.fromkeys(str(one["load"]) for one in ours)
        found = {load: _level([one for one in ours if one["load"] == load]) for load in loads}
    except (OSError, KeyError, TypeError, ValueError) as error:
        message = f"{path}: is no recording of the guard's benchmark ({error!r})"
        raise ScenarioError(message) from error
    if not found:
        message = f"{path}: no window of the condition {_CONDITION!r}"
        raise ScenarioError(message)
    return found


def _level(windows: Windows) -> Recorded:
    delays = {}
    for name, field in FIELDS.items():
        found = (tuple(1e3 * float(value) for value in one[field]) for one in windows)
        delays[name] = tuple(values for values in found if values)
    return Recorded(delays, statistics.fmean(float(one["strangers"]) for one in windows))


@dataclass(frozen=True)
class Median:
    """One delay at one load level, milliseconds; ``windows`` are its reactions where known."""

    value: float
    samples: int
    windows: chance.Windows = ()


@dataclass(frozen=True)
class Level:
    """One load level.

    Attributes:
        delays: by the name of the figure.
        others: share of the machine that others used meanwhile; None = not recorded.
        short: delays with too few samples, in words.
    """

    delays: Mapping[str, Median]
    others: float | None
    short: tuple[str, ...] = ()


def levels(paths: Sequence[Path], *, busy: bool = False) -> dict[str, Level]:
    """Every load level of the files.

    Args:
        paths: results and recordings of the guard's benchmark.
        busy: also what was measured while others used the machine.

    Raises:
        ScenarioError: a file is nothing of the guard's benchmark, was measured on a busy
            machine, lacks a figure, or has a load that another file has.
    """
    found: dict[str, Level] = {}
    for path in paths:
        for load, level in _levels(path).items():
            if load in found:
                raise ScenarioError(f"{path}: load {load} is in another file too")
            if not busy:
                refuse_busy(path, level.others, level.others is not None and _quiet(level.others))
            found[load] = level
    return found


def chosen(found: dict[str, Level], loads: Sequence[str] | None) -> dict[str, Level]:
    """The levels that were asked for; None = all.

    Raises:
        ScenarioError: the files have no such level.
    """
    if missing := [one for one in loads or () if one not in found]:
        raise ScenarioError(f"no load {missing[0]!r} in the files: they have {', '.join(found)}")
    return {name: found[name] for name in loads or found}


def _quiet(others: float) -> bool:
    return others <= QUIET_SHARE


def _levels(path: Path) -> dict[str, Level]:
    if is_recording(path):
        return {load: _recorded(one) for load, one in delays_of(path).items()}
    figures = any_figures(path)
    loads = [name.removesuffix(_LOAD_OF) for name in figures if name.endswith(_LOAD_OF)]
    if not loads:
        message = f"{path}: no figure that ends in {_LOAD_OF!r}: no load was served alone"
        raise ScenarioError(message)
    others = figures.get(QUIET, {}).get("value")
    return {
        load: Level(
            {
                name: _median(figures, f"{load}, {name}" if loads[1:] else name, path)
                for name in MEDIANS
            },
            None if others is None else float(others),
        )
        for load in loads
    }


def _recorded(one: Recorded) -> Level:
    medians = {name: _of_windows(windows) for name, windows in one.delays.items()}
    enough = {
        name: median
        for name, median in medians.items()
        if median.samples >= LEAST_SAMPLES and median.value > 0
    }
    short = tuple(
        f"{name}: {median.samples} samples; {LEAST_SAMPLES} are needed to say anything"
        for name, median in medians.items()
        if name not in enough
    )
    return Level(enough, one.others, short)


def _of_windows(windows: chance.Windows) -> Median:
    values = [value for one in windows for value in one]
    return Median(statistics.median(values) if values else 0.0, len(values), windows)


def _median(figures: Figures, name: str, path: Path) -> Median:
    count = name.removesuffix(", p50") + ", samples"
    for wanted in (name, count):
        if wanted not in figures:
            message = (
                f"{path}: no figure {wanted!r}; a file with several loads needs it of each: give "
                "the run's recording (-windows.json), or run the benchmark once per load (--loads)"
            )
            raise ScenarioError(message)
    return _enough(path, name, float(figures[name]["value"]), int(figures[count]["value"]))


def _enough(path: Path, name: str, value: float, samples: int) -> Median:
    if samples < LEAST_SAMPLES or value <= 0:
        message = f"{path}: {name}: {samples} samples; {LEAST_SAMPLES} are needed to say anything"
        raise ScenarioError(message)
    return Median(value, samples)
