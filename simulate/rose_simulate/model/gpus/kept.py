"""Keys and values that outlive the engine that made them: a tier of one job, beside its engines.

**Modelled: the product's store ends at a node** (docs/decisions/0661). This one is reached by all
engines of a job, wherever they are.

| when | what |
|---|---|
| a prompt has been prefilled, a turn has ended | the tier has the trajectory's keys up to there |
| a turn is cut | it has no more than that: a frozen engine writes nothing |
| a turn is admitted | what its engine has not, and the tier has, is fetched and not computed |

Sessions are named with the weights' version, so keys of one are never used under another. Writing
costs nothing here, fetching takes its time before the prefill begins, and the sessions that were
used least recently go first. Next step: ``batch`` asks it at admission.
"""

from __future__ import annotations

from collections import OrderedDict


class KeptKeys:
    """The tier.

    Args:
        room: tokens that it holds.
        fetch_s: seconds until one token's keys are in an engine.
    """

    def __init__(self, room: int, fetch_s: float) -> None:
        self._room, self.fetch_s = room, fetch_s
        self._held: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0

    def held(self, session: str) -> int:
        """Tokens of the session that an engine may fetch."""
        if session in self._held:
            self._held.move_to_end(session)
        return self._held.get(session, 0)

    def keep(self, session: str, tokens: int) -> None:
        """An engine has written the session's first tokens; what was longer stays."""
        before = self._held.pop(session, 0)
        self._held[session] = max(tokens, before)
        self._tokens += max(tokens, before) - before
        while self._tokens > self._room:
            self._tokens -= self._held.popitem(last=False)[1]
