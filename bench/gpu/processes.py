"""The benchmark's own processes: decode loops, and an MPS daemon in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose_agent.devices.mps.control import MpsControl, Pipes
from rose_agent.errors import MpsError

_START_SECONDS = 120.0
# A client of a broken MPS server may hang for ever.
_ANSWER_SECONDS = 30.0


class Worker:
    """A process that answers line by line; see ``worker`` and ``pool``."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        self.seen: dict[str, Any] = self.read(_START_SECONDS)

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            self._answers.put(line)
        self._answers.put("")

    def send(self, line: str) -> None:
        """Send a line."""
        if self.process.stdin is not None:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def read(self, seconds: float = _ANSWER_SECONDS) -> Any:  # noqa: ANN401  # any JSON
        """The next answer.

        Raises:
            EOFError: the process has ended, or hangs.
        """
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise EOFError(f"the decode loop has not answered for {seconds:.0f} s") from None
        if not line:
            raise EOFError(f"the decode loop ended with code {self.process.wait()}")
        return json.loads(line)

    def ask(self, line: str) -> Any:  # noqa: ANN401  # any JSON
        """Send a line and read its answer."""
        self.send(line)
        return self.read()

    def steps(self, seconds: float) -> list[tuple[int, int]]:
        """Steps that it makes in this time: end and length, nanoseconds."""
        self.ask("take")
        time.sleep(seconds)
        return [(end, length) for end, length in self.ask("take")]

    def end(self) -> None:
        """Quit, or be killed."""
        with contextlib.suppress(OSError, ValueError):
            self.send("quit")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@contextlib.contextmanager
def worker(
    *, fake: bool, batch: int = 8, environment: Mapping[str, str] | None = None
) -> Iterator[Worker]:
    """A decode loop that is ready, and ended afterwards.

    Raises:
        EOFError: it could not start.
    """
    command = [sys.executable, "-m", "bench.gpu.worker", "--batch", str(batch)]
    command += ["--fake", "--layers", "4"] if fake else []
    made = Worker(command, environment or {})
    try:
        yield made
    finally:
        made.end()


@contextlib.contextmanager
def pool(module: str, name: str) -> Iterator[Worker]:
    """An elastic KV pool that is ready, and ended afterwards.

    Raises:
        EOFError: it could not start.
    """
    made = Worker([sys.executable, "-m", module, "--name", name], {})
    try:
        yield made
    finally:
        made.end()


@dataclass(frozen=True)
class Daemon:
    """A running MPS daemon."""

    pipes: Pipes
    control: MpsControl

    @property
    def environment(self) -> dict[str, str]:
        """Of a client without a limit."""
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipes.pipe)}


@contextlib.contextmanager
def daemon(program: tuple[str, ...]) -> Iterator[Daemon]:
    """``nvidia-cuda-mps-control``, ended afterwards.

    Raises:
        OSError: there is no such program.
        MpsError: it does not answer.
    """
    folder = Path(tempfile.mkdtemp(prefix="mps", dir="/tmp"))
    pipes = Pipes(folder).create()
    process = subprocess.Popen([*program, "-f"], env=pipes.environment(os.environ))
    try:
        made = Daemon(pipes, MpsControl(pipes, program))
        _await(made.control)
        yield made
    finally:
        with contextlib.suppress(MpsError):
            made.control.quit()
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _await(control: MpsControl) -> None:
    deadline = time.monotonic() + _START_SECONDS / 10
    while True:
        try:
            control.servers()
        except MpsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
