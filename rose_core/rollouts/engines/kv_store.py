"""Keys and values that a lease's engines on a node keep for each other: sizes, what may be kept.

A turn that is cut goes on at another engine. With a store, that engine fetches what the first has
computed, whole pages of it, and computes the rest. A store is a folder in the node's memory
(``agent``'s ``kv_folders``), written and read by SGLang's hierarchical cache (``rose_engines``).

| kept | not kept |
|---|---|
| pages of weights whose digest the engine attests | what ran over a commit: it mixes two versions |
| whole pages | the rest of the last page |
| until newer pages need the room, or the lease has no slot on the node | anything longer |

Where the platform has a pool of memory that all nodes reach (``rose_engines.kv.pool``), pages are
also written there. An engine whose node lacks them pulls them, if to compute them takes longer.
It knows both from what it has measured itself, as of late (``PullPace``); until then it pulls
nothing.

Next step: ``rose_engines.kv.policy`` names what is kept.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import cast

PAGE_TOKENS = 16
"""Tokens of a page, which is one file: 2 MiB of an 8B's keys in bfloat16.

Engines compute whole pages at a time, so a page is no longer than the shortest prefill chunk
(``rose_core.guard.chunk``).
"""

SETUP_SECONDS = 0.05
"""Until the first page of a pull comes, before it is known (``PullPace``): pages are looked up, and
the pool's nodes connected to."""

LONGEST_SETUP_SECONDS = 1.0
"""Whatever was measured: a turn that waits so long before anything comes had better prefill."""

READ_BACK_PAGES = (1, 32)
"""Pages of two pulls by which an engine measures: two lengths tell set-up and pages apart. Over
100 Gb/s the second takes 6 ms more for an 8B, which is more than pulls differ by."""

LONGEST_SECONDS = 20.0
"""Of a pull: a third of what a router lets an engine be silent (``placement.watch``), since the
prefill of what is left follows in silence too."""

MEASURED_SECONDS = 60.0
"""From one measure to the next. An engine reads back what it has just written, also while turns
pull, since these are all long: 74 MiB of an 8B's keys, for which nobody waits."""

_STAGED_CONTEXTS = 2
_KEPT, _SLOWER, _QUICKER = 0.9, 4.0, 4.0
_FEW = 1.8  # pulls, the newest counting most: one measure has two of them
_ALIKE = 0.05  # lengths of pulls that say nothing of where their time goes
_FLATTEST = 1 / max(READ_BACK_PAGES)  # of a page's mean time: what short pulls do not tell from 0
_Sums = tuple[float, float, float, float, float]
# Over pulls, each by one over its pages: of 1, pages, pages squared, seconds, seconds by pages.
_NOTHING: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)


class RecentPace:
    """What one of many takes, as of late: the newest count most.

    Whoever was stopped in the middle of a sample was not slow: it counts for four times what was
    expected.
    """

    def __init__(self) -> None:
        self._seconds = self._count = 0.0

    @property
    def seconds_each(self) -> float:
        """0 = nothing is known."""
        return self._seconds / self._count if self._count else 0.0

    def note(self, seconds: float, count: int) -> None:
        """So many have taken so long."""
        known = self.seconds_each
        took = min(seconds, _SLOWER * known * count) if known else seconds
        self._seconds = _KEPT * self._seconds + took
        self._count = _KEPT * self._count + count


@dataclass(frozen=True)
class PullCost:
    """What a pull takes, as an engine knows it.

    Attributes:
        setup_seconds: before the first page.
        seconds_per_page: 0 = nothing is known.
    """

    setup_seconds: float = SETUP_SECONDS
    seconds_per_page: float = 0.0

    def of(self, pages: int) -> float:
        """Seconds of a pull of so many pages."""
        return self.setup_seconds + pages * self.seconds_per_page


class PullPace:
    """What a pull takes, as of late: a line through whole pulls, by least squares.

    The newest count most. A pull's spread grows with its pages, so each counts by one over them: of
    long pulls the slope is learned, of short ones the set-up. Where few were seen, or all of one
    length, nothing tells the two apart. Then all of their time is laid to the pages, and the set-up
    is ``SETUP_SECONDS`` on top, which pulls too little rather than too much.

    Whoever was stopped in the middle of a pull was not slow: it counts for four times what was
    expected. One that is four times as quick as any line through the others is no accident: what
    was slow is so no more, and the past is forgotten.
    """

    def __init__(self) -> None:
        self.cost = PullCost()
        self._sums = _NOTHING

    def note(self, seconds: float, pages: int) -> None:
        """A pull of so many pages, at least one, has taken so long."""
        _, pulls, total, _, taken = self._sums
        if pulls:
            mean, usual = taken / total, total / pulls
            # Set-up and pages both take their time, so a line is as high there, and no higher.
            if _QUICKER * seconds < min(pages, usual) * mean:
                self._sums = _NOTHING
            else:
                most = self.cost.of(pages) if self._has_a_line() else max(pages, usual) * mean
                seconds = min(seconds, _SLOWER * most)
        more = (1 / pages, 1.0, float(pages), seconds / pages, seconds)
        self._sums = cast(
            "_Sums", tuple(_KEPT * one + new for one, new in zip(self._sums, more, strict=True))
        )
        self.cost = self._fit()

    def _has_a_line(self) -> bool:
        ones, pulls, total, _, _ = self._sums
        return pulls >= _FEW and ones * total - pulls**2 >= _ALIKE * ones * total

    def _fit(self) -> PullCost:
        ones, pulls, total, shares, taken = self._sums
        if not self._has_a_line():
            return PullCost(SETUP_SECONDS, taken / total)
        setup = (shares * total - taken * pulls) / (ones * total - pulls**2)
        setup = min(max(setup, 0.0), LONGEST_SETUP_SECONDS)
        return PullCost(setup, max((taken - setup * pulls) / total, _FLATTEST * taken / total))


def patience(pages: int, seconds_per_token: float, cost: PullCost) -> float:
    """Seconds for which a turn waits for its pages; 0 = none are pulled, to prefill is as quick.

    Args:
        pages: that are missing.
        seconds_per_token: of the engine's prefill; 0 = not known.
        cost: of its pulls.
    """
    if not cost.seconds_per_page:
        return 0.0
    computed = min(pages * PAGE_TOKENS * seconds_per_token, LONGEST_SECONDS)
    return computed if cost.of(pages) < computed else 0.0


def measures_anew(last: float | None, now: float) -> bool:
    """Whether an engine that has written pages reads them back, to learn what a pull takes.

    Args:
        last: when a pull was measured, seconds; None = never.
        now: on the same clock.
    """
    return last is None or now - last >= MEASURED_SECONDS


@dataclass(frozen=True)
class KvPoolSpec:
    """The platform's pool, as an engine is told of it.

    Attributes:
        master: ``host:port`` of Mooncake's master.
        protocol: ``tcp`` or ``rdma``.
        python: that has Mooncake; empty = the engine's.
    """

    master: str
    protocol: str = "tcp"
    python: str = ""


@dataclass(frozen=True)
class PoolCounts:
    """What became of the pool since an engine was told of it.

    Attributes:
        joined: it can be asked now; False = not yet, or left alone after a failure.
        pulled_bytes, pull_seconds: of pages that came, and what they took.
        written_bytes: of pages that are there now.
        dropped_bytes: of pages that were not written, since too many waited.
        late_orders: answers that nobody waited for to the end.
        failures: times that the pool was left alone for a while.
    """

    joined: bool = False
    pulled_bytes: int = 0
    pull_seconds: float = 0.0
    written_bytes: int = 0
    dropped_bytes: int = 0
    late_orders: int = 0
    failures: int = 0


def pool_secret(lease_token: str, lease_uid: str) -> str:
    """What names and seals a lease's pages in a pool; engines of the lease alone are given it.

    The token is made of the lease's name, which a later lease may have. The uid is no secret, and
    never comes again.

    Args:
        lease_token: by which the lease's router knows its nodes' agents; empty = none is made.
        lease_uid: of the lease; empty = none is made.
    """
    if not lease_token or not lease_uid:
        return ""
    message = f"rose-kv-pool/{lease_uid}"
    return hmac.new(lease_token.encode(), message.encode(), "sha256").hexdigest()


def whole_pages(tokens: int) -> int:
    """Of the first tokens of a sequence, those that a store can have."""
    return tokens // PAGE_TOKENS * PAGE_TOKENS


def staging_tokens(context_tokens: int, kv_tokens: int) -> int:
    """Tokens in the host memory of one engine, through which everything goes in and out.

    Half of it may be fetched into at a time, so two of the longest turns are what one needs. More
    than the engine computes with is of no use.

    Args:
        context_tokens: longest prompt plus output.
        kv_tokens: the engine's pool.
    """
    wanted = _STAGED_CONTEXTS * max(context_tokens, PAGE_TOKENS)
    return min(-(-wanted // PAGE_TOKENS) * PAGE_TOKENS, max(kv_tokens, PAGE_TOKENS))


def admits(asked: int, taken: int, room: int) -> bool:
    """Whether a node has room for one more store of so many bytes beside those that it has."""
    return asked + taken <= room
