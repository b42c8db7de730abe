"""What the host may ask of its root helper.

An engine goes by its name alone: cgroups, limits, user and folders follow from the helper's own
command line, so a host that was taken over can name no path, no user and no limit.
"""

from __future__ import annotations

import enum
import re

import msgspec

NAME = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._]{0,127}")
"""What names an engine: the folder name of its slot."""

LARGEST = 128 << 10
"""Most bytes of a request or an answer."""


class Move(enum.Enum):
    """What becomes of a whole tree."""

    FREEZE = "freeze"
    THAW = "thaw"
    KILL = "kill"


class Take(msgspec.Struct, tag=True, frozen=True):
    """Give an engine a user, and that user what it needs of its folder.

    Attributes:
        made_by: what makes its kernels, 16 hexadecimal digits; a false word costs the host's own
            engines their compiled kernels, and nobody anything else.
    """

    name: str
    made_by: str


class Spawn(msgspec.Struct, tag=True, frozen=True):
    """Start an engine; its log comes with the message, its pidfd with the answer."""

    name: str
    argv: tuple[str, ...]
    variables: dict[str, str]
    own_shm: bool = True


class Steer(msgspec.Struct, tag=True, frozen=True):
    """Freeze, thaw or kill an engine's tree."""

    name: str
    move: Move


class Quota(msgspec.Struct, tag=True, frozen=True):
    """Give an engine the quota for busy serving, or its own."""

    name: str
    busy: bool


class Reap(msgspec.Struct, tag=True, frozen=True):
    """Collect an engine's first process, which has ended."""

    name: str


class Close(msgspec.Struct, tag=True, frozen=True):
    """Remove an empty tree's cgroups and what it left in shared memory."""

    name: str


class Release(msgspec.Struct, tag=True, frozen=True):
    """The engine has ended: its user and its home go."""

    name: str


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Remove what an engine left in its folder; with ``permit`` the folder too."""

    name: str
    permit: bool


class OpenKeys(msgspec.Struct, tag=True, frozen=True):
    """Let an engine into the folder of its lease's keys, which is made where it is the first.

    Attributes:
        lease: ``namespace/name``; a false word shows keys to engines that the host could start too.
        lease_uid: as ``kv_folders.KvOwner`` has it.
        wanted: bytes.
    """

    name: str
    lease: str
    lease_uid: str
    wanted: int


class CloseKeys(msgspec.Struct, tag=True, frozen=True):
    """The slot is gone; with the last one of its lease go the keys."""

    name: str


Request = Take | Spawn | Steer | Quota | Reap | Close | Release | Forget | OpenKeys | CloseKeys


class HelperReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of it.

    Attributes:
        refusal: why not; empty = done.
        pid, cgroup: of a spawned engine.
        code: how a reaped process ended.
        uid, home: the user that was given.
        folder: of the lease's keys.
    """

    refusal: str = ""
    pid: int = 0
    cgroup: str = ""
    code: int = 0
    uid: int = 0
    home: str = ""
    folder: str = ""


class Ready(msgspec.Struct, frozen=True):
    """The helper's first word: what it has found, or why it ends.

    Attributes:
        driver, reason, base, prefix: the freezer's.
        bases: controller -> hierarchy's version and folder of the limits.
    """

    refusal: str = ""
    driver: str = ""
    reason: str = ""
    base: str = ""
    prefix: str = ""
    bases: dict[str, tuple[int, str]] = {}
