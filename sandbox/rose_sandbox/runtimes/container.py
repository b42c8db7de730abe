"""What sandboxes of real containers have in common, whichever program runs them.

Everything about a sandbox lies in its folder, written before it is needed: a runtime that starts
anew over the same folder finds what an earlier one left, running or suspended.

| file | holds |
|---|---|
| ``sandbox.json`` | spec, incarnation, and the parts where it is suspended |
| ``bundle/config.json`` | what the program is told (``oci``) |

All mounts lie below ``/run/GROUP``: a sandbox's root is another user, who must get there, and a
folder of state can be removed without a walk into what is mounted.

Files are ``volume``'s, so that files that one program's sandbox wrote begin another's. Images of
processes are of the program that made them, and no other reads them.
Next step: ``runc`` and ``runsc`` run programs and commands.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from pydantic import TypeAdapter

from rose_sandbox.errors import (
    AlreadyThere,
    CannotRestore,
    RuntimeFailed,
    SandboxError,
    Suspended,
    UnknownImage,
    UnknownSandbox,
)
from rose_sandbox.runtimes import oci
from rose_sandbox.runtimes.open_files import OpenFile, held_with, write_held
from rose_sandbox.runtimes.parts import Parts, find_parts
from rose_sandbox.runtimes.processes import empty, group_of
from rose_sandbox.runtimes.programs import call, run
from rose_sandbox.runtimes.runtime import (
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
from rose_wire.cgroups import hierarchies, members

FILES, PROCESSES = "files.tar", "processes.tar"
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
        images: of processes, in a folder.
        held: files that these have open.
    """

    files: Part | None = None
    cut: str | None = None
    images: Path | None = None
    held: tuple[OpenFile, ...] = ()


class CommandEnd(NamedTuple):
    """How a command ended.

    Attributes:
        exit_code: 0..255; of a late one what it answered, if it did.
        session_lost: its session's shell ended with it.
        late: it was killed, after its time.
    """

    exit_code: int
    session_lost: bool = False
    late: bool = False

    def result(self, out: bytes, err: bytes, output_bytes: int) -> ExecResult:
        """What its caller gets, with at most so many bytes of each stream."""
        return ExecResult(
            LATE.exit_code if self.late else self.exit_code,
            cut_output(out, output_bytes),
            cut_output(err, output_bytes),
            timed_out=self.late,
            cut=max(len(out), len(err)) > output_bytes,
            session_lost=self.session_lost,
        )


LATE = CommandEnd(124, late=True)
"""Of a command that was killed and did not answer."""
GRACE_SECONDS = 1.0
"""For a session's shell to notice that what it waited for was killed, before it is killed too."""


class FrozenCut(NamedTuple):
    """What a checkpoint knows of the instant that it was taken in.

    Attributes:
        seconds: that the sandbox stood still.
        held: files that it had open.
    """

    seconds: float
    held: tuple[OpenFile, ...] = ()


class ContainerRuntime(ABC):
    """Sandboxes of one program.

    Args:
        folder: of all state; a disk with room.
        parts: programs and images; None: this machine's.
        within: group below which those of sandboxes lie, from the top of each hierarchy.
        disk_bytes: of all sandboxes' files.

    Raises:
        Unavailable: this machine lacks a part.
    """

    name: ClassVar[str]
    """Of the runtime, and of the program."""
    programs: ClassVar[tuple[str, ...]]
    """That it needs."""
    image: ClassVar[str]
    """A file that each of the program's images of processes has, and no other program's."""

    def __init__(
        self,
        folder: Path,
        parts: Parts | None = None,
        within: str = "",
        disk_bytes: int = VOLUME_BYTES,
    ) -> None:
        self.parts = parts or find_parts(self.programs)
        self._folder = folder.resolve()
        self.group, self._within = group_of(self._folder), within
        self._loopback = self._folder / "loopback"
        self._roots = Path("/run") / self.group
        self._images = self._folder / "images"
        # No key begins with a point.
        self._volume = Volume(self._folder, self._roots / ".host", self.parts, disk_bytes)
        self._threads = ThreadPoolExecutor(thread_name_prefix="sandbox")
        self._opening = asyncio.Lock()
        self._is_open = False
        self._next = 0

    # --- the host ----------------------------------------------------------------------------

    async def _open(self) -> None:
        async with self._opening:
            if not self._is_open:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._loopback.write_text(oci.LOOPBACK)
                self._loopback.chmod(0o755)
                self._roots.mkdir(mode=0o711, exist_ok=True)
                await self._clear(self._images)
                self._images.chmod(0o700)
                await self._prepare()
                await self._volume.open()
                # A host that was killed while it made one left a half behind; while it saved one,
                # a cut and a sandbox that stands still.
                await self._volume.remove_cuts()
                for home in self._folder.glob("sandboxes/*"):
                    if not (home / "sandbox.json").exists():
                        await self._remove(home.name)
                    else:
                        await self._let_go(home.name)
                self._is_open = True

    @abstractmethod
    async def _prepare(self) -> None:
        """What the program needs once, when the runtime opens."""

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

    # --- life --------------------------------------------------------------------------------

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
            await call(self._keep, record)
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
                await self._fill(beginning.files, key, beginning.held)
        await self._volume.mount(key, spec.image, self._roots / key)
        bundle = home / "bundle"
        bundle.mkdir(exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(self._config(spec, self._roots / key)))
        if beginning.images is None:
            await self._run_first(key)
        elif (beginning.images / self.image).exists():
            await self._restore_processes(beginning.images, key)
        else:
            raise CannotRestore(
                f"the processes of {key} were saved by another runtime than {self.name}: restore "
                "them at a host that has that one (--runtime)"
            )
        await self._wait_until_it_listens(key)

    @abstractmethod
    def _config(self, spec: SandboxSpec, root: Path) -> object:
        """``config.json`` of a sandbox whose root folder is mounted."""

    @abstractmethod
    async def _run_first(self, key: str) -> None:
        """Start its first process.

        Raises:
            RuntimeFailed: it does not start.
        """

    @abstractmethod
    async def _restore_processes(self, images: Path, key: str) -> None:
        """Start it as its images of processes have it, which other restores may share.

        Raises:
            CannotRestore: they do not give processes back.
        """

    @abstractmethod
    async def _wait_until_it_listens(self, key: str) -> None:
        """Return when commands can be given to it.

        Raises:
            RuntimeFailed: it does not listen in time.
        """

    def _cgroup(self, key: str) -> str:
        """Its group, from the top of each hierarchy."""
        return "/" + "/".join(filter(None, (self._within, self.group, key)))

    async def _fill(self, part: Part, key: str, held: tuple[OpenFile, ...]) -> None:
        try:
            _check(part)
            await self._volume.unpack(part.path, key, held)
        except RuntimeFailed as error:
            raise CannotRestore(f"files of {key} cannot be unpacked: {error}") from error

    @asynccontextmanager
    async def _unpacked(
        self, parts: CheckpointParts, specs: Sequence[SandboxSpec]
    ) -> AsyncIterator[_Beginning]:
        """Parts, unpacked once for all that begin as them."""
        name = self._name(specs[0].key)
        images, cut = self._images / name, None
        held: tuple[OpenFile, ...] = ()
        try:
            if parts.processes is not None:
                images.mkdir()
                try:
                    _check(parts.processes)
                    await unpack_images(self.parts.path, parts.processes.path, images)
                    held = held_with(images)
                except RuntimeFailed as error:
                    raise CannotRestore(
                        f"processes of {specs[0].key} cannot be unpacked: {error}"
                    ) from error
            if len(specs) > 1 and parts.files is not None:
                # A snapshot of it costs milliseconds, whatever its size.
                cut = name
                await self._volume.make(cut, specs[0].limits.disk_bytes)
                await self._fill(parts.files, cut, held)
            yield _Beginning(
                parts.files if cut is None else None,
                cut,
                images if parts.processes is not None else None,
                held,
            )
        finally:
            shutil.rmtree(images, ignore_errors=True)
            await self._volume.remove(name)

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
        # Also what a restore that failed left behind, of which the program knows nothing. ``runc
        # delete`` looks whether a killed process is gone every 0.1 s; what it would do is this.
        await self._in_thread(empty, self._groups(key))
        for known in self._known(key):
            if known.is_dir():
                shutil.rmtree(known, ignore_errors=True)
            elif known.exists():  # a pod's own files are read-only, also where there is none
                known.unlink(missing_ok=True)
        await self._volume.unmount(self._roots / key)
        with suppress(OSError):
            (self._roots / key).rmdir()

    @abstractmethod
    def _known(self, key: str) -> Iterable[Path]:
        """What the program itself keeps of a sandbox."""

    async def _clear(self, *folders: Path) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def _tops(self) -> list[Path]:
        found = [folder / self._within / self.group for folder in hierarchies()]
        return [folder for folder in found if folder.is_dir()]

    def _groups(self, key: str) -> list[Path]:
        return [folder / key for folder in self._tops()]

    def _pids(self, key: str) -> list[int]:
        found = {pid for group in self._groups(key)[:1] for pid in members(group)}
        return sorted(found - {0})

    @abstractmethod
    def _first(self, key: str) -> int | None:
        """Process id of its first process on the host; None where it has none there.

        Raises:
            UnknownSandbox: it does not run.
        """

    async def _in_thread(
        self, function: Callable[..., _T], *arguments: object, **named: object
    ) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(function, *arguments, **named))

    # --- checkpoints -------------------------------------------------------------------------

    async def checkpoint(self, handle: Handle, kind: Kind, into: Path) -> CheckpointParts:
        """See ``Runtime``."""
        record = self._running(handle)
        await self._open()
        started = time.monotonic()
        cut = self._name(handle.key)
        try:
            frozen = await self._cut(handle.key, kind, cut)
            files = processes = None
            if kind.has_files:
                await self._volume.pack(cut, into / FILES, frozen.held)
                files = _part(into / FILES)
            if kind.has_processes:
                images = self._home(handle.key) / "images"
                write_held(images, frozen.held)
                await pack_images(self.parts.path, images, into / PROCESSES)
                processes = _part(into / PROCESSES)
        except BaseException:  # also when cancelled: half a checkpoint is none
            for name in (FILES, PROCESSES):
                (into / name).unlink(missing_ok=True)
            raise
        finally:
            await self._volume.remove(cut)
        return CheckpointParts(
            record.spec, files, processes, frozen.seconds, time.monotonic() - started
        )

    @abstractmethod
    async def _cut(self, key: str, kind: Kind, cut: str) -> FrozenCut:
        """Save into a cut and the folder ``images`` of its home, in the same frozen instant.

        Raises:
            CannotCheckpoint: something cannot be saved.
        """

    @abstractmethod
    async def _let_go(self, key: str) -> None:
        """Let a sandbox run that a host left standing still; others are no error."""

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
            open_images(images)
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
        await call(self._keep, replace(record, suspended=parts))
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
        await call(self._keep, running)
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
            init=self._first(key),
            pids=tuple(self._pids(key)),
            cgroup=unified[0] if unified else None,
            root=self._roots / key,
            upper=self._volume.upper(key),
            lower=self._volume.lower(record.spec.image),
            door=self._door(key),
        )

    def _door(self, key: str) -> Path | None:  # noqa: ARG002 - most are entered
        return None


def _part(path: Path) -> Part:
    return Part(path, path.stat().st_size)


def _check(part: Part) -> None:
    try:
        size = part.path.stat().st_size
    except OSError as error:
        raise CannotRestore(f"{part.path} is not there") from error
    if size != part.bytes:
        raise CannotRestore(f"{part.path} has {size} bytes and not {part.bytes}")


async def pack_images(path: str, images: Path, into: Path) -> None:
    """A folder of images as one file, the same bytes for the same images; the folder is gone.

    Raises:
        RuntimeFailed: the disk is full.
    """
    await run(
        path,
        *("tar", "--create", "--sort=name", "--format=pax", "--sparse", "--numeric-owner"),
        *("--file", into, "--directory", images, "."),
    )
    shutil.rmtree(images, ignore_errors=True)


async def unpack_images(path: str, file: Path, images: Path) -> None:
    """Images of ``pack_images`` into a folder that is there; any number of restores may share it.

    Raises:
        RuntimeFailed: the file is torn, or the disk full.
    """
    await run(path, *("tar", "--extract", "--file", file, "--directory", images))
    open_images(images)


def open_images(images: Path) -> None:
    """Let tasks read them that are not yet, or already, another user; the folder above is shut."""
    for path in images.iterdir():
        path.chmod(0o644)
    images.chmod(0o755)
