"""When a line of a batch goes (pure): whose is next, whether it is tried again, and until when.

Tenants go in turn, and of one tenant's the nearest deadline. Deadlines alone would let who names
the shortest window keep all others from the engines. What becomes of a line after one try:

| the router said | the line |
|---|---|
| 2xx | is answered |
| nothing, or that it cannot now (``_AGAIN``) | waits, to its deadline |
| 500 | waits, and has failed after some of them: it may be the line's own fault |
| anything else | has failed: asking again would not help |
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

# Of these, 401 and 403 are about the credential of ``rose batches``, which its owner mends.
_AGAIN = frozenset({401, 403, 408, 409, 425, 429, 502, 503, 504})
_MOST_500S = 5
_FIRST_SECONDS, _LONGEST_SECONDS = 0.5, 30.0
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_SECONDS = 14 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")


@dataclass(frozen=True)
class WaitingBatch:
    """A batch that has a line to send.

    Attributes:
        name: its id.
        tenant: whose it is.
        deadline: Unix seconds.
        running: lines of its tenant under way.
    """

    name: str
    tenant: str
    deadline: float
    running: int


def next_batch(waiting: Iterable[WaitingBatch]) -> str | None:
    """The id of the batch whose line goes next; None when none waits."""
    chosen = min(
        waiting, key=lambda one: (one.running, one.deadline, one.tenant, one.name), default=None
    )
    return None if chosen is None else chosen.name


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


def seconds_of(text: str) -> int:
    """How long a batch may take, as OpenAI's clients write it (``24h``).

    Raises:
        ValueError: it is none, or too long.
    """
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNIT_SECONDS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_SECONDS:
        message = f"completion_window {text!r}: expected 24h or the like, at most 14d (s, m, h, d)"
        raise ValueError(message)
    return seconds
