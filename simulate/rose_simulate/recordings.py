"""What the guard's benchmark has recorded window by window -> delays of each load level.

``out/bench/guard-windows.json`` holds every reaction of every window of a run with its load, so one
run with several loads is enough to hold one of them out. Only the condition ``ours`` is read: the
tap, guard and engine host of production. Next step: ``calibrate`` compares the levels.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rose_simulate.model.errors import ScenarioError
from rose_simulate.timings import CLOSED, OPENED, STOPPED

# A figure of the benchmark, and the reactions of a window (seconds) that it is the median of.
FIELDS: Final = {CLOSED: "closed_s", STOPPED: "stopped_s", OPENED: "released_s"}
_CONDITION = "ours"

Windows = list[dict[str, Any]]


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
