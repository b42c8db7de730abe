"""The disk of all sandboxes of a host: a btrfs in one sparse file, a subvolume for each sandbox.

A sandbox's root is an overlay: the image below, read-only, and its subvolume's ``upper`` above. A
cut is a snapshot, which takes milliseconds however much there is, and a limit is a quota.
Owners are shifted as in the sandbox (``kernel.FIRST_ID``), on disk and in saved files alike.
Next step: ``runc`` has a sandbox's life.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rose_sandbox.errors import RuntimeFailed
from rose_sandbox.runtimes.kernel import (
    FIRST_ID,
    create_subvolume,
    delete_subvolume,
    limit_subvolume,
    mount_mapped,
    mount_overlay,
    snapshot_subvolume,
    unmount,
)
from rose_sandbox.runtimes.open_files import HELD, OpenFile, give_numbers, write_held
from rose_sandbox.runtimes.parts import Parts
from rose_sandbox.runtimes.programs import call, run

VOLUME_BYTES = 1 << 40
"""Of the sparse file where nobody names a size: the disk below is the real bound then."""
_NEW = ".new"
"""Ending of a folder in which a snapshot is made."""
_XATTRS = ("--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner", "--sparse")


def is_mounted(folder: Path) -> bool:
    """Whether something is mounted there; of one file system too, which ``is_mount`` cannot see."""
    table = Path("/proc/self/mounts").read_text()
    return any(line.split()[1] == str(folder) for line in table.splitlines())


class Volume:
    """Mounted below a folder of its own, apart from the host's state.

    Whoever removes a folder of state, as test runners and clean-ups of temporary folders do, must
    not walk into the image or into what sandboxes have.

    Args:
        folder: of the host's state.
        mounts: of mounts alone; below ``/run``, which ends with the mounts.
        parts: programs and images.
        size: of the file system, bytes.
    """

    def __init__(self, folder: Path, mounts: Path, parts: Parts, size: int = VOLUME_BYTES) -> None:
        self._parts, self._size = parts, size
        self._file = folder / "volume.img"
        self._mounts = mounts
        self._mount = mounts / "volume"
        self._lowers = mounts / "lower"

    async def open(self) -> None:
        """Make the file system where there is none, and mount it; images too.

        Raises:
            RuntimeFailed: the machine has no btrfs, loop devices or overlays, or there is a file
                system that is larger than it may be.
        """
        self._mounts.mkdir(mode=0o700, exist_ok=True)
        self._mount.mkdir(exist_ok=True)
        if not self._file.exists():
            new = self._file.with_suffix(".new")
            with new.open("wb") as file:
                file.truncate(self._size)
            await self._run("mkfs.btrfs", "-q", "-f", new)
            new.rename(self._file)
        if (has := self._file.stat().st_size) > self._size:
            raise RuntimeFailed(
                f"{self._file} is a file system of {has >> 20} MiB, and {self._size >> 20} MiB are "
                "allowed (--gibibytes): end its sandboxes, remove it, and start again"
            )
        if not is_mounted(self._mount):
            await self._run("mount", "-o", "loop,noatime", self._file, self._mount)
        try:  # also of one that is mounted: an earlier attempt may have come no further
            await self._run("btrfs", "quota", "enable", "--simple", self._mount)
        except RuntimeFailed as error:
            raise RuntimeFailed(
                "a limit of disk needs Linux 6.7 or later, and this is "
                f"{os.uname().release}: {error}"
            ) from error
        for image in sorted(self._parts.images.iterdir()):
            await asyncio.to_thread(self._show, image)

    def _show(self, image: Path) -> None:
        lower = self._lowers / image.name
        lower.mkdir(parents=True, exist_ok=True)
        if not is_mounted(lower):
            try:
                mount_mapped(image, lower)
            except OSError as error:
                raise RuntimeFailed(
                    f"{image} cannot be shown with other owners (an ID-mapped mount): {error}; "
                    "images must lie on ext4, xfs, btrfs or tmpfs, not on an overlay or a network"
                ) from error

    def lower(self, image: str) -> Path:
        """An image's root folder with shifted owners."""
        return self._lowers / image

    def subvolume(self, name: str) -> Path:
        """Where a sandbox's changes lie."""
        return self._mount / name

    def upper(self, name: str) -> Path:
        """Its changes to the image."""
        return self._mount / name / "upper"

    async def make(self, name: str, disk_bytes: int) -> None:
        """A fresh subvolume of limited size."""
        await call(_make, self.subvolume(name), disk_bytes)

    async def copy(self, cut: str, name: str, disk_bytes: int) -> None:
        """A subvolume that begins as a cut."""
        await self.cut(cut, name)
        await call(_finish, self.subvolume(name), disk_bytes)

    async def remove_cuts(self) -> None:
        """What a host that was killed between a cut and its end left."""
        for folder in self._mount.glob(f"*{_NEW}"):
            await call(_remove_new, folder)
        for folder in self._mount.glob("*.*"):
            await self.remove(folder.name)

    async def cut(self, name: str, cut: str) -> None:
        """A subvolume's files as they are now."""
        await call(_snapshot, self.subvolume(name), self.subvolume(cut))

    async def remove(self, name: str) -> None:
        """A subvolume or cut; none is no error."""
        if self.subvolume(name).exists():
            await call(delete_subvolume, self.subvolume(name))

    async def pack(self, name: str, into: Path, held: Iterable[OpenFile] = ()) -> None:
        """A cut's files as one file, the same bytes for the same files.

        Args:
            name: of the cut.
            into: the file.
            held: files that processes have open, whose numbers ``unpack`` gives back.
        """
        await asyncio.to_thread(write_held, self.subvolume(name), held)
        await self._run(
            *("tar", "--create", "--sort=name", "--format=pax", *_XATTRS),
            "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime",
            *("--file", into, "--directory", self.subvolume(name), HELD, "upper"),
        )

    async def unpack(self, file: Path, name: str, held: Iterable[OpenFile] = ()) -> None:
        """Files of ``pack`` into a fresh subvolume.

        Args:
            file: that they are in.
            name: of the subvolume.
            held: files that processes have open, beside those that ``pack`` was told.

        Raises:
            RuntimeFailed: the file is torn, or they are too many.
        """
        await asyncio.to_thread(give_numbers, self.subvolume(name), file, held)
        await self._run(
            *(
                "tar",
                "--extract",
                "--overwrite",
                "--preserve-permissions",
                "--same-owner",
                *_XATTRS,
            ),
            *("--file", file, "--directory", self.subvolume(name)),
        )

    async def mount(self, name: str, image: str, root: Path) -> None:
        """A sandbox's root."""
        root.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - local metadata, microseconds
        layers = ",".join(
            f"{what}={where}"
            for what, where in (
                ("lowerdir", self.lower(image)),
                ("upperdir", self.upper(name)),
                ("workdir", self.subvolume(name) / "work"),
            )
        )
        await call(mount_overlay, layers, root)

    async def unmount(self, root: Path) -> None:
        """A sandbox's root; one that is not mounted is no error."""
        if is_mounted(root):
            await call(unmount, root)

    async def close(self) -> None:
        """Unmount everything; only where no sandbox runs, for its root would not hold a mount."""
        lowers = sorted(self._lowers.iterdir()) if self._lowers.exists() else []
        for folder in (*lowers, self._mount):
            if is_mounted(folder):
                await call(unmount, folder)
        for folder in (*lowers, self._lowers, self._mount, self._mounts):
            with suppress(OSError):
                folder.rmdir()

    async def _run(self, *arguments: str | Path) -> bytes:
        return await run(self._parts.path, *arguments)


def _snapshot(source: Path, folder: Path) -> None:
    # The kernel lets nobody else into a folder until a snapshot that is made there is on disk. From
    # folders of their own, all that are made at a time go there together.
    new = folder.with_name(f"{folder.name}{_NEW}")
    new.mkdir()
    try:
        snapshot_subvolume(source, new / folder.name)
        (new / folder.name).rename(folder)
    finally:
        _remove_new(new)


def _remove_new(folder: Path) -> None:
    for left in folder.iterdir():
        delete_subvolume(left)
    folder.rmdir()


def _make(folder: Path, disk_bytes: int) -> None:
    create_subvolume(folder)
    upper = folder / "upper"
    upper.mkdir()
    os.chown(upper, FIRST_ID, FIRST_ID)
    _finish(folder, disk_bytes)


def _finish(folder: Path, disk_bytes: int) -> None:
    # An overlay's work folder belongs to one mount and is never taken over.
    work = folder / "work"
    if work.exists():
        shutil.rmtree(work)
    work.mkdir()
    limit_subvolume(folder, disk_bytes)
