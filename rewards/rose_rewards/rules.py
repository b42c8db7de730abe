"""Functions that come with ROSE: rules that need no model and no network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def exact(reward: Mapping[str, Any]) -> float:
    """1 when the answer is the expected text, blanks around both aside."""
    return float(str(reward["answer"]).strip() == str(reward["expected"]).strip())


def contains(reward: Mapping[str, Any]) -> float:
    """1 when the expected text stands in the answer."""
    return float(str(reward["expected"]) in str(reward["answer"]))


def number(reward: Mapping[str, Any]) -> float | None:
    """1 when the last number of the answer is the expected one; no verdict without an expected."""
    expected = _last(str(reward["expected"]))
    found = _last(str(reward["answer"]))
    if expected is None:
        return None
    return float(found is not None and abs(found - expected) <= 1e-6 * max(1.0, abs(expected)))


def math(reward: Mapping[str, Any]) -> float | None:
    """1 when math-verify finds the answer equal to the expected; needs ``rose-gpu[rewards]``."""
    from math_verify import parse, verify  # noqa: PLC0415  # brings sympy: for who uses it

    # Its own alarm is off: the gateway stops what takes too long, and says so.
    expected = parse(str(reward["expected"]), parsing_timeout=None)
    if not expected:
        return None
    answer = parse(str(reward["answer"]), parsing_timeout=None)
    return float(verify(expected, answer, timeout_seconds=None))


def _last(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
