"""The helper's process: find what this machine has, end what an earlier host left, then obey.

One thread and one socket, whose other end is the host. When that is closed the host has ended:
every engine is killed, and so is what is left when this process ends (``enter.become``).

    python -m rose_agent.host.helper.serve FD ARGUMENTS OF THE HOST
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import msgspec

from rose_agent.errors import BadEngine, GroupError, HostError
from rose_agent.host.helper.messages import LARGEST, HelperReply, Ready, Request
from rose_agent.host.helper.rights import Rights
from rose_agent.host.options.arguments import check_users, kv_folders_of, limiter_of, parser
from rose_agent.host.processes.repair import leftovers
from rose_agent.host.users.accounts import COUNT
from rose_agent.os.freezers import Freezer, detect
from rose_agent.os.groups import ProcessGroup, end
from rose_core.unreadable import UNREADABLE
from rose_engines.node.rundir import RunDir

_log = logging.getLogger(__name__)
_END_SECONDS = 10.0
# Everybody passes, the host's group adds files, nobody takes away another's.
_SHARED = 0o1771


def main(argv: list[str]) -> int:
    """Entry of the process.

    Returns:
        0 the host has ended, 1 nothing can be begun.
    """
    with socket.socket(fileno=int(argv[0])) as host:
        host.set_inheritable(False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it ends when the host does
        arguments = parser().parse_args(argv[1:])
        logging.basicConfig(
            level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
        )
        try:
            rights = prepare(arguments)
        except (HostError, OSError, ValueError) as error:
            _send(host, Ready(refusal=str(error)))
            return 1
        _send(host, _ready(rights))
        serve_requests(host, rights)
        rights.kill_all()
    return 0


def _send(host: socket.socket, message: Ready) -> None:
    with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile: the next read says so
        host.send(msgspec.msgpack.encode(message))


def prepare(arguments: argparse.Namespace) -> Rights:
    """Find what works here, clean up, and make the run directory the host's.

    Raises:
        HostError, OSError, ValueError: it cannot be; says why.
    """
    check_users(arguments)
    rundir = RunDir(arguments.rundir).create()
    freezer = detect(arguments.cgroup, scope=str(arguments.rundir.resolve()))
    limiter = limiter_of(arguments, freezer.prefix)
    for tree in leftovers(rundir, freezer):
        _end(tree, freezer, arguments.engine_uid)
    limiter.sweep()
    folders = kv_folders_of(arguments)
    folders.sweep()
    slots = os.open(rundir.slots, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    uid: int = arguments.host_uid
    rights = Rights(
        *(uid, arguments.engine_uid, arguments.engine_python, slots), freezer, limiter, folders
    )
    for slot in rundir.all_slots():
        rights.forget(slot.uid, permit=slot.is_twin)
    give_away(rundir, uid)
    return rights


def _end(tree: ProcessGroup, freezer: Freezer, first: int) -> None:
    """End what an earlier host left; its records are believed only of engines."""
    directory, members = tree.directory, tree.pids()
    named = directory is not None and directory.name.startswith(freezer.prefix)
    if not named and not all(_user(pid) in range(first, first + COUNT) for pid in members):
        _log.error("%s is no engine's and is left alone", directory or members)
        return
    with contextlib.suppress(GroupError):
        gone = end(tree, _END_SECONDS)
        _log.warning("ended %d processes of an earlier host: %s", len(members), gone)


def _user(pid: int) -> int:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return -1


def give_away(rundir: RunDir, uid: int) -> None:
    """Make the host's what is the host's; the rest stays root's.

    Raises:
        OSError: the run directory is not ours.
    """
    os.chown(rundir.root, 0, uid)
    rundir.root.chmod(_SHARED)
    logs = rundir.root / "logs"
    logs.mkdir(mode=0o700, exist_ok=True)
    for socket_file in (rundir.host_socket, rundir.enforcer_bell):
        socket_file.unlink(missing_ok=True)
    for folder, mode in ((rundir.slots, 0o711), (logs, 0o700)):
        _give(folder, uid, mode)
    for folder in (*rundir.slots.iterdir(), logs):
        if folder.is_symlink() or not folder.is_dir():
            continue
        _give(folder, uid, 0o700)
        for file in folder.iterdir():  # permits and logs
            with contextlib.suppress(OSError):  # neither: nobody opens it
                _give(file, uid)


def _give(path: Path, uid: int, mode: int | None = None) -> None:
    """Links are not followed; what has a second name elsewhere is left alone."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        seen = os.fstat(file)
        if stat.S_ISDIR(seen.st_mode) or (stat.S_ISREG(seen.st_mode) and seen.st_nlink == 1):
            os.fchown(file, uid, uid)
            if mode is not None:
                os.fchmod(file, mode)
    finally:
        os.close(file)


def _ready(rights: Rights) -> Ready:
    freezer, bases = rights.freezer, rights.limiter.bases
    return Ready(
        driver=freezer.driver,
        reason=freezer.reason,
        base=str(freezer.base or ""),
        prefix=freezer.prefix,
        bases={name: (base.version, str(base.folder)) for name, base in bases.items()},
    )


def serve_requests(host: socket.socket, rights: Rights) -> None:
    """One request after the other until the host hangs up."""
    while True:
        data, files, _, _ = socket.recv_fds(host, LARGEST, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if not data:
                return
            answer, given = _one(rights, data, files[0] if files else None)
        finally:
            for file in files:
                os.close(file)
        with contextlib.suppress(BrokenPipeError):  # the next read says that it is the end
            socket.send_fds(host, [msgspec.msgpack.encode(answer)], [given] if given else [])
        if given is not None:
            os.close(given)


def _one(rights: Rights, data: bytes, log: int | None) -> tuple[HelperReply, int | None]:
    try:
        return rights.do(msgspec.msgpack.decode(data, type=Request), log)
    except (BadEngine, *UNREADABLE) as error:
        _log.warning("refused: %s", error)  # an honest host never asks for this
        return HelperReply(refusal=str(error)), None
    except (HostError, OSError, ValueError) as error:
        return HelperReply(refusal=str(error) or type(error).__name__), None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
