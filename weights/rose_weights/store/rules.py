"""Rules of the store, as pure functions over a run's state."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rose_core.delta import Codec, Hop, Manifest
from rose_core.delta.codec import SELF_CONTAINED
from rose_core.identity import WeightVersion
from rose_weights.errors import BadManifest, Fenced, HeadMoved
from rose_weights.store.state import RunState, StoredVersion


def check_commit(manifest: Manifest, state: RunState, expected: WeightVersion | None) -> None:
    """Whether a manifest may become the head.

    Raises:
        Fenced: its incarnation is not the one that may publish.
        HeadMoved: the publisher believes in another head.
        BadManifest: its sequence does not follow.
    """
    target = manifest.target
    if target.incarnation != state.fence:
        message = (
            f"{target} is refused: run {state.run!r} is published by incarnation {state.fence} "
            f"({state.publisher or 'nobody yet'})"
        )
        raise Fenced(message)
    if expected != state.head:
        message = f"{target} expected the head to be {expected}; it is {state.head}"
        raise HeadMoved(message)
    continues = state.head is not None and state.head.incarnation == target.incarnation
    following = state.head.sequence + 1 if state.head is not None and continues else 0
    if target.sequence != following:
        message = f"{target} is out of order: the next version is number {following}"
        raise BadManifest(message)


def check_forms(manifest: Manifest, smaller: Manifest | None) -> None:
    """Whether a manifest can be merged, and its smaller form makes the same version.

    Raises:
        BadManifest: it cannot, or they differ in more than how blocks are coded.
    """
    if any(block.codec not in SELF_CONTAINED for block in manifest.blocks):
        message = (
            f"{manifest.target} lists blocks that cannot be merged without their base; send them "
            f"beside self-contained ones"
        )
        raise BadManifest(message)
    if smaller is None:
        return
    places = [(block.tensor, block.tile, block.changes) for block in manifest.blocks]
    if [(block.tensor, block.tile, block.changes) for block in smaller.blocks] != places or (
        msgspec.structs.replace(smaller, blocks=manifest.blocks) != manifest
    ):
        message = f"{manifest.target}: its two forms do not make the same version"
        raise BadManifest(message)


def check_model(manifest: Manifest, before: Manifest) -> None:
    """Whether a manifest describes the model of an earlier version, which may be its base.

    A delta must cut tiles as its base does, since the two are merged. A full version may cut them
    anew, as a trainer does that goes on with another number of ranks: no merge leads across it.

    Raises:
        BadManifest: it is another model, or cut otherwise than its base.
    """
    if (_model(before), before.tied) != (_model(manifest), manifest.tied):
        message = (
            f"{manifest.target} has other tensors than {before.target}: "
            f"{difference(before, manifest)}; publish another model under another run"
        )
        raise BadManifest(message)
    if manifest.base is not None and before.tensors != manifest.tensors:
        message = (
            f"{manifest.target} cuts its tensors into other tiles than its base {before.target}; "
            f"publish it in full"
        )
        raise BadManifest(message)


def _model(manifest: Manifest) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in manifest.tensors]


def summary(
    manifest: Manifest, smaller: Manifest | None = None, encode_seconds: float = 0.0
) -> StoredVersion:
    """How the state lists a manifest, and the same version coded on its base if there is one."""
    return StoredVersion(
        version=manifest.target,
        manifest=manifest.name,
        base=manifest.base,
        digest=manifest.digest,
        step=manifest.step,
        changes=manifest.changes,
        elements=manifest.elements,
        bytes=manifest.block_bytes,
        full=manifest.base is None and not manifest.bare,
        on_base="" if smaller is None else smaller.name,
        encode_seconds=encode_seconds,
    )


def should_merge_here(hops: Sequence[Hop], absent_bytes: int) -> bool:
    """Whether a relay merges single deltas itself rather than having their sum sent.

    A sum is never smaller than the largest delta in it by much, so bringing less than that is
    the cheaper way. A dense block cannot be taken back without its base.

    Args:
        hops: the single deltas on the way.
        absent_bytes: bytes of their blocks that the relay would have to bring.
    """
    if any(hop.back and _dense(hop.manifest) for hop in hops):
        return False
    return absent_bytes <= max(hop.manifest.block_bytes for hop in hops)


def _dense(manifest: Manifest) -> bool:
    return any(block.codec != Codec.STEPS for block in manifest.blocks)


def difference(before: Manifest, after: Manifest) -> str:
    """The first difference of two tensor tables, for people."""
    old = {tensor.name: (tensor.dtype, tensor.shape) for tensor in before.tensors}
    new = {tensor.name: (tensor.dtype, tensor.shape) for tensor in after.tensors}
    if gone := sorted(old.keys() - new.keys()):
        return f"{gone[0]} is missing"
    if added := sorted(new.keys() - old.keys()):
        return f"{added[0]} is new"
    for name, was in old.items():
        if was != new[name]:
            return f"{name} was {was}, is {new[name]}"
    return "their order or ties differ"
