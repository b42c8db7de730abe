"""``rose simulate calibrate FILE ...``: one load level of the guard's benchmark held out.

The simulator has one number per delay of the control path, whatever the load. Here that is put to
the test: the delays of the other load levels predict those of the one held out.

FILE is a result of that benchmark or a run's recording. A recording also says how far a delay may
be off by chance (``chance``); where only part of that lies within ``LIMIT`` the delay is
*undecided*. Exit code 0 when every delay lies within the limit for certain, else 1. What was
measured while others used the machine is refused; with ``--busy`` it is compared, the share is
said, and the exit code is 1 whatever comes of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

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
from rose_simulate.model.errors import ScenarioError, SimulationError
from rose_wire.flags import VerbParser

LIMIT = 0.15
_VERDICTS = {True: "", False: "  outside", None: "  undecided"}
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

    | file | load levels in it |
    |---|---|
    | ``out/bench/guard-windows.json``, the recording of a run | every load of it |
    | ``out/bench/guard.json`` of one load (``python -m bench.guard --loads conv``) | that one |
    | the same of several loads | those with figures of their own, ``conv, ours: arrival to ...`` |

    A recording holds every reaction of every window of a run with its load, so one run with several
    loads is enough to hold one of them out. Only the condition ``ours`` is read: the tap, guard and
    engine host of production. A delay with fewer than ``LEAST_SAMPLES`` reactions at a load of a
    recording is left out there, and named.

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


class Compared(msgspec.Struct, frozen=True):
    """One delay, milliseconds.

    Attributes:
        low, high: 95 % interval of ``off``; None where the file has no windows.
    """

    name: str
    predicted: float
    observed: float
    samples: int
    low: float | None = None
    high: float | None = None

    @property
    def off(self) -> float:
        """Prediction less observation, as a share of the observation."""
        return self.predicted / self.observed - 1

    @property
    def holds(self) -> bool | None:
        """Within the limit; None where the interval lies only partly within it."""
        low = self.off if self.low is None else self.low
        high = self.off if self.high is None else self.high
        if low > LIMIT or high < -LIMIT:
            return False
        return True if low >= -LIMIT and high <= LIMIT else None


class Calibration(msgspec.Struct, frozen=True):
    """What became of the prediction.

    Attributes:
        others: the most that others used of the machine.
        short: delays of the level held out that had too few samples, in words.
    """

    held_out: str
    fitted_on: tuple[str, ...]
    delays: tuple[Compared, ...]
    others: float | None = None
    short: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Every delay within the limit for certain, on a machine that nobody else used."""
        return self.quiet and all(one.holds is True for one in self.delays)

    @property
    def quiet(self) -> bool:
        """Whether the recording says anything of the control path alone."""
        return self.others is not None and self.others <= QUIET_SHARE


def calibrate(found: Mapping[str, Level], held_out: str) -> Calibration:
    """Predict one load level from the others, each weighted by its samples.

    Raises:
        ScenarioError: there is no such level, or no other.
    """
    others = {name: level for name, level in found.items() if name != held_out}
    if held_out not in found or not others:
        message = f"cannot hold out {held_out!r}: load levels are {', '.join(found)}"
        raise ScenarioError(message)
    delays = []
    for name, seen in found[held_out].delays.items():
        known = [level.delays[name] for level in others.values() if name in level.delays]
        if not known:
            continue
        delays.append(_compared(name, seen, known))
    if not delays:
        why = "; ".join(found[held_out].short) or "no other level has its delays"
        raise ScenarioError(f"cannot hold out {held_out!r}: {why}")
    shares = [level.others for level in found.values()]
    most = None if None in shares else max(one for one in shares if one is not None)
    return Calibration(held_out, tuple(others), tuple(delays), most, found[held_out].short)


def _compared(name: str, seen: Median, known: Sequence[Median]) -> Compared:
    off = chance.off(seen.value, [(one.value, one.samples) for one in known])
    ends = chance.ends(seen.windows, [one.windows for one in known]) or (None, None)
    return Compared(name, seen.value * (1 + off), seen.value, seen.samples, *ends)


def table(one: Calibration) -> str:
    """Render a calibration as text."""
    lines = [
        f"held out: {one.held_out}; predicted from: {', '.join(one.fitted_on)}; limit {LIMIT:.0%}",
        f"{'':<44} predicted   observed       off [95 %]            samples",
    ]
    if not one.quiet:
        share = "an unknown share" if one.others is None else f"{one.others:.0%}"
        lines.insert(0, f"NOT A CALIBRATION: others used {share} of the machine")
    lines += [
        f"{row.name:<44} {row.predicted:>6.2f} ms  {row.observed:>6.2f} ms  {row.off:>+8.1%}"
        f" {_ends(row):<18} {row.samples:>7}{_VERDICTS[row.holds]}"
        for row in one.delays
    ]
    lines += [f"left out: {why}" for why in one.short]
    return "\n".join(lines)


def _ends(row: Compared) -> str:
    if row.low is None or row.high is None:
        return ""
    return f"[{row.low:+.0%}, {row.high:+.0%}]"


def parser() -> argparse.ArgumentParser:
    """Arguments of ``calibrate``."""
    made = VerbParser(prog="rose simulate calibrate", description=__doc__)
    made.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON of bench.guard")
    made.add_argument("--hold-out", metavar="LOAD", help="only this level; otherwise each in turn")
    made.add_argument("--loads", metavar="LOAD", nargs="+", help="only these levels of the files")
    made.add_argument("--busy", action="store_true", help="also what a shared machine measured")
    made.add_argument("--json", type=Path, help="write the comparison there")
    return made


def main(argv: list[str]) -> int:
    """Run the verb."""
    options = parser().parse_args(argv)
    try:
        found = chosen(levels(options.files, busy=options.busy), options.loads)
        some = [name for name, level in found.items() if level.delays]
        held_out = [options.hold_out] if options.hold_out else some or list(found)
        made = [calibrate(found, name) for name in held_out]
    except SimulationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("\n\n".join(map(table, made)) + "\n")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
    return 0 if all(one.holds for one in made) else 1
