"""Sandboxes of gVisor: what runs in them meets a kernel of its own, and not the host's.

So this is the runtime for tenants who do not trust each other: a hole in the host's kernel is not
in reach of their programs. Files are on the host, as with ``runc``, and are cut as there. Processes
and what lies in memory are gVisor's, which saves them all as one image.

A frozen instant: ``runsc pause``, gVisor's image, snapshot, ``runsc resume``. Files that programs
map come to the host before the image is done, so the snapshot follows it.
Next step: ``served`` is what a command talks to, through ``channel``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
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
from rose_sandbox.runtimes import files, oci
from rose_sandbox.runtimes.channel import ANSWER_SECONDS, FROM, TO, Channel, Silent
from rose_sandbox.runtimes.container import (
    GRACE_SECONDS,
    LATE,
    CommandEnd,
    ContainerRuntime,
    FrozenCut,
)
from rose_sandbox.runtimes.kernel import FIRST_ID
from rose_sandbox.runtimes.parts import GVISOR, Parts
from rose_sandbox.runtimes.processes import pauses
from rose_sandbox.runtimes.programs import run, whole
from rose_sandbox.runtimes.runtime import (
    FILE_BYTES,
    OUTPUT_BYTES,
    ExecResult,
    Handle,
    Kind,
    SandboxSpec,
    check_command,
)
from rose_sandbox.runtimes.served import SHORT
from rose_sandbox.runtimes.volume import VOLUME_BYTES
from rose_wire.cgroups import text_of

STREAM_BYTES = oci.RUN_BYTES
"""Of a command's output: what has room where it lies."""
_FLAGS = (
    # Nothing but a loopback, which the host reaches by sockets in a folder of its own.
    *("--network=none", "--host-uds=open"),
    # Files are the host's own, where they are limited and cut; nothing of them is kept inside.
    *("--overlay2=none", "--file-access=shared"),
)
_SOCKETS = (Path("/var/run"), Path("/run"), Path("/tmp"))  # noqa: S108 - gVisor's own choice
"""Where gVisor puts a sandbox's control socket, if not in its own folder."""
# What gVisor says of things it cannot save -> the word for it.
_UNDUMPABLE = (
    (r"deleted and invalidated dentries", "deleted file"),
    (r"host\.inode is not savable|hostinet|host FD", "file of the host"),
    (r"[Nn]o space left", "full disk of the host"),
)


class RunscRuntime(ContainerRuntime):
    """Sandboxes of gVisor; arguments as of ``ContainerRuntime``, and this.

    Args:
        way_out: whether there is one (``Facts.door``), which ``socat`` in the image carries.
    """

    name = "runsc"
    programs = GVISOR
    image = "checkpoint.img"

    def __init__(
        self,
        folder: Path,
        parts: Parts | None = None,
        within: str = "",
        disk_bytes: int = VOLUME_BYTES,
        *,
        way_out: bool = False,
    ) -> None:
        super().__init__(folder, parts, within, disk_bytes)
        self._way_out = way_out
        self._channels: dict[str, Channel] = {}

    # --- life -------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Nothing."""

    def _config(self, spec: SandboxSpec, root: Path) -> object:
        way = self._way(spec.key)
        way.mkdir(mode=0o711, exist_ok=True)
        return oci.gvisor_config(spec, root, self._cgroup(spec.key), way, out=self._way_out)

    def _way(self, key: str) -> Path:
        """Folder of sockets that it may connect to; no key has a point."""
        return self._roots / f"{key}.way"

    async def _run_first(self, key: str) -> None:
        # gVisor puts a folder in memory over an empty /tmp, where no cut of files would find it.
        root = os.open(self._roots / key, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            await self._in_thread(files.put, root, "/tmp/.rose", b"", 0o600)  # noqa: S108 - its own
        finally:
            os.close(root)
        await self._start(key, "run", "--detach", "--bundle", self._home(key) / "bundle")

    async def _restore_processes(self, images: Path, key: str) -> None:
        bundle = self._home(key) / "bundle"
        try:
            await self._start(
                key, "restore", "--detach", "--bundle", bundle, "--image-path", images
            )
        except RuntimeFailed as error:
            raise CannotRestore(f"processes of {key} cannot be restored: {error}") from error

    async def _start(self, key: str, verb: str, *options: str | Path) -> None:
        """Start its first process at fresh pipes."""
        self._hang_up(key)
        home = self._home(key)
        Channel.make(home)
        # Both ways, so that it never finds its host gone.
        ends = [os.open(home / name, os.O_RDWR | os.O_CLOEXEC) for name in (TO, FROM)]
        try:
            await self._runsc(key, verb, *options, pipes=(ends[0], ends[1]))
        finally:
            for end in ends:
                os.close(end)

    async def _wait_until_it_listens(self, key: str) -> None:
        try:
            await self._channel(key).ask("hello")
        except Silent as error:
            raise RuntimeFailed(f"sandbox {key} does not listen: {error}") from error

    async def _let_go(self, key: str) -> None:
        with suppress(RuntimeFailed):  # it does not stand still
            await self._runsc(key, "resume")
        with suppress(RuntimeFailed, UnknownSandbox, OSError):
            await self._channel(key).ask("hello")

    def _container(self, key: str) -> str:
        # gVisor takes the beginning of a name for the name; no key has a point.
        return f"{super()._container(key)}."

    def _known(self, key: str) -> Iterable[Path]:
        self._hang_up(key)
        name = self._container(key)
        own = self._folder / "runsc"
        # Where one is left, the next life of the key takes the next place, and none after the last.
        sockets = [place / f"runsc-{name}.sock" for place in (own, *_SOCKETS)]
        return [*own.glob(f"{name}_sandbox:*"), *sockets, self._way(key)]

    def _door(self, key: str) -> Path | None:
        return self._way(key) / "proxy" if self._way_out else None

    def _first(self, key: str) -> None:  # noqa: ARG002 - none of its processes is the host's
        return None

    async def _runsc(
        self, key: str, verb: str, *options: str | Path, pipes: tuple[int, int] | None = None
    ) -> None:
        log = self._home(key) / "runsc.log"
        log.unlink(missing_ok=True)
        try:
            await run(
                self.parts.path,
                *("runsc", "--root", self._folder / "runsc", "--log", log, *_FLAGS),
                verb,
                *(*options, self._container(key)),
                pipes=pipes,
            )
        except RuntimeFailed as error:
            raise RuntimeFailed(_errors_of(log) or str(error)) from error

    # --- its first process ------------------------------------------------------------------

    def _channel(self, key: str) -> Channel:
        if key not in self._channels:
            self._channels[key] = Channel(self._home(key), lambda: bool(self._pids(key)))
        return self._channels[key]

    def _hang_up(self, key: str) -> None:
        if (channel := self._channels.pop(key, None)) is not None:
            channel.close()

    async def close(self) -> None:
        """See ``Runtime``."""
        await super().close()
        for key in list(self._channels):
            self._hang_up(key)

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
        data = check_command(command, session) + b"\n"
        channel = self._channel(handle.key)
        number = f"{time.time_ns():x}{secrets.token_hex(2)}"
        then = data if len(data) > SHORT else data.replace(b"\0", b"") + b"\0"
        try:
            status, _ = await channel.ask("run", number, session or "-", len(data), then=then)
            if status != "ok":
                raise RuntimeFailed(
                    "the sandbox takes no commands (/run/rose); what ran in it broke or filled "
                    "that folder: go back to an earlier turn, or end it"
                )
            end = await self._ended(channel, number, within, session)
        except asyncio.CancelledError:
            await whole(self._give_up(channel, number, session))
            raise
        try:
            out, err = [await self._stream(channel, f"{number}.{one}") for one in ("out", "err")]
            await channel.ask("drop", number)
        except Silent:
            if not end.late:
                raise
            out = err = b""  # it has no process left to look with: the command took them all
        return end.result(out, err, output_bytes)

    async def _ended(
        self, channel: Channel, number: str, within: float, session: str | None
    ) -> CommandEnd:
        """Wait for a command's end, which comes at the latest soon after ``within`` seconds."""
        ends, killed = time.monotonic() + within, 0.0
        for pause in pauses():
            try:
                status, output = await channel.ask("look", number, within=_left(ends))
            except Silent:
                return LATE
            if status == "done":
                code, _, rest = output.decode().strip().partition(" ")
                return CommandEnd(int(code), rest == "lost", killed > 0)
            if status == "gone":  # killed: it says nothing
                return CommandEnd(137, session is not None, killed > 0)
            now = time.monotonic()
            if now >= ends:
                killed = killed or now
                hard = session is None or now > killed + GRACE_SECONDS
                runs = await _kill(channel, number, hard=hard)
                if session is None or not runs:
                    return LATE
            await asyncio.sleep(pause)
        raise AssertionError("pauses never end")

    async def _give_up(self, channel: Channel, number: str, session: str | None) -> None:
        """Kill a command whose caller has gone."""
        with suppress(SandboxError):
            await self._ended(channel, number, 0.0, session)
            await channel.ask("drop", number)

    async def _stream(self, channel: Channel, name: str) -> bytes:
        path = f"/run/rose/{name}".encode() + b"\0"
        return (await channel.ask("get", STREAM_BYTES, then=path, most=STREAM_BYTES))[1]

    # --- files and ports --------------------------------------------------------------------

    async def read_file(self, handle: Handle, path: str, limit: int = FILE_BYTES) -> bytes:
        """See ``Runtime``."""
        self._running(handle)
        await self._open()
        channel = self._channel(handle.key)
        status, data = await channel.ask("get", limit, then=_path(path), most=limit)
        if status == "large":
            raise TooLarge(f"{path} has over {limit} bytes")
        if status != "ok":
            raise BadPath(f"{path} is no plain file")
        return data

    async def write_file(self, handle: Handle, path: str, data: bytes, mode: int = 0o644) -> None:
        """See ``Runtime``."""
        record = self._running(handle)
        await self._open()
        if not path.startswith("/") or path.endswith("/"):
            raise BadPath(f"{path!r} is no absolute path of a file")
        if len(data) > min(FILE_BYTES, record.spec.limits.disk_bytes):
            raise TooLarge(f"{len(data)} bytes for {path} do not fit")
        status = await self._channel(handle.key).put(_path(path), mode, data)
        if status == "bad":
            raise BadPath(f"{path} is no plain file, or leads through one")
        if status != "ok":
            raise TooLarge(f"{path}: the sandbox's disk is full")

    async def connect(self, handle: Handle, port: int) -> socket.socket:
        """See ``Runtime``; a checkpoint hangs up, and the image needs ``socat``."""
        self._running(handle)
        await self._open()
        name = secrets.token_hex(4)
        path = self._way(handle.key) / name
        with socket.socket(socket.AF_UNIX) as door:
            door.setblocking(False)
            door.bind(str(path))
            try:
                os.chown(path, FIRST_ID, FIRST_ID)
                door.listen(1)
                status, _ = await self._channel(handle.key).ask("join", port, name)
                if status != "ok":
                    raise NotListening(f"nothing listens at port {port} of sandbox {handle.key}")
                async with asyncio.timeout(ANSWER_SECONDS):
                    connection, _ = await asyncio.get_running_loop().sock_accept(door)
            except TimeoutError as error:
                raise NotListening(
                    f"port {port} of sandbox {handle.key} cannot be reached: its image has no socat"
                ) from error
            finally:
                path.unlink()
        connection.setblocking(False)
        return connection

    # --- checkpoints ------------------------------------------------------------------------

    async def _cut(self, key: str, kind: Kind, cut: str) -> FrozenCut:
        try:
            return await self._cut_apart(key, kind, cut)
        finally:
            await self._channel(key).ask("hello")

    async def _cut_apart(self, key: str, kind: Kind, cut: str) -> FrozenCut:
        images = self._home(key) / "images"
        await self._clear(images)
        # Connections to the host could not be given back.
        async with self._channel(key).quiet("part"), self._paused(key):
            started = time.monotonic()
            try:
                if kind.has_processes:
                    await self._runsc(
                        key,
                        *("checkpoint", "--leave-running", "--compression=none"),
                        *("--exclude-committed-zero-pages", "--image-path", images),
                    )
                if kind.has_files:
                    await self._volume.cut(key, cut)
            except RuntimeFailed as error:
                output = str(error)
                what = next(
                    (status for sign, status in _UNDUMPABLE if re.search(sign, output)), None
                )
                raise CannotCheckpoint(
                    what or "runtime",
                    # gVisor says it in a line; where in its own program is no matter of a tenant.
                    f"sandbox {key} cannot be saved: {output.partition(chr(10))[0].rstrip(':')}; a "
                    "host with --runtime runc may save such a one",
                ) from error
            # Inode numbers are gVisor's own, which its image has.
            return FrozenCut(time.monotonic() - started)

    @asynccontextmanager
    async def _paused(self, key: str) -> AsyncIterator[None]:
        try:
            await self._runsc(key, "pause")
            yield
        finally:
            await self._runsc(key, "resume")


def _path(path: str) -> bytes:
    data = os.fsencode(path)
    if b"\0" in data:
        raise BadPath(f"{path!r} has a zero byte")
    return data + b"\0"


async def _kill(channel: Channel, number: str, *, hard: bool) -> bool:
    """Kill what a command's runner started; ``hard``: the runner too. False: it has none."""
    with suppress(Silent):
        status, _ = await channel.ask("kill", number, "hard" if hard else "")
        return status != "none"
    return True


def _left(ends: float) -> float:
    # Also at the last moment somebody busy has time to answer.
    return max(ends - time.monotonic(), GRACE_SECONDS)


def _errors_of(log: Path) -> str:
    """What runsc says went wrong: a line of JSON for each error."""
    found = []
    for line in text_of(log).splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            if entry.get("level") == "error":
                found.append(str(entry["msg"]))
    return "; ".join(found)
