"""What root does for the engine host, request by request, and what it refuses.

| request | refused when |
|---|---|
| any | the name is no plain folder name |
| ``Take`` | all users are taken; the slot's folder is not the host's own, or is a link |
| the same | ``made_by`` is not 16 hexadecimal digits |
| ``OpenKeys`` | there is no place for keys, or no room in it (``kv_folders``) |
| ``Spawn`` | no user was taken; the program is no engine of this installation; one runs already |
| ``Steer``, ``Reap`` | no engine of that name was spawned here |

Folders in the run directory belong to the host, who may be hostile: they are opened without
following links, and only then given away or emptied. Freezing is delegated: the host owns the one
file that stops or continues an engine's cgroup, so a stop needs nobody's answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rose_agent.errors import BadEngine, GroupError
from rose_agent.host.helper.messages import (
    NAME,
    Close,
    CloseKeys,
    Forget,
    HelperReply,
    Move,
    OpenKeys,
    Quota,
    Reap,
    Release,
    Request,
    Spawn,
    Steer,
    Take,
)
from rose_agent.host.processes.exec_engine import become
from rose_agent.host.users import kernel_caches
from rose_agent.host.users.accounts import COUNT
from rose_agent.host.users.kv_folders import KvFolders, KvOwner
from rose_agent.os.freezers import Freezer
from rose_agent.os.groups import ProcessGroup
from rose_agent.os.limits import Limiter
from rose_agent.os.processes import kernel_path, shared_memory

_log = logging.getLogger(__name__)

MODULES = frozenset({"rose_engines.fake", "rose_engines.sglang.launch", "rose_engines.vllm.launch"})
"""What an engine may be; ``classes`` composes no others."""

# The file that stops and continues a cgroup.
_STOPS = ("cgroup.freeze", "freezer.state")
_EXEC_SECONDS = 10.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class _Engine:
    """What is known of one name.

    Attributes:
        kernels: where the folders of compiled kernels lie.
        pid: its first process until that is collected, else 0.
        leader: the same for as long as the tree may have members.
    """

    uid: int
    home: str
    kernels: Path
    pid: int = 0
    leader: int = 0
    snapshots: frozenset[Path] = frozenset()


@dataclass
class Rights:
    """The helper's work.

    Attributes:
        host: user and group of the engine host.
        first: the first of the engines' users.
        python: the Python that engines run with.
        slots: the run directory's folder of slots, opened.
        kv_folders: where the engines of a lease keep keys for each other.
    """

    host: int
    first: int
    python: Path
    slots: int
    freezer: Freezer
    limiter: Limiter
    kv_folders: KvFolders = field(default_factory=KvFolders)
    _engines: dict[str, _Engine] = field(default_factory=dict)

    def do(self, request: Request, log: int | None) -> tuple[HelperReply, int | None]:
        """Carry out one request.

        Returns:
            The answer, and a pidfd that goes with it.

        Raises:
            BadEngine: refused; says why.
            GroupError, OSError: the kernel would not.
        """
        _check_name(request.name)
        match request:
            case Spawn():
                return self._spawn(request, log)
            case Take(name, made_by):
                return self._take(name, made_by), None
            case OpenKeys() | CloseKeys():
                return self._keys(request), None
            case Reap(name):
                return self._reap(name), None
        self._act(request)
        return HelperReply(), None

    def _act(self, request: Request) -> None:
        """Carry out one that is answered by nothing more than that it was."""
        match request:
            case Steer(name, move):
                self._steer(name, move)
            case Quota(name, busy):
                self.limiter.set_quota(name, busy=busy)
            case Close(name):
                self._close(name)
            case Release(name):
                self._release(name)
            case Forget(name, permit):
                self.forget(name, permit=permit)

    def kill_all(self) -> None:
        """The host has ended: so do its engines."""
        for name, engine in self._engines.items():
            if engine.leader:
                with contextlib.suppress(GroupError):
                    self._group(name).kill()

    def _keys(self, request: OpenKeys | CloseKeys) -> HelperReply:
        """A slot's way into the folder of its lease, and its end."""
        if isinstance(request, CloseKeys):
            self.kv_folders.close(request.name)
            return HelperReply()
        owner = KvOwner(request.lease, request.lease_uid)
        found = self.kv_folders.open(request.name, owner, request.wanted)
        return HelperReply(folder=str(found.path))

    # --- a user

    def _take(self, name: str, made_by: str) -> HelperReply:
        if kernel_caches.MADE_BY.fullmatch(made_by) is None:
            raise BadEngine(f"{made_by[:80]!r} does not say what makes kernels")
        known = self._engines.get(name)
        if known is None:
            used = {engine.uid for engine in self._engines.values()}
            uid = next((n for n in range(self.first, self.first + COUNT) if n not in used), None)
            if uid is None:
                raise BadEngine(f"all {COUNT} users from {self.first} on have an engine")
            self._give(name, uid)
            home = tempfile.mkdtemp(prefix="rose-engine-")
            os.chown(home, uid, uid)
            root = self._kernels(made_by)
            kernel_caches.prune(os.listdir(self.slots), root)  # noqa: PTH208  # an open folder
            kernel_caches.open_for(name, uid, root)
            known = self._engines[name] = _Engine(uid, home, root)
        return HelperReply(uid=known.uid, home=known.home)

    def _kernels(self, made_by: str) -> Path:
        return kernel_caches.root_of(Path(f"/proc/self/fd/{self.slots}").readlink(), made_by)

    def _give(self, name: str, uid: int) -> None:
        """``accounts`` has the table; the control socket's folder is open to the host's group."""
        with self._folder(name) as folder:
            if os.fstat(folder).st_uid != self.host:
                raise BadEngine(f"the folder of {name} is not the engine host's")
            for part, user, group, mode in (
                ("bundles", self.host, uid, 0o750),
                ("own", uid, self.host, 0o2770),
            ):
                with _opened(part, folder) as inner:
                    os.fchown(inner, user, group)
                    os.fchmod(inner, mode)
            os.fchown(folder, self.host, uid)
            os.fchmod(folder, 0o710)

    def _release(self, name: str) -> None:
        engine = self._engines.get(name)
        if engine is None:
            return
        if engine.pid:
            raise BadEngine(f"the engine {name} has not ended")
        shutil.rmtree(engine.home, ignore_errors=True)
        kernel_caches.close(name, engine.kernels)
        del self._engines[name]

    # --- a process

    def _spawn(self, order: Spawn, log: int | None) -> tuple[HelperReply, int | None]:
        engine = self._engine(order.name)
        if engine.pid:
            raise BadEngine(f"the engine {order.name} runs already")
        if order.argv[:2] != (str(self.python), "-m") or order.argv[2:3] not in {
            (module,) for module in MODULES
        }:
            raise BadEngine(f"{' '.join(order.argv[:3])[:200]} is no engine of this installation")
        if log is None:
            raise BadEngine("an engine needs a log")
        engine.pid = self._fork(order, engine.uid, self._cgroups(order.name), log)
        engine.leader = engine.pid
        path = kernel_path(engine.pid, self.freezer.driver) if self.freezer.base else ""
        return HelperReply(pid=engine.pid, cgroup=path), os.pidfd_open(engine.pid)

    def _cgroups(self, name: str) -> list[str]:
        """Make and limit them; the host may stop and continue what is in them."""
        directory = self.freezer.prepare(name)
        folders = {*self.limiter.prepare(name), *([directory] if directory else [])}
        for stop in [directory / name for name in _STOPS] if directory else []:
            with contextlib.suppress(FileNotFoundError):  # of the other hierarchy
                os.chown(stop, self.host, self.host)
        return [str(folder / "cgroup.procs") for folder in folders]

    def _fork(self, order: Spawn, uid: int, procs: list[str], log: int) -> int:
        """Become the engine in a child.

        Raises:
            GroupError: a step on the way failed.
        """
        status_end, engine_end = os.pipe()  # closed by the exec
        shm = self.limiter.limits.shm_bytes if order.own_shm else 0
        group, helper = self.kv_folders.group_of(order.name), os.getpid()
        pid = os.fork()
        if not pid:
            try:
                _settle(log)
                variables = order.variables
                ids = {"uid": uid, "shm": shm, "group": group, "parent": helper}
                become(order.argv, variables, procs=procs, **ids)
            except BaseException as error:  # noqa: BLE001  # nothing of the helper may run on here
                os.write(engine_end, f"{type(error).__name__}: {error}".encode()[:1000])
            finally:
                os._exit(127)
        os.close(engine_end)
        with os.fdopen(status_end, "rb", 0) as status:
            ready, _, _ = select.select([status], [], [], _EXEC_SECONDS)
            failure = status.read(1000).decode() if ready else "it took too long"
        if failure:
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(GroupError):
                self._tree(order.name, pid).thaw()
            os.waitpid(pid, 0)
            raise GroupError(f"the engine {order.name} cannot be started: {failure}")
        return pid

    def _steer(self, name: str, move: Move) -> None:
        group = self._group(name)
        if move is Move.FREEZE:
            group.freeze()
        elif move is Move.THAW:
            group.thaw()
        else:
            engine = self._engines[name]
            engine.snapshots |= shared_memory(pid for pid in group.pids() if pid)
            group.kill()

    def _reap(self, name: str) -> HelperReply:
        engine = self._engine(name)
        if not engine.pid:
            raise BadEngine(f"no engine {name} runs")
        pid, status = os.waitpid(engine.pid, os.WNOHANG)
        if not pid:
            raise BadEngine(f"the engine {name} has not ended")
        engine.pid = 0
        return HelperReply(code=os.waitstatus_to_exitcode(status))

    def _close(self, name: str) -> None:
        engine = self._engines.get(name)
        directory = self.freezer.directory(name)
        if directory is not None:
            with contextlib.suppress(FileNotFoundError):
                directory.rmdir()  # tried again by the host while the last exit takes its time
        self.limiter.remove(name)
        for path in engine.snapshots if engine is not None else ():
            path.unlink(missing_ok=True)

    # --- folders

    def forget(self, name: str, *, permit: bool) -> None:
        """Empty a slot's folder, or remove it; links in it are removed and not followed."""
        if permit:
            shutil.rmtree(name, ignore_errors=True, dir_fd=self.slots)
            return
        with contextlib.suppress(OSError), self._folder(name) as folder:
            for file in ("engine.json", "weights.json", "slot.json"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=folder)
            for part in ("bundles", "own"):
                shutil.rmtree(part, ignore_errors=True, dir_fd=folder)

    @contextlib.contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        with _opened(name, self.slots) as folder:
            yield folder

    def _engine(self, name: str) -> _Engine:
        engine = self._engines.get(name)
        if engine is None:
            raise BadEngine(f"no user was taken for the engine {name}")
        return engine

    def _group(self, name: str) -> ProcessGroup:
        engine = self._engine(name)
        if not engine.leader:
            raise BadEngine(f"no engine {name} runs")
        return self._tree(name, engine.leader)

    def _tree(self, name: str, leader: int) -> ProcessGroup:
        return self.freezer.group(name, leader)


def _check_name(name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise BadEngine(f"{name[:80]!r} is no name of an engine")


@contextlib.contextmanager
def _opened(name: str, parent: int) -> Iterator[int]:
    folder = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


def _settle(log: int) -> None:
    """A session of its own, nothing to read, the log to write, no signal ignored."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
