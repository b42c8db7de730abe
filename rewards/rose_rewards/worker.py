"""A worker: gives every right away, then runs one team's function on what comes in a pipe.

    python -I -m rose_rewards.worker     # one line of JSON in, one line out

The first line says what it is to become (``Terms``); only after that the team's code is imported.
It has a user of its team's own, no network, no capability, no credential in its environment, and
limits on memory, files and processes. Its end is the pipe's: it does not outlive the gateway.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

_NEW_NETWORK, _NEW_USER, _NEW_MOUNTS = 0x40000000, 0x10000000, 0x00020000
_BIND, _MOVE, _PRIVATE = 0x1000, 0x2000, 0x4000 | 0x40000
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_MOST_FILES = 128
# Per user, threads included: a library's pool fits, a fork bomb does not.
_MOST_PROCESSES = 256
_LARGEST_FILE = 256 << 20


class Terms(msgspec.Struct, frozen=True):
    """What a worker becomes.

    Attributes:
        entry: ``module:function``.
        path: folder of the team's code; empty = none.
        user: id that it runs under; 0 = the gateway's own, which is no root then.
        memory_bytes: address space.
        network: whether it keeps the gateway's.
    """

    entry: str
    path: str
    user: int
    memory_bytes: int
    network: bool


def _system(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _show_interpreter(library: ctypes.CDLL) -> None:
    """Let the worker's user read Python where it lies in a folder that is closed to others.

    The folder becomes an empty one with nothing but Python below it, in this worker's sight alone.
    """
    python = Path(sys.base_prefix)
    closed = next((one for one in reversed(python.parents) if not one.stat().st_mode & 1), None)
    if closed is None:
        return

    def mount(source: Path | None, target: Path, kind: bytes | None, flags: int) -> None:
        named = None if source is None else os.fsencode(source)
        found = library.mount(
            named, os.fsencode(target), kind, flags, b"mode=755" if kind else None
        )
        _system(found, f"mount of {target}")

    _system(library.unshare(_NEW_MOUNTS), "no mounts of its own")
    mount(None, Path("/"), None, _PRIVATE)
    aside = Path("python").absolute()
    aside.mkdir()
    mount(python, aside, None, _BIND)
    mount(None, closed, b"tmpfs", 0)
    python.mkdir(parents=True)
    mount(aside, python, None, _MOVE)
    aside.rmdir()


def confine(terms: Terms) -> None:
    """Give away what the function does not need.

    Raises:
        OSError: the kernel refuses; nothing of the team has been read yet.
    """
    library = ctypes.CDLL(None, use_errno=True)
    root = os.geteuid() == 0
    if not terms.network:
        flags = _NEW_NETWORK if root else _NEW_NETWORK | _NEW_USER
        _system(library.unshare(flags), "no network of its own")
    if terms.user:
        _show_interpreter(library)
        os.setgroups([])
        os.setresgid(terms.user, terms.user, terms.user)
        os.setresuid(terms.user, terms.user, terms.user)
    _system(library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    _system(library.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "death signal")
    os.umask(0o077)
    limits = {
        resource.RLIMIT_AS: terms.memory_bytes,
        resource.RLIMIT_NOFILE: _MOST_FILES,
        resource.RLIMIT_FSIZE: _LARGEST_FILE,
        resource.RLIMIT_CORE: 0,
    }
    if terms.user:  # without one the limit would count the gateway's own processes
        limits[resource.RLIMIT_NPROC] = _MOST_PROCESSES
    for which, most in limits.items():
        resource.setrlimit(which, (most, most))


def main() -> int:
    """Answer until the pipe ends."""
    asked = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # What the function prints is no answer, and what it or a program of its own reads no question.
    os.dup2(2, 1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    terms = msgspec.json.decode(asked.readline(), type=Terms)
    try:
        confine(terms)
        if terms.path:
            sys.path.insert(0, terms.path)
        module, _, name = terms.entry.partition(":")
        function = getattr(importlib.import_module(module), name)
        answer: dict[str, Any] = {"ready": True}
    except Exception as error:  # noqa: BLE001  # a team's code: whatever it raises is its answer
        function, answer = None, {"failed": _text(error)}
    while True:
        answers.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
        answers.flush()
        line = asked.readline()
        if not line or function is None:
            return 0
        try:
            answer = {"said": function(msgspec.json.decode(line))}
            json.dumps(answer, allow_nan=False)  # NaN is no verdict that is missing: it fails
        except Exception as error:  # noqa: BLE001  # as above
            answer = {"failed": _text(error)}


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


if __name__ == "__main__":
    sys.exit(main())
