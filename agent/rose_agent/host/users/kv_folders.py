"""Folders in which the engines of a lease on this node keep keys for each other, in its memory.

``--kv-store`` names a tmpfs that belongs to the host, and ``--kv-store-mib`` what may lie there.

| path | owner, group, mode | lives |
|---|---|---|
| the tmpfs | host, 0711 | as long as the host's container; emptied when a host starts |
| ``<lease>`` | host, group of the lease, 02770 | while the lease has a slot on this node |
| ``.<lease>-<time>`` | the same, 0700 | until its pages are freed |

A lease is its uid: one that was deleted and made anew under its name has another folder, also while
a slot of the first is still there. Engines are users of their own, and enter by the lease's group,
which no other lease's engines are in. What a lease asked for is counted here against the room,
before its first engine starts; within it, engines remove what was used longest ago
(``rose_engines.kv.pages``). One that does not is stopped by the tmpfs's size and by its own limit
of memory, to which the pages it writes count. Next step: ``engine_process`` opens and
``engine_host`` closes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rose_agent.errors import BadEngine, BadInput, NoMemory
from rose_agent.host.users.accounts import COUNT
from rose_agent.os.processes import proc_text
from rose_core.rollouts.engines.kv_store import admits

_log = logging.getLogger(__name__)

_OURS = re.compile(r"[0-9a-f]{16}|\.[0-9a-f]{16}-[0-9]+")
_SHARED = Path("/dev/shm")  # noqa: S108  # that is the place
_OFF = "or set kvStoreGiB: 0 in the lease"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    if path.exists():
        _log.warning("%s cannot be removed", path)


@dataclass(frozen=True)
class KvOwner:
    """The lease that keys belong to, by its name and by its uid.

    Attributes:
        lease: ``namespace/name``, for people.
        uid: the lease's; empty = not told, so the slot shares with no other.
    """

    lease: str
    uid: str


@dataclass(frozen=True)
class KvFolder:
    """Where a lease's keys are, and the group that may enter."""

    path: Path
    group: int


@dataclass
class _Lease:
    folder: KvFolder
    slots: dict[str, int]  # what each asked for

    @property
    def bytes(self) -> int:
        """What its engines may keep: the most that one of them was started with."""
        return max(self.slots.values(), default=0)


@dataclass
class KvFolders:
    """The folders of one host.

    Attributes:
        root: the tmpfs; None = the host has none.
        room: bytes that all leases may keep there together.
        first_user: of the engines; 0 = they run as the host.
        engine_bytes: most memory of one engine; 0 = any.
        remove: takes a folder away; it may take seconds, so a thread of its own does it.
    """

    root: Path | None = None
    room: int = 0
    first_user: int = 0
    engine_bytes: int = 0
    remove: Callable[[Path], None] = _remove
    _leases: dict[str, _Lease] = field(default_factory=dict)

    def sweep(self) -> None:
        """Empty the tmpfs: whatever an earlier host has left there, no engine uses any more."""
        if self.root is None:
            return
        self.root.chmod(0o711)
        for left in self.root.iterdir():
            if _OURS.fullmatch(left.name):
                _remove(left)

    def open(self, slot: str, owner: KvOwner, wanted: int) -> KvFolder:
        """The folder of a slot's lease, made where it is the first.

        Args:
            slot: uid of the slot; ``close`` takes it again.
            owner: the lease.
            wanted: bytes that the lease's engines of this node may keep.

        Raises:
            BadEngine: this host cannot; says what to change.
            NoMemory: other leases have the room now.
            OSError: the folder cannot be made.
        """
        root = self._check(owner.lease, wanted)
        key = owner.uid or slot
        known = self._leases.get(key)
        others = sum(one.bytes for name, one in self._leases.items() if name != key)
        if not admits(wanted, others, self.room):
            raise NoMemory(
                f"lease {owner.lease} asks for {wanted >> 20} MiB of keys, and other leases have "
                f"{others >> 20} of this node's {self.room >> 20} MiB; lower kvStoreGiB, raise "
                f"--kv-store-mib (engineHost.kvStoreGibibytes), {_OFF}"
            )
        if known is None:
            used = {one.folder.group for one in self._leases.values()}
            start = self.first_user + COUNT
            group = next(n for n in range(start, start + COUNT) if n not in used)
            path = root / hashlib.sha256(key.encode()).hexdigest()[:16]
            _make(path, group)
            known = self._leases[key] = _Lease(KvFolder(path, group), {})
        known.slots[slot] = wanted
        return known.folder

    def group_of(self, slot: str) -> int:
        """The group that a slot's engine has beside its own; 0 = none."""
        return next((one.folder.group for one in self._leases.values() if slot in one.slots), 0)

    def close(self, slot: str) -> None:
        """A slot is gone, with its engine; with the last one of its lease goes the folder.

        Many GiB are freed in seconds, and the caller also stops engines for serving's sake:
        the folder goes out of the way at once, and its pages beside everything else.
        """
        for lease, one in tuple(self._leases.items()):
            one.slots.pop(slot, None)
            if one.slots:
                continue
            del self._leases[lease]
            path = one.folder.path
            aside = path.with_name(f".{path.name}-{time.monotonic_ns()}")
            with contextlib.suppress(FileNotFoundError):
                path.chmod(0o700)  # its group is the next lease's
                path.rename(aside)
                threading.Thread(target=self.remove, args=(aside,), daemon=True).start()

    def used(self) -> int:
        """Bytes of all keys here; 0 where the folder is gone: every metric hangs on the answer."""
        if self.root is None:
            return 0
        try:
            found = os.statvfs(self.root)
        except FileNotFoundError:
            return 0
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def _check(self, lease: str, wanted: int) -> Path:
        if not lease:
            raise BadEngine(f"an engine of no lease shares keys with nobody; name one, {_OFF}")
        if self.root is None:
            raise BadEngine(
                "this engine host has no memory for keys; give it a tmpfs with --kv-store DIR "
                f"--kv-store-mib N (engineHost.kvStoreGibibytes of the chart), {_OFF}"
            )
        if not self.first_user:
            raise BadEngine(
                "engines run as the host's user here, so one lease could read another's keys; set "
                f"--engine-uid (engineHost.engines.firstUser of the chart), {_OFF}"
            )
        if wanted > self.room:
            raise BadEngine(
                f"{wanted >> 20} MiB of keys do not fit into the {self.room >> 20} MiB that this "
                f"node has for them; raise engineHost.kvStoreGibibytes, {_OFF}"
            )
        if self.engine_bytes and wanted >= self.engine_bytes:
            raise BadEngine(
                f"an engine may have {self.engine_bytes >> 20} MiB of memory, to which the keys "
                f"that it writes count; raise --engine-memory-mib above {wanted >> 20} MiB "
                f"(engineHost.engines.memoryMebibytes), {_OFF}"
            )
        return self.root


def check(root: Path | None, room: int, shm_bytes: int) -> None:
    """Refuse a place that is none.

    Args:
        root: as ``KvFolders.root``.
        room: as ``KvFolders.room``.
        shm_bytes: size of each engine's own ``/dev/shm``; 0 = they share the node's.

    Raises:
        BadInput: says what is wrong with it.
    """
    if root is None and not room:
        return
    if root is None or not room:
        raise BadInput("--kv-store and --kv-store-mib go together; give both or none")
    kind, point = _file_system(root) if root.is_dir() else ("", root)
    if kind != "tmpfs":
        raise BadInput(
            f"--kv-store {root} is no folder on a tmpfs; mount one of {room >> 20} MiB there"
        )
    if shm_bytes and point == _SHARED:
        raise BadInput(
            f"--kv-store {root} cannot be seen by engines that have a /dev/shm of their own; use "
            "another tmpfs, or --engine-shm-mib 0"
        )
    if point == root.resolve() == _SHARED or any(
        _OURS.fullmatch(one.name) is None for one in root.iterdir()
    ):
        raise BadInput(
            f"--kv-store {root} is used for other things, and is emptied at each start; name a "
            "folder of its own"
        )
    found = os.statvfs(root)
    size = found.f_blocks * found.f_frsize
    if 0 < size < room:
        raise BadInput(
            f"--kv-store-mib {room >> 20} is more than the tmpfs {root} has, {size >> 20} MiB; make"
            " it larger"
        )


def _file_system(path: Path) -> tuple[str, Path]:
    """Kind and mount point of what a folder lies on."""
    best = ("", Path("/"))
    resolved = path.resolve()
    for line in proc_text("self", "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point = Path(left.split()[4].encode().decode("unicode_escape"))
        if resolved.is_relative_to(point) and len(point.parts) >= len(best[1].parts):
            best = (right.split()[0], point)
    return best


def _make(path: Path, group: int) -> None:
    _remove(path)
    path.mkdir(mode=0o700)
    os.chown(path, -1, group)
    path.chmod(0o2770)
