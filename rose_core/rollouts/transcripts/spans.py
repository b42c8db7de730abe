"""Which weight version sampled which output tokens of a turn.

Spans are half-open token ranges, in order, without gap or overlap. The engine counts within one
leg (its own answer); a turn's spans are its legs' spans, shifted and joined.

``kv`` states where the keys and values under the tokens came from. The router keeps prefix caches
apart by version (``extra_key``), so a leg starts on keys of its own version (``own``). Tokens
sampled after a commit in the middle of a leg may sit on keys of the older version (``mixed``), and
so may all tokens of an engine that reuses keys over commits (``kvPolicy: Reuse``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec
from msgspec.structs import replace

UNKNOWN = "unknown"


class Kv(StrEnum):
    """Provenance of the keys and values that the tokens of a span attended to."""

    OWN = "own"
    MIXED = "mixed"


_OWN, _MIXED = Kv  # named once: an enum's member is slow to find


class TokenSpan(msgspec.Struct, frozen=True, gc=False):
    """Output tokens ``start`` to ``end`` (exclusive) were sampled by ``version``."""

    version: str
    start: int
    end: int
    kv: Kv = _OWN

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.end - self.start


def covers(spans: Sequence[TokenSpan], count: int) -> bool:
    """Whether the spans cover tokens 0 to ``count`` exactly once, in order."""
    if len(spans) == 1:  # the usual case
        return spans[0].start == 0 < count == spans[0].end
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            return False
        position = span.end
    return position == count


def joined(spans: Iterable[TokenSpan]) -> tuple[TokenSpan, ...]:
    """Merge neighbours of the same version and provenance."""
    result: list[TokenSpan] = []
    for span in spans:
        last = result[-1] if result else None
        if last and (last.version, last.kv, last.end) == (span.version, span.kv, span.start):
            result[-1] = replace(last, end=span.end)
        else:
            result.append(span)
    return tuple(result)


def shifted(spans: Iterable[TokenSpan], by: int) -> tuple[TokenSpan, ...]:
    """Move spans from a leg's count to the turn's."""
    if not by:
        return tuple(spans)
    return tuple(replace(span, start=span.start + by, end=span.end + by) for span in spans)


def cut(spans: Iterable[TokenSpan], end: int) -> tuple[TokenSpan, ...]:
    """What of the spans lies before token ``end``."""
    return tuple(
        span if span.end <= end else replace(span, end=end) for span in spans if span.start < end
    )


def normal(
    spans: Sequence[tuple[str, int, int]], cache_key: str, count: int, *, reused: bool = False
) -> tuple[TokenSpan, ...]:
    """An engine's spans as ours: empty ones dropped, provenance added, cut to ``count`` tokens.

    Args:
        spans: (version, start, end) in the leg's count.
        cache_key: version under whose prefix-cache key the leg was sent.
        count: tokens received from the leg.
        reused: the engine may have begun the leg on keys of an older version.

    Returns:
        Spans, or an empty tuple when the engine's do not cover the tokens: then the versions of
        these tokens are unknown.
    """
    if len(spans) == 1 and spans[0][1] == 0 and spans[0][2] >= count > 0:
        version = spans[0][0]  # no commit in the leg; asked for every token, so it is made short
        return (TokenSpan(version, 0, count, _provenance(version, cache_key, reused)),)
    found = joined(
        TokenSpan(version, start, end, _provenance(version, cache_key, reused))
        for version, start, end in spans
        if end > start
    )
    kept = cut(found, count)
    return kept if covers(kept, count) else ()


def _provenance(version: str, cache_key: str, reused: bool) -> Kv:
    return _OWN if version == cache_key and not reused else _MIXED
