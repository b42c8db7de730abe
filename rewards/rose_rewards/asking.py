"""When another process is asked again: judges' routers and sandbox hosts alike.

To be away is no try, so both are asked until a reward's time is over. All that a restart cut off
come back spread over the pauses (exponential backoff with jitter). Next step: ``judge`` and
``programs`` ask.
"""

from __future__ import annotations

import random
from typing import Final

AWAY: Final = frozenset({408, 429, 502, 503, 504})
"""Statuses of who will be there again: a restart, a full queue, none behind it yet."""
_LONGEST_PAUSE_SECONDS = 4.0  # a restart takes some seconds, and what is back is found soon


def pause_seconds(asked: int, first: float) -> float:
    """Seconds before it is asked once more: twice as long each time, with jitter.

    Args:
        asked: how often it was, 1 or more.
        first: the longest pause after the first time, seconds.
    """
    longest = min(_LONGEST_PAUSE_SECONDS, first * 2.0 ** (asked - 1))
    return longest * (0.5 + random.random() / 2)  # noqa: S311  # no secret
