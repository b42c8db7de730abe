"""The checks of ``make gpu-check``: which there are, what each may take, and in which run it is.

Every check has a budget, and a run a bound; two runs of less than ten minutes do all of them. A
check whose budget no longer fits is not begun, and one that outlives its budget is ended with all
that it has started: on a GPU each is a process of its own. A check that does not run says why, and
takes no other with it. Next step: ``aims`` judges the figures.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.beside import Measured, Scale

_ROOT = Path(__file__).parents[2]
BOUND_SECONDS = 570.0
# A rehearsal tries the orders on whatever machine there is; budgets are for a GPU's machine.
REHEARSAL_PATIENCE = 20.0
_FAILURES = (OSError, EOFError, RuntimeError, subprocess.SubprocessError, ImportError, ValueError)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        budget_s: it is ended after this.
        run: 1 or 2.
    """

    name: str
    module: str
    budget_s: float
    run: int

    def measure(self, scale: Scale) -> Measured:
        """Carry it out here."""
        work: Callable[[Scale], Measured] = getattr(importlib.import_module(self.module), self.name)
        return work(scale)


CHECKS: Mapping[str, Check] = {
    check.name: check
    for check in (
        Check("nvml", "bench.gpu.beside", 60, 1),
        Check("footprint", "bench.gpu.beside", 60, 1),
        Check("resident", "bench.gpu.beside", 60, 1),
        Check("stop", "bench.gpu.beside", 210, 1),
        Check("storm", "bench.gpu.beside", 120, 1),
        Check("killed", "bench.gpu.beside", 60, 1),
        Check("corun", "bench.gpu.beside", 70, 2),
        Check("commit", "bench.gpu.commits", 200, 2),
        Check("digest", "bench.gpu.commits", 120, 2),
        Check("saver", "bench.gpu.commits", 150, 2),
    )
}


@dataclass
class Outcome:
    """What a run has found.

    Attributes:
        not_run: why a check gave no figures.
    """

    measured: Measured
    seconds: dict[str, float]
    not_run: dict[str, str]


def chosen(only: str, run: int | None) -> list[str]:
    """Names of the checks of a run.

    Raises:
        ValueError: there is no such check.
    """
    names = [name for name in only.split(",") if name]
    unknown = sorted(set(names) - set(CHECKS))
    if unknown:
        raise ValueError(f"no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    wanted = names or [check.name for check in CHECKS.values() if run in {None, check.run}]
    return [name for name in CHECKS if name in wanted]


def carry_out(
    names: Sequence[str],
    measure: Callable[[Check], Measured],
    bound_s: float = BOUND_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Every check that still fits into the bound."""
    outcome, began = Outcome([], {}, {}), clock()
    for name in names:
        check = CHECKS[name]
        left = bound_s - (clock() - began)
        if check.budget_s > left:
            outcome.not_run[name] = f"its {check.budget_s:.0f} s do not fit into {left:.0f} s left"
            continue
        started = clock()
        try:
            found = measure(check)
        except _FAILURES as error:
            outcome.not_run[name] = f"{type(error).__name__}: {error}"
        else:
            outcome.measured += found
        outcome.seconds[name] = round(clock() - started, 1)
    return outcome


def apart(check: Check) -> Measured:
    """In a process of its own, ended with all of its own at the end of its budget.

    Raises:
        OSError: it failed, or took too long.
    """
    budget_s = check.budget_s
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu.suite", check.name],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=budget_s)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"no end within its {budget_s:.0f} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # frozen workers too
        process.communicate()  # reaps it and closes the pipe
    if process.returncode != 0 or not output.strip():
        raise OSError(f"ended with {process.returncode}")
    return [(name, float(value), unit) for name, value, unit in json.loads(output.splitlines()[-1])]


@contextlib.contextmanager
def rehearsed(names: Sequence[str]) -> Iterator[Callable[[Check], Measured]]:
    """The checks of a run in one process, small and on the CPU: torch is imported once.

    Args:
        names: which, in the order in which they are asked for.

    Yields:
        Gives a check's figures. It raises OSError where the check failed, or takes too long.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu.suite", *names, "--rehearse"],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # frozen workers too

    def measure(check: Check) -> Measured:
        late = threading.Timer(check.budget_s * REHEARSAL_PATIENCE, end)
        late.start()
        line = process.stdout.readline() if process.stdout is not None else ""
        late.cancel()
        if not line:
            raise OSError(f"ended with {process.wait()}")
        found = json.loads(line)
        if isinstance(found, str):
            raise OSError(found)
        return [(name, float(value), unit) for name, value, unit in found]

    try:
        yield measure
    finally:
        end()
        process.communicate()  # reaps it and closes the pipe


def main(argv: list[str]) -> int:
    """One check, for ``apart``, or those of a rehearsal: names, and ``--rehearse``."""
    if "--rehearse" not in argv:
        sys.stdout.write(json.dumps(CHECKS[argv[0]].measure(Scale())) + "\n")
        return 0
    for name in argv[:-1]:
        found: Measured | str
        try:
            found = CHECKS[name].measure(Scale.rehearsal())
        except _FAILURES as error:
            found = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
