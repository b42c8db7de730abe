"""Our format on the same deltas: every byte counted, and speed per core beside the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from rose_core.delta import (
    BlockEntry,
    Builder,
    Codec,
    Hop,
    Manifest,
    TensorSpec,
    check_block,
    compose,
    name_of,
    table,
)
from rose_core.delta.batch import decode_batch
from rose_core.delta.bits import Bits, number_format
from rose_core.delta.codec import encode_on_base, encode_tile, find_changes, step
from rose_core.delta.digest import digest_run
from rose_core.identity import WeightVersion
from rose_engines.weights.decoding import groups
from rose_weights.pieces import PIECE_BYTES

_ResultT = TypeVar("_ResultT")

KIND = number_format("BF16")
FRAME_BYTES = 14
"""gRPC's message prefix and HTTP/2's frame header, per piece of at most ``PIECE_BYTES``."""


class Chain:
    """A base and deltas from it, built with the product's own builder."""

    def __init__(self, states: Sequence[Bits], shape: tuple[int, int]) -> None:
        self.states = states
        self.blocks: dict[bytes, bytes] = {}
        tensors = table([TensorSpec("model.layers.0.mlp.gate_proj.weight", "BF16", shape)])
        base = Builder(tensors, None, self.keep)
        base.add(None, states[0], blocks=False)
        self.manifests = [base.finish(WeightVersion("bench", 1, 0))]
        for number in range(1, len(states)):
            self.manifests.append(self.delta(self.manifests[-1], number - 1, number))

    def delta(self, base: Manifest, before: int, after: int) -> Manifest:
        """The delta between two states."""
        return self.forms(base, before, after)[0]

    def forms(self, base: Manifest, before: int, after: int) -> tuple[Manifest, Manifest]:
        """The delta as every receiver reads it, and with blocks coded on their base."""
        builder = Builder(base.tensors, base, self.keep, on_base=True)
        builder.add(self.states[before], self.states[after])
        manifest = builder.finish(WeightVersion("bench", 1, after))
        return manifest, builder.on_base(manifest) or manifest

    def merged(self) -> Manifest:
        """All deltas as one."""
        hops = [Hop(manifest) for manifest in self.manifests[1:]]
        return compose(hops, lambda block: self.blocks[block.sha256], self.keep)

    def keep(self, data: bytes) -> None:
        """Remember a block."""
        self.blocks[name_of(data)] = data

    def apply(self, manifest: Manifest, old: Bits) -> Bits:
        """Decode every block and stage absolute values against ``old``."""
        state = old.copy()
        for block in manifest.blocks:
            base = manifest.tensors[block.tensor].tiling.cut(old, block.tile)
            changes = manifest.read(block, self.blocks[block.sha256], base)
            where = manifest.positions(block, changes)
            state[where] = changes.resolve(state[where], KIND)
        return state


def wire_bytes(manifest: Manifest) -> int:
    """Everything a receiver is sent for one delta: manifest, blocks, framing."""
    payload = len(manifest.encode()) + manifest.block_bytes
    return payload + FRAME_BYTES * (-(-payload // PIECE_BYTES) + 1)


def best(work: Callable[[], _ResultT], repeats: int = 7) -> tuple[float, _ResultT]:
    """Least processor time of several runs, after one to warm up, and the result.

    Processor time of this thread, so that neighbours on a shared machine count less.
    """
    result = work()
    shortest = float("inf")
    for _ in range(repeats):
        began = time.thread_time()
        result = work()
        shortest = min(shortest, time.thread_time() - began)
    return shortest, result


def on_base_speed(old: Bits, new: Bits, tile: int = 1 << 20) -> float:
    """GB/s of model bytes to make blocks coded on their base (v2)."""

    def encode() -> int:
        size = 0
        for start in range(0, len(old), tile):
            before, after = old[start : start + tile], new[start : start + tile]
            size += len(encode_on_base(before, find_changes(before, after, KIND), KIND))
        return size

    seconds, _ = best(encode, 3)
    return old.nbytes / 1e9 / seconds


def break_even(chain: Chain, steps: Manifest, on_base: Manifest, encode: float) -> float:
    """Bytes/s of a link below which the second form arrives sooner, one core on either side.

    Args:
        chain: holds the blocks.
        steps: the delta in its first form.
        on_base: in its second form.
        encode: GB/s of model bytes to make the second form; it is made besides the first.
    """
    saved = wire_bytes(steps) - wire_bytes(on_base)
    encoding = chain.states[0].nbytes / 1e9 / encode
    rates = [decode_rate(chain, form) for form in (steps, on_base)]
    decoding = steps.changes / rates[1] - steps.changes / rates[0]
    return saved / (encoding + decoding)


class Speeds:
    """GB/s of model bytes, and changes/s, of one delta on one core."""

    def __init__(self, old: Bits, new: Bits, tile: int = 1 << 20) -> None:
        self._old, self._new = old, new
        self._tiles = [slice(start, start + tile) for start in range(0, len(old), tile)]
        self.gigabytes = old.nbytes / 1e9

    def memcpy(self) -> float:
        """Copy of the model, GB/s."""
        target = np.empty_like(self._old)
        return self.gigabytes / best(lambda: np.copyto(target, self._old))[0]

    def scan(self) -> float:
        """Comparison alone, GB/s."""
        return self.gigabytes / best(lambda: np.array_equal(self._old, self._new))[0]

    def encode(self) -> float:
        """All stages from bits to blocks, GB/s."""
        return self.gigabytes / best(self._encode)[0]

    def digest(self) -> float:
        """Digest of the whole state, GB/s."""
        return self.gigabytes / best(lambda: digest_run("w", 0, self._new))[0]

    def _encode(self) -> list[bytes]:
        return [encode_tile(self._old[at], self._new[at], KIND)[0] for at in self._tiles]


def decode_rate(chain: Chain, manifest: Manifest) -> float:
    """Hash check, decode, base gather, absolute values, changes/s; grouped as engines do it."""
    old = chain.states[0]

    def stage() -> int:
        return sum(
            len(_staged(chain, manifest, group, old)) for group in groups(list(manifest.blocks))
        )

    seconds, count = best(stage)
    return count / seconds


def _staged(chain: Chain, manifest: Manifest, group: list[BlockEntry], old: Bits) -> Bits:
    """New bits of everything that a group of blocks changes."""
    entry, read = manifest.tensors[0], [chain.blocks[block.sha256] for block in group]
    first = group[0]
    if len(group) > 1:
        for block, data in zip(group, read, strict=True):
            check_block(data, block.sha256)
        batch = decode_batch(read, [block.tile for block in group], entry.tiling, KIND)
        return step(old.take(batch.positions, mode="clip"), batch.steps, KIND)
    base = entry.tiling.cut(old, first.tile) if first.codec == Codec.RICE else None
    changes = manifest.read(first, read[0], base)
    where = manifest.positions(first, changes)
    return changes.resolve(old.take(where, mode="clip"), KIND)
