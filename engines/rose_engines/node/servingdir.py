"""Files through which guard and sleeper of a node agree on a serving replica that is lent whole.

    serving/alive               permit whose host heartbeat says that the sleeper runs
    serving/<pod uid>/order     how to speak to the engine, and whether it is drained (guard)
    serving/<pod uid>/permit    extended by the guard for as long as serving may sleep
    serving/<pod uid>/record    where serving stands (sleeper)
    drain/<pod uid>/drain       exists while traffic is to stay away from the pod (sleeper)

The last folder is the only one that a serving pod sees: its owner mounts it and lets the readiness
probe fail while the file exists. Where nobody mounts it, it does not exist, and nothing is drained.
Next step: ``rose_agent.guard.replicas.whole`` writes orders, ``rose_agent.sleeper.sleepers``
follows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec


class SleepOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """``handover``: one replica.

    Attributes:
        processes: (pid, start ticks) of serving's processes; a pid alone may be another's later.
        drained: it is not Ready and has no request, so it may be put to sleep.
    """

    engine: str
    url: str
    processes: tuple[tuple[int, int], ...]
    gpus: tuple[str, ...]
    release_bytes: int
    wake_seconds: float
    drained: bool = False


@dataclass(frozen=True)
class ServingDir:
    """Paths of one replica."""

    path: Path
    drain_folder: Path

    @property
    def uid(self) -> str:
        """The pod's uid."""
        return self.path.name

    @property
    def order(self) -> Path:
        """``SleepOrder``."""
        return self.path / "order"

    @property
    def permit(self) -> Path:
        """See ``rose_engines.node.permit``."""
        return self.path / "permit"

    @property
    def record(self) -> Path:
        """The sleeper's own."""
        return self.path / "record"

    @property
    def drain(self) -> Path:
        """The word to the pod's readiness probe."""
        return self.drain_folder / "drain"


@dataclass(frozen=True)
class ServingDirs:
    """All of them, in a run directory."""

    root: Path

    @property
    def folder(self) -> Path:
        """Folder of the orders to serving engines and of their records."""
        return self.root / "serving"

    @property
    def drains(self) -> Path:
        """What serving pods mount a part of."""
        return self.root / "drain"

    @property
    def alive(self) -> Path:
        """The sleeper's heartbeat."""
        return self.folder / "alive"

    def of(self, uid: str) -> ServingDir:
        """Paths of one replica."""
        return ServingDir(self.folder / uid, self.drains / uid)

    def ordered(self) -> tuple[ServingDir, ...]:
        """Replicas with an order."""
        return tuple(self.of(path.parent.name) for path in sorted(self.folder.glob("*/order")))
