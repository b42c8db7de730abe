"""Gives every engine a user of its own, so that none can read or steer another.

With ``--engine-uid N`` engines run as the users N, N+1, ...; each number is also their group. What
an engine may reach of the run directory:

| path | owner | engine |
|---|---|---|
| run directory, ``slots`` | host, 0711 | passes through, lists nothing |
| ``slots/<uid>`` | host : engine, 0710 | passes through; nobody else's engine does |
| ``permit`` | host, 0644 | reads |
| ``bundles`` | host : engine, 0750 | reads |
| ``own`` | engine, 0700 | its control socket |
| sockets, ``slot.json``, ``engine.json`` | host, 0600 | nothing |

With a root helper (``helper``) ``own`` has the host's group and mode 02770, so that it reaches the
control socket, and the run directory is root's with mode 01771. ``weights.json`` is 0644.

Home and temporary files are a folder of its own too, which goes with the engine; compiled kernels
are another, which stays as long as the slot (``kernel_caches``). Without a first user engines run
as the host does.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rose_agent.errors import BadEngine
from rose_agent.host.users import kernel_caches
from rose_engines.node.rundir import RunDir, SlotDir

COUNT = 1000


@dataclass(frozen=True)
class Account:
    """Who an engine runs as.

    Attributes:
        uid: user and group; 0 = the host's own.
        home: folder for its temporary files; None = the host's.
        kernels: folder for its compiled kernels; None = the host's.
    """

    uid: int = 0
    home: Path | None = None
    kernels: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead it to its own folders, and its name.

        Libraries ask for a name without looking whether there is one, and the user has no entry
        in ``/etc/passwd`` where an image of another maker runs.
        """
        if self.home is None:
            return {}
        own = {name: str(self.home) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
        own |= dict.fromkeys(("USER", "LOGNAME"), f"rose-engine-{self.uid}")
        return own | (kernel_caches.environment(self.kernels) if self.kernels else {})


@dataclass
class Accounts:
    """Users that this host hands out.

    Attributes:
        first: the first of them; 0 = engines run as the host's user.
        made_by: what makes the engines' kernels (``kernel_caches.made_by``).
    """

    first: int = 0
    made_by: str = kernel_caches.UNKNOWN
    _taken: dict[str, Account] = field(default_factory=dict)

    def open(self, rundir: RunDir) -> None:
        """Let engines pass through the run directory.

        Raises:
            OSError: the run directory is not ours.
        """
        if self.first:
            for folder in (rundir.root, rundir.slots):
                folder.chmod(0o711)

    def take(self, slot: SlotDir) -> Account:
        """The user of a slot's next process, with its folders made.

        Raises:
            BadEngine: all users are taken.
            OSError: a folder cannot be given away.
        """
        if not self.first:
            return Account()
        known = self._taken.get(slot.uid)
        if known is not None:
            return known
        used = {account.uid for account in self._taken.values()}
        uid = next((n for n in range(self.first, self.first + COUNT) if n not in used), None)
        if uid is None:
            raise BadEngine(f"all {COUNT} users from {self.first} on have an engine")
        home = Path(tempfile.mkdtemp(prefix="rose-engine-"))
        os.chown(home, uid, uid)
        _give(slot, uid)
        slots = slot.folder.parent
        root = kernel_caches.root_of(slots, self.made_by)
        kernel_caches.prune([folder.name for folder in slots.iterdir()], root)
        kernels = kernel_caches.open_for(slot.uid, uid, root)
        account = self._taken[slot.uid] = Account(uid, home, kernels)
        return account

    def release(self, slot: SlotDir) -> None:
        """The engine has ended: its user and its folder go."""
        account = self._taken.pop(slot.uid, None)
        if account is not None and account.home is not None:
            shutil.rmtree(account.home, ignore_errors=True)
            kernel_caches.close(slot.uid, kernel_caches.root_of(slot.folder.parent, self.made_by))


def _give(slot: SlotDir, uid: int) -> None:
    for folder, owner, mode in (
        (slot.folder, 0, 0o710),
        (slot.bundles, 0, 0o750),
        (slot.own, uid, 0o700),
    ):
        os.chown(folder, owner or os.geteuid(), uid)
        folder.chmod(mode)
