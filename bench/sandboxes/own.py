"""Runtimes of tests and benchmarks: they end with all their sandboxes, killed ones at a next start.

A host's sandboxes live on when it is killed, by design. So whoever wants none to stay behind says
so here: each runtime has a file in ``REGISTER``, locked as long as its process lives, and whoever
starts the next one removes what is left of those that are no longer locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from rose_sandbox.runtimes.container import ContainerRuntime
from rose_sandbox.runtimes.parts import Parts
from rose_sandbox.runtimes.processes import empty
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runsc import RunscRuntime
from rose_wire.cgroups import hierarchies

REGISTER = Path("/run/rose-sandbox-register")
_R = TypeVar("_R", bound=ContainerRuntime)


@asynccontextmanager
async def own_runtime(folder: Path, parts: Parts | None = None) -> AsyncIterator[RuncRuntime]:
    """A runtime over a folder; nothing of it is left on the machine when the block ends.

    Raises:
        Unavailable: this machine lacks a part.
    """
    async with _owned(RuncRuntime(folder, parts)) as runtime:
        yield runtime


@asynccontextmanager
async def own_gvisor(
    folder: Path, parts: Parts | None = None, *, way_out: bool = False
) -> AsyncIterator[RunscRuntime]:
    """The same of gVisor.

    Raises:
        Unavailable: this machine lacks a part.
    """
    async with _owned(RunscRuntime(folder, parts, way_out=way_out)) as runtime:
        yield runtime


@asynccontextmanager
async def _owned(runtime: _R) -> AsyncIterator[_R]:
    with _registered(runtime.group):
        try:
            yield runtime
        finally:
            await runtime.close()


@contextmanager
def _registered(group: str) -> Iterator[None]:
    REGISTER.mkdir(mode=0o700, exist_ok=True)
    with _locked():
        remove_leftovers()
        entry = (REGISTER / group).open("w")
        fcntl.flock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        remove(group)
        (REGISTER / group).unlink()
        entry.close()


@contextmanager
def _locked() -> Iterator[None]:
    descriptor = os.open(REGISTER, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_leftovers() -> None:
    """Everything of runtimes whose process has ended; those of others are left alone."""
    for path in REGISTER.iterdir():
        with path.open() as entry:
            try:
                fcntl.flock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            remove(path.name)
            path.unlink()


def remove(group: str) -> None:
    """Processes, control groups and mounts of a runtime; its folder of state is its owner's."""
    tops = [top / group for top in hierarchies() if (top / group).is_dir()]
    empty([folder for top in tops for folder in top.iterdir() if folder.is_dir()])
    empty(tops)
    mounts = Path("/run") / group
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        if line.split()[1].startswith(f"{mounts}/"):
            subprocess.run(["umount", "--lazy", line.split()[1]], check=True, timeout=60)
    shutil.rmtree(mounts, ignore_errors=True)
