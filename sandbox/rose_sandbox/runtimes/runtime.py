"""What every runtime of sandboxes offers, and the values that cross that seam.

A sandbox is a root file system over a read-only image, and the processes in it. Its states:

| from | by | to |
|---|---|---|
| - | ``create``, ``restore``, ``fork`` | Running |
| Running | ``suspend`` | Suspended: only its parts are left, no process and no memory |
| Suspended | ``resume`` | Running |
| Running, Suspended | ``end`` | gone |

``checkpoint`` leaves it Running, also where it fails. Files and processes of one checkpoint are cut
in the same frozen instant. A part is one plain file, complete by itself: files relative to the
image, processes relative to the files. So the latest files and the latest processes make a sandbox
when neither has changed since it was cut, which the inspector says.
Next step: ``runc`` on real parts, ``fake`` in this process.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from rose_core.sandboxes.networks import Network
from rose_sandbox.errors import BadPath, TooLarge

MIB = 1024 * 1024
OUTPUT_BYTES = 256 * 1024
"""Of each stream that ``exec`` hands back by default: more than a model's context holds."""
COMMAND_BYTES = 1 * MIB
"""The longest command: a file pasted into a here-document."""
FILE_BYTES = 512 * MIB
"""The largest file that is read or written in one call, which has it in memory."""
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


class Kind(StrEnum):
    """What a checkpoint saves."""

    FILES = "files"
    PROCESSES = "processes"
    FULL = "full"

    @property
    def has_files(self) -> bool:
        """Whether files are in it."""
        return self is not Kind.PROCESSES

    @property
    def has_processes(self) -> bool:
        """Whether processes are in it."""
        return self is not Kind.FILES


class State(StrEnum):
    """Where a sandbox stands."""

    RUNNING = "running"
    SUSPENDED = "suspended"


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use.

    Attributes:
        cpus: of the machine's processors, in processors.
        memory_bytes: of its processes and of what they keep in ``/run`` and ``/dev/shm``.
        pids: processes and threads.
        disk_bytes: what it may write over its image.
    """

    cpus: float = 1.0
    memory_bytes: int = 1024 * MIB
    pids: int = 512
    disk_bytes: int = 2048 * MIB


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox is made of; the same wherever it is restored.

    Attributes:
        key: its name on this host: letters, digits, ``-`` and ``_``, at most 63.
        image: a name from ``Runtime.images``.
        limits: what it may use.
        environment: variables of every command, over the image's own.
        folder: where commands start.
        networks: that its host may dial for it; None: as the host's own rules say.
    """

    key: str
    image: str = "base"
    limits: Limits = Limits()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = "/home"
    networks: tuple[Network, ...] | None = None


@dataclass(frozen=True)
class Handle:
    """A sandbox of a runtime.

    Attributes:
        key: the spec's.
        incarnation: of its processes on this host, counted up by create, restore and resume.
    """

    key: str
    incarnation: int = 1


@dataclass(frozen=True)
class ExecResult:
    """How a command ended.

    Attributes:
        exit_code: 0..255; 128 + n after signal n; 124 where ``timed_out``.
        stdout: its first and last bytes where ``cut``.
        stderr: as ``stdout``.
        timed_out: it ran past its limit and was killed, with what it had started in the meantime.
        cut: a stream had more bytes than were asked for, or than the sandbox keeps.
        session_lost: the session's shell has ended (it was killed, or the command said ``exit``);
            the next command gets a fresh one.
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    cut: bool = False
    session_lost: bool = False


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint.

    Attributes:
        path: where it lies.
        bytes: its size.
    """

    path: Path
    bytes: int


@dataclass(frozen=True)
class CheckpointParts:
    """What a sandbox is restored from; parts of several checkpoints may be joined.

    Attributes:
        spec: of the sandbox that was saved.
        files: changes to the image; None: the bare image.
        processes: None: it starts with none.
        frozen_seconds: how long the sandbox stood still.
        seconds: how long the whole took.
    """

    spec: SandboxSpec
    files: Part | None = None
    processes: Part | None = None
    frozen_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes of all saved parts together."""
        return sum(part.bytes for part in (self.files, self.processes) if part is not None)


@dataclass(frozen=True)
class Facts:
    """How a sandbox stands in Linux.

    Attributes:
        state: running or suspended.
        init: process id of its first process on the host; None where it has none.
        pids: of all its processes on the host, the first one among them.
        cgroup: folder of its group in the unified hierarchy, by which an inspector knows it.
        root: its root folder on the host; reading through it follows a tenant's links.
        upper: folder with its changes to the image.
        lower: the image, with owners as in ``upper``.
        door: path of a socket of the host that its way out leads to; None: its network is entered.
    """

    state: State
    init: int | None = None
    pids: tuple[int, ...] = ()
    cgroup: Path | None = None
    root: Path | None = None
    upper: Path | None = None
    lower: Path | None = None
    door: Path | None = None


class Runtime(Protocol):
    """Runs sandboxes on one host; every method may be called for several sandboxes at once.

    Calls for one sandbox are the caller's to order: at most one of checkpoint, suspend, resume and
    end at a time. Every method with a handle raises ``UnknownSandbox``, and ``Suspended`` where the
    sandbox must run; ``RuntimeFailed`` where the runtime's own program fails.
    """

    @property
    def name(self) -> str:
        """``runc``, ``runsc``, ``fake``."""
        ...

    async def images(self) -> tuple[str, ...]:
        """Names of the images that are here, sorted."""
        ...

    async def sandboxes(self) -> tuple[Handle, ...]:
        """Those that run or are suspended, by key; also those that an earlier host left behind."""
        ...

    async def create(self, spec: SandboxSpec) -> Handle:
        """Start a sandbox on the bare image.

        Raises:
            UnknownImage: it is not here.
            AlreadyThere: the key is taken.
            BadPath: the key or the folder is none.
        """
        ...

    async def exec(
        self,
        handle: Handle,
        command: str,
        within: float,
        *,
        session: str | None = None,
        output_bytes: int = OUTPUT_BYTES,
    ) -> ExecResult:
        """Run a command of the shell and wait for it, not for what it leaves in the background.

        A cancelled call ends when the command has: it is killed as one past its limit is, for
        nobody hears how it ends, and the session's next one would wait for it.

        Args:
            handle: the sandbox.
            command: for ``bash -c``.
            within: seconds.
            session: a shell that lives on between commands (``cd``, ``export``), made at its first
                one; None: a fresh shell.
            output_bytes: of each stream.

        Raises:
            TooLarge: the command is over ``COMMAND_BYTES``.
        """
        ...

    async def read_file(self, handle: Handle, path: str, limit: int = FILE_BYTES) -> bytes:
        """A plain file's bytes; links are followed inside the sandbox only.

        Raises:
            BadPath: it is not there, or no plain file.
            TooLarge: it has more than ``limit`` bytes.
        """
        ...

    async def write_file(self, handle: Handle, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a plain file, with the folders above it; what was there is replaced.

        Raises:
            BadPath: the path is none, or leads through something that is no folder.
            TooLarge: ``data`` is over ``FILE_BYTES`` or does not fit the sandbox's disk.
        """
        ...

    async def connect(self, handle: Handle, port: int) -> socket.socket:
        """A TCP connection, non-blocking, to a server at the sandbox's loopback address.

        Raises:
            NotListening: nothing answers.
        """
        ...

    async def checkpoint(self, handle: Handle, kind: Kind, into: Path) -> CheckpointParts:
        """Save what ``kind`` says into a folder that is there; the sandbox runs on.

        Raises:
            CannotCheckpoint: something cannot be saved; ``into`` is as it was.
        """
        ...

    async def restore(self, parts: CheckpointParts, spec: SandboxSpec) -> Handle:
        """Make a sandbox from parts; any number may be made from the same.

        Args:
            parts: from here or from another host with the same image.
            spec: its key may differ from the saved one's; image and folder may not.

        Raises:
            UnknownImage: it is not here.
            AlreadyThere: the key is taken.
            CannotRestore: the parts are torn, or do not fit together.
        """
        ...

    async def restore_all(
        self, parts: CheckpointParts, specs: Sequence[SandboxSpec]
    ) -> tuple[Handle, ...]:
        """Make a sandbox of each spec from the same parts; of none, the bare image's.

        All of them or none.

        Raises:
            UnknownImage, AlreadyThere, CannotRestore: as ``restore``.
        """
        ...

    async def fork(self, handle: Handle, keys: Sequence[str]) -> tuple[Handle, ...]:
        """A sandbox for each key as this one is now; it runs on. All of them or none.

        Raises:
            CannotCheckpoint: something in it cannot be saved.
            AlreadyThere: a key is taken.
        """
        ...

    async def suspend(self, handle: Handle, into: Path) -> CheckpointParts:
        """Save all of it into a folder and free its memory and processes.

        Raises:
            CannotCheckpoint: something cannot be saved; it runs on.
        """
        ...

    async def resume(self, handle: Handle) -> Handle:
        """Run a suspended sandbox on, from the parts where ``suspend`` put them.

        Raises:
            CannotRestore: they are no longer there; the sandbox stays suspended.
        """
        ...

    async def end(self, handle: Handle) -> None:
        """Kill its processes and remove its files; an ended or unknown one is no error."""
        ...

    async def facts(self, handle: Handle) -> Facts:
        """How it stands; a suspended one has facts too."""
        ...

    async def close(self) -> None:
        """Let go of what the runtime itself holds; sandboxes live on."""
        ...


def check_spec(spec: SandboxSpec) -> None:
    """What every runtime asks of a spec.

    Raises:
        BadPath: the key or the folder is none.
    """
    if not _KEY.fullmatch(spec.key):
        raise BadPath(
            f"{spec.key!r} is no key: 1 to 63 letters, digits, - and _, the first no - or _"
        )
    if not spec.folder.startswith("/"):
        raise BadPath(f"folder {spec.folder!r} is not absolute")


def check_command(command: str, session: str | None) -> bytes:
    """What every runtime asks of a command; returns its bytes.

    Raises:
        TooLarge: it is over ``COMMAND_BYTES``.
        BadPath: the session has no name.
    """
    data = command.encode()
    if len(data) > COMMAND_BYTES:
        raise TooLarge(f"the command has over {COMMAND_BYTES} bytes; write a file and run it")
    if session is not None:
        check_spec(SandboxSpec(session))
    return data


def cut_output(data: bytes, limit: int) -> bytes:
    """The first and the last half of ``limit`` bytes, where there are more."""
    if len(data) <= limit:
        return data
    half = limit // 2
    return data[:half] + data[len(data) - (limit - half) :]
