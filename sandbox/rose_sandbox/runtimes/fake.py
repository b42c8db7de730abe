"""A runtime in this process: files are a mapping, processes are records; the same every time.

Its shell knows what the contract test says, and no more: ``;``, ``&&``, ``>``, ``>>``, ``&`` at the
end, ``$NAME``, and the commands of ``_BUILTINS``. Every other command is a process of that name:
in the foreground it is not found (127), in the background it lives until it is killed.
Next step: ``runc`` does it with real processes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import posixpath
import re
import shlex
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rose_sandbox.errors import (
    AlreadyThere,
    BadPath,
    CannotCheckpoint,
    CannotRestore,
    NotListening,
    Suspended,
    TooLarge,
    UnknownImage,
    UnknownSandbox,
)
from rose_sandbox.runtimes.runtime import (
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
    check_command,
    check_spec,
    cut_output,
)

_FIRST_PID = 2  # the first process is 1, as in a real one


@dataclass
class _Process:
    name: str
    arguments: list[str]


@dataclass
class _World:
    """Everything of one sandbox."""

    spec: SandboxSpec
    files: dict[str, bytes] = field(default_factory=dict)
    processes: dict[int, _Process] = field(default_factory=dict)
    sessions: dict[str, dict[str, str]] = field(default_factory=dict)
    ports: dict[int, bytes] = field(default_factory=dict)
    next_pid: int = _FIRST_PID
    incarnation: int = 1
    suspended: CheckpointParts | None = None

    def used(self) -> int:
        return sum(len(data) for data in self.files.values())


class _Exit(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class _Shell:
    """One shell: its variables and folder are in ``variables``, which outlives it in a session."""

    world: _World
    variables: dict[str, str]
    within: float
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)

    async def run(self, command: str) -> int:
        code = 0
        for line in re.split(r"[;\n]", command):
            for statement in line.split("&&"):
                code = await self._statement(statement.strip())
                if code:
                    break
        return code

    def _expand(self, text: str) -> str:
        return re.sub(r"\$(\w+)", lambda found: self.variables.get(found[1], ""), text)

    def path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.variables["PWD"], name))

    async def _statement(self, text: str) -> int:
        background = text.endswith("&")
        argv = [self._expand(part) for part in shlex.split(text.removesuffix("&"))]
        target, append = None, False
        if len(argv) > 2 and argv[-2] in {">", ">>"}:
            target, append, argv = self.path(argv[-1]), argv[-2] == ">>", argv[:-2]
        if not argv:
            return 0
        if background:
            return self._start(argv)
        if argv[0] == "sleep":
            return await self._sleep(float(argv[1]))
        built_in = _BUILTINS.get(argv[0])
        if built_in is None:
            self.err += f"bash: {argv[0]}: command not found\n".encode()
            return 127
        code, output = built_in(self, argv[1:])
        if target is None:
            self.out += output
            return code
        return code or self._write(target, output, append=append)

    async def _sleep(self, seconds: float) -> int:
        if seconds > self.within:
            await asyncio.sleep(self.within)
            raise TimeoutError
        await asyncio.sleep(seconds)
        return 0

    def _start(self, argv: list[str]) -> int:
        world = self.world
        if len(world.processes) + 1 >= world.spec.limits.pids:
            self.err += b"bash: fork: retry: Resource temporarily unavailable\n"
            return 254
        world.processes[world.next_pid] = _Process(argv[0], argv[1:])
        world.next_pid += 1
        return 0

    def _write(self, path: str, data: bytes, *, append: bool) -> int:
        before = self.world.files.get(path, b"")
        data = before + data if append else data
        if self.world.used() - len(before) + len(data) > self.world.spec.limits.disk_bytes:
            self.err += f"bash: {path}: No space left on device\n".encode()
            return 1
        self.world.files[path] = data
        return 0


def _echo(_shell: _Shell, argv: list[str]) -> tuple[int, bytes]:
    return 0, (" ".join(argv) + "\n").encode()


def _cat(shell: _Shell, argv: list[str]) -> tuple[int, bytes]:
    path = shell.path(argv[0])
    if path not in shell.world.files:
        shell.err += f"cat: {path}: No such file or directory\n".encode()
        return 1, b""
    return 0, shell.world.files[path]


def _rm(shell: _Shell, argv: list[str]) -> tuple[int, bytes]:
    return (0, b"") if shell.world.files.pop(shell.path(argv[-1]), None) is not None else (1, b"")


def _test(shell: _Shell, argv: list[str]) -> tuple[int, bytes]:
    return (0 if shell.path(argv[1]) in shell.world.files else 1), b""


def _export(shell: _Shell, argv: list[str]) -> tuple[int, bytes]:
    name, _, value = argv[0].partition("=")
    shell.variables[name] = value
    return 0, b""


def _cd(shell: _Shell, argv: list[str]) -> tuple[int, bytes]:
    shell.variables["PWD"] = shell.path(argv[0])
    return 0, b""


def _pwd(shell: _Shell, _argv: list[str]) -> tuple[int, bytes]:
    return 0, f"{shell.variables['PWD']}\n".encode()


def _exit(_shell: _Shell, argv: list[str]) -> tuple[int, bytes]:
    raise _Exit(int(argv[0]) if argv else 0)


def _named(shell: _Shell, argv: list[str]) -> list[int]:
    return [pid for pid, one in shell.world.processes.items() if one.name == argv[-1]]


def _pgrep(shell: _Shell, argv: list[str]) -> tuple[int, bytes]:
    found = _named(shell, argv)
    return (0 if found else 1), "".join(f"{pid}\n" for pid in found).encode()


def _pkill(shell: _Shell, argv: list[str]) -> tuple[int, bytes]:
    found = _named(shell, argv)
    for pid in found:
        del shell.world.processes[pid]
    return (0 if found else 1), b""


_BUILTINS: Mapping[str, Callable[[_Shell, list[str]], tuple[int, bytes]]] = {
    "cat": _cat,
    "cd": _cd,
    "echo": _echo,
    "exit": _exit,
    "export": _export,
    "false": lambda _shell, _argv: (1, b""),
    "mkdir": lambda _shell, _argv: (0, b""),  # its files need no folders
    "pgrep": _pgrep,
    "pkill": _pkill,
    "pwd": _pwd,
    "rm": _rm,
    "test": _test,
    "true": lambda _shell, _argv: (0, b""),
    "type": lambda _shell, _argv: (0, b""),  # whatever is begun here is there
}


class FakeRuntime:
    """Sandboxes that are values.

    Args:
        images: name -> its files, by absolute path.
        undumpable: names of processes that cannot be saved.
    """

    name = "fake"

    def __init__(
        self,
        images: Mapping[str, Mapping[str, bytes]] | None = None,
        undumpable: Iterable[str] = (),
    ) -> None:
        self._images = {"base": {}} if images is None else images
        self._undumpable = frozenset(undumpable)
        self._worlds: dict[str, _World] = {}

    async def images(self) -> tuple[str, ...]:
        """See ``Runtime``."""
        return tuple(sorted(self._images))

    async def sandboxes(self) -> tuple[Handle, ...]:
        """See ``Runtime``."""
        return tuple(Handle(key, world.incarnation) for key, world in sorted(self._worlds.items()))

    async def create(self, spec: SandboxSpec) -> Handle:
        """See ``Runtime``."""
        return self._add(self._fresh(spec))

    def _fresh(self, spec: SandboxSpec) -> _World:
        check_spec(spec)
        if spec.image not in self._images:
            raise UnknownImage(
                f"no image {spec.image}; here are: {', '.join(sorted(self._images))}"
            )
        if spec.key in self._worlds:
            raise AlreadyThere(f"sandbox {spec.key} is there; end it or take another key")
        return _World(spec, files=dict(self._images[spec.image]))

    def _add(self, world: _World) -> Handle:
        self._worlds[world.spec.key] = world
        return Handle(world.spec.key, world.incarnation)

    def _world(self, handle: Handle, *, running: bool = True) -> _World:
        world = self._worlds.get(handle.key)
        if world is None or (running and world.incarnation != handle.incarnation):
            raise UnknownSandbox(f"no sandbox {handle.key} (incarnation {handle.incarnation})")
        if running and world.suspended is not None:
            raise Suspended(f"sandbox {handle.key} is suspended; resume it first")
        return world

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
        world = self._world(handle)
        check_command(command, session)
        variables = dict(world.spec.environment) | {"PWD": world.spec.folder}
        if session is not None:
            variables = world.sessions.setdefault(session, variables)
        before = set(world.processes)
        shell = _Shell(world, variables, within)
        try:
            code, lost, late = await shell.run(command), False, False
        except _Exit as exited:
            code, lost, late = exited.code, session is not None, False
        except (TimeoutError, asyncio.CancelledError) as error:
            code, lost, late = 124, False, True
            for pid in set(world.processes) - before:
                del world.processes[pid]
            if isinstance(error, asyncio.CancelledError):
                raise
        if lost and session is not None:
            del world.sessions[session]
        out, err = bytes(shell.out), bytes(shell.err)
        return ExecResult(
            code,
            cut_output(out, output_bytes),
            cut_output(err, output_bytes),
            timed_out=late,
            cut=max(len(out), len(err)) > output_bytes,
            session_lost=lost,
        )

    async def read_file(self, handle: Handle, path: str, limit: int = FILE_BYTES) -> bytes:
        """See ``Runtime``."""
        world = self._world(handle)
        data = world.files.get(path)
        if data is None:
            raise BadPath(f"{path} is no plain file in sandbox {handle.key}")
        if len(data) > limit:
            raise TooLarge(f"{path} has {len(data)} bytes, over {limit}")
        return data

    async def write_file(
        self,
        handle: Handle,
        path: str,
        data: bytes,
        mode: int = 0o644,  # noqa: ARG002 - it has no modes
    ) -> None:
        """See ``Runtime``."""
        world = self._world(handle)
        if not path.startswith("/") or path.endswith("/"):
            raise BadPath(f"{path!r} is no absolute path of a file")
        rest = world.used() - len(world.files.get(path, b""))
        if len(data) > FILE_BYTES or rest + len(data) > world.spec.limits.disk_bytes:
            raise TooLarge(f"{len(data)} bytes for {path} do not fit")
        if any(above in world.files for above in _above(path)):
            raise BadPath(f"{path} leads through a file")
        world.files[path] = data

    def serve(self, handle: Handle, port: int, answer: bytes) -> None:
        """Let a server in the sandbox answer at a port."""
        self._world(handle).ports[port] = answer

    async def connect(self, handle: Handle, port: int) -> socket.socket:
        """See ``Runtime``."""
        answer = self._world(handle).ports.get(port)
        if answer is None:
            raise NotListening(f"nothing listens at port {port} of sandbox {handle.key}")
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(answer)
        ours.setblocking(False)
        return ours

    async def checkpoint(self, handle: Handle, kind: Kind, into: Path) -> CheckpointParts:
        """See ``Runtime``."""
        world = self._world(handle)
        if kind.has_processes:
            for process in world.processes.values():
                if process.name in self._undumpable:
                    raise CannotCheckpoint(
                        process.name, f"process {process.name} of {handle.key} cannot be saved"
                    )
        files = processes = None
        if kind.has_files:
            image = self._images[world.spec.image]
            changed = {
                path: base64.b64encode(data).decode()
                for path, data in sorted(world.files.items())
                if image.get(path) != data
            }
            gone = sorted(image.keys() - world.files.keys())
            files = _part(into / "files.tar", {"changed": changed, "gone": gone})
        if kind.has_processes:
            processes = _part(
                into / "processes.tar",
                {
                    "processes": {
                        pid: [one.name, *one.arguments] for pid, one in world.processes.items()
                    },
                    "sessions": world.sessions,
                    "ports": {port: answer.hex() for port, answer in world.ports.items()},
                    "next_pid": world.next_pid,
                },
            )
        return CheckpointParts(world.spec, files, processes)

    async def restore(self, parts: CheckpointParts, spec: SandboxSpec) -> Handle:
        """See ``Runtime``."""
        world = self._fresh(spec)
        if (spec.image, spec.folder) != (parts.spec.image, parts.spec.folder):
            raise CannotRestore(f"{spec.key} has another image or folder than {parts.spec.key}")
        self._fill(world, parts)
        return self._add(world)

    async def restore_all(
        self, parts: CheckpointParts, specs: Sequence[SandboxSpec]
    ) -> tuple[Handle, ...]:
        """See ``Runtime``."""
        made: list[Handle] = []
        try:
            for spec in specs:
                made.append(await self.restore(parts, spec))  # noqa: PERF401 - what is made counts
        except BaseException:  # also cancelled: those made so far must not stay
            for one in made:
                await self.end(one)
            raise
        return tuple(made)

    def _fill(self, world: _World, parts: CheckpointParts) -> None:
        try:
            image = dict(self._images[world.spec.image])
            if parts.files is not None:
                saved = _read(parts.files)
                for path in saved["gone"]:
                    del image[path]
                for path, data in saved["changed"].items():
                    image[path] = base64.b64decode(data)
            world.files = image
            if parts.processes is not None:
                saved = _read(parts.processes)
                world.processes = {
                    int(pid): _Process(name, arguments)
                    for pid, (name, *arguments) in saved["processes"].items()
                }
                world.sessions = saved["sessions"]
                world.ports = {
                    int(port): bytes.fromhex(answer) for port, answer in saved["ports"].items()
                }
                world.next_pid = saved["next_pid"]
        except (OSError, ValueError, KeyError) as error:
            raise CannotRestore(f"the parts of {parts.spec.key} are torn: {error}") from error

    async def fork(self, handle: Handle, keys: Sequence[str]) -> tuple[Handle, ...]:
        """See ``Runtime``."""
        world = self._world(handle)
        children = [self._fresh(replace(world.spec, key=key)) for key in keys]
        if len(set(keys)) < len(keys):
            raise AlreadyThere("a key stands twice among the children's")
        for process in world.processes.values():
            if process.name in self._undumpable:
                raise CannotCheckpoint(
                    process.name, f"process {process.name} of {handle.key} cannot be saved"
                )
        for child in children:
            child.files = dict(world.files)
            child.processes = dict(world.processes)
            child.sessions = {name: dict(values) for name, values in world.sessions.items()}
            child.ports = dict(world.ports)
            child.next_pid = world.next_pid
        return tuple(self._add(child) for child in children)

    async def suspend(self, handle: Handle, into: Path) -> CheckpointParts:
        """See ``Runtime``."""
        parts = await self.checkpoint(handle, Kind.FULL, into)
        spec = self._world(handle).spec
        self._worlds[handle.key] = _World(spec, suspended=parts, incarnation=handle.incarnation)
        return parts

    async def resume(self, handle: Handle) -> Handle:
        """See ``Runtime``."""
        world = self._world(handle, running=False)
        if world.suspended is None:
            return Handle(handle.key, world.incarnation)
        fresh = _World(world.spec, incarnation=world.incarnation + 1)
        self._fill(fresh, world.suspended)
        return self._add(fresh)

    async def end(self, handle: Handle) -> None:
        """See ``Runtime``."""
        self._worlds.pop(handle.key, None)

    async def facts(self, handle: Handle) -> Facts:
        """See ``Runtime``."""
        world = self._world(handle, running=False)
        return Facts(State.RUNNING if world.suspended is None else State.SUSPENDED)

    async def close(self) -> None:
        """See ``Runtime``."""


def _above(path: str) -> list[str]:
    return [str(folder) for folder in Path(path).parents]


def _part(path: Path, value: object) -> Part:
    data = json.dumps(value).encode()
    path.write_bytes(data)
    return Part(path, len(data))


def _read(part: Part) -> dict[str, Any]:
    data = part.path.read_bytes()
    if len(data) != part.bytes:
        raise ValueError(f"{part.path} has {len(data)} bytes and not {part.bytes}")
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"{part.path} holds no parts")  # noqa: TRY004
    return value
