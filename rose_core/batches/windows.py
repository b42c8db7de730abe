"""Completion windows: how long a batch may take, as OpenAI's clients write it (``24h``)."""

from __future__ import annotations

import re

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_SECONDS = 14 * 86_400
_WORDS = re.compile(r"([1-9][0-9]{0,6})([smhd])")


def seconds_of(text: str) -> int:
    """Seconds of a window.

    Raises:
        ValueError: it is none, or too long.
    """
    found = _WORDS.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_SECONDS:
        message = f"completion_window {text!r}: expected 24h or the like, at most 14d (s, m, h, d)"
        raise ValueError(message)
    return seconds
