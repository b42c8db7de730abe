"""Numpy twins of ``rice_loops``: the same bits without a compiler, several times slower."""

from __future__ import annotations

import numpy as np

from rose_core.delta.bits import Bits, Indices
from rose_core.delta.rice_loops import CLASSES, LONGEST_QUOTIENT, LONGEST_STEP


def largest(old: Bits, mask: int) -> int:
    """The largest value under a mask."""
    return int((old & old.dtype.type(mask)).max(initial=0))


def rank(
    old: Bits, indices: Indices, shift: int, mask: int, reference: int
) -> tuple[Bits, Indices]:
    """Class and gap of every change."""
    whole = _classes(old, shift, mask, reference)
    classes, gaps = whole[indices], np.empty(len(indices), np.int64)
    for kind in np.unique(classes):
        mine = classes == kind
        among = np.searchsorted(np.flatnonzero(whole == kind), indices[mine])
        gaps[mine] = np.diff(among, prepend=-1) - 1
    return classes, gaps


def arrange(classes: Bits, gaps: Indices, steps: Bits) -> tuple[Indices, Indices, Bits]:
    """Changes per class; gaps and steps class by class."""
    order = np.argsort(classes, kind="stable")
    return np.bincount(classes, minlength=CLASSES), gaps[order], steps[order]


def choose(gaps: Indices, counts: Indices) -> Indices:
    """Per class the Rice parameter that codes its gaps in the fewest bits."""
    parts = np.split(gaps, np.cumsum(counts)[:-1])
    return np.array([_parameter(part) for part in parts], np.int64)


def write(gaps: Indices, steps: Bits, counts: Indices, parameters: Indices, width: int) -> bytes:
    """The bit stream."""
    codes = np.empty((len(gaps), 2), np.uint64)
    lengths = np.empty((len(gaps), 2), np.int64)
    codes[:, 0], lengths[:, 0] = _gap_codes(gaps, np.repeat(parameters, counts))
    codes[:, 1], lengths[:, 1] = _step_codes(steps, width)
    ends = np.cumsum(lengths.reshape(-1))
    total = int(ends[-1]) if len(ends) else 0
    below = np.repeat(ends, lengths.reshape(-1)) - 1 - np.arange(total)
    ones = np.repeat(codes.reshape(-1), lengths.reshape(-1)) >> below.astype(np.uint64)
    return np.packbits((ones & np.uint64(1)).astype(np.uint8)).tobytes()


def read(  # noqa: PLR0917
    stream: bytes, counts: Indices, parameters: Indices, width: int, gaps: Indices, steps: Bits
) -> bool:
    """The inverse of ``write``; False when the bits do not end with the last change."""
    most = len(stream) * 8
    # A one in front keeps leading zeros, zeros behind end what runs past the end.
    text = format(int.from_bytes(b"\1" + stream + bytes(16)), "b")[1:]
    at = 0
    for number, parameter in enumerate(np.repeat(parameters, counts).tolist()):
        gaps[number], at = _gap(text, at, parameter)
        if at > most:
            return False
        steps[number], at = _step(text, at, width)
        if at > most:
            return False
    return most - at < 8


def place(  # noqa: PLR0917
    old: Bits, shift: int, mask: int, reference: int, counts: Indices, gaps: Indices
) -> tuple[Indices, Indices] | None:
    """Positions of the changes and where each one's gap stood."""
    whole = _classes(old, shift, mask, reference)
    indices = np.empty(len(gaps), np.int64)
    end = 0
    for kind, count in enumerate(counts):
        start, end = end, end + int(count)
        among = np.cumsum(gaps[start:end] + 1) - 1
        members = np.flatnonzero(whole == kind)
        if count and int(among[-1]) >= len(members):
            return None
        indices[start:end] = members[among]
    source = np.argsort(indices, kind="stable")
    return indices[source], source


def _classes(old: Bits, shift: int, mask: int, reference: int) -> Bits:
    exponents = ((old >> old.dtype.type(shift)) & old.dtype.type(mask)).astype(np.int64)
    classes: Bits = np.clip(reference - exponents, 0, CLASSES - 1).astype(np.uint8)
    return classes


def _parameter(gaps: Indices) -> int:
    if not len(gaps):
        return 0
    guess = max(int(gaps.mean() * 0.69 + 1).bit_length() - 1, 0)
    costs = {
        parameter: int((gaps >> parameter).sum()) + len(gaps) * (parameter + 1)
        for parameter in range(max(guess - 1, 0), min(guess + 2, 31))
    }
    return min(costs, key=lambda parameter: costs[parameter])


def _gap_codes(gaps: Indices, parameters: Indices) -> tuple[Bits, Indices]:
    quotients = gaps >> parameters
    rest = gaps & ((1 << parameters) - 1)
    long = quotients >= LONGEST_QUOTIENT
    short = ((2 << np.where(long, 0, quotients)) - 2 << parameters) | rest
    codes = np.where(long, (((1 << LONGEST_QUOTIENT) - 1) << 32) | gaps, short)
    lengths = np.where(long, LONGEST_QUOTIENT + 32, quotients + 1 + parameters)
    return codes.astype(np.uint64), lengths


def _step_codes(steps: Bits, width: int) -> tuple[Bits, Indices]:
    plain = steps.astype(np.int64)
    down = plain >= 1 << (width - 1)
    sizes = np.where(down, (1 << width) - plain, plain)
    long = sizes > LONGEST_STEP
    near = np.where(long, 1, sizes)
    short = (down.astype(np.int64) << near) | ((1 << near) - 2)
    ones = (down.astype(np.int64) << LONGEST_STEP) | ((1 << LONGEST_STEP) - 1)
    codes = np.where(long, (ones << width) | plain, short)
    return codes.astype(np.uint64), np.where(long, 1 + LONGEST_STEP + width, 1 + near)


def _gap(text: str, at: int, parameter: int) -> tuple[int, int]:
    quotient = text.find("0", at) - at
    if not 0 <= quotient < LONGEST_QUOTIENT:
        start, end = at + LONGEST_QUOTIENT, at + LONGEST_QUOTIENT + 32
        return int(text[start:end] or "0", 2), end
    start, end = at + quotient + 1, at + quotient + 1 + parameter
    return (quotient << parameter) | int(text[start:end] or "0", 2), end


def _step(text: str, at: int, width: int) -> tuple[int, int]:
    down, start = text[at] == "1", at + 1
    size = text.find("0", start) - start
    if not 0 <= size < LONGEST_STEP:
        start, end = start + LONGEST_STEP, start + LONGEST_STEP + width
        return int(text[start:end] or "0", 2), end
    return ((1 << width) - size - 1 if down else size + 1), start + size + 1
