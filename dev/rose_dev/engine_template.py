"""One process that has imported what others begin with, from which a test session forks them.

To import PyTorch and SGLang takes 15 of the 25 s of CPU time that an engine on a CPU needs until it
is ready, and a session starts dozens of engines; vLLM is no quicker. A process of ROSE's takes 0.3
to 1 s, nearly all of it for imports, and a session starts hundreds. Forking is safe after the
imports alone: there is one thread and no driver (``_serve`` refuses to begin otherwise). Production
has no such process; decisions 0470 and 0880 say why.

``Template`` is the test's side. Run as a script by the engine's own Python, this file is the other
side, so its imports are the standard library's. A start is one message: arguments, environment, and
three file descriptors, for output, errors and word of the end. The template ends when the test's
process does, and its engines with it. Other processes, the workers of a lane, share it by ``join``:
each has a channel of its own, with which its engines end.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Stock:
    """An engine of others, or ROSE itself, as far as a template knows it.

    Attributes:
        title: its name.
        launcher: ROSE's module that starts it.
        imports: what takes the time.
        late: variables that it reads only when an engine starts.
        early: variables as the launcher sets them before it imports the engine.
        whole: packages of which every module is imported, too.
        exits: a fork waits for its threads and calls what is registered for an exit.
    """

    title: str
    launcher: str
    imports: tuple[str, ...]
    late: frozenset[str]
    early: tuple[tuple[str, str], ...] = ()
    whole: tuple[str, ...] = ()
    exits: bool = False


SGLANG = Stock(
    "SGLang",
    "rose_engines.sglang.launch",
    (
        "sglang.launch_server",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.models.registry",
        "sglang.srt.plugins",
        # What each scheduler imports when it starts, and ROSE's plugin for its compiled loops.
        "sglang.srt.dllm.algorithm",
        "numba",
    ),
    # A rank binds its threads, and plugins are loaded.
    frozenset({"SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_PLUGINS"}),
    (("SGLANG_USE_CPU_ENGINE", "1"),),
)
VLLM = Stock(
    "vLLM",
    "rose_engines.vllm.launch",
    (
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
    ),
    frozenset({"VLLM_PLUGINS"}),
)
ROSE = Stock(
    "ROSE",
    "rose_cli.main",
    # Packages of others. Each fork imports ROSE's rooms itself, as far as it needs them: they have
    # metrics, which a process that does not import them does not show.
    (
        "aiohttp.web",
        "cryptography.hazmat.primitives.serialization",
        "cryptography.x509",
        "google.protobuf.json_format",
        "grpc.aio",
        "jwt",
        "kopf",
        "kubernetes.aio",
        "msgspec",
        "numpy",
        "prometheus_client",
        "psutil",
        "pydantic",
        "uvloop",
        "xxhash",
        "yaml",
    ),
    # ROSE's processes read the first when they look for a cluster; the others say who tests.
    frozenset(
        {
            "KUBECONFIG",
            "PYTEST_CURRENT_TEST",
            "PYTEST_XDIST_TESTRUNUID",
            "PYTEST_XDIST_WORKER",
            "PYTEST_XDIST_WORKER_COUNT",
        }
    ),
    whole=("rose_core",),  # no input or output, and no metrics
    exits=True,
)
_STOCKS = {one.title: one for one in (SGLANG, VLLM, ROSE)}
# What differs between engines. Our launchers and plugins read it; imports of engines do not.
_OWN = "ROSE_"
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
        """Exit status as ``Popen`` has it: None while the process runs."""

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""

    def kill(self) -> None:
        """Send it SIGKILL, unless it has ended."""

    def terminate(self) -> None:
        """Send it SIGTERM, unless it has ended."""


class ForkedEngine:
    """An engine, or a process of ROSE's, that the template has forked.

    Attributes:
        pid: its process, the leader of its session.
        returncode: exit status; the negative number of the signal that ended it; None before.
    """

    def __init__(self, title: str, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self._title = title
        self.returncode: int | None = None
        self._link = link
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
                if not select.select([self._link], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self._title, timeout or 0.0)
                received = self._link.recv(64)
                # Without a word the template is gone, and the kernel kills its engines.
                self.returncode = int(received) if received else -signal.SIGKILL
                self._link.close()
            return self.returncode

    def fileno(self) -> int:
        """Becomes readable when it ends; -1 when somebody has waited for that."""
        return self._link.fileno()

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            # The template may have reaped it since; its number is not given away that soon.
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send it SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send it SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)


class Channel:
    """A way to a template.

    It forks engines whose environment is the same but for what none of their imports reads.

    Args:
        link: to the template.
        environment: under which it has imported the engine.
        stock: which engine.
        seconds: within which it must have imported the engine, or have forked.
    """

    def __init__(
        self,
        link: socket.socket,
        environment: Mapping[str, str],
        stock: Stock,
        seconds: float,
    ) -> None:
        self._link, self._stock = link, stock
        self._link.settimeout(seconds)
        self._common = _common(stock, environment)
        self._lock = threading.Lock()

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether the engine would be imported alike under this environment."""
        return _common(self._stock, environment) == self._common

    def alive(self) -> bool:
        """Whether the template can fork."""
        # Whatever it sends is an answer that somebody waits for, so what is here now is its end.
        return self._link.fileno() >= 0 and not select.select([self._link], [], [], 0)[0]

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: int,
        program: Path | None = None,
        *,
        module: str = "",
        errors: int | None = None,
    ) -> ForkedEngine:
        """Fork an engine; it is in this process's folder.

        Args:
            argv: arguments of the engine, without interpreter and module.
            environment: the whole of it.
            log: file descriptor of its output.
            program: a file that is run in the launcher's place.
            module: the same for a module.
            errors: file descriptor of its standard error; None = ``log``.

        Raises:
            ConnectionError: the template could not import the engine; its output says why.
        """
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        wanted = {
            "argv": list(argv),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
            "program": program and str(program),
            "module": module or self._stock.launcher,
        }
        message = json.dumps(wanted).encode()
        outputs = [log, log if errors is None else errors]
        with theirs, self._lock:
            try:
                socket.send_fds(self._link, [message], [*outputs, theirs.fileno()])
                answer = self._link.recv(64)
            except OSError:  # its end, or ours, is closed; or it took too long
                answer = b""
        if not answer:
            link.close()
            self.close()  # a late answer would be taken for the next one's
            title = self._stock.title
            raise ConnectionError(f"the process that imports {title} for engines has ended")
        return ForkedEngine(self._stock.title, int(answer), link)

    def close(self) -> None:
        """End what was forked by this way."""
        self._link.close()


def join(
    at: Path,
    environment: Mapping[str, str],
    stock: Stock = SGLANG,
    seconds: float = _IMPORT_SECONDS,
) -> Channel:
    """A way of one's own to another process's template.

    Args:
        at: where it listens.
        environment: as it was given there.
        stock: which engine.
        seconds: as of ``Channel``.

    Raises:
        OSError: there is none.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(str(at))
    except OSError:
        link.close()
        raise
    return Channel(link, environment, stock, seconds)


class Template(Channel):
    """Starts the process that imports the engine, and ends it.

    Args:
        python: of the engine's environment.
        environment: of the first engine.
        stock: which engine.
        seconds: as of ``Channel``.
        at: a new socket there takes others' channels; None = there are no others.
    """

    def __init__(
        self,
        python: Path,
        environment: Mapping[str, str],
        stock: Stock = SGLANG,
        seconds: float = _IMPORT_SECONDS,
        at: Path | None = None,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours, environment, stock, seconds)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            fds = [theirs.fileno()]
            if at is not None:
                door.bind(str(at))
                door.listen()
                fds.append(door.fileno())
            self._process = subprocess.Popen(
                [python, __file__, stock.title, *map(str, fds)],
                env=self._common | dict(stock.early),
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
            )

    def close(self) -> None:
        """End the template, and with it all that it has forked."""
        self._process.kill()  # its engines are killed by the kernel
        self._process.wait(60)
        super().close()


def _common(stock: Stock, environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_OWN) and name not in stock.late
    }


def _serve(stock: Stock, first: socket.socket, door: socket.socket | None = None) -> None:
    """Import once, then fork for each message of a channel, and tell of each end.

    It ends with the first channel.
    """
    # A search for garbage would read all that was imported, in each engine anew, and with it copy
    # what the forks share. SGLang asks for one at each start.
    gc.disable()
    for name in stock.imports:
        __import__(name)
    for package in map(importlib.import_module, stock.whole):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            __import__(module.name)
    gc.freeze()
    gc.enable()
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        sys.exit(f"{stock.title}'s imports have started threads: no engine can be forked from here")
    _fork_until_closed(stock, first, door)


def _fork_until_closed(stock: Stock, first: socket.socket, door: socket.socket | None) -> None:
    poll = select.poll()
    channels = {first.fileno(): first}
    running: dict[int, _Running] = {}
    for opened in filter(None, (first, door)):
        poll.register(opened, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                poll.unregister(ready)
                running.pop(ready).tell_its_end(ready)
            elif door is not None and ready == door.fileno():
                channel, _ = door.accept()
                channels[channel.fileno()] = channel
                poll.register(channel, select.POLLIN)
            elif (received := _receive(channels[ready]))[0]:
                ended, engine = _fork(stock, *received, channels[ready])
                running[ended] = engine
                poll.register(ended, select.POLLIN)
            else:
                poll.unregister(ready)
                closed = channels.pop(ready)
                if closed is first:
                    return
                _end_engines(running, closed)
                closed.close()


@dataclass(frozen=True)
class _Running:
    """An engine, as the template knows it.

    Attributes:
        link: for word of its end.
        channel: whose engine it is.
    """

    pid: int
    link: socket.socket
    channel: socket.socket

    def tell_its_end(self, ended: int) -> None:
        """Reap it, and tell its status."""
        os.close(ended)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with self.link, suppress(OSError):  # a test that asks no more
            self.link.send(str(status).encode())


def _end_engines(running: Mapping[int, _Running], channel: socket.socket) -> None:
    """Those of a worker that has ended."""
    for engine in running.values():
        if engine.channel is channel:
            os.kill(engine.pid, signal.SIGKILL)  # not reaped yet, so it is this one


def _fork(
    stock: Stock, message: bytes, handles: Sequence[int], channel: socket.socket
) -> tuple[int, _Running]:
    """Start an engine; a descriptor that says when it has ended, and what is known of it."""
    *outputs, last = handles
    link = socket.socket(fileno=last)
    template, pid = os.getpid(), os.fork()
    if pid == 0:
        _become(stock, json.loads(message), outputs, template)
    for one in outputs:
        os.close(one)
    with suppress(OSError):  # a worker that was killed: its engine goes with its channel
        channel.send(str(pid).encode())
    return os.pidfd_open(pid), _Running(pid, link, channel)


def _receive(channel: socket.socket) -> tuple[bytes, Sequence[int]]:
    handles = array.array("i")
    try:
        message, ancillary, _, _ = channel.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(3 * 4))
    except ConnectionError:  # a worker that was killed had an answer to read
        return b"", ()
    for _, _, data in ancillary:
        handles.frombytes(data)
    return message, handles


def _become(stock: Stock, start: Mapping[str, Any], outputs: Sequence[int], template: int) -> None:
    """Turn this fork into an engine; never returns."""
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != template:  # it ended before the kernel knew
            os.kill(os.getpid(), signal.SIGKILL)
        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
        # The channel and others' ends: an engine that held them would hide the template's death.
        os.closerange(3, max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()) + 1)
        # Only what differs: SGLang names its processes in the place of an environment untouched.
        wanted = dict(start["environment"])
        for name in os.environ.keys() - wanted.keys() - dict(stock.early).keys():
            del os.environ[name]
        os.environ.update({k: v for k, v in wanted.items() if os.environ.get(k) != v})
        os.chdir(start["folder"])
        sys.path[0] = start["folder"]  # as for ``python -m``
        _run(start)
        status = 0
    except SystemExit as end:
        status = _status_of(end)
    except BaseException:  # noqa: BLE001  # an interpreter would print it, and end with 1
        traceback.print_exc()
    finally:
        try:
            if stock.exits:
                _finish()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _run(start: Mapping[str, Any]) -> None:
    """As ``python FILE`` or ``python -m MODULE`` does."""
    program, module = start["program"], start["module"]
    sys.argv = [program or module, *start["argv"]]
    if program:
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _status_of(end: SystemExit) -> int:
    """As an interpreter takes it: a text is for people, and is a failure."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


def _finish() -> None:
    """What an interpreter does before it ends; ``multiprocessing`` does the same in its forks."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001


if __name__ == "__main__":
    _serve(_STOCKS[sys.argv[1]], *(socket.socket(fileno=int(fd)) for fd in sys.argv[2:]))
    os._exit(0)  # the test is gone; whatever the engine would do at an exit is nobody's wish
