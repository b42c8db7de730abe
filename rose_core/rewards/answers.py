"""Whether what a program gave is what its case expects (pure).

| of | rule |
|---|---|
| what it printed | as many lines, empty ones at both ends aside, and in each the same words |
| a word | the same text; of an expected integer a number of the same value; of an expected \
fraction one within the tolerance |
| a result of a call | the same JSON, tuples as lists; a fraction within the tolerance |
| an ``assert`` | Python's ``==`` of values that literals have, or the distance that it names |

What a program gives is a stranger's. It is walked along what is expected, so it decides neither how
deep nor how long: of what it printed there is never more than a word apart from the whole, and a
result is not even read that is longer than one that is right. Its values are never keys: numbers
can be made whose hashes collide. Results are written as ``rose_rewards.program_cases`` says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import zip_longest
from typing import Final

from rose_core.rewards.cases import AssertCase, Case, Near, StdinCase

_EXPONENT: Final = r"([eE][-+]?[0-9]{1,4})?"
_FRACTION: Final = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))" + _EXPONENT)
_INTEGER: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)")
"""Not ``007``: that may be a time, or bits."""
_NUMBER: Final = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)" + _EXPONENT)
_MOST_NUMBER: Final = 400
"""Characters of a number that a program prints: as many as a float has at most, and more."""
_WORD: Final = re.compile(r"\S+")


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
        if isinstance(case, StdinCase):
            return _prints(case.expected, gave.decode(), tolerance)
        if len(gave) > _longest(case.expected):
            return False
        value = json.loads(gave)
        if isinstance(case, AssertCase):
            return _holds(case, value)
        rule, wanted = _Rule(tolerance, json=True), case.expected
        around = case.wrapped and isinstance(wanted, list) and len(wanted) == 1
        return _is_same(wanted, value, rule) or (around and _is_same(wanted[0], value, rule))
    except (ValueError, RecursionError, OverflowError):
        return False


def _prints(expected: str, gave: str, tolerance: float) -> bool:
    expected, gave = expected.strip(), gave.strip()
    if expected == gave:
        return True
    if expected.count("\n") != gave.count("\n"):
        return False
    wanted = there = 0
    while wanted >= 0:  # line by line: to split them all would be a hundred times their size
        ends, gave_ends = expected.find("\n", wanted), gave.find("\n", there)
        if not _is_line(_until(expected, wanted, ends), _until(gave, there, gave_ends), tolerance):
            return False
        wanted, there = ends + 1 or -1, gave_ends + 1
    return True


def _until(text: str, first: int, end: int) -> str:
    return text[first:] if end < 0 else text[first:end]


def _is_line(expected: str, gave: str, tolerance: float) -> bool:
    return expected == gave or all(
        one is not None and other is not None and _is_word(one[0], other[0], tolerance)
        for one, other in zip_longest(_WORD.finditer(expected), _WORD.finditer(gave))
    )


def _is_word(expected: str, gave: str, tolerance: float) -> bool:
    if expected == gave:
        return True
    if len(gave) > _MOST_NUMBER or not _NUMBER.fullmatch(gave):
        return False
    if _INTEGER.fullmatch(expected):
        return len(expected) <= _MOST_NUMBER and Decimal(expected) == Decimal(gave)
    is_fraction = _FRACTION.fullmatch(expected) is not None
    return is_fraction and _is_near(float(expected), float(gave), tolerance)


_AROUND: Final = 64
"""Characters around a value that is right: its kind, brackets, and as much again."""
_LONGEST_NUMBER: Final = 330
"""Of a float's value, written as an integer."""


def _longest(expected: object) -> int:
    """Bytes of a result that is right, however it is written; or a few times as many."""
    if isinstance(expected, dict):
        pairs = expected.items()
        return _AROUND + sum(_AROUND + _longest(one) + _longest(two) for one, two in pairs)
    if isinstance(expected, list | tuple | set | frozenset):
        return _AROUND + sum(2 + _longest(one) for one in expected)
    if isinstance(expected, str):
        return _AROUND + 12 * len(expected)  # JSON writes what is beyond ASCII as ``\ud83d\ude00``
    if isinstance(expected, int):
        return _AROUND + expected.bit_length() // 3
    return _LONGEST_NUMBER


def _holds(case: AssertCase, value: object) -> bool:
    if case.by_identity:
        return value is case.expected  # JSON has each of them once, as Python
    if case.near is None:
        return _is_same(case.expected, value, _Rule(None, json=False))
    return isinstance(value, int | float) and _is_within(case.expected, value, case.near)


def _is_within(expected: float, gave: float, near: Near) -> bool:
    if near.below:
        return abs(gave - expected) < near.absolute
    return math.isclose(gave, expected, rel_tol=near.relative, abs_tol=near.absolute)


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
