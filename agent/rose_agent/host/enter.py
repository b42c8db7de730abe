"""Become the engine: the few steps between the host's ``fork`` and the engine's ``exec``.

Run as a script with the host's Python and nothing but the standard library, so that no code of
the host runs between fork and exec (the host has threads). In this order, because each step
takes away a right that the step before needs: join the cgroups, be the first to be killed when
memory runs out, no core dumps, shared memory of one's own, give up the uid, no new privileges,
``exec``.

    python -I -S enter.py --procs FILE ... [--shm BYTES] [--uid N] -- PROGRAM ARGUMENTS
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import sys
from pathlib import Path

_PR_SET_NO_NEW_PRIVS = 38
_FIRST_TO_DIE = "1000"
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_MS_NOSUID_NODEV = 0x2 | 0x4


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="enter")
    parser.add_argument("--procs", action="append", default=[], help="cgroup.procs to join")
    parser.add_argument("--uid", type=int, default=0, help="user and group to become; 0 = stay")
    parser.add_argument("--shm", type=int, default=0, help="size of an own /dev/shm; 0 = shared")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _own_shared_memory(libc: ctypes.CDLL, size: int) -> None:
    """A mount namespace in which ``/dev/shm`` is a file system of this size."""
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    _check(libc.mount(None, b"/", None, _MS_REC_PRIVATE, None), "make mounts private")
    options = f"size={size},mode=1777".encode()
    place = b"/dev/shm"  # the place itself is the point
    _check(libc.mount(b"rose", place, b"tmpfs", _MS_NOSUID_NODEV, options), "own /dev/shm")


def main(argv: list[str]) -> None:
    """Join, drop, exec; never returns.

    Raises:
        OSError: a step failed; the engine is then not started.
    """
    arguments = _arguments(argv)
    for procs in arguments.procs:
        # 0 means "the writer", whatever pid namespace it lives in.
        Path(procs).write_text("0")
    Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_DIE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if arguments.shm:
        _own_shared_memory(libc, arguments.shm)
    if arguments.uid:
        os.setgroups([])
        os.setgid(arguments.uid)
        os.setuid(arguments.uid)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    # The program is the engine that the host itself composed; that is this script's purpose.
    os.execvpe(program[0], program, dict(os.environ))  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
