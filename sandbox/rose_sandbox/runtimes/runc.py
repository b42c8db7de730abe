"""Real sandboxes: runc starts them, CRIU saves their processes, ``volume`` their files.

Everything about a sandbox lies in its folder, written before it is needed: a runtime that starts
anew over the same folder finds what an earlier one left, running or suspended.

| file | holds |
|---|---|
| ``sandbox.json`` | spec, incarnation, and the parts where it is suspended |
| ``bundle/config.json`` | what runc is told (``oci``) |

All mounts lie below ``/run/GROUP``: a sandbox's root is another user, who must get there, and a
folder of state can be removed without a walk into what is mounted.

A frozen instant: its groups stand still, snapshot, CRIU's dump, they go on. Packing comes after it.
Next step: ``inside`` is what a command talks to.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from rose_sandbox.errors import (
    AlreadyThere,
    BadPath,
    CannotCheckpoint,
    CannotRestore,
    NotListening,
    RuntimeFailed,
    SandboxError,
    Suspended,
    TooLarge,
    UnknownImage,
    UnknownSandbox,
)
from rose_sandbox.runtimes import criu, inside, kernel, oci
from rose_sandbox.runtimes.files import is_gone, look, put, read, runner_of, write
from rose_sandbox.runtimes.held import OpenFile, held_by
from rose_sandbox.runtimes.parts import Parts, find_parts
from rose_sandbox.runtimes.processes import (
    POLL_SECONDS,
    empty,
    freeze,
    group_of,
    hierarchies,
    inner_pid,
    pauses,
    stat_of,
    stop_anew,
    text_of,
    thaw,
    ticks,
)
from rose_sandbox.runtimes.programs import call, run
from rose_sandbox.runtimes.runtime import (
    COMMAND_BYTES,
    FILE_BYTES,
    OUTPUT_BYTES,
    CheckpointParts,
    ExecResult,
    Facts,
    Handle,
    Kind,
    Part,
    SandboxSpec,
    State,
    check_spec,
    cut_output,
)
from rose_sandbox.runtimes.volume import VOLUME_BYTES, Volume

FILES, PROCESSES = "files.tar", "processes.tar"
START_SECONDS = 20.0
"""Until the first process of a sandbox listens; it takes milliseconds on a free machine."""
GRACE_SECONDS = 1.0
"""For a session's shell to notice that what it waited for was killed, before it is killed too."""
SETTLE_TRIES = 250
"""Half a second on a busy machine; a runner that has answered ends within its next slice."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Record:
    """``sandbox.json``."""

    spec: SandboxSpec
    incarnation: int = 1
    suspended: CheckpointParts | None = None


_RECORDS = TypeAdapter(_Record)


@dataclass(frozen=True)
class _Beginning:
    """What sandboxes begin as; of none, the bare image.

    Attributes:
        files: packed; None: there are none, or they are in ``cut``.
        cut: files as a subvolume.
        images: CRIU's, of processes, in a folder.
    """

    files: Part | None = None
    cut: str | None = None
    images: Path | None = None


class RuncRuntime:
    """Sandboxes of runc.

    Args:
        folder: of all state; a disk with room.
        parts: programs and images; None: this machine's.
        within: group below which those of sandboxes lie, from the top of each hierarchy.
        disk_bytes: of all sandboxes' files.

    Raises:
        Unavailable: this machine lacks a part.
    """

    name = "runc"

    def __init__(
        self,
        folder: Path,
        parts: Parts | None = None,
        within: str = "",
        disk_bytes: int = VOLUME_BYTES,
    ) -> None:
        self.parts = parts or find_parts()
        self._folder = folder.resolve()
        self.group, self._within = group_of(self._folder), within
        self._criu = self._folder / "criu.conf"
        self._loopback = self._folder / "loopback"
        self._roots = Path("/run") / self.group
        self._images = self._folder / "images"
        # No key begins with a point.
        self._volume = Volume(self._folder, self._roots / ".host", self.parts, disk_bytes)
        self._threads = ThreadPoolExecutor(thread_name_prefix="sandbox")
        self._opening = asyncio.Lock()
        self._is_open = False
        self._next = 0

    # --- the host ---------------------------------------------------------------------------

    async def _open(self) -> None:
        async with self._opening:
            if not self._is_open:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._criu.write_text(criu.CONFIGURATION)
                self._loopback.write_text(oci.LOOPBACK)
                self._loopback.chmod(0o755)
                self._roots.mkdir(mode=0o711, exist_ok=True)
                await self._clear(self._images)
                self._images.chmod(0o700)
                with suppress(RuntimeFailed):  # CRIU is slower then, and says what is wrong
                    await criu.learn_kernel(self.parts.path)
                await self._volume.open()
                # A host that was killed while it made one left a half behind; while it saved one,
                # a cut and a sandbox that stands still.
                await self._volume.remove_cuts()
                for home in self._folder.glob("sandboxes/*"):
                    if not (home / "sandbox.json").exists():
                        await self._remove(home.name)
                    else:
                        thaw(self._groups(home.name))
                self._is_open = True

    async def images(self) -> tuple[str, ...]:
        """See ``Runtime``."""
        return tuple(sorted(folder.name for folder in self.parts.images.iterdir()))

    async def sandboxes(self) -> tuple[Handle, ...]:
        """See ``Runtime``."""
        found = []
        for file in sorted(self._folder.glob("sandboxes/*/sandbox.json")):
            with suppress(SandboxError):
                record = self._record(file.parent.name)
                found.append(Handle(record.spec.key, record.incarnation))
        return tuple(found)

    async def close(self) -> None:
        """See ``Runtime``."""
        if self._is_open:
            if not any(self._record(one.key).suspended is None for one in await self.sandboxes()):
                await self._volume.close()
                for folder in (self._roots, *self._tops()):
                    with suppress(OSError):
                        folder.rmdir()
            self._is_open = False
        self._threads.shutdown(wait=False)

    def _home(self, key: str) -> Path:
        return self._folder / "sandboxes" / key

    def _name(self, key: str) -> str:
        """Of a cut; no key has a point."""
        self._next += 1
        return f"{key}.{self._next}"

    def _container(self, key: str) -> str:
        return f"{self.group}-{key}"

    def _record(self, key: str) -> _Record:
        try:
            return _RECORDS.validate_json((self._home(key) / "sandbox.json").read_bytes())
        except OSError as error:
            raise UnknownSandbox(f"no sandbox {key} here") from error

    def _keep(self, record: _Record) -> None:
        home = self._home(record.spec.key)
        new = home / "sandbox.json.new"
        with new.open("wb") as file:
            file.write(_RECORDS.dump_json(record))
            file.flush()
            os.fsync(file.fileno())
        new.replace(home / "sandbox.json")

    def _running(self, handle: Handle) -> _Record:
        record = self._record(handle.key)
        if record.incarnation != handle.incarnation:
            raise UnknownSandbox(
                f"sandbox {handle.key} is at incarnation {record.incarnation}, "
                f"not {handle.incarnation}"
            )
        if record.suspended is not None:
            raise Suspended(f"sandbox {handle.key} is suspended; resume it first")
        return record

    # --- life -------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> Handle:
        """See ``Runtime``."""
        return await self._begin(spec, _Beginning())

    async def _begin(self, spec: SandboxSpec, beginning: _Beginning) -> Handle:
        check_spec(spec)
        await self._open()
        if spec.image not in await self.images():
            here = ", ".join(await self.images())
            raise UnknownImage(f"no image {spec.image}; here are: {here}")
        home = self._home(spec.key)
        try:
            home.parent.mkdir(mode=0o700, exist_ok=True)
            home.mkdir()
        except FileExistsError:
            raise AlreadyThere(f"sandbox {spec.key} is there; end it or take another key") from None
        record = _Record(spec)
        try:
            await self._raise(record, beginning)
            self._keep(record)
        except BaseException:  # also when cancelled: half a sandbox would keep its key
            await self._remove(spec.key)
            raise
        return Handle(spec.key, record.incarnation)

    async def _raise(self, record: _Record, beginning: _Beginning) -> None:
        """Make a sandbox run whose folder is there."""
        spec = record.spec
        key, home = spec.key, self._home(spec.key)
        if beginning.cut is not None:
            await self._volume.copy(beginning.cut, key, spec.limits.disk_bytes)
        else:
            await self._volume.make(key, spec.limits.disk_bytes)
            if beginning.files is not None:
                await self._fill(beginning.files, key)
        await self._volume.mount(key, spec.image, self._roots / key)
        bundle = home / "bundle"
        bundle.mkdir(exist_ok=True)
        config = oci.config(
            spec,
            self._roots / key,
            "/" + "/".join(filter(None, (self._within, self.group, key))),
            self._criu,
            self._loopback,
        )
        (bundle / "config.json").write_text(json.dumps(config))
        if beginning.images is not None:
            await self._restore_processes(beginning.images, key)
        else:
            await self._runc(key, "run", "--detach", "--bundle", bundle, quiet=True)
        await self._wait_until_it_listens(key)

    async def _fill(self, part: Part, key: str) -> None:
        try:
            _check(part)
            await self._volume.unpack(part.path, key)
        except RuntimeFailed as error:
            raise CannotRestore(f"files of {key} cannot be unpacked: {error}") from error

    @asynccontextmanager
    async def _unpacked(
        self, parts: CheckpointParts, specs: Sequence[SandboxSpec]
    ) -> AsyncIterator[_Beginning]:
        """Parts, unpacked once for all that begin as them."""
        name = self._name(specs[0].key)
        images, cut = self._images / name, None
        try:
            if parts.processes is not None:
                images.mkdir()
                try:
                    _check(parts.processes)
                    await criu.unpack_images(self.parts.path, parts.processes.path, images)
                except RuntimeFailed as error:
                    raise CannotRestore(
                        f"processes of {specs[0].key} cannot be unpacked: {error}"
                    ) from error
            if len(specs) > 1 and parts.files is not None:
                # A snapshot of it costs milliseconds, whatever its size.
                cut = name
                await self._volume.make(cut, specs[0].limits.disk_bytes)
                await self._fill(parts.files, cut)
            yield _Beginning(
                parts.files if cut is None else None,
                cut,
                images if parts.processes is not None else None,
            )
        finally:
            shutil.rmtree(images, ignore_errors=True)
            await self._volume.remove(name)

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
            said = criu.errors_of(work / "restore.log")
            raise CannotRestore(
                f"processes of {key} cannot be restored: {said or error}"
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

    async def end(self, handle: Handle) -> None:
        """See ``Runtime``."""
        if self._home(handle.key).exists():
            await self._open()
            await self._remove(handle.key)

    async def _remove(self, key: str) -> None:
        home = self._home(key)
        (home / "sandbox.json").unlink(missing_ok=True)
        await self._stop(key)
        await self._volume.remove(key)
        shutil.rmtree(home, ignore_errors=True)

    async def _stop(self, key: str) -> None:
        """Its processes and its root, not its files."""
        # Also what a restore that failed left behind, of which runc knows nothing. ``runc delete``
        # looks whether a killed process is gone every 0.1 s; what it would do then is this.
        await self._in_thread(empty, self._groups(key))
        shutil.rmtree(self._folder / "runc" / self._container(key), ignore_errors=True)
        await self._volume.unmount(self._roots / key)
        with suppress(OSError):
            (self._roots / key).rmdir()

    async def _clear(self, *folders: Path) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

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
            words = re.findall(r'level=error msg="(.*)"$', text_of(log), re.MULTILINE)
            raise RuntimeFailed("; ".join(words) or str(error)) from error

    def _tops(self) -> list[Path]:
        found = [folder / self._within / self.group for folder in hierarchies()]
        return [folder for folder in found if folder.is_dir()]

    def _groups(self, key: str) -> list[Path]:
        return [folder / key for folder in self._tops()]

    # --- commands ---------------------------------------------------------------------------

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
        if len(command.encode()) > COMMAND_BYTES:
            raise TooLarge(f"the command has over {COMMAND_BYTES} bytes; write a file and run it")
        if session is not None:
            check_spec(SandboxSpec(session))
        self._next += 1
        # Numbers of an earlier host or of a restored state are never met again.
        number = f"{time.time_ns():x}{self._next:x}"
        begun = ticks()
        with self._root(handle.key) as root:
            await self._in_thread(self._ask, root, number, command, session)
            lost = late = False
            code: int | None = None
            ends, killed = time.monotonic() + within, 0.0
            for turn, pause in enumerate(pauses()):
                answer = await self._in_thread(look, root, f"{number}.rc")
                if answer is not None and answer.endswith(b"\n"):
                    word, _, rest = answer.decode().strip().partition(" ")
                    code, lost = int(word), rest == "lost"
                    break
                now = time.monotonic()
                if turn % 16 == 15 and await self._in_thread(is_gone, root, number):
                    # The runner was killed, and says nothing.
                    answer = await self._in_thread(look, root, f"{number}.rc")
                    if answer is None:
                        code, lost = 137, session is not None
                        break
                if now >= ends:
                    late = True
                    if not killed:
                        killed = now
                    hard = session is None or now > killed + GRACE_SECONDS
                    await self._in_thread(self._kill, handle.key, root, number, begun, hard)
                    if hard and session is None:
                        break
                await asyncio.sleep(pause)
            out = await self._in_thread(look, root, f"{number}.out")
            err = await self._in_thread(look, root, f"{number}.err")
            await self._in_thread(self._settle, handle.key, root, number)
            await self._in_thread(self._tidy, handle.key, root, number)
        return ExecResult(
            124 if late or code is None else code,
            cut_output(out or b"", output_bytes),
            cut_output(err or b"", output_bytes),
            timed_out=late,
            cut=max(len(out or b""), len(err or b"")) > output_bytes,
            session_lost=lost,
        )

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

    def _init(self, key: str) -> int:
        try:
            state = json.loads(
                (self._folder / "runc" / self._container(key) / "state.json").read_bytes()
            )
            return int(state["init_process_pid"])
        except OSError as error:
            raise UnknownSandbox(f"sandbox {key} does not run") from error

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

    def _kill(self, key: str, root: int, number: str, begun: int, hard: bool) -> None:
        """What a command's runner started since; ``hard``: the runner itself too."""
        runner = runner_of(root, number)
        table = {pid: entry for pid in self._pids(key) if (entry := stat_of(pid)) is not None}
        top = next((pid for pid in table if inner_pid(pid) == runner), None)
        if top is None:
            return
        below = {top}
        while True:  # a table is short: at most Limits.pids
            more = {pid for pid, one in table.items() if one.parent in below or one.session == top}
            if more <= below:
                break
            below |= more
        doomed = {pid for pid in below - {top} if table[pid].started >= begun}
        for pid in doomed | ({top} if hard else set()):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)

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
        try:
            folder = kernel.open_in(root, inside.FOLDER, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return
        try:
            for ending in ("cmd", "pid", "rc", "out", "err"):
                if f"{inside.FOLDER}/{number}.{ending}" not in held:
                    with suppress(OSError):
                        os.unlink(f"{number}.{ending}", dir_fd=folder)
        finally:
            os.close(folder)

    def _pids(self, key: str) -> list[int]:
        found: set[int] = set()
        for group in self._groups(key)[:1]:
            with suppress(OSError):
                found = {int(pid) for pid in (group / "cgroup.procs").read_text().split()} - {0}
        return sorted(found)

    async def _in_thread(self, function: Callable[..., _T], *arguments: object) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(function, *arguments))

    # --- files and ports --------------------------------------------------------------------

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

    # --- checkpoints ------------------------------------------------------------------------

    async def checkpoint(self, handle: Handle, kind: Kind, into: Path) -> CheckpointParts:
        """See ``Runtime``."""
        record = self._running(handle)
        await self._open()
        started = time.monotonic()
        cut = self._name(handle.key)
        try:
            frozen, held = await self._cut(handle.key, kind, cut)
            files = processes = None
            if kind.has_files:
                await self._volume.pack(cut, into / FILES, held)
                files = _part(into / FILES)
            if kind.has_processes:
                images = self._home(handle.key) / "images"
                await criu.pack_images(self.parts.path, images, into / PROCESSES)
                processes = _part(into / PROCESSES)
        except BaseException:  # also when cancelled: half a checkpoint is none
            for name in (FILES, PROCESSES):
                (into / name).unlink(missing_ok=True)
            raise
        finally:
            await self._volume.remove(cut)
        return CheckpointParts(record.spec, files, processes, frozen, time.monotonic() - started)

    async def _cut(self, key: str, kind: Kind, cut: str) -> tuple[float, tuple[OpenFile, ...]]:
        """Save into a cut and the folder ``images``.

        Returns:
            The seconds that it stood still, and the files that it had open.
        """
        home = self._home(key)
        held: tuple[OpenFile, ...] = ()
        images, work = home / "images", home / "dump"
        await self._clear(images, work)
        async with self._frozen(key):
            started = time.monotonic()
            try:
                if kind.has_files:
                    upper = self._volume.upper(key)
                    held = await self._in_thread(held_by, self._pids(key), upper)
                    await self._volume.cut(key, cut)
                if kind.has_processes:
                    await self._runc(
                        key,
                        *("checkpoint", "--leave-running"),
                        *("--image-path", images, "--work-path", work),
                    )
            except RuntimeFailed as error:
                said = criu.errors_of(work / "dump.log")
                raise CannotCheckpoint(
                    criu.undumpable(said) if said else "runtime",
                    f"sandbox {key} cannot be saved: {said or error}",
                ) from error
            return time.monotonic() - started, held

    @asynccontextmanager
    async def _frozen(self, key: str) -> AsyncIterator[None]:
        try:
            # To its end, also when cancelled: a freeze that ends after the ``thaw`` is for ever.
            await call(freeze, self._groups(key))
            await self._in_thread(stop_anew, self._pids(key))
            yield
        finally:
            await call(thaw, self._groups(key))

    async def restore(self, parts: CheckpointParts, spec: SandboxSpec) -> Handle:
        """See ``Runtime``."""
        (made,) = await self.restore_all(parts, [spec])
        return made

    async def restore_all(
        self, parts: CheckpointParts, specs: Sequence[SandboxSpec]
    ) -> tuple[Handle, ...]:
        """See ``Runtime``."""
        for spec in specs:
            if (spec.image, spec.folder) != (parts.spec.image, parts.spec.folder):
                raise CannotRestore(f"{spec.key} has another image or folder than {parts.spec.key}")
            check_spec(spec)
        await self._open()
        async with self._unpacked(parts, specs) as beginning:
            return await self._all(self._begin(spec, beginning) for spec in specs)

    async def _all(self, begun: Iterable[Coroutine[None, None, Handle]]) -> tuple[Handle, ...]:
        """Sandboxes that begin beside each other: all of them or none."""
        tasks = [asyncio.create_task(one) for one in begun]
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            return tuple(task.result() for task in tasks)
        except BaseException:  # also when cancelled: ``gather`` has waited for all of them
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    await self.end(task.result())
            raise

    async def fork(self, handle: Handle, keys: Sequence[str]) -> tuple[Handle, ...]:
        """See ``Runtime``."""
        record = self._running(handle)
        await self._open()
        for key in keys:
            check_spec(SandboxSpec(key))
            if keys.count(key) > 1 or self._home(key).exists():
                raise AlreadyThere(f"sandbox {key} is there; end it or take another key")
        cut = self._name(handle.key)
        images = self._images / cut
        try:
            await self._cut(handle.key, Kind.FULL, cut)
            (self._home(handle.key) / "images").rename(images)
            criu.open_images(images)
            beginning = _Beginning(cut=cut, images=images)
            return await self._all(
                self._begin(replace(record.spec, key=key), beginning) for key in keys
            )
        finally:
            shutil.rmtree(images, ignore_errors=True)
            await self._volume.remove(cut)

    async def suspend(self, handle: Handle, into: Path) -> CheckpointParts:
        """See ``Runtime``."""
        record = self._running(handle)
        parts = await self.checkpoint(handle, Kind.FULL, into)
        self._keep(replace(record, suspended=parts))
        await self._stop(handle.key)
        await self._volume.remove(handle.key)
        return parts

    async def resume(self, handle: Handle) -> Handle:
        """See ``Runtime``."""
        record = self._record(handle.key)
        if record.suspended is None:
            return Handle(handle.key, record.incarnation)
        await self._open()
        # A host that died between these steps left a half behind.
        await self._stop(handle.key)
        await self._volume.remove(handle.key)
        running = _Record(record.spec, record.incarnation + 1)
        try:
            async with self._unpacked(record.suspended, [record.spec]) as beginning:
                await self._raise(running, beginning)
        except BaseException:  # also when cancelled: it stays suspended, whole
            await self._stop(handle.key)
            await self._volume.remove(handle.key)
            raise
        self._keep(running)
        return Handle(handle.key, running.incarnation)

    async def facts(self, handle: Handle) -> Facts:
        """See ``Runtime``."""
        record = self._record(handle.key)
        key = handle.key
        if record.suspended is not None:
            return Facts(State.SUSPENDED)
        unified = [group for group in self._groups(key) if (group / "cgroup.freeze").exists()]
        return Facts(
            State.RUNNING,
            init=self._init(key),
            pids=tuple(self._pids(key)),
            cgroup=unified[0] if unified else None,
            root=self._roots / key,
            upper=self._volume.upper(key),
            lower=self._volume.lower(record.spec.image),
        )


# --- records and logs -------------------------------------------------------------------------


def _part(path: Path) -> Part:
    return Part(path, path.stat().st_size)


def _check(part: Part) -> None:
    try:
        size = part.path.stat().st_size
    except OSError as error:
        raise CannotRestore(f"{part.path} is not there") from error
    if size != part.bytes:
        raise CannotRestore(f"{part.path} has {size} bytes and not {part.bytes}")
