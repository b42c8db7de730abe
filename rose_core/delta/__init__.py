"""The weight format: lossless element deltas in Hugging Face coordinates; pure numpy.

Read in this order: ``manifest`` (what a version is), ``tiles`` (how tensors are cut), ``codec``
(blocks), ``bits`` (steps instead of differences), ``digest`` (what is attested), ``merge`` and
``lineage`` (several versions at once). The specification is ``docs/weight-format.md``.

To apply a bundle::

    manifest = Manifest.decode(data)
    for tensor, blocks in manifest.blocks_by_tensor():
        for block in blocks:
            changes = manifest.read(block, bytes_of(block.sha256.hex()))   # checked
            where = manifest.positions(block, changes)                     # flat indices
            new = changes.resolve(live[where], tensor.kind)                # bits
            after = manifest.tile_digests[manifest.tile_number(block)]       # what it must become

Live weights are numpy views of unsigned integers (``tensor.kind.unsigned``).
"""

from rose_core.delta.bits import FORMATS, NumberFormat, number_format, ordered, unordered
from rose_core.delta.build import Builder, TensorSpec, table
from rose_core.delta.codec import (
    Codec,
    TileChanges,
    check_block,
    decode_block,
    encode_tile,
    name_of,
)
from rose_core.delta.digest import (
    NOTHING,
    Digest,
    digest_at,
    digest_change,
    digest_run,
    digest_tile,
    total,
)
from rose_core.delta.errors import (
    BlockError,
    DeltaError,
    DigestMismatch,
    LineageError,
    ManifestError,
)
from rose_core.delta.found import FoundTile
from rose_core.delta.manifest import BlockEntry, Manifest, TensorEntry
from rose_core.delta.merge import Hop, compose, inverse, then
from rose_core.delta.tiles import TileBox, Tiling, tiling

__all__ = [
    "FORMATS",
    "NOTHING",
    "BlockEntry",
    "BlockError",
    "Builder",
    "Codec",
    "DeltaError",
    "Digest",
    "DigestMismatch",
    "FoundTile",
    "Hop",
    "LineageError",
    "Manifest",
    "ManifestError",
    "NumberFormat",
    "TensorEntry",
    "TensorSpec",
    "TileBox",
    "TileChanges",
    "Tiling",
    "check_block",
    "compose",
    "decode_block",
    "digest_at",
    "digest_change",
    "digest_run",
    "digest_tile",
    "encode_tile",
    "inverse",
    "name_of",
    "number_format",
    "ordered",
    "table",
    "then",
    "tiling",
    "total",
    "unordered",
]
