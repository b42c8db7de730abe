"""The rule ``math``; needs ``rose-gpu[rewards]``.

Apart from the others, so that its library, of seconds, is imported as a worker starts. Within a
verification it would count against a time limit that was learned from workers that had it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify


def math(reward: Mapping[str, Any]) -> float | None:
    """1 when math-verify finds the answer equal to the expected; no verdict without an expected."""
    # Its own alarm is off: the gateway stops what takes too long, and says so.
    expected = parse(str(reward["expected"]), parsing_timeout=None)
    if not expected:
        return None
    answer = parse(str(reward["answer"]), parsing_timeout=None)
    return float(verify(expected, answer, timeout_seconds=None))
