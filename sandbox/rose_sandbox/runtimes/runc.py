"""Sandboxes of runc: it starts them, and CRIU saves their processes.

A frozen instant: its groups stand still, snapshot, CRIU's dump, they go on. Packing comes after it.
CRIU's settings and the words for its errors stand here too.
Next step: ``inside`` is what a command talks to.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rose_sandbox.errors import (
    BadPath,
    CannotCheckpoint,
    CannotRestore,
    NotListening,
    RuntimeFailed,
    SandboxError,
    TooLarge,
    UnknownSandbox,
)
from rose_sandbox.runtimes import inside, kernel, oci
from rose_sandbox.runtimes.container import (
    GRACE_SECONDS,
    LATE,
    CommandEnd,
    ContainerRuntime,
    FrozenCut,
)
from rose_sandbox.runtimes.files import is_gone, look, put, read, runner_of, write
from rose_sandbox.runtimes.open_files import held_by
from rose_sandbox.runtimes.parts import PROGRAMS
from rose_sandbox.runtimes.processes import (
    POLL_SECONDS,
    Stat,
    freeze,
    inner_pid,
    pauses,
    stat_of,
    stop_anew,
    thaw,
    ticks,
)
from rose_sandbox.runtimes.programs import call, run, whole
from rose_sandbox.runtimes.runtime import (
    FILE_BYTES,
    OUTPUT_BYTES,
    ExecResult,
    Handle,
    Kind,
    SandboxSpec,
    check_command,
)
from rose_wire.cgroups import signal_all, text_of

START_SECONDS = 20.0
"""Until the first process of a sandbox listens; it takes milliseconds on a free machine."""
LOOKS = 8
"""At what a command has started. What stands still starts nothing, so only one that lives on, a
session's shell, can go on past them; it is asked anew until the command has ended."""
LOOKS_PER_RUNNER = 16
"""A runner that was killed answers nothing; seldom enough to be looked for at few looks."""
SETTLE_TRIES = 250
"""Half a second on a busy machine; a runner that has answered ends within its next slice."""


# CRIU's: connections inside are saved, none leads out; deleted files up to what a log may have.
CRIU_CONFIGURATION = """\
tcp-established
network-lock skip
manage-cgroups=ignore
file-locks
link-remap
ghost-limit 67108864
"""
# What CRIU says of things it cannot save -> the word for it.
_UNDUMPABLE = (
    (r"io_uring", "io_uring"),
    (r"userfaultfd", "userfaultfd"),
    (r"perf_event", "perf_event"),
    (r"bpf", "bpf"),
    (r"[Gg]host file.*(big|limit)|Can't dump ghost file", "large deleted file"),
    (r"unix: (Ext|.*external|.*peer)", "external socket"),
    (r"sk unix|unix: ", "unix socket"),
    (r"packet|Unknown socket|unsupported.*socket|sockets?: ", "socket"),
    (r"tty: |Can't dump.*tty|terminal", "terminal"),
    (r"is in the different (pid|net|mnt|user|ipc|uts) ?n", "nested namespace"),
    (r"mnt: ", "mount"),
    (r"Can't lookup mount|Can't open file|files-reg", "file"),
    (r"ptrace|Unable to (seize|interrupt)|traced", "traced process"),
    (r"Zombie|zombie|dead", "dying process"),
)
CRIU_KERNEL = Path("/run/criu.kdat")
"""Where CRIU keeps what it found out about the kernel."""


@dataclass(frozen=True)
class _Asked:
    """A command under way; ``begun``: before it was asked for, as ``Stat.started`` counts."""

    key: str
    number: str
    session: str | None
    begun: int


def _end_of(root: int, asked: _Asked, *, also_runner: bool) -> CommandEnd | None:
    """How a command ended, by its runner or, if that is asked, by its absence; None: it runs."""
    answer = look(root, f"{asked.number}.rc")
    if answer is not None and answer.endswith(b"\n"):
        code, _, rest = answer.decode().strip().partition(" ")
        return CommandEnd(int(code), session_lost=rest == "lost")
    # A runner may have answered and gone since, so its answer is looked for once more.
    if also_runner and is_gone(root, asked.number) and look(root, f"{asked.number}.rc") is None:
        return CommandEnd(137, session_lost=asked.session is not None)
    return None


class RuncRuntime(ContainerRuntime):
    """Sandboxes of runc; arguments as of ``ContainerRuntime``."""

    name = "runc"
    programs = PROGRAMS
    image = "inventory.img"

    # --- life --------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        self._criu.write_text(CRIU_CONFIGURATION)
        with suppress(RuntimeFailed):  # CRIU is slower then, and says what is wrong
            await learn_kernel(self.parts.path)

    @property
    def _criu(self) -> Path:
        return self._folder / "criu.conf"

    def _config(self, spec: SandboxSpec, root: Path) -> object:
        return oci.config(spec, root, self._cgroup(spec.key), self._criu, self._loopback)

    async def _run_first(self, key: str) -> None:
        bundle = self._home(key) / "bundle"
        await self._runc(key, "run", "--detach", "--bundle", bundle, quiet=True)

    async def _restore_processes(self, images: Path, key: str) -> None:
        home = self._home(key)
        await self._clear(work := home / "restore")
        try:
            await self._runc(
                key,
                *("restore", "--detach", "--bundle", home / "bundle"),
                *("--image-path", images, "--work-path", work),
                quiet=True,
            )
        except RuntimeFailed as error:
            reasons = errors_of(work / "restore.log")
            raise CannotRestore(
                f"processes of {key} cannot be restored: {reasons or error}"
            ) from error

    async def _wait_until_it_listens(self, key: str) -> None:
        ends = time.monotonic() + START_SECONDS
        for pause in pauses():
            with suppress(OSError, UnknownSandbox), self._root(key) as root:
                os.close(kernel.open_in(root, f"{inside.FOLDER}/in", os.O_WRONLY | os.O_NONBLOCK))
                return
            if time.monotonic() > ends:
                raise RuntimeFailed(f"sandbox {key} does not listen after {START_SECONDS:.0f} s")
            await asyncio.sleep(pause)

    async def _let_go(self, key: str) -> None:
        thaw(self._groups(key))

    def _known(self, key: str) -> Iterable[Path]:
        return [self._folder / "runc" / self._container(key)]

    def _first(self, key: str) -> int:
        return self._init(key)

    async def _runc(self, key: str, verb: str, *options: str | Path, quiet: bool = False) -> None:
        log = self._home(key) / "runc.log"
        log.unlink(missing_ok=True)
        try:
            await run(
                self.parts.path,
                *("runc", "--root", self._folder / "runc", "--log", log, verb),
                *(*options, self._container(key)),
                quiet=quiet,
            )
        except RuntimeFailed as error:
            messages = re.findall(r'level=error msg="(.*)"$', text_of(log), re.MULTILINE)
            raise RuntimeFailed("; ".join(messages) or str(error)) from error

    def _init(self, key: str) -> int:
        try:
            state = json.loads(
                (self._folder / "runc" / self._container(key) / "state.json").read_bytes()
            )
            return int(state["init_process_pid"])
        except OSError as error:
            raise UnknownSandbox(f"sandbox {key} does not run") from error

    @contextmanager
    def _root(self, key: str) -> Iterator[int]:
        """A descriptor of its root, as its own processes see it."""
        init = self._init(key)
        try:
            descriptor = os.open(f"/proc/{init}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UnknownSandbox(f"the first process of sandbox {key} is gone") from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    # --- commands ----------------------------------------------------------------------------

    async def exec(
        self,
        handle: Handle,
        command: str,
        within: float,
        *,
        session: str | None = None,
        output_bytes: int = OUTPUT_BYTES,
    ) -> ExecResult:
        """See ``Runtime``."""
        self._running(handle)
        await self._open()
        check_command(command, session)
        self._next += 1
        # Numbers of an earlier host or of a restored state are never met again.
        number = f"{time.time_ns():x}{self._next:x}"
        begun = ticks()
        with self._root(handle.key) as root:
            asked = _Asked(handle.key, number, session, begun)
            try:
                await whole(self._in_thread(self._ask, root, number, command, session))
                end = await self._ended(asked, root, within)
            except asyncio.CancelledError:
                await whole(self._give_up(asked))
                raise
            out = await self._in_thread(look, root, f"{number}.out")
            err = await self._in_thread(look, root, f"{number}.err")
            await self._in_thread(self._settle, handle.key, root, number)
            await self._in_thread(self._tidy, handle.key, root, number)
        return end.result(out or b"", err or b"", output_bytes)

    async def _ended(self, asked: _Asked, root: int, within: float) -> CommandEnd:
        """Wait for a command's end, which comes at the latest soon after ``within`` seconds."""
        ends, killed = time.monotonic() + within, 0.0
        for turn, pause in enumerate(pauses()):
            also_runner = turn % LOOKS_PER_RUNNER == LOOKS_PER_RUNNER - 1
            end = await self._in_thread(_end_of, root, asked, also_runner=also_runner)
            if end is not None:
                return end._replace(late=killed > 0)
            now = time.monotonic()
            if now >= ends:
                killed = killed or now
                hard = asked.session is None or now > killed + GRACE_SECONDS
                runs = await self._in_thread(self._kill, asked, root, hard=hard)
                if asked.session is None or not runs:
                    return LATE
            await asyncio.sleep(pause)
        raise AssertionError("pauses never end")

    async def _give_up(self, asked: _Asked) -> None:
        """Kill a command whose caller has gone."""
        with suppress(SandboxError, OSError), self._root(asked.key) as root:
            await self._ended(asked, root, 0.0)
            await self._in_thread(self._settle, asked.key, root, asked.number)
            await self._in_thread(self._tidy, asked.key, root, asked.number)

    def _ask(self, root: int, number: str, command: str, session: str | None) -> None:
        try:
            with kernel.owner(kernel.FIRST_ID):
                write(root, f"{inside.FOLDER}/{number}.cmd", command.encode() + b"\n", 0o600)
            door = kernel.open_in(root, f"{inside.FOLDER}/in", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            raise RuntimeFailed(
                f"the sandbox takes no commands ({inside.FOLDER}: {error.strerror}); what ran in "
                "it broke or filled that folder: go back to an earlier turn, or end it"
            ) from error
        try:
            os.write(door, f"{number} {session or '-'}\n".encode())
        finally:
            os.close(door)

    def _kill(self, asked: _Asked, root: int, *, hard: bool) -> bool:
        """Kill what a command's runner started since; ``hard``: the runner itself too.

        Returns:
            False: it has no runner, as where no more processes are allowed, and never runs.
        """
        # A runner says who it is before it reads this.
        self._unlink(root, f"{asked.number}.cmd")
        runner = runner_of(root, asked.number)
        if runner is None:
            return False
        top = next((pid for pid in self._pids(asked.key) if inner_pid(pid) == runner), None)
        if top is None:
            return True
        # All stand still before any is killed: a shell whose child is killed first goes on to its
        # next line. Parents stop before their children.
        below, doomed = {top}, [top] if hard else []
        signal_all(doomed, signal.SIGSTOP)
        for _ in range(LOOKS):  # at what was being born meanwhile
            new = self._below(asked.key, top, below)
            more = [pid for pid, one in new.items() if one.started >= asked.begun]
            if not more:
                break
            signal_all(more, signal.SIGSTOP)
            below |= new.keys()
            doomed += more
        signal_all(doomed, signal.SIGKILL)
        return True

    def _below(self, key: str, top: int, known: Collection[int]) -> dict[int, Stat]:
        """What a runner has started, and what has its session; parents before their children."""
        table = {pid: entry for pid in self._pids(key) if (entry := stat_of(pid)) is not None}
        of_session = {pid for pid, one in table.items() if one.session == top}
        found: dict[int, Stat] = {}
        while True:  # a table is short: at most Limits.pids
            seen = {*known, *found}
            more = {
                pid: one
                for pid, one in table.items()
                if pid not in seen
                and (one.parent in seen or (pid in of_session and one.parent not in of_session))
            }
            if not more:
                return found
            found |= more

    def _settle(self, key: str, root: int, number: str) -> None:
        """Wait until a command's runner has ended or, a session's, waits for the next one.

        It has already said how the command ended; an inspector should not see its last steps.
        """
        runner = runner_of(root, number)
        top = next((pid for pid in self._pids(key) if inner_pid(pid) == runner), None)
        for _ in range(SETTLE_TRIES if top is not None else 0):
            doing = text_of(Path(f"/proc/{top}/syscall"))
            if not doing or doing.startswith("0 0x9 "):
                return
            time.sleep(POLL_SECONDS[0])

    def _tidy(self, key: str, root: int, number: str) -> None:
        """Remove a command's files, but for streams that something in the background still has."""
        held: set[str] = set()
        for pid in self._pids(key):
            with suppress(OSError):
                held |= {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        names = [f"{number}.{ending}" for ending in ("cmd", "pid", "rc", "out", "err")]
        self._unlink(root, *(one for one in names if f"{inside.FOLDER}/{one}" not in held))

    def _unlink(self, root: int, *names: str) -> None:
        try:
            folder = kernel.open_in(root, inside.FOLDER, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return
        try:
            for name in names:
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)

    # --- files and ports ---------------------------------------------------------------------

    async def read_file(self, handle: Handle, path: str, limit: int = FILE_BYTES) -> bytes:
        """See ``Runtime``."""
        self._running(handle)
        with self._root(handle.key) as root:
            return await self._in_thread(read, root, path, limit)

    async def write_file(self, handle: Handle, path: str, data: bytes, mode: int = 0o644) -> None:
        """See ``Runtime``."""
        record = self._running(handle)
        if not path.startswith("/") or path.endswith("/"):
            raise BadPath(f"{path!r} is no absolute path of a file")
        if len(data) > min(FILE_BYTES, record.spec.limits.disk_bytes):
            raise TooLarge(f"{len(data)} bytes for {path} do not fit")
        with self._root(handle.key) as root:
            await self._in_thread(put, root, path, data, mode)

    async def connect(self, handle: Handle, port: int) -> socket.socket:
        """See ``Runtime``."""
        self._running(handle)
        # A thread that enters another network is good for nothing else.
        with ThreadPoolExecutor(1) as threads:
            loop = asyncio.get_running_loop()
            try:
                init = self._init(handle.key)
                connection = await loop.run_in_executor(threads, kernel.socket_of, init)
            except OSError as error:
                raise UnknownSandbox(f"sandbox {handle.key} does not run: {error}") from error
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, ("127.0.0.1", port))
        except OSError as error:
            connection.close()
            raise NotListening(
                f"nothing listens at port {port} of sandbox {handle.key}: {error}"
            ) from error
        return connection

    # --- checkpoints -------------------------------------------------------------------------

    async def _cut(self, key: str, kind: Kind, cut: str) -> FrozenCut:
        home = self._home(key)
        images, work = home / "images", home / "dump"
        await self._clear(images, work)
        async with self._frozen(key):
            started = time.monotonic()
            try:
                upper = self._volume.upper(key)
                held = await self._in_thread(held_by, self._pids(key), upper)
                if kind.has_files:
                    await self._volume.cut(key, cut)
                if kind.has_processes:
                    await self._runc(
                        key,
                        *("checkpoint", "--leave-running"),
                        *("--image-path", images, "--work-path", work),
                    )
            except RuntimeFailed as error:
                reasons = errors_of(work / "dump.log")
                raise CannotCheckpoint(
                    undumpable(reasons) if reasons else "runtime",
                    f"sandbox {key} cannot be saved: {reasons or error}",
                ) from error
            return FrozenCut(time.monotonic() - started, held)

    @asynccontextmanager
    async def _frozen(self, key: str) -> AsyncIterator[None]:
        try:
            # To its end, also when cancelled: a freeze that ends after the ``thaw`` is for ever.
            await call(freeze, self._groups(key))
            await self._in_thread(stop_anew, self._pids(key))
            yield
        finally:
            await call(thaw, self._groups(key))


async def learn_kernel(path: str, known: Path = CRIU_KERNEL) -> None:
    """Let CRIU find out about the kernel once, and not at every call, which takes it 60 ms.

    It does so itself where ``/run`` is in memory, which no kernel outlives; in a container, and on
    many machines, ``/run`` is not. A file from before the machine started is made anew.

    Args:
        path: ``PATH`` of the runtime's programs.
        known: the file.

    Raises:
        RuntimeFailed: it could not be found out, or not be kept; calls are slower then.
    """
    if known.exists() and known.stat().st_mtime > _started():  # noqa: ASYNC240 - microseconds
        return
    ask = "mount -t tmpfs tmpfs /run && criu check >&2 && exec cat /run/criu.kdat"
    found = await run(path, "unshare", "--mount", "sh", "-c", ask)
    try:
        with tempfile.NamedTemporaryFile(dir=known.parent, delete=False) as file:
            file.write(found)
        Path(file.name).replace(known)  # noqa: ASYNC240 - as above
    except OSError as error:
        raise RuntimeFailed(f"{known} cannot be written: {error.strerror}") from error


def _started() -> float:
    text = text_of(Path("/proc/stat"))
    found = re.search(r"^btime (\d+)$", text, re.MULTILINE)
    return float(found[1]) if found else float("inf")


def errors_of(log: Path) -> str:
    """What CRIU says went wrong, first things first."""
    found = re.findall(r"Error \(([^)]*)\): (.*)", text_of(log))
    lines = [f"{where.partition(':')[0]}: {text}" for where, text in found if "rlimit" not in text]
    return "; ".join(lines[:4])


def undumpable(errors: str) -> str:
    """What could not be saved, in a word."""
    for pattern, reason in _UNDUMPABLE:
        if re.search(pattern, errors):
            return reason
    return "process"
