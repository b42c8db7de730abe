"""All of a sandbox at one moment, byte for byte: what an inspector's word is compared with.

| of | compared |
|---|---|
| files of the upper layer | mode, owner, every byte, time; folders: that they are there, whose |
| files in memory | every byte |
| processes | which there are, their folders, what they have open and where they read in it |
| their settings | masks, owners, limits, what they do at which signal |
| their memory | every byte that they may write and share with nobody |
| a session's shell | what it says of itself, since its memory differs after every command |

It knows nothing of how an inspector looks, but for the shell's words. An inspector looks at one
moment, and a job may write while it is compared. So its word is judged by the states on both sides
of each of its looks: what only some of them show is nobody's mistake.
Next step: ``recall`` counts; the inspector's fuzzer looks for what is missed.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rose_sandbox.inspector.witness import shell_state
from rose_sandbox.runtimes.runtime import Facts

_PIECE = 1 << 20
_SETTING = re.compile(r"^(Umask|Uid|Gid|Groups|SigBlk|SigIgn|SigCgt):\s*(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class FullState:
    """Of a sandbox that runs; two are the same or they are not."""

    files: dict[str, tuple[object, ...]]
    in_memory: str
    processes: dict[tuple[int, str], tuple[object, ...]]

    def changed(self, before: FullState) -> tuple[bool, bool]:
        """Whether files differ, and whether processes or files in memory do."""
        processes = (self.in_memory, self.processes) != (before.in_memory, before.processes)
        return self.files != before.files, processes


Around = tuple[FullState, FullState]
"""The states just before and just after a look."""


def surely_changed(before: Around, now: Around) -> tuple[bool, bool]:
    """Whether files, and whether processes or files in memory, differ whenever it looked."""
    found = [one.changed(other) for one in now for other in before]
    return all(files for files, _ in found), all(processes for _, processes in found)


def surely_same(before: Around, now: Around) -> bool:
    """Whether nothing differs, whenever it looked."""
    return not any(any(one.changed(other)) for one in now for other in before)


def full_state(facts: Facts) -> FullState:
    """The present one."""
    return FullState(_files(facts), _in_memory(facts), _processes(facts))


def _files(facts: Facts) -> dict[str, tuple[object, ...]]:
    if facts.upper is None or facts.lower is None:
        raise OSError("a suspended sandbox has no moment")
    found: dict[str, tuple[object, ...]] = {}
    for here, _, names in os.walk(facts.upper):
        for name in ["", *names]:
            path = Path(here) / name
            about = path.lstat()
            what: object = None
            if stat.S_ISREG(about.st_mode):
                what = hashlib.sha256(path.read_bytes()).hexdigest(), about.st_mtime_ns
            elif stat.S_ISLNK(about.st_mode):
                what = str(path.readlink())
            where = os.path.relpath(path, facts.upper)
            # Folders of the image above which something came and went.
            if not (stat.S_ISDIR(about.st_mode) and (facts.lower / where).is_dir()):
                found[where] = (about.st_mode, about.st_uid, about.st_rdev, what)
    return found


def _in_memory(facts: Facts) -> str:
    """Every byte of files that lie in memory, but for ROSE's own."""
    digest = hashlib.sha256()
    for top in ("run", "dev"):
        for here, folders, names in os.walk(Path("/proc", str(facts.init), "root", top)):
            folders[:] = sorted(set(folders) - {"rose"})
            for name in sorted(names):
                path = Path(here) / name
                if path.is_file() and not path.is_symlink():
                    digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _processes(facts: Facts) -> dict[tuple[int, str], tuple[object, ...]]:
    found: dict[tuple[int, str], tuple[object, ...]] = {}
    for pid in facts.pids:
        if pid == facts.init or facts.init is None:
            continue
        at = Path("/proc", str(pid))
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            fields = (at / "stat").read_text().rpartition(") ")[2].split()
            line = (at / "cmdline").read_bytes()
            if fields[0] == "Z" or not line:
                continue
            state = shell_state(pid, facts.init)
            memory = _memory(at) if state is None else hashlib.sha256(state.encode()).hexdigest()
            about = (line, str((at / "cwd").readlink()), *_settings(at))
            found[pid, fields[19]] = (*about, _open(at), memory)
    return found


def _settings(at: Path) -> tuple[object, ...]:
    limits = dict(_SETTING.findall((at / "status").read_text()))
    return tuple(sorted(limits.items())), (at / "limits").read_text()


def _open(at: Path) -> tuple[tuple[str, str, str], ...]:
    found = []
    for entry in (at / "fd").iterdir():
        with suppress(FileNotFoundError):
            target = str(entry.readlink())
            limits = (at / "fdinfo" / entry.name).read_text()
            place = re.search(r"^pos:\s*(\d+)", limits, re.MULTILINE)
            own = target.startswith("/run/rose/")
            found.append((entry.name, "" if own else target, place[1] if place and not own else ""))
    return tuple(sorted(found))


def _memory(at: Path) -> str:
    digest = hashlib.sha256()
    with (at / "mem").open("rb", buffering=0) as memory:
        for row in (at / "maps").read_text().splitlines():
            place, rights, *_ = row.split(maxsplit=2)
            if rights[1] != "w" or rights[3] != "p":
                continue
            begin, end = (int(part, 16) for part in place.split("-"))
            memory.seek(begin)
            digest.update(f"{begin:x}-{end:x}".encode())
            for start in range(begin, end, _PIECE):
                digest.update(memory.read(min(_PIECE, end - start)))
    return digest.hexdigest()
