"""Inner loops of the base-conditioned codec (``rice``); compiled by numba where it is installed.

Without numba they run as they stand: they touch changed elements only, except ``rank`` and
``place``, which ``rice`` then replaces by numpy. Long, because numba cannot call plain functions.
"""

# ruff: noqa: ANN401
from __future__ import annotations

from typing import Any

import numpy as np

CLASSES = 16
LONGEST_QUOTIENT = 24
"""A quotient this long announces the whole gap in 32 bits."""
LONGEST_STEP = 15
"""A magnitude this far beyond one announces the whole step."""


def rank(  # noqa: PLR0917
    old: Any, indices: Any, shift: int, mask: int, reference: int, classes: Any, gaps: Any
) -> None:
    """Class of each changed element, and how many unchanged ones of it lie since the last."""
    since = np.zeros(CLASSES, np.int64)
    number = 0
    count = len(indices)
    for position in range(len(old)):
        if number == count:
            break
        distance = reference - ((np.int64(old[position]) >> shift) & mask)
        kind: Any = min(max(distance, 0), CLASSES - 1)
        if indices[number] == position:
            classes[number] = kind
            gaps[number] = since[kind]
            since[kind] = 0
            number += 1
        else:
            since[kind] += 1


def place(  # noqa: PLR0917
    old: Any,
    shift: int,
    mask: int,
    reference: int,
    counts: Any,
    gaps: Any,
    indices: Any,
    source: Any,
) -> bool:
    """Positions of changed elements in ascending order, and which of the gaps each came from."""
    at = np.zeros(CLASSES, np.int64)
    end = np.zeros(CLASSES, np.int64)
    left = np.zeros(CLASSES, np.int64)
    total: Any = 0
    for kind in range(CLASSES):
        at[kind] = total
        total += np.int64(counts[kind])
        end[kind] = total
        left[kind] = np.int64(gaps[at[kind]]) if at[kind] < total else -1
    number = 0
    for position in range(len(old)):
        distance = reference - ((np.int64(old[position]) >> shift) & mask)
        at_class: Any = min(max(distance, 0), CLASSES - 1)
        if left[at_class] > 0:
            left[at_class] -= 1
        elif left[at_class] == 0:
            indices[number] = position
            source[number] = at[at_class]
            number += 1
            at[at_class] += 1
            left[at_class] = np.int64(gaps[at[at_class]]) if at[at_class] < end[at_class] else -1
            if number == total:
                break
    return bool(number == total)


def write(  # noqa: C901, PLR0912, PLR0917
    gaps: Any, steps: Any, counts: Any, parameters: Any, width: int, out: Any
) -> int:
    """Bits of every class, one after the other; ``out`` is one byte per bit.

    Returns:
        Number of bits.
    """
    used = 0
    number = 0
    half = 1 << (width - 1)
    for kind in range(CLASSES):
        parameter = np.int64(parameters[kind])
        for _ in range(np.int64(counts[kind])):
            gap = np.int64(gaps[number])
            quotient = gap >> parameter
            if quotient >= LONGEST_QUOTIENT:
                for _ in range(LONGEST_QUOTIENT):
                    out[used] = 1
                    used += 1
                for place_ in range(32):
                    out[used] = (gap >> (31 - place_)) & 1
                    used += 1
            else:
                for _ in range(quotient):
                    out[used] = 1
                    used += 1
                out[used] = 0
                used += 1
                for place_ in range(parameter):
                    out[used] = (gap >> (parameter - 1 - place_)) & 1
                    used += 1
            step = np.int64(steps[number])
            down = step >= half
            size = (2 * half - step) if down else step
            out[used] = 1 if down else 0
            used += 1
            if size - 1 >= LONGEST_STEP:
                for _ in range(LONGEST_STEP):
                    out[used] = 1
                    used += 1
                for place_ in range(width):
                    out[used] = (step >> (width - 1 - place_)) & 1
                    used += 1
            else:
                for _ in range(size - 1):
                    out[used] = 1
                    used += 1
                out[used] = 0
                used += 1
            number += 1
    return used


def read(  # noqa: C901, PLR0912, PLR0917
    data: Any, counts: Any, parameters: Any, width: int, gaps: Any, steps: Any
) -> bool:
    """The inverse of ``write``; False when the bits end too early."""
    bits = len(data) * 8
    at = 0
    number = 0
    half = 1 << (width - 1)
    for kind in range(CLASSES):
        parameter = np.int64(parameters[kind])
        for _ in range(np.int64(counts[kind])):
            quotient = 0
            while quotient < LONGEST_QUOTIENT:
                if at >= bits:
                    return False
                bit = (np.int64(data[at >> 3]) >> (7 - (at & 7))) & 1
                at += 1
                if bit == 0:
                    break
                quotient += 1
            long = quotient == LONGEST_QUOTIENT
            length = 32 if long else parameter
            if at + length + 1 > bits:
                return False
            value: Any = 0
            for _ in range(length):
                value = value * 2 + ((np.int64(data[at >> 3]) >> (7 - (at & 7))) & 1)
                at += 1
            gaps[number] = value if long else quotient * (1 << parameter) + value
            down = (np.int64(data[at >> 3]) >> (7 - (at & 7))) & 1
            at += 1
            size = 1
            while size <= LONGEST_STEP:
                if at >= bits:
                    return False
                bit = (np.int64(data[at >> 3]) >> (7 - (at & 7))) & 1
                at += 1
                if bit == 0:
                    break
                size += 1
            if size > LONGEST_STEP:
                if at + width > bits:
                    return False
                value = 0
                for _ in range(width):
                    value = value * 2 + ((np.int64(data[at >> 3]) >> (7 - (at & 7))) & 1)
                    at += 1
                steps[number] = value
            else:
                steps[number] = (2 * half - size) if down else size
            number += 1
    return bits - at < 8
