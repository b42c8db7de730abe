"""Ends a test process that hangs where pytest-timeout cannot (``-p rose_dev.watchdog``).

pytest-timeout raises an exception in the main thread, once. A test that waits in a ``finally``, in
the teardown of a fixture or inside C code outlives that, and with it the whole run. So a thread of
``faulthandler``, which needs no interpreter lock, waits a grace longer, writes the stack of every
thread to the real standard error and ends the process. Under xdist the controller names the test,
counts it as failed and gives the rest of its file to another worker (``scheduler``). The
same clock runs from the end of the tests to the end of the process.

Next: ``rose_dev.contained`` bounds the run as a whole; the notes written here tell it which test
each process began last.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest
from pytest_timeout import Settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.scheduler.protocol import Scheduling
from xdist.workermanage import WorkerController

NOTES = "ROSE_TEST_NOTES"
"""Environment variable with the folder where each test process notes what it runs."""
STACKS = signal.SIGUSR2
"""Makes a test process that has noted something write its stacks."""

_GRACE = "watchdog_grace"
_END = "watchdog_end"
_TOGETHER = "together"
_LIMIT = pytest.StashKey[float]()
_STDERR = pytest.StashKey[int]()


class _Once(LoadFileScheduling):
    """Gives files that share something slow (``together``) to one worker, as one.

    And it does not run a test again that has ended its worker.

    xdist's own gives all that a dead worker had left to the next one, the deadly test first, until
    so many workers have died that the run gives up.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        groups = [line.split() for line in self.config.getini(_TOGETHER)]
        names = [group[0] for group in groups if file.startswith(tuple(group))]
        return names[0] if names else file

    def remove_node(self, node: WorkerController) -> str | None:
        """Count the test that ran as done before the rest is given to others."""
        units = self.assigned_work[node]
        left = [(unit, test) for unit in units.values() for test, done in unit.items() if not done]
        if not left:
            return super().remove_node(node)
        unit, deadly = left[0]
        unit[deadly] = True
        self.assigned_work[node] = {
            scope: unit for scope, unit in units.items() if not all(unit.values())
        }
        super().remove_node(node)
        return deadly


def scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """The scheduler for ``--dist loadfile``; None leaves it to xdist."""
    return _Once(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the settings."""
    grace = "seconds a test may go on after its timeout has been raised in it"
    parser.addini(_GRACE, grace, default="60")
    shared = "beginnings of paths per line: one worker runs all files of a line"
    parser.addini(_TOGETHER, shared, type="linelist")
    parser.addini(_END, "seconds from the end of the tests to the end of the process", default="60")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error that no capture replaces."""
    config.stash[_STDERR] = os.dup(2)
    if NOTES in os.environ:
        faulthandler.register(STACKS, file=config.stash[_STDERR])


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> None:
    """Note the limit of the test, and leave the timer to pytest-timeout."""
    item.stash[_LIMIT] = float(settings.timeout)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the clock, anew for each attempt."""
    _note(item.nodeid)
    limit = item.stash.get(_LIMIT, 0.0)
    if limit > 0:
        _arm(item.config, limit + float(item.config.getini(_GRACE)))


def pytest_timeout_cancel_timer() -> None:
    """The test has ended."""
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Threads and pools that nobody has ended must not keep the process."""
    _arm(session.config, float(session.config.getini(_END)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Never run again what ended its worker."""
    return scheduler(config, log)


def _arm(config: pytest.Config, seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[_STDERR])


def _note(nodeid: str) -> None:
    if folder := os.environ.get(NOTES):
        (Path(folder) / str(os.getpid())).write_text(nodeid)
