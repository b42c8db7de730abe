"""Live weights of an engine, seen in canonical coordinates, and how a staged bundle gets there.

Canonical means Hugging Face tensor name and flat index; whatever the engine fuses or pads is
hidden behind ``LiveTensor``. What ``rose_engines.weights.staging`` has staged is *committed*
between two iterations, in time that grows with the changes alone: scatter and read back, or put the
old bits back. Then it is *confirmed* beside the serving engine: the digests of the touched tensors
are recomputed on the live weights. Next step: ``rose_engines.weights.session`` says when each may
happen.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rose_core.delta import faults, loops, rice
from rose_core.delta.batch import decode_batch
from rose_core.delta.bits import number_format
from rose_core.delta.codec import (
    SELF_CONTAINED,
    Codec,
    decode_block,
    encode_on_base,
    encode_tile,
    find_changes,
    step,
)
from rose_core.delta.digest import Digest, digest_change, total
from rose_core.delta.safetensors import StoredTensor
from rose_core.delta.tiles import Tiling
from rose_engines.errors import BrokenWeights, CommitRefused
from rose_engines.tensors.canonical import HostTensor, Live, LiveTensor, host_tensors
from rose_engines.weights import fused_scatter
from rose_engines.weights.host_memory import HostMemory
from rose_engines.weights.staging import StagedUpdate


def digest_live(live: Live) -> Digest:
    """Digest of everything that is held here, read from the live weights."""
    return total(tensor.digest() for tensor in live.values())


def zero(tensor: LiveTensor) -> None:
    """Write zeros over all of it."""
    bits = tensor.all_bits()
    tensor.put(slice(0, bits.size), np.zeros_like(bits))


def readable(live: Live) -> tuple[int, ...]:
    """Codecs that bundles for these weights may use.

    Blocks coded on their base need the whole tile's old bits: free where the weights are in host
    memory, a copy of nearly the whole model where they are on a device.
    """
    host = all(isinstance(tensor, HostTensor) for tensor in live.values())
    return tuple(map(int, SELF_CONTAINED + ((Codec.RICE,) if host else ())))


def warm_up(live: Live) -> None:
    """Compile what staging needs, for every element type of the engine.

    Compiling takes a second in which no other thread of the process runs, so it is done before the
    engine serves and not beside it.
    """
    for dtype in sorted({tensor.dtype for tensor in live.values()}):
        kind = number_format(dtype)
        old = np.zeros(64, kind.unsigned)
        new = old.copy()
        new[[3, 60]] = 1
        block, _ = encode_tile(old, new, kind, backend="numpy")
        batch = decode_batch([block], [0], Tiling(1, len(old), 1, len(old)), kind)
        moved = step(old[batch.positions], batch.steps, kind)
        digest_change("warm-up", batch.positions, old[batch.positions], moved)
        HostTensor("warm-up", dtype, old.shape, old).put(batch.positions, moved)
        HostTensor("warm-up", dtype, old.shape, old).holds(batch.positions, moved)
        _warm_up_loops(dtype)
        if Codec.RICE in readable(live) and kind.width <= rice.WIDEST:
            block = encode_on_base(old, find_changes(old, new, kind, "numpy"), kind, "numpy")
            decode_block(block, kind, len(old), base=old)
    fused_scatter.warm_up(live)


def _warm_up_loops(dtype: str) -> None:
    """Over many tensors at once, with places as a segment has them."""
    bits = np.zeros(4, number_format(dtype).unsigned)
    memory = HostMemory.of(host_tensors({"warm-up": StoredTensor(dtype, (4,), bits)}))
    for width in memory.arrays:
        rows = np.array([[0, 0, 0, 4, 0, -1, 0, 0, 0, loops.STEPS, 1]], np.int64)
        places, names = np.arange(4, dtype=np.uint32), np.zeros(0, np.int64)
        given = np.ones_like(bits)
        memory.resolve(width, rows, places, names, given, bits.copy(), lambda: None)
        memory.swap(width, rows, places, given)
        memory.digests([0])


def commit(update: StagedUpdate, live: Live) -> Digest:
    """Swap the staged elements in; all or nothing. Takes as long as there are changes.

    Only between two iterations. Every element is read back from where it was written; that nothing
    else has changed is for ``confirm``, which reads whole tensors beside the serving engine.

    Returns:
        The digest of the whole state.

    Raises:
        CommitRefused: ``DigestMismatch``; the old bits are back and were checked.
        BrokenWeights: they are not; the engine must not compute any more.
    """
    wrong = scatter(update, live)
    faults.at("engine.commit.checked")
    if wrong is None:
        return Digest.parse(update.outline.digest)
    revert(update, live, wrong)
    raise CommitRefused("DigestMismatch", f"{update.version}: {wrong}; the old weights are back")


def scatter(update: StagedUpdate, live: Live) -> str | None:
    """Overwrite every staged element and read it back; again does no harm.

    Returns:
        The first tensor that did not keep what was written, None = all did.
    """
    faults.at("engine.commit.begin")
    wrong = update.fused.put() if update.fused is not None else None
    wrong = update.host.put() or wrong
    for change in update.single:
        tensor = live[change.tensor.name]
        tensor.put(change.where, change.new)
        if wrong is None and not tensor.holds(change.where, change.new):
            wrong = change.tensor.name
        faults.at("engine.commit.scatter")
    return f"{wrong} did not keep what was written" if wrong is not None else None


def confirm(update: StagedUpdate, live: Live) -> str | None:
    """Recompute the digests of the touched tensors on the live weights; nobody writes meanwhile.

    Whole tensors are read, in one run each: that covers their untouched tiles too, and is much
    faster than tiles that are cut along columns.

    Returns:
        The first tensor that is not what the manifest says, None = all are.
    """
    numbers = {number: name for number, name in enumerate(live) if name in update.wanted}
    read = update.host.memory.digests(list(numbers))
    found = {numbers[number]: digest for number, digest in read.items()}
    left = {name: live[name].digest() for name in update.wanted if name not in found}
    return first_wrong(update, found | left)


def revert(update: StagedUpdate, live: Live, wrong: str) -> None:
    """Put the old bits back and check the whole state.

    Raises:
        BrokenWeights: it is not what it was.
    """
    put_back(update, live)
    left = digest_live(live)
    if left != update.current:
        raise BrokenWeights(
            f"{update.version}: {wrong}; after the undo the weights have digest {left} instead of "
            f"{update.current}"
        )


def put_back(update: StagedUpdate, live: Live) -> None:
    """Undo ``scatter``; again does no harm."""
    if update.fused is not None:
        update.fused.put_back()  # the digests show whether it was kept
    update.host.put_back()
    for change in update.single:
        live[change.tensor.name].put(change.where, change.old)


def first_wrong(update: StagedUpdate, found: Mapping[str, Digest]) -> str | None:
    """The first touched tensor whose live digest is not the sum of the manifest's tile digests."""
    for name, digest in found.items():
        wanted = update.wanted[name]
        if digest != wanted:
            return f"{name} has digest {digest} instead of {wanted}"
    return None
