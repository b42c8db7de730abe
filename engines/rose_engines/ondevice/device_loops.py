"""The codec's loops where the weights are: comparing, coding and reading by torch operations.

The third implementation of ``rose_core.delta.kernels.Kernels`` beside numba and numpy, function by
function: golden vectors and property tests hold it to the same bytes. torch computes with signed
integers, which wrap as unsigned ones do, so bits are tensors of signed integers of their own
width. What is sequential and small stays on the host: zstd, and the bit stream of exponent
classes. Next step: ``rose_trainer.device_diff`` compares a model with them, ``device_stage``
applies a delta.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rose_core.delta import rice_loops
from rose_core.delta.bits import Bits, Indices
from rose_core.delta.loops import ESCAPE
from rose_engines.ondevice import device_digest

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(
    old: torch.Tensor, new: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions where two runs of bits differ, with the bits on either side."""
    where = torch.nonzero(old != new).view(-1)
    return where, old[where], new[where]


def steps_between(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Ordered-integer steps from one run of sign-magnitude values to another."""
    return _ordered(new) - _ordered(old)


def move(old: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Move sign-magnitude values by ordered-integer steps."""
    moved = _ordered(old) + steps
    return torch.where(moved < 0, moved ^ _top(moved), ~moved)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    return torch.where(bits < 0, ~bits, bits ^ _top(bits))


def _top(bits: torch.Tensor) -> int:
    return torch.iinfo(bits.dtype).min


class Packed(NamedTuple):
    """Streams of several tiles after one another.

    Attributes:
        gaps, codes, escapes: the streams.
        gap_ends, escape_ends: per tile where its part of them ends.
    """

    gaps: torch.Tensor
    codes: torch.Tensor
    escapes: torch.Tensor
    gap_ends: torch.Tensor
    escape_ends: torch.Tensor


def pack_tiles(local: torch.Tensor, steps: torch.Tensor, ends: torch.Tensor) -> Packed:
    """Positions and steps of several tiles to gap bytes, code bytes and escaped steps.

    Args:
        local: positions inside their tiles, ascending in each, tile after tile.
        steps: one for each.
        ends: per tile where its changes end.
    """
    gap = torch.diff(local, prepend=local.new_full((1,), -1)).sub_(1)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    starts = starts[starts < ends]
    gap[starts] = local[starts]
    more = torch.div(gap, ESCAPE, rounding_mode="floor")
    places = (more + 1).cumsum(0)
    count = int(places[-1]) if len(places) else 0
    gaps = torch.full((count,), ESCAPE, dtype=torch.uint8, device=local.device)
    gaps[places - 1] = gap.sub_(more.mul_(ESCAPE)).to(torch.uint8)
    codes, far = _codes(steps)
    return Packed(gaps, codes, steps[far], _at(places, ends), _at(far.cumsum(0), ends))


def _codes(steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Code bytes, and which steps stand apart."""
    bits = steps.element_size() * 8
    zigzag = device_digest.values_of((steps << 1) ^ (steps >> (bits - 1)))
    far = (zigzag > ESCAPE) | (zigzag < 0)  # below zero where all 64 bits are taken
    return torch.where(far, ESCAPE, zigzag - 1).to(torch.uint8), far


def _at(sums: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Running sums as they stand at the ends of tiles."""
    return torch.cat([sums.new_zeros(1), sums])[ends]


def moved(
    flat: torch.Tensor, before: torch.Tensor, after: torch.Tensor, key: int, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What changes add to either lane of their tiles' digests; ``flat`` is used up.

    Differences of running sums are exact, since all of it is modulo 2^64.
    """
    by = device_digest.values_of(after) - device_digest.values_of(before)
    lanes = (_at(lane.cumsum_(0), ends) for lane in device_digest.products(flat, by, key))
    low, high = (torch.diff(lane, prepend=lane.new_zeros(1)) for lane in lanes)
    return low, high


def unpack(
    gaps: torch.Tensor, codes: torch.Tensor, escapes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Bytes back to positions and steps, or None when the streams do not belong together."""
    ends = gaps != ESCAPE
    where = (gaps.to(torch.int64) + ends).cumsum_(0).sub_(1)[ends]
    far = codes == ESCAPE
    if len(where) != len(codes) or int(far.sum()) != len(escapes):
        return None
    zigzag = codes.to(torch.int64).add_(1)
    steps = ((zigzag >> 1) ^ -(zigzag & 1)).to(escapes.dtype)
    steps[far] = escapes
    return where, steps


def largest(old: torch.Tensor, mask: int) -> int:
    """The largest value under a mask."""
    return int((_wide(old) & mask).max()) if len(old) else 0


def rank(
    old: torch.Tensor, where: torch.Tensor, shift: int, mask: int, reference: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Class of every change, and unchanged elements of it since the last change in the class."""
    whole = _classes(old, shift, mask, reference)
    classes, gaps = whole[where], torch.empty_like(where)
    for kind in torch.unique(classes).tolist():
        mine = classes == kind
        among = torch.searchsorted(_members(whole, kind), where[mine])
        gaps[mine] = torch.diff(among, prepend=among.new_full((1,), -1)) - 1
    return classes, gaps


def place(  # noqa: PLR0917
    old: torch.Tensor,
    shift: int,
    mask: int,
    reference: int,
    counts: Indices,
    gaps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Positions of the changes and where each one's gap stood; None when there are too few."""
    whole = _classes(old, shift, mask, reference)
    found = []
    parts = torch.split(gaps, counts.tolist())
    for kind, part in enumerate(parts):
        members, among = _members(whole, kind), (part + 1).cumsum(0) - 1
        if len(part) and int(among[-1]) >= len(members):
            return None
        found.append(members[among])
    where, source = torch.sort(torch.cat(found), stable=True)
    return where, source


def _classes(old: torch.Tensor, shift: int, mask: int, reference: int) -> torch.Tensor:
    exponents = (_wide(old) >> shift) & mask
    return (reference - exponents).clamp_(0, rice_loops.CLASSES - 1).to(torch.uint8)


def _members(whole: torch.Tensor, kind: int) -> torch.Tensor:
    return torch.nonzero(whole == kind).view(-1)


def _wide(old: torch.Tensor) -> torch.Tensor:
    """Bits in an integer that takes the largest mask; signs of narrow ones do not matter."""
    return old.to(torch.int64)


def there(array: Bits, device: torch.device | str) -> torch.Tensor:
    """An array of bits on a device."""
    return torch.tensor(array.view(f"i{array.itemsize}"), device=device)


def here(bits: torch.Tensor) -> Bits:
    """Bits on the host, as the unsigned integers they are."""
    array = bits.cpu().numpy()
    return array.view(f"u{array.itemsize}")
