"""Run a program where other users may reach folders that lie below a closed one.

    python opened.py KEEP FOLDER ... -- PROGRAM ARGUMENTS

The engine environment of a test machine often lies in root's home, which nobody else may enter; in
an image it does not. In a mount namespace of its own, each closed parent of the named folders is
covered by an empty folder that everybody may pass, in which the named ones are found at their old
places. KEEP is an empty folder for the way there.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def closed_parent(folder: Path) -> Path | None:
    """The uppermost parent that others may not pass."""
    parents = reversed(folder.parents)
    return next((one for one in parents if not one.stat().st_mode & 0o001), None)


def main(argv: list[str]) -> None:
    """Cover, then become the program."""
    border = argv.index("--")
    keep, *folders = [Path(one).resolve() for one in argv[:border]]
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "private")
    kept = []
    for number, folder in enumerate(folders):
        if closed_parent(folder) is not None:
            (keep / str(number)).mkdir()
            _bind(libc, folder, keep / str(number))
            kept.append((keep / str(number), folder))
    closed = {closed_parent(folder) for _, folder in kept}
    for parent in filter(None, closed):
        options = b"mode=755,size=1m"
        _check(libc.mount(b"opened", os.fsencode(parent), b"tmpfs", 0, options), "cover")
    for place, folder in kept:
        folder.mkdir(parents=True, exist_ok=True)
        _bind(libc, place, folder)
    os.execvp(argv[border + 1], argv[border + 1 :])  # noqa: S606  # that is the purpose


def _bind(libc: ctypes.CDLL, source: Path, target: Path) -> None:
    flags = _MS_BIND | _MS_REC
    _check(libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None), str(source))


if __name__ == "__main__":
    main(sys.argv[1:])
