"""Delays of the control path from ``out/bench/guard.json``, in place of a scenario's assumed ones.

| delay | figure of the guard's benchmark | says |
|---|---|---|
| ``tap_s`` | arrival to permit closed, p50 | first segment to decision |
| ``close_s`` | | nothing more: the permit is closed by then |
| ``freeze_s`` | arrival to every thread stopped, p50, less that | with an iteration in it |
| ``open_s`` | open gate to first rollout token, p50 | bound: a step of that engine is in it |

Medians, because a delay here is one number; the benchmark's tails are not in the simulation. What
was measured while others used the machine is refused: it would be a delay of theirs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rose_simulate.model.errors import ScenarioError
from rose_simulate.model.scenarios.scenario import Delays

QUIET = "machine: share used by other processes"
CLOSED = "ours: arrival to permit closed, p50"
STOPPED = "ours: arrival to every thread stopped, p50"
OPENED = "ours: open gate to first rollout token, p50"
MEDIANS = (CLOSED, STOPPED, OPENED)

Figures = dict[str, dict[str, Any]]
"""What a benchmark has recorded, by name."""


def measured(path: Path, assumed: Delays) -> Delays:
    """The delays that were measured; what the benchmark does not say stays as assumed.

    Raises:
        ScenarioError: it is no result of the guard's benchmark, or of a busy machine.
    """
    figures = quiet_figures(path)
    missing = [name for name in MEDIANS if name not in figures]
    if missing:
        message = f"{path}: no figure {missing[0]!r}; is it the guard's benchmark?"
        raise ScenarioError(message)
    closed, stopped, opened = (figures[name]["value"] / 1000 for name in MEDIANS)
    freeze = max(0.0, stopped - closed)
    changes = {"tap_s": closed, "close_s": 0.0, "freeze_s": freeze, "open_s": opened}
    return assumed.model_copy(update=changes)


def quiet_figures(path: Path) -> Figures:
    """The figures of a benchmark that had the machine to itself.

    Raises:
        ScenarioError: it is no result of a benchmark, or others used the machine meanwhile.
    """
    figures = any_figures(path)
    others = figures.get(QUIET)
    value = None if others is None else float(others.get("value", 1.0))
    refuse_busy(path, value, others is not None and others["met"] is True)
    return figures


def refuse_busy(path: Path, others: float | None, quiet: bool) -> None:
    """Say why what was measured there is no delay of the control path.

    Raises:
        ScenarioError: others used the machine, or nobody knows whether they did.
    """
    if quiet:
        return
    share = "an unknown share" if others is None else f"{others:.0%}"
    message = (
        f"{path}: others used {share} of the machine while it was measured; "
        "run make bench-guard on a quiet one"
    )
    raise ScenarioError(message)


def any_figures(path: Path) -> Figures:
    """The figures of a benchmark, however busy the machine was.

    Raises:
        ScenarioError: it is no result of a benchmark.
    """
    try:
        content = json.loads(path.read_text())
        return {one["name"]: one for one in content["figures"]}
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path}: cannot be read: {error}"
        raise ScenarioError(message) from error
    except (KeyError, TypeError, ValueError) as error:
        message = f"{path}: is no result of a benchmark ({error})"
        raise ScenarioError(message) from error
