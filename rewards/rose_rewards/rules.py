"""Functions that come with ROSE: rules that need no model and no network.

Without an expected answer none has a verdict. ``math_rule`` has the one that needs a library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def exact(reward: Mapping[str, Any]) -> float | None:
    """1 when the answer is the expected text, blanks around both aside."""
    if reward["expected"] is None:
        return None
    return float(str(reward["answer"]).strip() == str(reward["expected"]).strip())


def contains(reward: Mapping[str, Any]) -> float | None:
    """1 when the expected text stands in the answer."""
    if reward["expected"] is None:
        return None
    return float(str(reward["expected"]) in str(reward["answer"]))


def number(reward: Mapping[str, Any]) -> float | None:
    """1 when the last number of the answer is the expected one; no verdict without an expected."""
    expected = _last(str(reward["expected"]))
    found = _last(str(reward["answer"]))
    if expected is None or not isfinite(expected):
        return None
    if found is None or (found.is_integer() and expected.is_integer()):
        return float(found == expected)
    # Of fractions alone: among millions the next whole number is as near.
    return float(abs(found - expected) <= 1e-6 * max(1.0, abs(expected)))


def _last(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
