"""Effects that left a sandbox, and whether a trajectory may go back across them.

| effect | repeated | gone back across |
|---|---|---|
| GET, HEAD, OPTIONS | reads again: the world may have moved on | told as ``stale`` |
| PUT, DELETE, or any with an Idempotency-Key | has the same effect | told as ``repeated`` |
| POST, PATCH, tunnels, lost entries | could happen twice | refused: ``EffectsCrossed`` |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_IDEMPOTENT = frozenset({"PUT", "DELETE"})


class Repeatability(StrEnum):
    """Whether an effect on the outside may be repeated."""

    READ = "read"
    IDEMPOTENT = "idempotent"
    ONCE = "once"


class EffectsCrossed(Exception):
    """Going back would cross effects that cannot be repeated.

    Attributes:
        effects: those effects, in order.
    """

    def __init__(self, effects: tuple[EgressEffect, ...]) -> None:
        shown = "; ".join(f"turn {one.turn}: {one.method} {one.target}" for one in effects[:3])
        more = f" and {len(effects) - 3} more" if len(effects) > 3 else ""
        super().__init__(
            f"{len(effects)} effects outside the sandbox cannot be repeated ({shown}{more}); go "
            "back to a turn after them, or say crossing=flag if the world outside was put right"
        )
        self.effects = effects


@dataclass(frozen=True)
class EgressEffect:
    """One request that left a sandbox.

    Attributes:
        turn: the turn whose command sent it.
        method: of HTTP; CONNECT: a tunnel; LOST: entries that the log had no room for.
        target: host and path.
        status: of the answer; 0: none came, so it may have happened.
        keyed: it carried an Idempotency-Key.
    """

    turn: int
    method: str
    target: str
    status: int = 0
    keyed: bool = False

    @property
    def kind(self) -> Repeatability:
        """What a repetition does."""
        if self.method in _READS:
            return Repeatability.READ
        if self.method in _IDEMPOTENT or self.keyed:
            return Repeatability.IDEMPOTENT
        return Repeatability.ONCE


@dataclass(frozen=True)
class RewoundEffects:
    """What lies between the present and a turn gone back to.

    Attributes:
        stale: reads whose answers may have changed.
        repeated: what may happen again, to the same effect.
        once: what cannot be repeated.
    """

    stale: tuple[EgressEffect, ...] = ()
    repeated: tuple[EgressEffect, ...] = ()
    once: tuple[EgressEffect, ...] = ()


def cross(effects: Iterable[EgressEffect], back_to: int, *, flag: bool = False) -> RewoundEffects:
    """What going back to the end of a turn crosses.

    Args:
        effects: of the trajectory so far, also of turns without a record.
        back_to: the turn whose record is restored.
        flag: hand back what cannot be repeated rather than refuse.

    Raises:
        EffectsCrossed: something cannot be repeated, and ``flag`` is not set.
    """
    later = [one for one in effects if one.turn > back_to]
    once = tuple(one for one in later if one.kind is Repeatability.ONCE)
    if once and not flag:
        raise EffectsCrossed(once)
    return RewoundEffects(
        tuple(one for one in later if one.kind is Repeatability.READ),
        tuple(one for one in later if one.kind is Repeatability.IDEMPOTENT),
        once,
    )
