"""Runs a command and ends whatever it leaves: ``rose_dev.contained [--limit SECONDS] COMMAND ...``.

Tests and benchmarks start engines, servers and hosts, some of which live on by design when their
starter dies. A run that was killed cannot end them itself. So this process adopts every orphan
below it (``PR_SET_CHILD_SUBREAPER``, prctl(2)) and, once the command is over, however it ended,
kills what is left. Signals of a terminal reach the command by themselves; a termination of this
process is passed on. It says which processes it had to end: after a run that ended by itself there
should be none.

A command that is not over within the limit is ended with all below it, after every test process
has said which test it began last and where it stands (``rose_dev.watchdog``).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from rose_dev.watchdog import NOTES, STACKS

_SET_CHILD_SUBREAPER = 36
_PATIENCE_SECONDS = 10.0
_STACKS_SECONDS = 0.5  # to write them, one process after the other
_LIMIT_STATUS = 124  # as timeout(1)


def run(argv: list[str], limit: float = 0.0) -> int:
    """Run the command to its end or to its limit in seconds (0: none), then end the orphans.

    Returns:
        The command's exit status; 128 + the number of the signal that killed it; 124 at the limit.

    Raises:
        OSError: the command cannot be started.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, _nothing)  # unlike SIG_IGN, not inherited by the command
    with tempfile.TemporaryDirectory(prefix="rose-notes-") as notes:
        command = subprocess.Popen(argv, env=os.environ | {NOTES: notes}).pid
        signal.signal(signal.SIGTERM, lambda number, _frame: os.kill(command, number))
        signal.signal(signal.SIGALRM, _over)
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            status = _wait_for(command)
        except TimeoutError:
            status = _LIMIT_STATUS
            sys.stderr.write(f"not over after {limit:g} s, ended: {' '.join(argv)}\n")
            _print_what_runs(Path(notes))
        signal.setitimer(signal.ITIMER_REAL, 0)
        end_children()
    return status if status >= 0 else 128 - status


def _wait_for(command: int) -> int:
    """Wait as init does: the adopted ones that end must not stay behind as zombies."""
    while True:
        pid, status = os.wait()
        if pid == command:
            return os.waitstatus_to_exitcode(status)


def _print_what_runs(notes: Path) -> None:
    """Each living test process: the test it began last, then its stacks by itself."""
    for note in sorted(notes.iterdir()):
        with suppress(ProcessLookupError):
            os.kill(int(note.name), 0)
            sys.stderr.write(f"process {note.name} began last: {note.read_text()}\n")
            os.kill(int(note.name), STACKS)
            time.sleep(_STACKS_SECONDS)


def end_children() -> None:
    """Kill every descendant; the killed ones' children become ours, so look until none is left."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    ended = set[psutil.Process]()
    while time.monotonic() < deadline:
        _reap()
        left = [p for p in psutil.Process().children(recursive=True) if p.is_running()]
        if not left:
            return
        for process in left:
            if process not in ended:  # on a busy machine a killed one is there for a while
                _end(process)
                ended.add(process)
        time.sleep(0.05)


def _end(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            sys.stderr.write(f"left behind: {process.pid} {' '.join(process.cmdline())[:100]}\n")
            process.kill()


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _nothing(_number: int, _frame: object) -> None:
    """The terminal has told the command, too."""


def _over(_number: int, _frame: object) -> None:
    raise TimeoutError


def _main() -> int:
    parser = argparse.ArgumentParser(prog="rose_dev.contained", description=__doc__)
    parser.add_argument("--limit", type=float, default=0.0, help="seconds; 0: none")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    arguments = parser.parse_args()
    return run(arguments.command, arguments.limit)


if __name__ == "__main__":
    sys.exit(_main())
