"""``rose simulate calibrate FILE ...``: one load level of the guard's benchmark held out.

The simulator has one number per delay of the control path, whatever the load. Here that is put to
the test: the delays of the other load levels predict those of the one held out.

| FILE | load levels in it |
|---|---|
| result of one load (``python -m bench.guard --loads conv``) | that one |
| result of several loads | those that have figures of their own, ``conv, ours: arrival to ...`` |

Exit code 1 when a delay is off by more than ``LIMIT``, or when the files cannot say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rose_core.simulate.errors import ScenarioError, SimulationError
from rose_simulate.timings import MEDIANS, Figures, quiet_figures

LIMIT = 0.15
LEAST_SAMPLES = 20
_LOAD_OF = ", alone: time without a request"


@dataclass(frozen=True)
class Median:
    """One delay at one load level, milliseconds."""

    value: float
    samples: int


Level = Mapping[str, Median]
"""The delays of one load level, by the name of the figure."""


class Compared(msgspec.Struct, frozen=True):
    """One delay, milliseconds."""

    name: str
    predicted: float
    observed: float
    samples: int

    @property
    def off(self) -> float:
        """Prediction less observation, as a share of the observation."""
        return self.predicted / self.observed - 1

    @property
    def holds(self) -> bool:
        """Within the limit."""
        return abs(self.off) <= LIMIT


class Calibration(msgspec.Struct, frozen=True):
    """What became of the prediction."""

    held_out: str
    fitted_on: tuple[str, ...]
    delays: tuple[Compared, ...]


def levels(paths: Sequence[Path]) -> dict[str, Level]:
    """Every load level of the files.

    Raises:
        ScenarioError: a file is no result of the guard's benchmark, was measured on a busy
            machine, lacks a figure, or has a load that another file has.
    """
    found: dict[str, Level] = {}
    for path in paths:
        figures = quiet_figures(path)
        loads = [name.removesuffix(_LOAD_OF) for name in figures if name.endswith(_LOAD_OF)]
        if not loads:
            message = f"{path}: no figure that ends in {_LOAD_OF!r}: no load was served alone"
            raise ScenarioError(message)
        for load in loads:
            if load in found:
                raise ScenarioError(f"{path}: load {load} is in another file too")
            prefix = "" if len(loads) == 1 else f"{load}, "
            found[load] = {name: _median(figures, prefix + name, path) for name in MEDIANS}
    return found


def _median(figures: Figures, name: str, path: Path) -> Median:
    count = name.removesuffix(", p50") + ", samples"
    for wanted in (name, count):
        if wanted not in figures:
            message = (
                f"{path}: no figure {wanted!r}; a file with several loads needs it of each, "
                "or run the benchmark once per load (--loads) and give every file"
            )
            raise ScenarioError(message)
    value, samples = float(figures[name]["value"]), int(figures[count]["value"])
    if samples < LEAST_SAMPLES or value <= 0:
        message = f"{path}: {name}: {samples} samples; {LEAST_SAMPLES} are needed to say anything"
        raise ScenarioError(message)
    return Median(value, samples)


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
    for name in MEDIANS:
        known = [level[name] for level in others.values()]
        weight = sum(one.samples for one in known)
        predicted = sum(one.value * one.samples for one in known) / weight
        seen = found[held_out][name]
        delays.append(Compared(name, predicted, seen.value, seen.samples))
    return Calibration(held_out, tuple(others), tuple(delays))


def table(one: Calibration) -> str:
    """As text."""
    lines = [
        f"held out: {one.held_out}; predicted from: {', '.join(one.fitted_on)}; limit {LIMIT:.0%}",
        f"{'':<44} predicted   observed       off  samples",
    ]
    lines += [
        f"{row.name:<44} {row.predicted:>6.2f} ms  {row.observed:>6.2f} ms  {row.off:>+8.1%}"
        f"  {row.samples:>7}{'' if row.holds else '  outside'}"
        for row in one.delays
    ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Arguments of ``calibrate``."""
    made = argparse.ArgumentParser(prog="rose simulate calibrate", description=__doc__)
    made.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON of bench.guard")
    made.add_argument("--hold-out", metavar="LOAD", help="only this level; otherwise each in turn")
    made.add_argument("--json", type=Path, help="write the comparison there")
    return made


def main(argv: list[str]) -> int:
    """Run the verb."""
    options = parser().parse_args(argv)
    try:
        found = levels(options.files)
        held_out = [options.hold_out] if options.hold_out else list(found)
        made = [calibrate(found, name) for name in held_out]
    except SimulationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("\n\n".join(map(table, made)) + "\n")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
    return 0 if all(row.holds for one in made for row in one.delays) else 1
