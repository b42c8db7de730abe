"""One engine process tree: spawn it inside its cgroup, keep its log small, say how it ended.

The engine writes its log file itself (opened for append), so it survives the host; the host only
copies and truncates it when it grows. Next step: ``lifecycle`` decides when to spawn and to end.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rose_agent.errors import BadEngine
from rose_agent.host.processes import exec_engine
from rose_agent.host.processes.launchers import EngineProgram
from rose_agent.host.users.accounts import Account
from rose_agent.os.freezers import Freezer
from rose_agent.os.groups import ProcessGroup
from rose_agent.os.limits import Limiter
from rose_agent.os.processes import kernel_path, start_ticks

# What an engine inherits of the host's environment; secrets and cluster addresses are not in it.
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "HOME", "LD_LIBRARY_PATH")
# SGLang's load snapshots; other shared memory may belong to others as well.
LOG_BYTES = 4 * 1024 * 1024


class Root(Protocol):
    """An engine's first process, whatever its parent is."""

    @property
    def pid(self) -> int:
        """Process number, in the namespace of the caller."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None = it lives."""

    async def wait(self) -> int:
        """Wait for its end; returns ``returncode``."""


class Spawner(Protocol):
    """Starts engines in the host's place: the root helper of a host without privileges."""

    def spawn(
        self,
        name: str,
        argv: tuple[str, ...],
        variables: dict[str, str],
        log: int,
        *,
        own_shm: bool,
    ) -> tuple[Root, str]:
        """Start it; its cgroups, limits and user are those of this name.

        Returns:
            Its first process, and its cgroup as the kernel names it.

        Raises:
            GroupError: it was refused or could not be made.
        """


@dataclass(frozen=True)
class Spawned:
    """A running engine.

    Attributes:
        root: the process the host started; its pid leads the tree.
        group: the tree.
        start_ticks: start time of the root in the kernel's clock ticks.
        cgroup_path: the tree's cgroup as the kernel names it; empty without a cgroup.
    """

    root: Root
    group: ProcessGroup
    start_ticks: int
    cgroup_path: str


def environment(program: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: an allow-list of the host's, then the program's own."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {"PATH": os.defpath, **inherited, **program}


@dataclass(frozen=True)
class Containment:
    """What an engine's processes are put into.

    Attributes:
        name: the slot's uid; names the cgroup.
        freezer: the machine's way to stop trees; makes the cgroup.
        log: file that takes the engine's output, appended to.
        account: who it runs as; the host's user by default.
        limiter: what it may take of the node; None = anything.
        own_shm: the limit of shared memory applies; MPS clients need the node's.
        spawner: who starts it in our place; None = we do.
        group: one that it is in beside its own; 0 = none.
    """

    name: str
    freezer: Freezer
    log: Path
    account: Account = field(default_factory=Account)
    limiter: Limiter | None = None
    own_shm: bool = True
    spawner: Spawner | None = None
    group: int = 0

    @property
    def shm_bytes(self) -> int:
        """Size of its own ``/dev/shm``; 0 = it has the node's."""
        return self.limiter.limits.shm_bytes if self.limiter and self.own_shm else 0


async def spawn(program: EngineProgram, inside: Containment) -> Spawned:
    """Start the engine in a cgroup of its own.

    Raises:
        GroupError: the cgroup cannot be made.
        BadEngine: the program does not exist.
    """
    if shutil.which(program.argv[0]) is None:
        message = f"engine program {program.argv[0]} does not exist or may not be run"
        raise BadEngine(message)
    variables = environment({**program.environment, **inside.account.environment})
    with inside.log.open("ab") as output:
        if inside.spawner is None:
            root, path = await _spawn(program, inside, variables, output.fileno())
        else:
            root, path = inside.spawner.spawn(
                inside.name, program.argv, variables, output.fileno(), own_shm=inside.own_shm
            )
    group = inside.freezer.group(inside.name, root.pid)
    return Spawned(root, group, start_ticks(root.pid), path)


async def _spawn(
    program: EngineProgram, inside: Containment, variables: dict[str, str], output: int
) -> tuple[Root, str]:
    """Start it as our own child; its process, and its cgroup as the kernel names it."""
    freezer = inside.freezer
    directory = freezer.prepare(inside.name)
    folders = [directory] if directory is not None else []
    if inside.limiter is not None:
        folders += [made for made in inside.limiter.prepare(inside.name) if made != directory]
    folders += [folder for folder in program.cgroups if folder not in folders]
    steps = [f"--procs={folder / 'cgroup.procs'}" for folder in folders]
    steps += [f"--uid={inside.account.uid}", f"--shm={inside.shm_bytes}"]
    steps += [f"--group={inside.group}"]
    root = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", exec_engine.__file__, *steps, "--"),
        *program.argv,
        env=variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    return root, "" if directory is None else await _wait_until_joined(
        root, directory, freezer.driver
    )


async def _wait_until_joined(root: asyncio.subprocess.Process, directory: Path, driver: str) -> str:
    """Wait until the process is in its cgroup; returns the kernel's name for that."""
    for _ in range(2000):
        path = kernel_path(root.pid, driver)
        if path.endswith(f"/{directory.name}"):
            return path
        if root.returncode is not None:
            break
        await asyncio.sleep(0.005)
    return ""


def rotate(log: Path, limit: int = LOG_BYTES) -> None:
    """Keep at most two times ``limit`` bytes: copy the log aside and empty it.

    The engine appends, so after the truncation it goes on at the start of the file.
    """
    try:
        if log.stat().st_size <= limit:
            return
        shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)
    except FileNotFoundError:
        return


def last_lines(log: Path, characters: int = 600) -> str:
    """The end of the log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - characters))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
