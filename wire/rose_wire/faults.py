"""Lets a process be started so that it fails at a named step: ``ROSE_FAULT=STEP#N=ACTION``.

For ``make torture`` and the tests under ``tests/faults``. Without the variable nothing is
installed. Steps are in ``rose_core.delta.faults``; actions:

| action | what happens at the step |
|---|---|
| ``kill`` | the process ends at once, as by ``kill -9`` |
| ``full`` | the disk is full: ``OSError(ENOSPC)`` |
| ``stop`` | the process stands still until it is continued or killed |

``ROSE_FAULT=clock=SECONDS`` names no step: the process's wall clock is that much ahead and behind
by turns, as on a machine whose clock is set while it runs.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time

from rose_core.delta import faults

VARIABLE = "ROSE_FAULT"

CLOCK = "clock="

_TURN_SECONDS = 2.0

LOG = logging.getLogger(__name__)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device (a fault that was asked for)")


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _jump(seconds: int) -> None:
    real = time.time_ns

    def shifted() -> int:
        ahead = int(time.monotonic() / _TURN_SECONDS) % 2
        return real() + (seconds if ahead else -seconds) * 1_000_000_000

    time.time_ns = shifted
    time.time = lambda: shifted() / 1e9


def arm() -> None:
    """Install the fault that the environment asks for, if it asks for one.

    Raises:
        ValueError: the variable names no step or no action.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    if text.startswith(CLOCK):
        _jump(int(text.removeprefix(CLOCK)))
        LOG.warning("this process's clock jumps, as %s asks for", VARIABLE)
        return
    actions = {"kill": _kill, "full": _full, "stop": _stop}
    faults.install(faults.parse(text, actions))
    LOG.warning("this process fails at %s, as %s asks for", text, VARIABLE)
