"""Runs a command and ends whatever it leaves behind: ``python -m rose_dev.contained COMMAND ...``.

Tests and benchmarks start engines, servers and hosts, some of which live on by design when their
starter dies. A run that was killed cannot end them itself. So this process adopts every orphan
below it (``PR_SET_CHILD_SUBREAPER``, prctl(2)) and, once the command is over, however it ended,
kills what is left. Signals of a terminal reach the command by themselves; a termination of this
process is passed on. It says which processes it had to end: after a run that ended by itself there
should be none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

_SET_CHILD_SUBREAPER = 36
_PATIENCE_SECONDS = 10.0


def run(argv: list[str]) -> int:
    """Run the command to its end, then end the orphans.

    Returns:
        The command's exit status; 128 + the number of the signal that killed it.

    Raises:
        OSError: the command cannot be started.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, _nothing)  # unlike SIG_IGN, not inherited by the command
    command = subprocess.Popen(argv).pid
    signal.signal(signal.SIGTERM, lambda number, _frame: os.kill(command, number))
    status = _wait_for(command)
    end_children()
    return status if status >= 0 else 128 - status


def _wait_for(command: int) -> int:
    """Wait as init does: the adopted ones that end must not stay behind as zombies."""
    while True:
        pid, status = os.wait()
        if pid == command:
            return os.waitstatus_to_exitcode(status)


def end_children() -> None:
    """Kill every descendant; the killed ones' children become ours, so look until none is left."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        _reap()
        left = [p for p in psutil.Process().children(recursive=True) if p.is_running()]
        if not left:
            return
        for process in left:
            _end(process)
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


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
