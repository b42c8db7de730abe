"""What ``rose weights inspect|verify|diff`` say, as text for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rose_core.delta import (
    BlockEntry,
    Codec,
    DeltaError,
    Digest,
    DigestMismatch,
    Manifest,
    check_block,
    digest_change,
    digest_tile,
    total,
)
from rose_core.delta.bits import Bits
from rose_core.delta.codec import SELF_CONTAINED
from rose_weights.bundle import MANIFEST, Bundle
from rose_weights.checkpoint import Checkpoint
from rose_weights.errors import Damaged, WeightsError
from rose_weights.store.open_store import open_store
from rose_weights.store.state import StoredVersion
from rose_weights.store.store import Store


class InspectionResult(NamedTuple):
    """What looking at weights found.

    Attributes:
        text: for people.
        good: whether all is well.
    """

    text: str
    good: bool = True


def inspect(where: str | Path, run: str = "") -> str:
    """A store's runs and versions, or one bundle or manifest.

    Raises:
        Damaged: nothing of the kind is there.
    """
    if (store := _store(where)) is not None:
        return "".join(_run_lines(store, run))
    path = Path(where)
    if (path / MANIFEST).is_file():
        return "".join(_manifest_lines(Bundle(path).manifest()))
    if path.is_file():
        try:
            return "".join(_manifest_lines(Manifest.decode(path.read_bytes())))
        except DeltaError as error:
            message = f"{path} is no manifest: {error}"
            raise Damaged(message) from error
    raise _nothing(path)


def _nothing(path: Path) -> Damaged:
    """The answer for a place with nothing of ours; a new store looks the same."""
    return Damaged(f"{path} is no store, bundle or manifest, or a store without a version yet")


def verify(where: str | Path, base: Path | None = None) -> InspectionResult:
    """Check every block, and a bundle's digests against a checkpoint."""
    if (store := _store(where)) is not None:
        return _verify_store(store)
    if not (Path(where) / MANIFEST).is_file():
        raise _nothing(Path(where))
    bundle = Bundle(Path(where))
    manifest = bundle.manifest()
    lines, good = _verify_blocks(manifest, bundle.read)
    if base is not None and good:
        try:
            checked = apply_to(Checkpoint(base), bundle)
            lines += f"{manifest.target}: digest {checked} after applying to {base}\n"
        except (WeightsError, DeltaError) as error:
            lines, good = lines + f"{manifest.target}: {error}\n", False
    return InspectionResult(lines, good)


def _store(where: str | Path) -> Store | None:
    """The store at a place, None when it is something else."""
    if "://" in str(where) or (Path(where) / "runs").is_dir():
        return open_store(str(where))
    return None


def diff(old: Path, new: Path) -> str:
    """Changed elements per tensor between two checkpoints.

    Raises:
        Damaged: one of them cannot be read.
    """
    before, after = Checkpoint(old), Checkpoint(new)
    changed = elements = 0
    lines = []
    for name in sorted(set(before.names()) | set(after.names())):
        if name not in before.names() or name not in after.names():
            lines.append(f"{name}: only in {old if name in before.names() else new}\n")
            continue
        if (before.dtype(name), before.shape(name)) != (after.dtype(name), after.shape(name)):
            lines.append(f"{name}: {before.dtype(name)} {before.shape(name)} became ")
            lines.append(f"{after.dtype(name)} {after.shape(name)}\n")
            continue
        count = int(np.count_nonzero(before.bits(name) != after.bits(name)))
        changed, elements = changed + count, elements + before.bits(name).size
        if count:
            lines.append(f"{name}: {count} of {before.bits(name).size} changed\n")
    lines.append(f"{changed} of {elements} elements changed ({_percent(changed, elements)})\n")
    return "".join(lines)


def apply_to(checkpoint: Checkpoint, bundle: Bundle) -> Digest:
    """Apply a bundle to a checkpoint in memory, tile by tile, and check every digest.

    Raises:
        DigestMismatch: says which tensor, and whether the base was wrong already.
        Damaged: a block or tensor is missing or damaged.
    """
    manifest = bundle.manifest()
    blocks = {(block.tensor, block.tile): block for block in manifest.blocks}
    for number, tensor in enumerate(manifest.tensors):
        if tensor.name not in checkpoint.names():
            message = f"the checkpoint has no tensor {tensor.name}"
            raise Damaged(message)
        flat = checkpoint.bits(tensor.name)
        for tile in range(tensor.tiling.count):
            found = digest_tile(tensor.name, flat, tensor.tiling, tile)
            place = tensor.first_tile + tile
            block = blocks.get((number, tile))
            whole = block is not None and block.codec in {Codec.RAW, Codec.PLANES}
            if manifest.base is not None and found != manifest.base_tile_digests[place]:
                message = f"tile {tile} of {tensor.name} is not what base {manifest.base} had"
                raise DigestMismatch(message)
            if block is not None:
                found = _after(manifest, block, bundle, flat, None if whole else found)
            if found != manifest.tile_digests[place]:
                message = f"tile {tile} of {tensor.name} is not what {manifest.target} states"
                raise DigestMismatch(message)
    return total(manifest.tile_digests)


def _after(
    manifest: Manifest, block: BlockEntry, bundle: Bundle, flat: Bits, before: Digest | None
) -> Digest:
    tensor = manifest.tensors[block.tensor]
    base = tensor.tiling.cut(flat, block.tile) if block.codec == Codec.RICE else None
    changes = manifest.read(block, bundle.read(block), base)
    where = manifest.positions(block, changes)
    old = flat[where]
    new = changes.resolve(old, tensor.kind)
    change = digest_change(tensor.name, where, old, new)
    if before is None:
        before = digest_tile(tensor.name, flat, tensor.tiling, block.tile)
    return before.plus(change)


def _run_lines(store: Store, only: str) -> Iterator[str]:
    runs = store.runs()
    if only and only not in runs:
        message = f"no run {only!r} in this store; it has {', '.join(runs) or 'none'}"
        raise Damaged(message)
    if not runs:
        yield "no run yet: the first publisher makes one\n"
    for run in runs:
        if only not in {"", run}:
            continue
        state = store.state(run)
        yield f"run {run}: head {state.head}, fence {state.fence} ({state.publisher})\n"
        for kept in state.versions:
            kind = f"from {kept.base}" if kept.base else ("full" if kept.full else "bare")
            yield (
                f"  {kept.version}  step {kept.step}  {kind}  {kept.bytes} bytes  "
                f"{_percent(kept.changes, kept.elements)}  {kept.digest}{_encoded(kept)}\n"
            )


def _encoded(kept: StoredVersion) -> str:
    return f"  encoded in {kept.encode_seconds:.2f} s" if kept.encode_seconds else ""


def _manifest_lines(manifest: Manifest) -> Iterator[str]:
    yield f"{manifest.base or 'nothing'} -> {manifest.target} (step {manifest.step})\n"
    yield f"digest {manifest.digest}, base {manifest.base_digest or 'none'}\n"
    yield (
        f"{len(manifest.tensors)} tensors, {manifest.state_bytes} bytes; "
        f"{manifest.changes} of {manifest.elements} elements changed "
        f"({_percent(manifest.changes, manifest.elements)})\n"
    )
    size = manifest.block_bytes + len(manifest.encode())
    yield f"{len(manifest.blocks)} blocks, {size} bytes with the manifest"
    yield f", {size / manifest.changes:.3f} bytes per change\n" if manifest.changes else "\n"
    for codec in Codec:
        count = sum(block.codec == codec for block in manifest.blocks)
        if count:
            yield f"  {codec.name}: {count} blocks\n"


def _verify_store(store: Store) -> InspectionResult:
    runs = store.runs()
    text, good = "" if runs else "no run yet: nothing to check\n", True
    for run in runs:
        for kept in store.state(run).versions:
            for manifest in store.manifests(kept):
                more, fine = _verify_blocks(manifest, lambda block: store.blocks.get(block.sha256))
                text, good = text + more, good and fine
    return InspectionResult(text, good)


def _verify_blocks(manifest: Manifest, read: Callable[[BlockEntry], bytes]) -> InspectionResult:
    bad = []
    for block in manifest.blocks:
        try:
            data = read(block)
            if block.codec in SELF_CONTAINED:  # the rest says nothing without its base
                manifest.read(block, data)
            else:
                check_block(data, block.sha256)
        except (WeightsError, DeltaError) as error:
            bad.append(f"  {manifest.tensors[block.tensor].name} tile {block.tile}: {error}\n")
    verdict = "damaged" if bad else "good"
    text = f"{manifest.target}: {len(manifest.blocks)} blocks, {verdict}\n" + "".join(bad)
    return InspectionResult(text, not bad)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "0 %"
