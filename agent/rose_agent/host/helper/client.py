"""The host's side of its root helper, behind the interfaces that it has without one as well.

| interface | asks the helper for | does itself |
|---|---|---|
| ``Freezer`` | nothing: cgroups are made by ``spawn`` | finds trees |
| ``ProcessGroup`` | kill, remove; stop and continue without a cgroup | stop and continue, reading |
| ``Limiter`` | quotas, removal | reads which limit was met |
| ``Accounts`` | users, homes | |
| ``KvFolders`` | folders of leases' keys | |
| ``Spawner`` | the process | waits for its end (pidfd) |

Calls block, some are made by the enforcer's thread, and one is under way at a time; each takes a
fraction of a millisecond but for ``spawn``, which waits for the engine's ``exec``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rose_agent.errors import GroupError, HostError
from rose_agent.host.helper.messages import (
    LARGEST,
    Close,
    CloseKeys,
    Forget,
    HelperReply,
    Move,
    OpenKeys,
    Quota,
    Ready,
    Reap,
    Release,
    Request,
    Spawn,
    Steer,
    Take,
)
from rose_agent.host.processes.process import Root
from rose_agent.host.users import kernel_caches
from rose_agent.host.users.accounts import Account, Accounts
from rose_agent.host.users.kv_folders import KvFolder, KvFolders, KvOwner
from rose_agent.os.freezers import Freezer
from rose_agent.os.groups import ProcessGroup, wait_for
from rose_agent.os.limits import CgroupBase, Limiter, Limits
from rose_engines.node.rundir import RunDir, SlotDir

_REMOVE_SECONDS = 5.0
_KILLED = -9


class Helper:
    """The other end.

    Args:
        connection: to the helper's process.
        process: the helper.

    Raises:
        HostError: the helper could not begin; says why.
    """

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.pidfd = os.pidfd_open(process.pid)
        self._process = process
        self._connection = connection
        self._lock = threading.Lock()
        data = connection.recv(LARGEST)
        self.ready = msgspec.msgpack.decode(data, type=Ready) if data else Ready("it has ended")
        if self.ready.refusal:
            self.close()
            raise HostError(f"root helper: {self.ready.refusal}")

    def ask(self, request: Request, log: int | None = None) -> tuple[HelperReply, int | None]:
        """Have something done.

        Returns:
            The answer, and the pidfd that came with it.

        Raises:
            GroupError: it was refused, or the helper has ended.
        """
        try:
            with self._lock:
                socket.send_fds(
                    self._connection,
                    [msgspec.msgpack.encode(request)],
                    [log] if log is not None else [],
                )
                data, files, _, _ = socket.recv_fds(
                    self._connection, LARGEST, 1, socket.MSG_CMSG_CLOEXEC
                )
        except OSError as error:
            raise GroupError(f"the root helper does not answer: {error.strerror}") from error
        if not data:
            raise GroupError("the root helper has ended")
        answer = msgspec.msgpack.decode(data, type=HelperReply)
        if answer.refusal:
            raise GroupError(answer.refusal)
        return answer, files[0] if files else None

    def close(self) -> None:
        """Hang up: it kills every engine and ends; returns once it has."""
        self._connection.close()
        self._process.wait()
        os.close(self.pidfd)

    # --- what the host has of it

    def freezer(self) -> Freezer:
        """The machine's way to stop trees."""
        ready = self.ready
        base = Path(ready.base) if ready.base else None
        return HelpedFreezer(ready.driver, ready.reason, base, prefix=ready.prefix, helper=self)

    def limiter(self, limits: Limits) -> Limiter:
        """What each engine may take."""
        bases = {
            name: CgroupBase(number, Path(at)) for name, (number, at) in self.ready.bases.items()
        }
        return HelpedLimiter(self, limits, bases, self.ready.prefix)

    def spawn(
        self,
        name: str,
        argv: tuple[str, ...],
        variables: dict[str, str],
        log: int,
        *,
        own_shm: bool,
    ) -> tuple[Root, str]:
        """Start an engine.

        Raises:
            GroupError: it was refused or could not be made.
        """
        answer, pidfd = self.ask(Spawn(name, argv, variables, own_shm), log)
        if pidfd is None:
            raise GroupError("the root helper named no process")
        return HelpedRoot(self, name, answer.pid, pidfd), answer.cgroup

    def forget(self, slot: SlotDir, permit: bool) -> None:
        """Remove what a slot's engine left."""
        self.ask(Forget(slot.uid, permit))


class HelpedRoot:
    """An engine's first process, a child of the helper."""

    def __init__(self, helper: Helper, name: str, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._helper = helper
        self._name = name
        self._pidfd = pidfd
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._note_end)

    async def wait(self) -> int:
        """Wait for its end; returns ``returncode``, that of a kill where nobody knows it."""
        await self._over.wait()
        return self.returncode if self.returncode is not None else _KILLED

    def _note_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        try:
            self.returncode = self._helper.ask(Reap(self._name))[0].code
        except GroupError:
            self.returncode = _KILLED  # the helper ended first, and took it along
        self._over.set()


@dataclass(frozen=True)
class HelpedFreezer(Freezer):
    """Finds trees itself; what it finds is killed and removed by the helper."""

    helper: Helper | None = field(default=None, repr=False)

    def group(self, uid: str, leader: int) -> ProcessGroup:
        """The tree of a slot."""
        inner = super().group(uid, leader)
        return inner if self.helper is None else HelpedGroup(inner, self.helper, uid)


class HelpedGroup:
    """An engine's tree: read, stopped and continued here, killed and removed by the helper."""

    def __init__(self, inner: ProcessGroup, helper: Helper, name: str) -> None:
        self._inner = inner
        self._helper = helper
        self._name = name
        # Of a cgroup the host owns the file that stops it.
        self._delegated = inner.directory is not None
        self.driver = inner.driver
        self.directory = inner.directory
        self.pids, self.is_frozen, self.cpu_ns = inner.pids, inner.is_frozen, inner.cpu_ns

    def freeze(self) -> None:
        """Ask every thread to stop."""
        self._steer(Move.FREEZE)

    def thaw(self) -> None:
        """Let every thread go on."""
        self._steer(Move.THAW)

    def kill(self) -> None:
        """Order the end of every process."""
        self._helper.ask(Steer(self._name, Move.KILL))

    def remove(self) -> None:
        """Forget an empty tree; the last exit may take the kernel seconds."""
        wait_for(self._removed, _REMOVE_SECONDS)

    def _removed(self) -> bool:
        try:
            self._helper.ask(Close(self._name))
        except GroupError:
            return False
        return True

    def _steer(self, move: Move) -> None:
        if not self._delegated:
            self._helper.ask(Steer(self._name, move))
        elif move is Move.FREEZE:
            self._inner.freeze()
        else:
            self._inner.thaw()


class HelpedLimiter(Limiter):
    """Reads itself which limit an engine met; sets nothing."""

    def __init__(
        self, helper: Helper, limits: Limits, bases: dict[str, CgroupBase], prefix: str
    ) -> None:
        super().__init__(limits, bases, prefix)
        self._helper = helper

    def set_quota(self, uid: str, *, busy: bool) -> None:
        """Give an engine the quota for busy serving, or its own."""
        self._helper.ask(Quota(uid, busy))

    def remove(self, uid: str) -> None:
        """Remove a slot's cgroups; they are empty once the engine has ended."""
        with contextlib.suppress(GroupError):  # the last exit takes its time: swept later
            self._helper.ask(Close(uid))


class HelpedAccounts(Accounts):
    """Users that the helper hands out."""

    def __init__(self, helper: Helper, first: int, made_by: str) -> None:
        super().__init__(first, made_by)
        self._helper = helper

    def open(self, rundir: RunDir) -> None:
        """The helper has done so."""

    def take(self, slot: SlotDir) -> Account:
        """The user of a slot's next process, with its folders made.

        Raises:
            GroupError: all are taken.
        """
        answer, _ = self._helper.ask(Take(slot.uid, self.made_by))
        root = kernel_caches.root_of(slot.folder.parent, self.made_by)
        return Account(answer.uid, Path(answer.home), root / slot.uid)

    def release(self, slot: SlotDir) -> None:
        """The engine has ended: its user and its folder go."""
        self._helper.ask(Release(slot.uid))


class HelpedKvFolders(KvFolders):
    """Folders of keys that the helper makes and removes."""

    def __init__(self, helper: Helper, root: Path | None) -> None:
        super().__init__(root)
        self._helper = helper

    def sweep(self) -> None:
        """The helper has done so."""

    def open(self, slot: str, owner: KvOwner, wanted: int) -> KvFolder:
        """The folder of a slot's lease; its group is the helper's business.

        Raises:
            GroupError: refused; says why.
        """
        answer, _ = self._helper.ask(OpenKeys(slot, owner.lease, owner.uid, wanted))
        return KvFolder(Path(answer.folder), 0)

    def close(self, slot: str) -> None:
        """A slot is gone."""
        if self.root is not None:
            self._helper.ask(CloseKeys(slot))
