"""Inode numbers of files that processes hold open: they come back with a restore.

A program may remember the number of a file that it opened, and look whether the file at that path
is still the same: SQLite refuses to write to a database whose number has changed. No system call
asks for a number. But btrfs gives them out in order and never again, so a fresh subvolume gives a
file the number that is wanted once all lower ones are used up.
Next step: ``volume`` packs and unpacks.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from rose_core.unreadable import UNREADABLE
from rose_sandbox.errors import RuntimeFailed

HELD = "held"
"""The first member of the archive."""
MOST_BURNT = 50_000
"""Numbers that are used up for nothing: half a second. A file beyond comes back with another."""
_MOST_BYTES = 1 << 20


class OpenFile(NamedTuple):
    """A file that a process has open.

    Attributes:
        number: of its inode.
        path: as the sandbox sees it.
    """

    number: int
    path: str


def held_by(pids: Iterable[int], upper: Path) -> tuple[OpenFile, ...]:
    """Files of a sandbox that these processes have open, by number; those of its image are not."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                found.add(_open_file(entry, upper))
    return tuple(sorted(one for one in found if one is not None))


def _open_file(descriptor: Path, upper: Path) -> OpenFile | None:
    """What a descriptor is open on; None: no file of the sandbox with one name."""
    with suppress(OSError, ValueError):
        path = str(descriptor.readlink())
        status = (upper / path.lstrip("/")).lstat()
        # One of several names is made by the archive, as a link to another.
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            return OpenFile(status.st_ino, path)
    return None


def write_held(folder: Path, held: Iterable[OpenFile]) -> None:
    """Keep the list where the archive begins; or among images, for processes saved by themselves.

    A process may open a file, and change none: the files that are saved by then know nothing of it.
    """
    (folder / HELD).write_bytes(msgspec.json.encode(tuple(held)))
    os.utime(folder / HELD, (0, 0))  # the same files are the same bytes


def read_held(archive: Path) -> tuple[OpenFile, ...]:
    """The list of an archive; archives of before have none."""
    try:
        with tarfile.open(archive) as opened:
            first = opened.next()
            if first is None or first.name != HELD or first.size > _MOST_BYTES:
                return ()
            data = opened.extractfile(first)
            return msgspec.json.decode(data.read() if data else b"[]", type=tuple[OpenFile, ...])
    except (tarfile.TarError, *UNREADABLE):
        return ()  # torn: ``tar`` says so


def held_with(images: Path) -> tuple[OpenFile, ...]:
    """The list that was saved with processes; of images of before there is none.

    Raises:
        RuntimeFailed: it is torn.
    """
    try:
        return msgspec.json.decode((images / HELD).read_bytes(), type=tuple[OpenFile, ...])
    except FileNotFoundError:
        return ()
    except UNREADABLE as error:
        raise RuntimeFailed(f"the list of open files is torn: {error}") from error


def give_numbers(folder: Path, archive: Path, held: Iterable[OpenFile] = ()) -> None:
    """Make held files in a fresh subvolume, empty, under their numbers.

    Args:
        folder: of the subvolume.
        archive: of its files, with its own list.
        held: that processes saved after it had open too.
    """
    upper, left = folder / "upper", MOST_BURNT
    known = {one.path: one for one in (*held, *read_held(archive))}
    for number, path in sorted(known.values()):
        relative = PurePosixPath(path.lstrip("/"))
        if ".." in relative.parts or not relative.parts:
            continue
        made = upper / relative
        made.parent.mkdir(parents=True, exist_ok=True)
        left = _make(made, number, left)
        if left <= 0:
            return


def _make(path: Path, number: int, left: int) -> int:
    """Make a file, if it can have the number; returns how many may still be used up."""
    while left > 0:
        path.touch(exist_ok=False)
        has = path.lstat().st_ino
        if has == number:
            return left
        path.unlink()
        if has > number or number - has > left:  # gone for good, or too far: burn none for nothing
            return left
        left -= 1
    return left
