"""Which turn may have ended an engine, and what becomes of it: no turn ends one after the other.

An engine's process that dies takes all its turns along, and the router carries them on elsewhere.
If one of them was the cause, it would end the next engine too. Bounds (``fields``) keep out what is
known to end engines; this is for what nobody knows yet. What a turn asks for is computed first in
its prefill, so a turn without a token of its leg is the likelier cause:

| at the death of the process, the turn | is |
|---|---|
| had no token of its leg yet | a suspect |
| had one | a bystander; at the second such death a suspect |

| a suspect | then |
|---|---|
| next leg | on an engine where no other turn runs, and none begins meanwhile |
| has one token more than at the death | cleared |
| ends a process again | refused: 422, no client asks again |

A connection that is lost while the engine's process goes on (it answers a request of one token, the
*canary*), or under a closed gate (nothing is computed there), says nothing about the turn.
Next step: ``rose_router.turns.runner`` keeps a ``SuspectRecord`` for each turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GATE_SECONDS = 0.5
"""A gate closed for longer: what the turn asked for is not what ended the process. Below it, the
gate may have closed because the process had ended."""


def suspects(tokens: Mapping[str, int]) -> frozenset[str]:
    """The legs that may have ended their engine.

    Args:
        tokens: tokens that each leg had from it.
    """
    return frozenset(leg for leg, count in tokens.items() if not count)


@dataclass(slots=True)
class SuspectRecord:
    """What is known against one turn.

    Attributes:
        deaths: processes that ended while it was a suspect.
        stood_by: processes that ended while it was a bystander.
        cleared_at: output tokens that clear it; ``None`` = it is no suspect.
        engines: whose processes those were, in order.
    """

    deaths: int = 0
    stood_by: int = 0
    cleared_at: int | None = None
    engines: tuple[str, ...] = ()

    def must_be_alone(self) -> bool:
        """It is a suspect."""
        return self.cleared_at is not None

    def saw_death(self, engine: str, *, suspected: bool, held: int) -> bool:
        """A process that ran its leg has died.

        Args:
            engine: whose process.
            suspected: the leg is one of ``suspects``.
            held: output tokens held now.

        Returns:
            True when the turn must not run again.
        """
        self.engines = (*self.engines, engine)
        if not suspected:
            self.stood_by += 1
        if suspected or self.stood_by > 1:
            self.deaths += 1
            self.cleared_at = held + 1
        return self.deaths > 1

    def note_tokens(self, held: int) -> None:
        """Note how many output tokens there are now."""
        if self.cleared_at is not None and held >= self.cleared_at:
            self.cleared_at, self.deaths, self.stood_by, self.engines = None, 0, 0, ()
