"""Keys and values that outlive the engine that made them: a tier of one job, beside its engines.

The product has it where its platform runs a pool (docs/decisions/0850): every engine of a job
reaches it over a link of a stated rate, which engines measure and the simulator knows. A turn waits
for it where that is quicker than to prefill (``patience``, which engines ask too).

| when | what |
|---|---|
| a prompt has been prefilled, a turn has ended | the tier has the trajectory's keys up to there |
| a turn is cut | it has no more than that: a frozen engine writes nothing |
| a turn is admitted | what its engine has not, and the tier has, is fetched where that is quicker |

Sessions are named with the weights' version, so keys of one are never used under another. Writing
costs nothing here, fetching takes its time before the prefill begins, and the sessions that were
used least recently go first. Next step: ``batch`` asks it at admission.
"""

from __future__ import annotations

from collections import OrderedDict

from rose_core.rollouts.engines.kv_store import PAGE_TOKENS, SETUP_SECONDS, patience


class KeptKeys:
    """The tier.

    Args:
        room: tokens that it holds.
        token_bytes: of one token's keys.
        bytes_per_second: of the link, to one engine.
    """

    def __init__(self, room: int, token_bytes: float, bytes_per_second: float) -> None:
        self._room = room
        self._page_seconds = max(1, round(token_bytes * PAGE_TOKENS)) / bytes_per_second
        self._held: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0

    def held(self, session: str) -> int:
        """Tokens of the session that an engine may fetch."""
        if session in self._held:
            self._held.move_to_end(session)
        return self._held.get(session, 0)

    def fetched(self, tokens: int, seconds_per_token: float) -> int:
        """Of so many tokens that an engine lacks, those that it fetches: pages, or none.

        Args:
            tokens: that the tier has.
            seconds_per_token: of the engine's prefill.
        """
        pages = tokens // PAGE_TOKENS
        waits = patience(pages, seconds_per_token, self._page_seconds)
        return pages * PAGE_TOKENS if waits else 0

    def seconds(self, tokens: int) -> float:
        """Until so many tokens' keys are in an engine."""
        if not tokens:
            return 0.0
        return SETUP_SECONDS + tokens / PAGE_TOKENS * self._page_seconds

    def keep(self, session: str, tokens: int) -> None:
        """An engine has written the session's first tokens; what was longer stays."""
        before = self._held.pop(session, 0)
        self._held[session] = max(tokens, before)
        self._tokens += max(tokens, before) - before
        while self._tokens > self._room:
            self._tokens -= self._held.popitem(last=False)[1]
