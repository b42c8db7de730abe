"""Inner loops of the base-conditioned codec (``rice``), for numba; ``rice_vectors`` has the twins.

Long, because numba cannot call plain functions. Elements are counted in blocks whose loops have a
fixed length, no branch and unsigned indices, so that they become vector instructions: numba adds a
check to every signed index. A word counts eight classes, a byte each.
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
BLOCK = 64
"""Elements counted at once; three of them fit what a byte can count."""
AT_ONCE = 56
"""Bits written at once."""
READY = 128
"""A byte of ``place`` at this value stands at the element it waits for."""

ZERO, ONE, SEVEN, EIGHT = np.uint64(0), np.uint64(1), np.uint64(7), np.uint64(8)
SIX, SIXTY_THREE, BYTE = np.uint64(6), np.uint64(63), np.uint64(255)
TOPS = np.uint64(0x8080808080808080)
EVERY = np.uint64(0xFFFFFFFFFFFFFFFF)


def largest(old: Any, mask: int) -> Any:
    """The largest value under a mask."""
    under = np.uint32(mask)
    most = np.uint32(0)
    for position in range(len(old)):
        value = np.uint32(np.uint32(old[position]) & under)
        most = max(most, value)
    return most


def rank(  # noqa: PLR0917
    old: Any,
    indices: Any,
    shift: int,
    mask: int,
    reference: int,
    lowest: Any,
    spans: Any,
    upto: Any,
    classes: Any,
    gaps: Any,
) -> None:
    """Class of each changed element, and how many unchanged ones of it lie since the last.

    ``lowest`` and ``spans`` tell per class which magnitudes belong to it; ``upto`` is ``BLOCK``
    ones and as many zeros. Blocks before a change are counted for all classes, the part of its own
    block before it for its class only.
    """
    by, under = np.uint64(shift), np.uint64(mask)
    magnitude = old.dtype.type((mask << shift) | ((1 << shift) - 1))
    # Members of each class before the current block; ``low`` and ``high`` are what is not yet added
    # to it: a byte per class (SIMD within a register), so three blocks of 64 fit.
    before = np.zeros(CLASSES, np.int64)
    last = np.zeros(CLASSES, np.int64)
    low, high = ZERO, ZERO
    counted: Any = 0
    unspilled: Any = 0
    for number in range(len(indices)):
        position = indices[number]
        start = position // BLOCK * BLOCK
        # 1. Count whole blocks before this change, for all classes at once.
        while counted < start:
            first = np.uint64(counted)
            for at in range(BLOCK):
                away: Any = reference - np.int64(
                    (np.uint64(old[first + np.uint64(at)]) >> by) & under
                )
                away = min(max(away, 0), CLASSES - 1)
                one = ONE << ((np.uint64(away) & SEVEN) * EIGHT)
                low += one if away < 8 else ZERO
                high += one if away >= 8 else ZERO
            counted += BLOCK
            unspilled += 1
            # 2. Before a byte can overflow, add the bytes to the sums.
            if unspilled == 3:
                for lane in range(8):
                    before[lane] += np.int64((low >> np.uint64(8 * lane)) & BYTE)
                    before[lane + 8] += np.int64((high >> np.uint64(8 * lane)) & BYTE)
                low, high = ZERO, ZERO
                unspilled = 0
        # 3. The change's own class, and its members in all the blocks before.
        away = reference - np.int64((np.uint64(old[np.uint64(position)]) >> by) & under)
        kind = np.uint64(min(max(away, 0), CLASSES - 1))
        word = low if kind < EIGHT else high
        members = before[kind] + np.int64((word >> ((kind & SEVEN) * EIGHT)) & BYTE)
        # 4. Members of that class in this block, before the change: the whole block is compared
        #    and masked by ``upto``, because a loop of fixed length has no branch; only the last,
        #    incomplete block is counted one by one.
        edge, span = lowest[kind], spans[kind]
        inside = position - start
        first = np.uint64(start)
        some = np.uint16(0)
        if start + BLOCK <= len(old):
            ahead = np.uint64(BLOCK - inside)
            for at in range(BLOCK):
                value = old[first + np.uint64(at)] & magnitude
                belongs = np.uint16(old.dtype.type(value - edge) <= span)
                some = np.uint16(some + (belongs & upto[ahead + np.uint64(at)]))
        else:
            for at in range(inside):
                value = old[first + np.uint64(at)] & magnitude
                some = np.uint16(some + np.uint16(old.dtype.type(value - edge) <= span))
        # 5. The gap is what has come of the class since its last change.
        members += np.int64(some)
        classes[number] = kind
        gaps[number] = members - last[kind]
        last[kind] = members + 1


def arrange(  # noqa: PLR0917
    classes: Any, gaps: Any, steps: Any, counts: Any, gaps_out: Any, steps_out: Any
) -> None:
    """Sort changes by class, keeping their order; counts them too."""
    counts[:] = 0
    for number in range(len(classes)):
        counts[np.uint64(classes[number])] += 1
    at = np.zeros(CLASSES, np.int64)
    total: Any = 0
    for kind in range(CLASSES):
        at[kind] = total
        total += counts[kind]
    for number in range(len(classes)):
        kind_ = np.uint64(classes[number])
        place_ = np.uint64(at[kind_])
        gaps_out[place_] = gaps[number]
        steps_out[place_] = steps[number]
        at[kind_] += 1


def choose(gaps: Any, counts: Any, parameters: Any) -> None:
    """Per class the Rice parameter that codes its gaps in the fewest bits."""
    start: Any = 0
    for kind in range(CLASSES):
        end = start + counts[kind]
        parameters[kind] = 0
        if end > start:
            guess: Any = 0
            above = np.int64(gaps[start:end].sum() / counts[kind] * 0.69 + 1)
            while above > 1:
                above >>= 1
                guess += 1
            fewest: Any = np.int64(-1)
            for parameter in range(max(guess - 1, 0), min(guess + 2, 31)):
                cost: Any = counts[kind] * (parameter + 1)
                for number in range(start, end):
                    cost += gaps[number] >> parameter
                if fewest < 0 or cost < fewest:
                    fewest = cost
                    parameters[kind] = parameter
        start = end


def write(  # noqa: PLR0917
    gaps: Any, steps: Any, counts: Any, parameters: Any, width: int, words: Any
) -> Any:
    """Bits of every class, one after the other, most significant first, in words of 64.

    Returns:
        Number of bits.
    """
    top, whole = ONE << np.uint64(width - 1), EVERY >> np.uint64(64 - width)
    used = ZERO
    current = ZERO
    number: Any = 0
    for kind in range(CLASSES):
        parameter = np.uint64(parameters[kind])
        rest = (ONE << parameter) - ONE
        for _ in range(counts[kind]):
            gap = np.uint64(gaps[number])
            quotient = gap >> parameter
            if quotient >= np.uint64(LONGEST_QUOTIENT):
                code = (((ONE << np.uint64(LONGEST_QUOTIENT)) - ONE) << np.uint64(32)) | gap
                length = np.uint64(LONGEST_QUOTIENT + 32)
            else:
                code = ((((ONE << quotient) - ONE) << ONE) << parameter) | (gap & rest)
                length = quotient + ONE + parameter
            step = np.uint64(steps[number])
            down = step >= top
            size = ((ZERO - step) & whole) if down else step
            sign = ONE if down else ZERO
            if size > np.uint64(LONGEST_STEP):
                ones = (ONE << np.uint64(LONGEST_STEP)) - ONE
                last = (((sign << np.uint64(LONGEST_STEP)) | ones) << np.uint64(width)) | step
                last_length = np.uint64(1 + LONGEST_STEP + width)
            else:
                last = (sign << size) | ((ONE << size) - np.uint64(2))
                last_length = ONE + size
            pushes = 2
            if length + last_length <= np.uint64(AT_ONCE):
                last |= code << last_length
                last_length += length
                pushes = 1
            while pushes > 0:
                if pushes == 1:
                    code, length = last, last_length
                pushes -= 1
                offset = used & SIXTY_THREE
                aligned = code << (np.uint64(64) - length)
                current |= aligned >> offset
                words[used >> SIX] = current
                used += length
                if offset + length >= np.uint64(64):
                    current = (aligned << ONE) << (SIXTY_THREE - offset)
                    words[used >> SIX] = current
            number += 1
    return np.int64(used)


def read(  # noqa: C901, PLR0912, PLR0917  # compiled as it stands, without helpers
    words: Any,
    bits: int,
    leading: Any,
    counts: Any,
    parameters: Any,
    width: int,
    gaps: Any,
    steps: Any,
) -> bool:
    """The inverse of ``write``; False when the bits do not end with the last change.

    ``words`` goes on with at least three words of zeros; ``leading`` tells how many ones a byte
    begins with.
    """
    whole = EVERY >> np.uint64(64 - width)
    most = np.uint64(bits)
    at = ZERO
    number: Any = 0
    for kind in range(CLASSES):
        parameter = np.uint64(parameters[kind])
        for _ in range(counts[kind]):
            word, offset = at >> SIX, at & SIXTY_THREE
            after = (words[word + ONE] >> ONE) >> (SIXTY_THREE - offset)
            window = (words[word] << offset) | after
            quotient = np.uint64(leading[window >> np.uint64(56)])
            if quotient == EIGHT:
                quotient += np.uint64(leading[(window >> np.uint64(48)) & BYTE])
                if quotient == np.uint64(16):
                    quotient += np.uint64(leading[(window >> np.uint64(40)) & BYTE])
            if quotient == np.uint64(LONGEST_QUOTIENT):
                gap = (window << np.uint64(LONGEST_QUOTIENT)) >> np.uint64(32)
                at += np.uint64(LONGEST_QUOTIENT + 32)
            else:
                gap = ((window << quotient) << ONE) >> ONE
                gap = (quotient << parameter) | (gap >> (SIXTY_THREE - parameter))
                at += quotient + ONE + parameter
            gaps[number] = gap
            word, offset = at >> SIX, at & SIXTY_THREE
            if at > most:
                return False
            after = (words[word + ONE] >> ONE) >> (SIXTY_THREE - offset)
            window = (words[word] << offset) | after
            down = window >> SIXTY_THREE
            window = window << ONE
            size = np.uint64(leading[window >> np.uint64(56)])
            if size == EIGHT:
                size += np.uint64(leading[(window >> np.uint64(48)) & BYTE])
            if size >= np.uint64(LONGEST_STEP):
                steps[number] = (window << np.uint64(LONGEST_STEP)) >> np.uint64(64 - width)
                at += np.uint64(1 + LONGEST_STEP + width)
            else:
                size += ONE
                steps[number] = (ZERO - size) & whole if down != ZERO else size
                at += size + ONE
            if at > most:
                return False
            number += 1
    return bool(most - at < EIGHT)


def place(  # noqa: PLR0912, PLR0917  # compiled as it stands, without helpers
    old: Any,
    shift: int,
    mask: int,
    kinds: Any,
    ones: Any,
    counts: Any,
    gaps: Any,
    indices: Any,
    source: Any,
) -> bool:
    """Positions of changed elements in ascending order, and which of the gaps each came from.

    A byte per class counts down to the class's next change, from 128 and what is left, at most 127
    more; the rest waits in ``left``.
    """
    by, under = np.uint64(shift), np.uint64(mask)
    at = np.zeros(CLASSES, np.int64)
    end = np.zeros(CLASSES, np.int64)
    left = np.zeros(CLASSES, np.int64)
    total: Any = 0
    low, high = ZERO, ZERO
    for kind in range(CLASSES):
        at[kind] = total
        total += np.int64(counts[kind])
        end[kind] = total
        rest = gaps[at[kind]] if at[kind] < total else np.int64(len(old))
        now = min(rest, np.int64(127))
        left[kind] = rest - now
        lane = np.uint64(READY + now) << np.uint64(8 * (kind & 7))
        if kind < 8:
            low |= lane
        else:
            high |= lane
    number: Any = 0
    if total == 0:
        return True
    for position in range(len(old)):
        exponent = (np.uint64(old[np.uint64(position)]) >> by) & under
        low -= ones[exponent + exponent]
        high -= ones[exponent + exponent + ONE]
        if (low & high & TOPS) != TOPS:
            # The byte of this element's class is at 127: refill it, and emit when it was the end.
            kind_ = np.uint64(kinds[exponent])
            rest = left[kind_]
            if rest > 0:
                rest -= 1
            else:
                indices[number] = position
                source[number] = at[kind_]
                number += 1
                if number == total:
                    break
                at[kind_] += 1
                rest = gaps[at[kind_]] if at[kind_] < end[kind_] else np.int64(len(old))
            now = min(rest, np.int64(127))
            left[kind_] = rest - now
            more = np.uint64(now + 1) << ((kind_ & SEVEN) * EIGHT)
            if kind_ < EIGHT:
                low += more
            else:
                high += more
    return bool(number == total)
