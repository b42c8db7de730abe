"""Why tokens of prompts are computed: who has had their keys before, if anybody.

``made`` of a job's trajectory is known to the simulator alone: which engine has computed how much
of it, under which weights. A turn's tokens that its engine computes are put down to the first row
that holds of them:

| cause | the keys of these tokens |
|---|---|
| ``UNFETCHED`` | are in the job's tier; computed as quickly, or nothing is measured yet |
| ``ROOM`` | this engine has had, and gave up for room |
| ``NODE`` | another engine of its node has made |
| ``ELSEWHERE`` | an engine of another node has made |
| ``WEIGHTS`` | were made by older weights alone |
| ``NEW`` | nobody has made, or was cut while doing so |

Next step: ``batch`` asks it at admission, the router adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Cause(StrEnum):
    """Why tokens of a prompt are computed; see the module."""

    UNFETCHED = "unfetched"
    ROOM = "room"
    NODE = "node"
    ELSEWHERE = "elsewhere"
    WEIGHTS = "weights"
    NEW = "new"


class KeyHistory:
    """What engines of one job have computed so far."""

    def __init__(self) -> None:
        self._made: dict[str, dict[str, dict[EngineHistory, int]]] = {}

    def note(self, engine: EngineHistory, session: str, tokens: int) -> None:
        """An engine has computed the first tokens of ``trajectory@version``."""
        trajectory, _, version = session.rpartition("@")
        made = self._made.setdefault(trajectory, {}).setdefault(version, {})
        made[engine] = max(tokens, made.get(engine, 0))

    def causes(
        self, engine: EngineHistory, session: str, tokens: range, in_tier: int
    ) -> Mapping[Cause, int]:
        """Why an engine computes these tokens of a session; ``in_tier``: of the first, in it."""
        trajectory, _, version = session.rpartition("@")
        versions = self._made.get(trajectory, {})
        here = versions.get(version, {})
        beside = (count for one, count in here.items() if one.node == engine.node)
        ends = {
            Cause.UNFETCHED: in_tier,
            Cause.ROOM: here.get(engine, 0),
            Cause.NODE: max(beside, default=0),
            Cause.ELSEWHERE: max(here.values(), default=0),
            Cause.WEIGHTS: max((max(one.values()) for one in versions.values()), default=0),
            Cause.NEW: tokens.stop,
        }
        found, at = {}, tokens.start
        for cause, end in ends.items():
            upto = max(at, min(end, tokens.stop))
            found[cause], at = upto - at, upto
        return found


class EngineHistory:
    """One engine's side of it.

    Args:
        history: of the job.
        node: where it stands.
    """

    def __init__(self, history: KeyHistory, node: str) -> None:
        self._history, self.node = history, node

    def note(self, session: str, tokens: int) -> None:
        """It has computed the session's first tokens, or has been given them."""
        self._history.note(self, session, tokens)

    def causes(self, session: str, tokens: range, in_tier: int) -> Mapping[Cause, int]:
        """Why it computes these tokens of a session."""
        return self._history.causes(self, session, tokens, in_tier)
