"""A small model as bit patterns, changed a little at a time, for tests of the weight plane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from rose_core.delta import (
    BlockEntry,
    Builder,
    Manifest,
    TensorEntry,
    TensorSpec,
    name_of,
    table,
)
from rose_core.delta.bits import Bits
from rose_core.identity import WeightVersion
from rose_weights.bundle import Bundle

SPECS = (
    TensorSpec("model.embed_tokens.weight", "BF16", (512, 96)),
    TensorSpec("model.layers.0.self_attn.o_proj.weight", "BF16", (512, 512)),
    TensorSpec("model.layers.0.mlp.gate_proj.weight", "F8_E4M3", (64, 64)),
    TensorSpec("model.layers.0.mlp.gate_proj.weight_scale_inv", "F32", (2, 2)),
    TensorSpec("model.norm.weight", "F16", (96,)),
    TensorSpec("steps", "I64", ()),
)


class Model:
    """Random bits under some specs and the manifests of their changes."""

    def __init__(self, seed: int, specs: Sequence[TensorSpec] = SPECS) -> None:
        random = np.random.default_rng(seed)
        self.tensors = table(specs)
        self.state: dict[str, Bits] = {
            tensor.name: random.integers(
                0, 1 << (8 * tensor.kind.width), tensor.elements, np.uint64, endpoint=False
            ).astype(tensor.kind.unsigned)
            if tensor.kind.width < 8
            else random.integers(0, 1 << 60, tensor.elements, np.uint64)
            for tensor in self.tensors
        }
        self.published: dict[str, Bits] = self.copy()
        self.manifest: Manifest | None = None
        self.on_base: Manifest | None = None

    def copy(self) -> dict[str, Bits]:
        return {name: bits.copy() for name, bits in self.state.items()}

    def change(self, seed: int, share: float = 0.02, *, whole_norm: bool = True) -> None:
        """Move a share of all elements by one step; the norm is replaced as a whole."""
        random = np.random.default_rng(seed)
        for name, bits in self.state.items():
            chosen = random.random(len(bits)) < share
            bits[chosen] += bits.dtype.type(1)
            if whole_norm and name == "model.norm.weight":
                bits[:] = random.integers(0, 65536, len(bits), np.uint16)

    def cut_anew(self) -> None:
        """Cut rows into half as many, as ranks do whose number has changed."""
        self.tensors = renumbered(
            msgspec.structs.replace(tensor, tile_rows=max(1, tensor.tile_rows // 2))
            for tensor in self.tensors
        )

    def full(self, run: str, incarnation: int) -> tuple[Manifest, dict[bytes, bytes]]:
        return self._build(WeightVersion(run, incarnation, 0), None)

    def delta(self, target: WeightVersion) -> tuple[Manifest, dict[bytes, bytes]]:
        assert self.manifest is not None
        return self._build(target, self.manifest)

    def _build(
        self, target: WeightVersion, base: Manifest | None
    ) -> tuple[Manifest, dict[bytes, bytes]]:
        blocks: dict[bytes, bytes] = {}
        builder = Builder(
            self.tensors, base, lambda data: blocks.update({name_of(data): data}), on_base=True
        )
        for tensor in self.tensors:
            old = None if base is None else self.published[tensor.name]
            builder.add(old, self.state[tensor.name])
        self.manifest = builder.finish(target, step=target.sequence * 10)
        self.on_base = builder.on_base(self.manifest)
        self.published = self.copy()
        return self.manifest, blocks


def renumbered(tensors: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """The table with every tensor's first tile behind the one before."""
    found: list[TensorEntry] = []
    for tensor in tensors:
        first = found[-1].first_tile + found[-1].tiling.count if found else 0
        found.append(msgspec.structs.replace(tensor, first_tile=first))
    return tuple(found)


def apply_manifest(
    held: dict[str, Bits], manifest: Manifest, read: Callable[[BlockEntry], bytes]
) -> None:
    """What an engine does: resolve every block against what it holds."""
    for block in manifest.blocks:
        tensor = manifest.tensors[block.tensor]
        live = held[tensor.name]
        changes = manifest.read(block, read(block), tensor.tiling.cut(live, block.tile))
        where = manifest.positions(block, changes)
        live[where] = changes.resolve(live[where], tensor.kind)


def apply_bundle(held: dict[str, Bits], bundle: Bundle) -> None:
    """The same from a folder."""
    apply_manifest(held, bundle.manifest(), bundle.read)
