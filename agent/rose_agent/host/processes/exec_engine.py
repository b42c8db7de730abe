"""Become the engine: the few steps between the host's ``fork`` and the engine's ``exec``.

The host runs it as a script with its Python and nothing but the standard library, so that no code
of its own runs between fork and exec (it has threads); its root helper, which has one thread, calls
``become`` right after its fork. In this order, because each step
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
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_FIRST_TO_DIE = "1000"
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_MS_NOSUID_NODEV = 0x2 | 0x4


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="enter")
    parser.add_argument("--procs", action="append", default=[], help="cgroup.procs to join")
    parser.add_argument("--uid", type=int, default=0, help="user and group to become; 0 = stay")
    parser.add_argument("--group", type=int, default=0, help="one group more; 0 = none")
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


def become(
    program: Sequence[str],
    environment: Mapping[str, str],
    *,
    procs: Sequence[str],
    uid: int,
    shm: int,
    group: int = 0,
    parent: int = 0,
) -> None:
    """Join, drop, exec; never returns.

    Args:
        program: what to run, with its arguments.
        environment: all of its variables.
        procs: files of the cgroups to join.
        uid: user and group to become; 0 = stay.
        shm: size of an own ``/dev/shm``, bytes; 0 = shared.
        group: one that it is in beside its own; 0 = none.
        parent: the process without which the engine must not go on; 0 = it may.

    Raises:
        OSError: a step failed; the engine is then not started.
    """
    for file in procs:
        # 0 means "the writer", whatever pid namespace it lives in.
        Path(file).write_text("0")
    Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_DIE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if shm:
        _own_shared_memory(libc, shm)
    if uid:
        os.setgroups([group] if group else [])
        os.setgid(uid)
        os.setuid(uid)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if parent:
        # After the change of user, which forgets it.
        _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "end with the parent")
        if os.getppid() != parent:
            raise OSError("the parent has ended already")
    # The program is the engine that the host itself composed; that is this module's purpose.
    os.execvpe(program[0], list(program), dict(environment))  # noqa: S606


def main(argv: list[str]) -> None:
    """Become the program of the command line; never returns.

    Raises:
        OSError: a step failed; the engine is then not started.
    """
    given = _arguments(argv)
    program = given.program[1:] if given.program[:1] == ["--"] else given.program
    become(program, os.environ, procs=given.procs, uid=given.uid, shm=given.shm, group=given.group)


if __name__ == "__main__":
    main(sys.argv[1:])
