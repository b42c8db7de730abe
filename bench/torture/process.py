"""One process of the world that is tortured: started with a fault, killed, told and listened to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose_dev.errors import StartFailed
from rose_dev.waiting import wait_until
from rose_wire.faults import VARIABLE

PATIENCE_SECONDS = 60.0


class Violation(Exception):
    """Something that must never be the case was."""


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for a condition.

    Raises:
        Violation: it did not come true in time.
    """
    try:
        wait_until(condition, what, seconds=seconds, pause=0.02)
    except StartFailed as error:
        raise Violation(str(error)) from error


@dataclass
class Process:
    """One process of the world.

    Attributes:
        lines: what it wrote on standard output, one JSON object a line (the publisher only).
        ever: the same of all its lives, also what was read only after the next one had begun.
    """

    name: str
    command: list[str]
    log: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    ever: list[dict[str, Any]] = field(default_factory=list)
    _child: subprocess.Popen[str] | None = None

    def start(self, fault: str = "") -> None:
        """Start it, to fail at a step if one is given."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop(VARIABLE, None)
        if fault:
            environment[VARIABLE] = fault
        self.lines = []
        with self.log.open("a") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        kept = (self.lines, self.ever)
        threading.Thread(target=self._read, args=(self._child, *kept), daemon=True).start()

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self._child.poll() if self._child is not None else None

    @property
    def pid(self) -> int:
        """Its process, 0 before it was started."""
        return self._child.pid if self._child is not None else 0

    @property
    def alive(self) -> bool:
        """It runs (or stands still)."""
        return self._child is not None and self._child.poll() is None

    @property
    def stopped(self) -> bool:
        """It stands still."""
        if self._child is None:
            return False
        try:
            status = Path(f"/proc/{self._child.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        if self._child is not None and self.alive:
            self._child.send_signal(number)

    def kill(self) -> None:
        """``kill -9`` and wait."""
        self.send(signal.SIGKILL)
        if self._child is not None:
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def write(self, line: str) -> None:
        """Write a line to its standard input; a process that died meanwhile reads nothing."""
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.write(f"{line}\n")
                self._child.stdin.flush()

    def has_printed(self, key: str, value: object = None) -> bool:
        """Whether it has said ``key`` (with that value)."""
        return any(key in line and (value is None or line[key] == value) for line in self.lines)

    @staticmethod
    def _read(child: subprocess.Popen[str], *kept: list[dict[str, Any]]) -> None:
        with contextlib.suppress(ValueError, OSError):  # the pipe is closed when it is killed
            for line in child.stdout or ():
                if line.startswith("{"):
                    lines = json.loads(line)
                    for one in kept:
                        one.append(lines)
