"""What becomes of a line after one try (pure).

| the router said | the line |
|---|---|
| 2xx | is answered |
| nothing, or that it cannot now (``_AGAIN``) | waits, to its deadline |
| 500 | waits, and has failed after some of them: it may be the line's own fault |
| anything else | has failed: asking again would not help |
"""

from __future__ import annotations

from enum import StrEnum

# Of these, 401 and 403 are about the credential of ``rose batches``, which its owner mends.
_AGAIN = frozenset({401, 403, 408, 409, 425, 429, 502, 503, 504})
_MOST_500S = 5
_FIRST_SECONDS, _LONGEST_SECONDS = 0.5, 30.0


class LineFate(StrEnum):
    """What becomes of a line after one try."""

    ANSWERED = "answered"
    FAILED = "failed"
    AGAIN = "again"


def outcome(status: int | None, errors: int) -> LineFate:
    """What becomes of the line.

    Args:
        status: of HTTP; None = the connection was lost before the answer was whole.
        errors: answers 500 of this line so far, this one included.
    """
    if status is not None and 200 <= status < 300:
        return LineFate.ANSWERED
    if status is None or status in _AGAIN or (status == 500 and errors < _MOST_500S):
        return LineFate.AGAIN
    return LineFate.FAILED


def wait_seconds(tries: int, asked: float | None) -> float:
    """Seconds until the next try: doubled each time, and no less than ``Retry-After`` asks."""
    own = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2.0 ** min(tries - 1, 10))
    return own if asked is None else min(max(own, asked), _LONGEST_SECONDS)
