"""Whether what a program gave is what its case expects (pure).

| of | rule |
|---|---|
| what it printed | as many lines, empty ones at the end aside, and in each the same words |
| a word | the same text, or where the expected one is a fraction a number within the tolerance |
| a result of a call | the same JSON, tuples as lists; a fraction within the tolerance |
| an ``assert`` | Python's ``==`` of values that literals have |

What a program gives is a stranger's. It is walked along what is expected, so it decides neither how
deep nor how long, and its values are never keys: numbers can be made whose hashes collide. Results
are written as ``rose_rewards.inside`` says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rose_core.rewards.cases import CallCase, Case, StdinCase

_FRACTION: Final = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")
_MOST_NUMBER: Final = 400
"""Characters of a number that a program prints: as many as a float has at most, and more."""


@dataclass(frozen=True)
class _Rule:
    """How values are compared.

    Attributes:
        tolerance: of fractions; None: they are the same.
        json: tuples are lists, and names of entries texts.
    """

    tolerance: float | None
    json: bool


def is_answer(case: Case, gave: bytes, tolerance: float) -> bool:
    """Whether a case is passed.

    Args:
        case: with what it expects.
        gave: what the program printed, or the JSON of its result.
        tolerance: of fractions, relative and absolute.
    """
    try:
        text = gave.decode()
        if isinstance(case, StdinCase):
            return _prints(case.expected, text, tolerance)
        value = json.loads(text)
        if not isinstance(case, CallCase):
            return _is_same(case.expected, value, _Rule(None, json=False))
        rule, wanted = _Rule(tolerance, json=True), case.expected
        around = case.wrapped and isinstance(wanted, list) and len(wanted) == 1
        return _is_same(wanted, value, rule) or (around and _is_same(wanted[0], value, rule))
    except (ValueError, RecursionError, OverflowError):
        return False


def _prints(expected: str, gave: str, tolerance: float) -> bool:
    wanted, there = _rows(expected), _rows(gave)
    return len(wanted) == len(there) and all(
        len(one) == len(other)
        and all(_is_word(word, given, tolerance) for word, given in zip(one, other, strict=True))
        for one, other in zip(wanted, there, strict=True)
    )


def _rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().split("\n")]


def _is_word(expected: str, gave: str, tolerance: float) -> bool:
    if expected == gave:
        return True
    if not _FRACTION.fullmatch(expected) or len(gave) > _MOST_NUMBER:
        return False
    return _is_near(float(expected), float(gave), tolerance)  # a word that is none: ValueError


def _is_near(expected: float, gave: float, tolerance: float) -> bool:
    return math.isclose(expected, gave, rel_tol=tolerance, abs_tol=tolerance)


def _is_same(expected: object, gave: object, rule: _Rule) -> bool:
    if isinstance(expected, list | tuple):
        parts = _parts(gave, type(expected).__name__, rule)
        return _is_row(expected, parts, rule)
    if isinstance(expected, set | frozenset):
        parts = _parts(gave, "set", rule)
        wanted = {_text(_written(one)) for one in expected}
        return parts is not None and wanted == {_text(one) for one in parts}
    if isinstance(expected, dict):
        return _is_table(expected, _parts(gave, "dict", rule), rule)
    if isinstance(gave, dict | list):
        return False
    if rule.tolerance is not None and isinstance(expected, float) and isinstance(gave, int | float):
        return _is_near(expected, gave, rule.tolerance)
    return bool(expected == gave)


def _parts(gave: object, kind: str, rule: _Rule) -> list[object] | None:
    """Of a result that is of this kind; None: it is of another."""
    if not isinstance(gave, dict) or len(gave) != 1:
        return None
    ((there, parts),) = gave.items()
    kinds = {"list", "tuple"} if rule.json and kind == "list" else {kind}
    return parts if there in kinds and isinstance(parts, list) else None


def _is_row(expected: Sequence[object], parts: list[object] | None, rule: _Rule) -> bool:
    if parts is None or len(expected) != len(parts):
        return False
    return all(_is_same(a, b, rule) for a, b in zip(expected, parts, strict=True))


def _is_table(expected: dict[object, object], parts: list[object] | None, rule: _Rule) -> bool:
    pairs = [one for one in parts or () if isinstance(one, list) and len(one) == 2]
    if parts is None or len(pairs) != len(parts):
        return False
    there = {_name(name, rule): value for name, value in pairs}
    wanted = {_name(_written(name), rule): value for name, value in expected.items()}
    return there.keys() == wanted.keys() and all(
        _is_same(value, there[name], rule) for name, value in wanted.items()
    )


def _name(written: object, rule: _Rule) -> str:
    """Of an entry; JSON has no others than texts, and Python writes ``{1: 2}`` as ``{"1": 2}``."""
    return written if rule.json and isinstance(written, str) else _text(written)


def _written(value: object) -> object:
    """A literal as a result is written."""
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_written(one) for one in value]}
    if isinstance(value, set | frozenset):
        return {"set": [_written(one) for one in value]}
    return value


def _text(written: object) -> str:
    """The same for what is equal in Python: ``True``, ``1`` and ``1.0``; sets in any order."""
    if isinstance(written, dict) and isinstance(written.get("set"), list):
        return "{" + ",".join(sorted(_text(one) for one in written["set"])) + "}"
    if isinstance(written, dict):
        return "(" + ",".join(name + _text(one) for name, one in written.items()) + ")"
    if isinstance(written, list):
        return "[" + ",".join(_text(one) for one in written) + "]"
    if isinstance(written, bool | float) and written == written // 1:
        written = int(written)
    return json.dumps(written)
