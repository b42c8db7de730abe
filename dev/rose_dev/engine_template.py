"""One process that has imported SGLang, from which the engines of a test session are forked.

To import PyTorch and SGLang takes 15 of the 25 s of CPU time that an engine on a CPU needs until it
is ready, and a session starts dozens of engines. Forking is safe after the imports alone: there is
one thread and no driver (``_serve`` refuses to begin otherwise). Production has no such process;
decision 0470 says why.

``Template`` is the test's side. Run as a script by the engine's own Python, this file is the other
side, so its imports are the standard library's. A start is one message: arguments, environment, and
two file descriptors, for output and for word of the end. The template ends when the test's process
does, and its engines with it.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

LAUNCHER = "rose_engines.sglang.launch"
IMPORTS = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang.srt.plugins",
)
# What differs between engines. Our launcher and plugin read it; SGLang's imports do not.
_OWN = "ROSE_"
# SGLang reads these when an engine starts: a rank binds its threads, and plugins are loaded.
_LATE = frozenset({"SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_PLUGINS"})
_CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"  # as the launcher sets it before it imports SGLang
_MESSAGE_BYTES = 1 << 17
_PR_SET_PDEATHSIG = 1  # prctl(2)
_IMPORT_SECONDS = 240.0


class ProcessHandle(Protocol):
    """What tests ask of an engine's process; ``subprocess.Popen`` has it."""

    @property
    def pid(self) -> int:
        """Its number, which is its process group's too."""

    @property
    def returncode(self) -> int | None:
        """As ``Popen`` has it."""

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """


class ForkedEngine:
    """An engine that the template has forked.

    Attributes:
        pid: its process, the leader of its session.
        returncode: exit status; the negative number of the signal that ended it; None before.
    """

    def __init__(self, pid: int, word: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._word = word
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        with self._lock:
            if self.returncode is None:
                if not select.select([self._word], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(LAUNCHER, timeout or 0.0)
                told = self._word.recv(64)
                # Without a word the template is gone, and the kernel kills its engines.
                self.returncode = int(told) if told else -signal.SIGKILL
                self._word.close()
            return self.returncode


class Template:
    """Forks engines whose environment is the same but for what no import of SGLang's reads.

    Args:
        python: of the engine's environment.
        environment: of the first engine.
        seconds: within which it must have imported SGLang, or have forked.
    """

    def __init__(
        self,
        python: Path,
        environment: Mapping[str, str],
        seconds: float = _IMPORT_SECONDS,
    ) -> None:
        self._common = _common(environment)
        self._lock = threading.Lock()
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(seconds)
        with theirs:
            self._process = subprocess.Popen(
                [python, __file__, str(theirs.fileno())],
                env=self._common | {_CPU_ENGINE: "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether SGLang would be imported alike under this environment."""
        return _common(environment) == self._common

    def alive(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: int,
        program: Path | None = None,
    ) -> ForkedEngine:
        """Fork an engine.

        Args:
            argv: arguments of SGLang, without interpreter and module.
            environment: the whole of it.
            log: file descriptor of its output.
            program: a file that is run in the launcher's place.

        Raises:
            ConnectionError: the template could not import SGLang; its output says why.
        """
        word, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        wanted = {"argv": list(argv), "environment": dict(environment)}
        message = json.dumps(wanted | {"program": program and str(program)}).encode()
        with theirs, self._lock:
            try:
                socket.send_fds(self._ours, [message], [log, theirs.fileno()])
                answer = self._ours.recv(64)
            except OSError:  # its end, or ours, is closed; or it took too long
                answer = b""
        if not answer:
            word.close()
            self.close()  # a late answer would be taken for the next one's
            raise ConnectionError("the process that imports SGLang for engines has ended")
        return ForkedEngine(int(answer), word)

    def close(self) -> None:
        """End the template, and with it what it has forked."""
        self._process.kill()  # its engines are killed by the kernel
        self._process.wait(60)
        self._ours.close()


def _common(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_OWN) and name not in _LATE
    }


def _serve(channel: socket.socket) -> None:
    """Import once, then fork for each message, and tell of each end."""
    for name in IMPORTS:
        __import__(name)
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        sys.exit("SGLang's imports have started threads: engines cannot be forked from here")
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                poll.unregister(ready)
                pid, word = running.pop(ready)
                os.close(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with word, suppress(OSError):  # a test that asks no more
                    word.send(str(status).encode())
                continue
            message, handles = _receive(channel)
            if not message:
                return
            log, word = handles[0], socket.socket(fileno=handles[1])
            pid = os.fork()
            if pid == 0:
                _become(json.loads(message), log)
            os.close(log)
            ended = os.pidfd_open(pid)
            running[ended] = (pid, word)
            poll.register(ended, select.POLLIN)
            channel.send(str(pid).encode())


def _receive(channel: socket.socket) -> tuple[bytes, Sequence[int]]:
    handles = array.array("i")
    message, ancillary, _, _ = channel.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(2 * 4))
    for _, _, data in ancillary:
        handles.frombytes(data)
    return message, handles


def _become(start: Mapping[str, Any], log: int) -> None:
    """Turn this fork into an engine; never returns."""
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # The channel and others' ends: an engine that held them would hide the template's death.
        os.closerange(3, max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()) + 1)
        # Only what differs: SGLang names its processes in the place of an environment untouched.
        wanted = dict(start["environment"])
        for name in os.environ.keys() - wanted.keys() - {_CPU_ENGINE}:
            del os.environ[name]
        os.environ.update({k: v for k, v in wanted.items() if os.environ.get(k) != v})
        program = start["program"]
        sys.argv = [program or LAUNCHER, *start["argv"]]
        if program:
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # an interpreter would print it, and end with 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # the test is gone; whatever SGLang would do at an exit is nobody's wish
