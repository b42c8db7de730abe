"""Cleans up when the demo itself was killed: ``python -m rose_demo.reaper``, started by the demo.

It reads lines from a pipe whose other end only the demo holds: ``child PID`` for every process that
must not outlive it, ``bye`` when the demo has cleaned up itself. The pipe's end without ``bye``
means that the demo is dead: children are killed and the cluster is brought down. It ignores the
signals of a terminal, which go to the demo.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

from rose_dev.cluster.node import Node


def watch(lines: Iterable[str], clean_up: Callable[[list[int]], None]) -> bool:
    """Follow the demo's lines to their end.

    Returns:
        Whether the demo had died and ``clean_up`` was called with its children.
    """
    children: list[int] = []
    for line in lines:
        verb, _, rest = line.strip().partition(" ")
        if verb == "bye":
            return False
        if verb == "child":
            children.append(int(rest))
    clean_up(children)
    return True


def end_everything(children: list[int]) -> None:
    """Kill the children and bring the cluster down."""
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    Node().down(log=lambda _line: None)


class Reaper:
    """The demo's side: starts the process and tells it what there is to end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rose_demo.reaper"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def child(self, pid: int) -> None:
        """A process that must not outlive the demo."""
        self._send(f"child {pid}")

    def _send(self, line: str) -> None:
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def __enter__(self) -> Self:
        """Use as a context manager around everything that needs cleaning up."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._send("bye")
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)


def main() -> int:
    """Watch standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.stdin, end_everything)
    return 0


if __name__ == "__main__":
    sys.exit(main())
