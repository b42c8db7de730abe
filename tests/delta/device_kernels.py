"""Loops that run on a device, with arrays at their borders: every call copies there and back."""

from __future__ import annotations

import numpy as np
import torch

from rose_core.delta.bits import Bits, Indices
from rose_core.delta.kernels import ClassLoops, Kernels
from rose_core.delta.rice import class_loops
from rose_engines.ondevice import device_digest
from rose_engines.ondevice.device_loops import (
    compare,
    here,
    largest,
    move,
    pack_tiles,
    place,
    rank,
    steps_between,
    there,
    unpack,
)

_EVERY = (1 << 64) - 1


def kernels_on(device: torch.device | str = "cpu") -> Kernels:
    """The loops as numba and numpy have them."""

    def bits(array: Bits) -> torch.Tensor:
        return there(array, device)

    def plain(array: Bits) -> torch.Tensor:
        return torch.tensor(array, device=device)

    def compare_(old: Bits, new: Bits) -> tuple[Indices, Bits, Bits]:
        where, before, after = compare(bits(old), bits(new))
        return where.cpu().numpy(), here(before), here(after)

    def pack_(indices: Indices, steps: Bits) -> tuple[Bits, Bits, Bits]:
        ends = torch.tensor([len(indices)], device=device)
        found = pack_tiles(plain(indices), bits(steps), ends)
        return here(found.gaps), here(found.codes), here(found.escapes)

    def unpack_(gaps: Bits, codes: Bits, escapes: Bits) -> tuple[Indices, Bits] | None:
        found = unpack(plain(gaps), plain(codes), bits(escapes))
        return None if found is None else (found[0].cpu().numpy(), here(found[1]))

    def run_(array: Bits, first: int, key: int) -> tuple[int, int]:
        return device_digest.rows_by_key(key, (first, 0), bits(array)[None, :])

    def at_(indices: Indices, array: Bits, key: int) -> tuple[int, int]:
        positions, values = plain(indices.astype(np.int64)), device_digest.values_of(bits(array))
        low, high = (int(lane.sum()) for lane in device_digest.products(positions, values, key))
        return low & _EVERY, high & _EVERY

    return Kernels(
        "torch",
        compare_,
        lambda old, new: here(steps_between(bits(old), bits(new))),
        lambda old, steps: here(move(bits(old), bits(steps))),
        pack_,
        unpack_,
        run_,
        at_,
        _classes_on(device),
    )


def _classes_on(device: torch.device | str) -> ClassLoops:
    """What looks at all elements of a tile runs on the device, what looks at changes does not."""
    host = class_loops()

    def rank_(
        old: Bits, indices: Indices, shift: int, mask: int, reference: int
    ) -> tuple[Bits, Indices]:
        where = torch.tensor(indices, device=device)
        classes, gaps = rank(there(old, device), where, shift, mask, reference)
        return here(classes), gaps.cpu().numpy()

    def place_(  # noqa: PLR0917
        old: Bits, shift: int, mask: int, reference: int, counts: Indices, gaps: Indices
    ) -> tuple[Indices, Indices] | None:
        given = torch.tensor(gaps, device=device)
        found = place(there(old, device), shift, mask, reference, counts, given)
        return None if found is None else (found[0].cpu().numpy(), found[1].cpu().numpy())

    return ClassLoops(
        lambda old, mask: largest(there(old, device), mask),
        rank_,
        host.arrange,
        host.choose,
        host.write,
        host.read,
        place_,
    )
