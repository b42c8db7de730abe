"""Lets a process be started so that it fails at a named step: ``ROSE_FAULT=STEP#N=ACTION``.

For ``rose weights torture`` and the tests under ``tests/faults``. Without the variable nothing is
installed. Steps are in ``rose_core.delta.faults``; actions:

| action | what happens at the step |
|---|---|
| ``kill`` | the process ends at once, as by ``kill -9`` |
| ``full`` | the disk is full: ``OSError(ENOSPC)`` |
| ``stop`` | the process stands still until it is continued or killed |
"""

from __future__ import annotations

import errno
import logging
import os
import signal

from rose_core.delta import faults

VARIABLE = "ROSE_FAULT"

LOG = logging.getLogger(__name__)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device (a fault that was asked for)")


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def arm() -> None:
    """Install the fault that the environment asks for, if it asks for one.

    Raises:
        ValueError: the variable names no step or no action.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    actions = {"kill": _kill, "full": _full, "stop": _stop}
    faults.install(faults.parse(text, actions))
    LOG.warning("this process fails at %s, as %s asks for", text, VARIABLE)
