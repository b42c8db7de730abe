"""``rose simulate calibrate FILE ...``: one load level of the guard's benchmark held out.

The simulator has one number per delay of the control path, whatever the load. Here that is put to
the test: the delays of the other load levels predict those of the one held out.

FILE is a result of that benchmark or a run's recording (``levels``). A recording also says how far
a delay may be off by chance (``chance``); where only part of that lies within ``LIMIT`` the delay
is *undecided*. Exit code 0 when every delay lies within the limit for certain, else 1. What was
measured while others used the machine is refused; with ``--busy`` it is compared, the share is
said, and the exit code is 1 whatever comes of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rose_simulate.files import chance
from rose_simulate.files.levels import QUIET_SHARE, Level, Median, chosen, levels
from rose_simulate.model.errors import ScenarioError, SimulationError
from rose_wire.flags import VerbParser

LIMIT = 0.15
_VERDICTS = {True: "", False: "  outside", None: "  undecided"}


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
