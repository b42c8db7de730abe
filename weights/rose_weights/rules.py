"""Rules of the store, as pure functions over a run's state."""

from __future__ import annotations

from rose_core.delta import Manifest
from rose_core.identity import WeightVersion
from rose_weights.errors import BadManifest, Fenced, HeadMoved
from rose_weights.state import Kept, RunState


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


def summary(manifest: Manifest) -> Kept:
    """How the state lists a manifest."""
    return Kept(
        version=manifest.target,
        manifest=manifest.name,
        base=manifest.base,
        digest=manifest.digest,
        step=manifest.step,
        changes=manifest.changes,
        elements=manifest.elements,
        bytes=manifest.block_bytes,
        full=manifest.base is None and not manifest.bare,
    )


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
    return "their order, tiles or ties differ"
