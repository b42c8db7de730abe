"""The codec's inner loops, written so that numba compiles them as they stand.

They are plain Python and give the same results uncompiled, only slowly; ``kernels`` decides what
runs and ``vectors`` holds the numpy twins. Every integer is made unsigned by hand, since numba
turns a mix of uint64 and int64 into floats. The test suite runs all three against each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ESCAPE = 255
"""A gap byte of 255 adds 255 and goes on; a code byte of 255 means the step stands apart."""

# Keys of elements: splitmix64 (Steele, Lea and Flood, 2014; multipliers of Stafford's variant 13).
# The second lane mixes once more, with the multiplier of degski's 64-bit mixer.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX1 = np.uint64(0xBF58476D1CE4E5B9)
MIX2 = np.uint64(0x94D049BB133111EB)
MIX3 = np.uint64(0xD6E8FEB86659FD93)
S30, S27, S31, S32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
ONE = np.uint64(1)
ZERO = np.uint64(0)


CHUNK = 512
"""Words compared before their differences are looked at: 4 kB on either side stay in the cache."""


def compare(  # noqa: PLR0917
    old: Any,  # noqa: ANN401
    new: Any,  # noqa: ANN401
    old_words: Any,  # noqa: ANN401
    new_words: Any,  # noqa: ANN401
    marked: Any,  # noqa: ANN401
    found: Any,  # noqa: ANN401
    before: Any,  # noqa: ANN401
    after: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Write the positions where two runs of bits differ, with the bits on either side.

    Compares eight bytes at a time: first notes the words that differ, then the elements in them.
    Every note is written always and counted when it holds: a branch would be guessed wrong at most
    of the changes, which costs more than all the writing. ``marked`` must have room for ``CHUNK``
    and one more, the others for one entry more than can differ. Indices are unsigned, since numba
    adds a check to every signed one.
    """
    count = ZERO
    words = len(old_words)
    per_word = 8 // old.itemsize
    width = np.uint64(old.itemsize * 8) & np.uint64(63)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - old.itemsize * 8)
    for start in range(0, words, CHUNK):
        first = np.uint64(start)
        differing = ZERO
        for word in range(min(CHUNK, words - start)):
            here = first + np.uint64(word)
            marked[differing] = word
            differing += np.uint64(old_words[here] != new_words[here])
        for number in range(differing):
            here = first + np.uint64(marked[np.uint64(number)])
            was, is_ = old_words[here], new_words[here]
            apart = was ^ is_
            for lane in range(per_word):
                found[count] = here * np.uint64(per_word) + np.uint64(lane)
                before[count] = was & mask
                after[count] = is_ & mask
                count += np.uint64((apart & mask) != ZERO)
                was, is_, apart = was >> width, is_ >> width, apart >> width
    for position in range(words * per_word, len(old)):
        if old[position] != new[position]:
            found[count] = position
            before[count] = old[position]
            after[count] = new[position]
            count += ONE
    return count


def steps_between(old: Any, new: Any, width_bits: int, steps: Any) -> None:  # noqa: ANN401
    """Ordered-integer steps from one run of sign-magnitude values to another."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits)
    top = ONE << np.uint64(width_bits - 1)
    for number in range(len(old)):
        before = np.uint64(old[number])
        after = np.uint64(new[number])
        before = before ^ (mask if before & top else top)
        after = after ^ (mask if after & top else top)
        steps[number] = (after - before) & mask


def move(old: Any, steps: Any, width_bits: int, new: Any) -> None:  # noqa: ANN401
    """Move sign-magnitude values by ordered-integer steps."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits)
    top = ONE << np.uint64(width_bits - 1)
    for number in range(len(old)):
        value = np.uint64(old[number])
        value = value ^ (mask if value & top else top)
        value = (value + np.uint64(steps[number])) & mask
        new[number] = value ^ (top if value & top else mask)


def put(flat: Any, where: Any, bits: Any) -> None:  # noqa: ANN401
    """Overwrite elements at positions that are known to be inside."""
    for number in range(len(where)):
        flat[np.uint64(where[number])] = bits[number]


def differing(flat: Any, where: Any, bits: Any) -> Any:  # noqa: ANN401
    """How many elements at these positions are not these bits."""
    count = ZERO
    for number in range(len(where)):
        count += np.uint64(flat[np.uint64(where[number])] != bits[number])
    return count


def pack(  # noqa: PLR0917
    indices: Any,  # noqa: ANN401
    steps: Any,  # noqa: ANN401
    width_bits: int,
    gaps: Any,  # noqa: ANN401
    codes: Any,  # noqa: ANN401
    escapes: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Ascending positions and steps to gap bytes, code bytes and escaped steps."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits)
    sign = np.uint64(width_bits - 1)
    previous: Any = -1
    gap_bytes = ZERO
    escaped = ZERO
    for number in range(len(indices)):
        position = np.int64(indices[number])
        gap = position - previous - 1
        previous = position
        while gap >= ESCAPE:
            gaps[gap_bytes] = ESCAPE
            gap_bytes += ONE
            gap -= ESCAPE
        gaps[gap_bytes] = gap
        gap_bytes += ONE
        step = np.uint64(steps[number])
        zigzag = (step << ONE) & mask
        if (step >> sign) != ZERO:
            zigzag = zigzag ^ mask
        if zigzag <= np.uint64(255):
            codes[number] = zigzag - ONE
        else:
            codes[number] = ESCAPE
            escapes[escaped] = steps[number]
            escaped += ONE
    return np.int64(gap_bytes), np.int64(escaped)


def unpack(  # noqa: PLR0917
    gaps: Any,  # noqa: ANN401
    codes: Any,  # noqa: ANN401
    escapes: Any,  # noqa: ANN401
    width_bits: int,
    indices: Any,  # noqa: ANN401
    steps: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Bytes back to positions and steps; ``indices`` has room for one more than there are codes.

    Positions are written always and counted when they end a gap, escapes are put in afterwards:
    most loops then need no branch.

    Returns:
        Number of escaped steps used, or -1 when the three streams do not belong together.
    """
    ends: Any = 0
    for at in range(len(gaps)):
        ends += np.int64(gaps[at] != ESCAPE)
    far: Any = 0
    for at in range(len(codes)):
        far += np.int64(codes[at] == ESCAPE)
    if ends != len(codes) or far > len(escapes):
        return -1
    number = ZERO
    position = np.int64(0)
    for at in range(len(gaps)):
        gap = np.int64(gaps[at])
        end = np.int64(gap != ESCAPE)
        indices[number] = position + gap
        position += gap + end
        number += np.uint64(end)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits)
    for at in range(len(codes)):
        zigzag = np.uint64(codes[at]) + ONE
        steps[at] = (zigzag >> ONE) ^ (mask if (zigzag & ONE) != ZERO else ZERO)
    if far > 0:
        number = ZERO
        for at in range(len(codes)):
            if codes[at] == ESCAPE:
                steps[at] = escapes[number]
                number += ONE
    return far


def digest_run(bits: Any, first: int, key: int) -> Any:  # noqa: ANN401
    """Both lanes of the digest of elements ``first, first + 1, ...`` of a tensor."""
    low = ZERO
    high = ZERO
    seed = np.uint64(key) + (np.uint64(first) + ONE) * GOLDEN
    for position in range(len(bits)):
        mixed = seed + np.uint64(position) * GOLDEN
        mixed = (mixed ^ (mixed >> S30)) * MIX1
        mixed = (mixed ^ (mixed >> S27)) * MIX2
        mixed = mixed ^ (mixed >> S31)
        value = np.uint64(bits[position])
        low += (mixed | ONE) * value
        mixed = (mixed ^ (mixed >> S32)) * MIX3
        high += ((mixed ^ (mixed >> S32)) | ONE) * value
    return low, high


def digest_at(indices: Any, bits: Any, key: int) -> Any:  # noqa: ANN401
    """Both lanes of the digest of single elements at positions of a tensor."""
    low = ZERO
    high = ZERO
    for number in range(len(indices)):
        mixed = np.uint64(key) + (np.uint64(indices[number]) + ONE) * GOLDEN
        mixed = (mixed ^ (mixed >> S30)) * MIX1
        mixed = (mixed ^ (mixed >> S27)) * MIX2
        mixed = mixed ^ (mixed >> S31)
        value = np.uint64(bits[number])
        low += (mixed | ONE) * value
        mixed = (mixed ^ (mixed >> S32)) * MIX3
        high += ((mixed ^ (mixed >> S32)) | ONE) * value
    return low, high


def digest_tensors(memory: Any, tensors: Any, keys: Any, chosen: Any, sums: Any) -> None:  # noqa: ANN401
    """Both lanes of the digest of whole tensors that lie without gaps.

    Args:
        memory: all tensors as one array.
        tensors: numbers of every tensor.
        keys: of every tensor's digest.
        chosen: which tensors.
        sums: per chosen tensor: both lanes.
    """
    for number in range(len(chosen)):
        tensor = chosen[number]
        base, limit = np.uint64(tensors[tensor, BASE]), tensors[tensor, LIMIT]
        low = ZERO
        high = ZERO
        seed = np.uint64(keys[tensor]) + GOLDEN
        for position in range(limit):
            mixed = seed + np.uint64(position) * GOLDEN
            mixed = (mixed ^ (mixed >> S30)) * MIX1
            mixed = (mixed ^ (mixed >> S27)) * MIX2
            mixed = mixed ^ (mixed >> S31)
            value = np.uint64(memory[base + np.uint64(position)])
            low += (mixed | ONE) * value
            mixed = (mixed ^ (mixed >> S32)) * MIX3
            high += ((mixed ^ (mixed >> S32)) | ONE) * value
        sums[number, 0], sums[number, 1] = low, high


# Numbers in a row of ``resolve`` and ``swap``: which tensor, which tile of it; where its elements
# begin among those given, how many; where their places begin (``RUN`` = they are lines of a box),
# where their names begin (``RUN`` = they are named by their places); the element that places count
# from; length of a line, and from one to the next; what is given; whether it is the whole tile.
TENSOR, TILE, ENTRY, COUNT, PLACE, NAME, START, COLUMNS, APART, GIVEN, WHOLE = range(11)
RUN = -1
VALUES, STEPS = 0, 1
# Numbers of a tensor: its first element in memory, from one to the next, elements, and whether its
# bits are sign and magnitude.
BASE, STRIDE, LIMIT, SIGNED = range(4)
GATHERED = 1024
"""Elements that ``resolve`` takes at a time."""
SWAPPED = 512
"""Elements that are written before they are read back: a line each, 32 kB, still is in the cache
that is next to the core."""
AHEAD = 64
"""Elements from one that is written to one that is fetched: about as many lines as a core waits for
at a time, and few enough to be there still."""


def fetch(memory: Any, at: Any) -> None:  # noqa: ANN401
    """Say that an element is needed soon.

    It changes nothing, so Python does nothing; ``kernels`` has numba make one instruction of it. A
    core that writes waits for one line after the other otherwise, since stores keep their order.
    """


def resolve(  # noqa: C901, PLR0912, PLR0915, PLR0917  # compiled as it stands, without helpers
    memory: Any,  # noqa: ANN401
    tensors: Any,  # noqa: ANN401
    keys: Any,  # noqa: ANN401
    rows: Any,  # noqa: ANN401
    places: Any,  # noqa: ANN401
    names: Any,  # noqa: ANN401
    given: Any,  # noqa: ANN401
    width_bits: int,
    old: Any,  # noqa: ANN401
    sums: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Gather old bits of many tensors, make new ones of what is given, and sum up both.

    Args:
        memory: all tensors as one array.
        tensors: numbers of every tensor.
        keys: of every tensor's digest.
        rows: what is given, tile by tile.
        places: of elements, where they have some.
        names: of elements, where they have some.
        given: steps or new bits; new bits afterwards.
        width_bits: of an element.
        old: room for bits before.
        sums: per row: both lanes of the digest of old bits, then of new ones.

    Returns:
        1 + the first row with an element outside its tensor, which is touched no further; 0 = none.
    """
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits)
    sign = np.uint64(width_bits - 1)
    top = ONE << sign
    indices = np.zeros(GATHERED, np.uint64)
    for row in range(len(rows)):
        tensor = rows[row, TENSOR]
        base, stride = np.uint64(tensors[tensor, BASE]), np.uint64(tensors[tensor, STRIDE])
        limit, signed = np.uint64(tensors[tensor, LIMIT]), tensors[tensor, SIGNED] != 0
        key = np.uint64(keys[tensor])
        count, entry = rows[row, COUNT], rows[row, ENTRY]
        place, name = rows[row, PLACE], rows[row, NAME]
        start, columns = np.uint64(rows[row, START]), rows[row, COLUMNS]
        apart, steps = np.uint64(rows[row, APART]), rows[row, GIVEN] == STEPS
        old_low, old_high, new_low, new_high = ZERO, ZERO, ZERO, ZERO
        line, column = start, 0
        # Piece by piece, and one thing after the other: each of these loops is short enough for
        # the processor to look ahead, and none has a branch that it would guess wrong.
        for first in range(0, count, GATHERED):
            end = min(first + GATHERED, count)
            entry_at, size = np.uint64(entry + first), end - first
            begin = np.uint64(place + first) if place >= 0 else ZERO
            first_line, first_column = line, column
            if place >= 0:
                for number in range(size):
                    here = np.uint64(number)
                    at = start + np.uint64(places[begin + here])
                    if at >= limit:
                        return row + 1
                    old[entry_at + here] = memory[base + at * stride]
            else:
                for number in range(size):
                    at = line + np.uint64(column)
                    if at >= limit:
                        return row + 1
                    old[entry_at + np.uint64(number)] = memory[base + at * stride]
                    column += 1
                    if column == columns:
                        column = 0
                        line += apart
            if steps and signed:
                for number in range(size):
                    here = entry_at + np.uint64(number)
                    value = np.uint64(old[here])
                    value = value ^ (((ZERO - (value >> sign)) & mask) | top)
                    value = (value + np.uint64(given[here])) & mask
                    given[here] = value ^ ((((value >> sign) - ONE) & mask) | top)
            elif steps:
                for number in range(size):
                    here = entry_at + np.uint64(number)
                    given[here] = (np.uint64(old[here]) + np.uint64(given[here])) & mask
            if name >= 0:
                for number in range(size):
                    indices[number] = np.uint64(names[np.uint64(name + first + number)])
            elif place >= 0:
                for number in range(size):
                    indices[number] = start + np.uint64(places[begin + np.uint64(number)])
            else:
                line, column = first_line, first_column
                for number in range(size):
                    indices[number] = line + np.uint64(column)
                    column += 1
                    if column == columns:
                        column = 0
                        line += apart
            for number in range(size):
                here = entry_at + np.uint64(number)
                before, after = np.uint64(old[here]), np.uint64(given[here])
                mixed = key + (indices[np.uint64(number)] + ONE) * GOLDEN
                mixed = (mixed ^ (mixed >> S30)) * MIX1
                mixed = (mixed ^ (mixed >> S27)) * MIX2
                mixed = mixed ^ (mixed >> S31)
                weight = mixed | ONE
                old_low += weight * before
                new_low += weight * after
                mixed = (mixed ^ (mixed >> S32)) * MIX3
                weight = (mixed ^ (mixed >> S32)) | ONE
                old_high += weight * before
                new_high += weight * after
        sums[row, 0], sums[row, 1] = old_low, old_high
        sums[row, 2], sums[row, 3] = new_low, new_high
    return 0


def swap(  # noqa: C901  # compiled as it stands, without helpers
    memory: Any,  # noqa: ANN401
    tensors: Any,  # noqa: ANN401
    rows: Any,  # noqa: ANN401
    places: Any,  # noqa: ANN401
    bits: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Overwrite elements that ``resolve`` found inside, and read them back.

    Returns:
        1 + the first row of which an element did not keep its bits, 0 = all did.
    """
    wrong = 0
    for row in range(len(rows)):
        tensor = rows[row, TENSOR]
        base, stride = np.uint64(tensors[tensor, BASE]), np.uint64(tensors[tensor, STRIDE])
        count, entry, place = rows[row, COUNT], rows[row, ENTRY], rows[row, PLACE]
        start, columns = np.uint64(rows[row, START]), rows[row, COLUMNS]
        apart = np.uint64(rows[row, APART])
        differing = ZERO
        first_line, first_column = start, 0
        for first in range(0, count, SWAPPED):
            end = min(first + SWAPPED, count)
            entry_at, size = np.uint64(entry + first), end - first
            if place >= 0:
                begin, last = np.uint64(place + first), np.uint64(place + count - 1)
                for number in range(size):
                    here = np.uint64(number)
                    coming = min(begin + here + np.uint64(AHEAD), last)
                    fetch(memory, base + (start + np.uint64(places[coming])) * stride)
                    at = start + np.uint64(places[begin + here])
                    memory[base + at * stride] = bits[entry_at + here]
                for number in range(size):
                    here = np.uint64(number)
                    at = start + np.uint64(places[begin + here])
                    differing += np.uint64(memory[base + at * stride] != bits[entry_at + here])
                continue
            line, column = first_line, first_column
            for number in range(size):
                at = line + np.uint64(column)
                memory[base + at * stride] = bits[entry_at + np.uint64(number)]
                column += 1
                if column == columns:
                    column = 0
                    line += apart
            line, column = first_line, first_column
            for number in range(size):
                at = line + np.uint64(column)
                differing += np.uint64(
                    memory[base + at * stride] != bits[entry_at + np.uint64(number)]
                )
                column += 1
                if column == columns:
                    column = 0
                    line += apart
            first_line, first_column = line, column
        if differing != ZERO and wrong == 0:
            wrong = row + 1
    return wrong
