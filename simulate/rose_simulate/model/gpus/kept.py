"""Keys and values that outlive the engine that made them: a tier of one job, beside its engines.

The product has it where its platform runs a pool (docs/decisions/0850): every engine of a job
reaches it over a link of a stated rate. Or its engines of a node share a folder in the node's
memory (docs/decisions/0661). A turn waits for it where that is quicker than to prefill,
as far as its engine knows: engines measure what pulls take, as the product's do (``PullPace``,
``patience``).

| when | what |
|---|---|
| a prompt has been prefilled, a turn has ended | the tier has the trajectory's keys up to there |
| a turn is cut | it has no more than that: a frozen engine writes nothing |
| a turn is admitted | what its engine has not, and the tier has, is fetched where that is quicker |
| an engine has written, once a minute | it has measured two pulls, beside its work |

Sessions are named with the weights' version, so keys of one are never used under another. Writing
costs nothing here, fetching takes its time before the prefill begins, and the sessions that were
used least recently go first. Next step: ``batch`` asks it at admission.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from rose_core.rollouts.engines.kv_store import (
    PAGE_TOKENS,
    READ_BACK_PAGES,
    PullCost,
    PullPace,
    measures_anew,
    patience,
)
from rose_simulate.model.gpus.recomputed import EngineHistory, KeyHistory


class KeptKeys:
    """The tier.

    Args:
        room: tokens that it holds.
        token_bytes: of one token's keys.
        bytes_per_second: of the link, to one engine.
        setup_seconds: of a pull, before its first page.
        is_near: a folder of the node, which the product reads without asking whether it is quicker.
    """

    def __init__(
        self,
        room: int,
        token_bytes: float,
        bytes_per_second: float,
        setup_seconds: float,
        *,
        is_near: bool = False,
    ) -> None:
        self._room, self.is_near = room, is_near
        page = max(1, round(token_bytes * PAGE_TOKENS)) / bytes_per_second
        self.cost = PullCost(setup_seconds, page)
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


class TierReader:
    """One engine's side of the tier: what it fetches, by what it has measured."""

    def __init__(self, tier: KeptKeys) -> None:
        self._tier, self._pace = tier, PullPace()
        self._measured: float | None = None

    def fetched(self, tokens: int, seconds_per_token: float) -> int:
        """Of so many tokens that the engine lacks and the tier has, those that it fetches.

        Args:
            tokens: of which whole pages come, or nothing.
            seconds_per_token: of the engine's prefill.
        """
        pages = tokens // PAGE_TOKENS
        if self._tier.is_near:
            return pages * PAGE_TOKENS
        if not patience(pages, seconds_per_token, self._pace.cost):
            return 0
        self._pace.note(self._tier.cost.of(pages), pages)
        return pages * PAGE_TOKENS

    def seconds(self, tokens: int) -> float:
        """Until so many tokens' keys are in the engine."""
        return self._tier.cost.of(tokens // PAGE_TOKENS) if tokens else 0.0

    def write(self, session: str, tokens: int, now: float) -> None:
        """The engine has made keys of the session's first tokens."""
        self._tier.keep(session, tokens)
        if tokens >= PAGE_TOKENS and measures_anew(self._measured, now):
            self._measured = now
            for pages in READ_BACK_PAGES:
                self._pace.note(self._tier.cost.of(pages), pages)


class JobKeys:
    """Where the engines of one job keep keys for each other, and who of them has made which.

    Args:
        tier: makes an empty one; None = they keep none.
        by_node: each node has its own; otherwise one is reached by all.
    """

    def __init__(self, tier: Callable[[], KeptKeys] | None, *, by_node: bool = False) -> None:
        self._make, self._by_node = tier, by_node
        self._tiers: dict[str, KeptKeys] = {}
        self._history = KeyHistory()

    def at(self, node: str) -> KeptKeys | None:
        """The tier that an engine there has."""
        if self._make is None:
            return None
        key = node if self._by_node else ""
        if key not in self._tiers:
            self._tiers[key] = self._make()
        return self._tiers[key]

    def history_of(self, node: str) -> EngineHistory:
        """A new engine's there."""
        return EngineHistory(self._history, node)
