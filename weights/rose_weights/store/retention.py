"""Keeps a store small: old versions are folded into one delta, unneeded blocks are swept.

The last ``window`` versions, leased ones and the first one stay. What lies between is composed
into one delta, so the first version (what an engine that loaded the model from disk holds) still
leads to every kept one. Work is done outside the run's lock; the list is replaced at the end.
"""

from __future__ import annotations

from collections.abc import Iterable

from rose_core.delta import BlockEntry, BlockError, Hop, compose
from rose_core.delta.lineage import retain, way
from rose_core.identity import WeightVersion
from rose_weights.errors import Damaged
from rose_weights.store.record import read_record
from rose_weights.store.rules import summary
from rose_weights.store.state import RunState, StoredVersion
from rose_weights.store.store import Store

WINDOW = 32
"""Versions kept behind the head."""

GRACE_SECONDS = 3600.0
"""Blocks younger than this are never swept: their manifest may be on its way."""


def fold(
    store: Store, run: str, *, window: int = WINDOW, leased: Iterable[WeightVersion] = ()
) -> int:
    """Fold versions outside the window into deltas between those that stay.

    Returns:
        Number of versions that are no longer listed.

    Raises:
        UnknownRun: no such run.
        StoreFailed, Damaged: nothing that was reachable is lost.
    """
    state = store.state(run)
    if len(state.versions) <= window + 1:
        return 0
    recent = {kept.version for kept in state.versions[-window - 1 :]}
    plan = retain(recent | set(leased), store.lineage(state))
    versions = tuple(
        _rebased(store, state, kept, plan.rebase.get(kept.version))
        for kept in state.versions
        if kept.version in plan.keep
    )
    dropped = len(state.versions) - len(versions)
    return dropped if dropped and store.relist(state, versions) else 0


def sweep(
    store: Store, *, spare: Iterable[bytes] = (), grace_seconds: float = GRACE_SECONDS
) -> int:
    """Remove blocks and manifests that no listed version needs.

    Returns:
        Bytes set free.

    Raises:
        Damaged: a listed manifest cannot be read; nothing is removed then.
    """
    needed, of_records = set(spare), set[bytes]()
    freed = 0
    for run in store.runs():
        state = store.state(run)
        for kept in state.versions:
            for manifest in store.manifests(kept):
                needed.update(block.sha256 for block in manifest.blocks)
        for listed in state.recorded:
            of_records |= read_record(store, run, listed.manifest).blocks()
    for run in store.runs():
        freed += store.sweep_manifests(run, grace_seconds)
    for run in store.backend.record_runs():
        freed += store.record_blocks(run).sweep(of_records, grace_seconds)
    return freed + store.blocks.sweep(needed, grace_seconds)


def _rebased(
    store: Store, state: RunState, kept: StoredVersion, base: WeightVersion | None
) -> StoredVersion:
    if base is None:
        return kept
    listed = {entry.version: entry for entry in state.versions}
    through = way(base, kept.version, store.lineage(state)).forward
    hops = [Hop(store.manifest(listed[version])) for version in through]

    def read(block: BlockEntry) -> bytes:
        return store.blocks.get(block.sha256)

    try:
        manifest = compose(hops, read, store.put_block)
    except BlockError as error:
        raise Damaged(str(error)) from error
    store.put_manifest(manifest)
    return summary(manifest)
