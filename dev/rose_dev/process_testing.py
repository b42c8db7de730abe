"""ROSE's own processes for tests, forked from one that has imported what they begin with.

A start is 0.3 to 1 s of a core, nearly all of it imports, and a fork 0.02 to 0.1 s (decision 0880).
What is forked runs as ``python -m`` runs it, from the command line on. What a fork cannot have is
started anew: another environment than the session's, namespaces, limits, another interpreter. Tests
of starts themselves do so too, and so do benchmarks, which count what a process takes by itself.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import BinaryIO

from rose_dev.engine_template import ROSE, Channel, ForkedEngine, ProcessHandle
from rose_dev.engine_testing import template_of

CLI = "rose_cli.main"
_CHUNK = 1 << 16
# Of the session: a test's own changes are no reason to import anew for all after it.
_ENVIRONMENT = dict(os.environ)


def _template(variables: Mapping[str, str]) -> Channel | None:
    """What to fork from; None where a process is to start by itself."""
    if "PYTEST_VERSION" not in os.environ:
        return None  # no session of tests: memory that is shared with a template is not one's own
    return template_of(ROSE, Path(sys.executable), variables, _ENVIRONMENT)


def start_process(
    module: str,
    *argv: str,
    env: Mapping[str, str] | None = None,
    output: int | None = None,
    errors: int | None = None,
) -> ProcessHandle:
    """``python -m module argv``, in a session of its own.

    Args:
        module: that is run.
        argv: its arguments.
        env: its whole environment; None = this process's.
        output: file descriptor of its standard output; None = this process's.
        errors: the same of its standard error.
    """
    variables = dict(os.environ if env is None else env)
    template = _template(variables)
    if template is not None:
        out, wrong = 1 if output is None else output, 2 if errors is None else errors
        return template.start(argv, variables, out, module=module, errors=wrong)
    return subprocess.Popen(
        [sys.executable, "-m", module, *argv],
        env=variables,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )


async def spawn_process(
    module: str,
    *argv: str,
    env: Mapping[str, str] | None = None,
    stdout: int | BinaryIO | None = None,
    stderr: int | BinaryIO | None = None,
) -> Process:
    """The same as asyncio's kind of process.

    Args:
        module: that is run.
        argv: its arguments.
        env: its whole environment; None = this process's.
        stdout: a file, ``DEVNULL`` or ``PIPE``; None = this process's.
        stderr: the same.
    """
    variables = dict(os.environ if env is None else env)
    template = _template(variables)
    if template is None:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *argv),
            env=variables,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    outputs = [_Output(asked, number) for number, asked in ((1, stdout), (2, stderr))]
    try:
        ends = [one.theirs for one in outputs]
        engine = template.start(argv, variables, ends[0], module=module, errors=ends[1])
    finally:
        for one in outputs:
            one.started()
    return _Forked(engine, *outputs)


class _Output:
    """Where a process writes to; of a pipe, our end.

    Args:
        asked: as of ``spawn_process``.
        number: this process's own, where nothing is asked.

    Attributes:
        theirs: file descriptor for the process.
        reader: what comes through a pipe; None where there is none.
    """

    def __init__(self, asked: int | BinaryIO | None, number: int) -> None:
        self._pipe, self._loop = asyncio.StreamReader(), asyncio.get_running_loop()
        self.reader = self._pipe if asked == PIPE else None
        self._ours, self._made = -1, False
        if asked == PIPE:
            self._ours, self.theirs = os.pipe()
            os.set_blocking(self._ours, False)
            self._made = True
            self._loop.add_reader(self._ours, self._read)
        elif asked == DEVNULL:
            self.theirs, self._made = os.open(os.devnull, os.O_WRONLY), True
        elif asked is None:
            self.theirs = number
        else:
            self.theirs = asked if isinstance(asked, int) else asked.fileno()

    def started(self) -> None:
        """The process has its end."""
        if self._made:
            os.close(self.theirs)

    def ended(self) -> None:
        """The process has ended: what it left in the pipe is all that comes."""
        while self._ours >= 0 and self._read():
            pass
        self._close()

    def _read(self) -> bool:
        with suppress(BlockingIOError):
            if data := os.read(self._ours, _CHUNK):
                self._pipe.feed_data(data)
                return True
            self._close()
        return False

    def _close(self) -> None:
        if self._ours >= 0:
            self._loop.remove_reader(self._ours)
            os.close(self._ours)
            self._ours = -1
            self._pipe.feed_eof()


class _Forked(Process):
    """A forked process as asyncio shows one that it has started itself."""

    def __init__(self, engine: ForkedEngine, stdout: _Output, stderr: _Output) -> None:
        self._engine, self._outputs = engine, (stdout, stderr)
        self._turn = asyncio.Lock()
        self.pid = engine.pid
        self.stdin, self.stdout, self.stderr = None, stdout.reader, stderr.reader

    @property
    def returncode(self) -> int | None:
        return self._engine.poll()

    async def wait(self) -> int:
        async with self._turn:
            if self._engine.poll() is None:
                loop, ended = asyncio.get_running_loop(), asyncio.Event()
                link = self._engine.fileno()
                loop.add_reader(link, ended.set)
                try:
                    await ended.wait()
                finally:
                    loop.remove_reader(link)
        status = self._engine.wait(0.0)
        for one in self._outputs:
            one.ended()
        return status

    def send_signal(self, signal: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        self._engine.send_signal(signal)

    def terminate(self) -> None:
        self.send_signal(SIGTERM)

    def kill(self) -> None:
        self.send_signal(SIGKILL)

    async def communicate(
        self,
        input: bytes | bytearray | memoryview | None = None,  # noqa: A002  # asyncio's word
    ) -> tuple[bytes, bytes]:
        if input is not None:
            raise ValueError("it has no standard input")
        await self.wait()
        out, errors = [one and await one.read() for one in (self.stdout, self.stderr)]
        return out or b"", errors or b""
