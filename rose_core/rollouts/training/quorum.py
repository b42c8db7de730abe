"""Who must run new weights before a trainer that pushes them is told that they are live.

The quorum counts engines that have *attested* the version or a newer one, and it is never met by
nobody: where no dedicated engine is attached, one engine of any kind must have it. Adapters of
a lease's other runs are never counted: what is pushed is its first's. Borrowed engines
are never waited for while there are dedicated ones: a publish must not hang on a closed gate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rose_core.identity import WeightVersion
from rose_core.rollouts.placement.views import EngineView
from rose_core.rollouts.versions import Pin, satisfies
from rose_core.wire.routing import EngineKind


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many, and for how long to wait for them.

    Attributes:
        dedicated: so many dedicated engines; ``None`` = all that are attached, 0 = nobody: the
            trainer goes on as soon as the weights are safe.
        seconds: longest wait; below the trainer's own time-out.
        hold_seconds: a pause that nobody ends is over after this.
    """

    dedicated: int | None = None
    seconds: float = 600.0
    hold_seconds: float = 1800.0


def missing(engines: Iterable[EngineView], version: WeightVersion, quorum: Quorum) -> str:
    """Who the quorum still waits for, in words; empty when it is met.

    Args:
        engines: those attached now.
        version: the new one.
        quorum: who must have it.
    """
    if quorum.dedicated == 0:
        return ""
    here = [engine for engine in engines if not engine.leaving and not engine.named]
    ours = [engine for engine in here if engine.kind is EngineKind.DEDICATED]
    if not ours and quorum.dedicated is None:
        some = any(_has(engine, version) for engine in here)
        return "" if some else "any engine at all (no dedicated engine is attached)"
    late = [engine.name for engine in ours if not _has(engine, version)]
    wanted = len(ours) if quorum.dedicated is None else quorum.dedicated
    if len(ours) - len(late) >= wanted:
        return ""
    return ", ".join(late) or f"{wanted - len(ours)} more dedicated engines"


def _has(engine: EngineView, version: WeightVersion) -> bool:
    return engine.version is not None and satisfies(engine.version, Pin(minimum=version))
