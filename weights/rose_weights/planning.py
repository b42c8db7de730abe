"""From what a receiver has to what it wants: one manifest, whatever lies between.

| receiver has | answer |
|---|---|
| the target | an empty delta |
| a kept version, with the digest published for it | the deltas between, merged into one |
| an unlisted version or none, but a digest some kept version has | as if it had that version |
| anything else | the target in full, dense |

A receiver's own digest decides, not its label: an engine whose weights are not what its label says
gets them in full. Merged manifests are cached; who asks for a merge that is being made waits for
it, who asks for another one does not.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from rose_core.delta import BlockEntry, BlockError, Hop, LineageError, Manifest, compose
from rose_core.delta.lineage import Way, full_way, way
from rose_core.identity import WeightVersion
from rose_weights.errors import Damaged, UnknownVersion
from rose_weights.state import Kept, RunState
from rose_weights.store import Store

CACHED = 64

_Key = tuple[str, ...]


class Planner:
    """Answers plans for one store; safe to call from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Key, Manifest] = OrderedDict()
        self._merging: dict[_Key, threading.Lock] = {}

    def plan(
        self,
        run: str,
        have: WeightVersion | None = None,
        digest: str = "",
        want: WeightVersion | None = None,
    ) -> tuple[Manifest, int]:
        """The manifest that leads from ``have`` to ``want`` (the head when None).

        Args:
            run: the run.
            have: the version the receiver holds, if it knows.
            digest: the digest of what it holds, attested; empty = nothing that counts.
            want: the version it wants.

        Returns:
            The manifest and the number of published manifests that went into it.

        Raises:
            UnknownRun, UnknownVersion: nothing to plan.
            LineageError: it cannot be had, not even in full.
            Damaged: blocks on the store's disk are damaged.
        """
        state = self._store.state(run)
        target = state.kept(want or state.head)
        if target is None:
            message = f"{want or run + ' without a head'} is not kept; head is {state.head}"
            raise UnknownVersion(message)
        manifest, merged = self._answer(state, recognise(state, have, digest), target)
        # Marks them as in use: retention leaves them alone while they are being fetched.
        self._store.blocks.missing(block.sha256 for block in manifest.blocks)
        return manifest, merged

    def cached_blocks(self) -> set[bytes]:
        """Blocks of cached merges, which retention must spare."""
        with self._lock:
            return {block.sha256 for found in self._cache.values() for block in found.blocks}

    def _answer(self, state: RunState, start: Kept | None, target: Kept) -> tuple[Manifest, int]:
        if start is not None:
            if start.digest == target.digest:
                return _empty(self._store.manifest(target), start.version), 0
            lineage = self._store.lineage(state)
            try:
                return self._along(state, way(start.version, target.version, lineage))
            except LineageError:
                pass  # no way by deltas: in full
        return self._along(state, full_way(target.version, self._store.lineage(state)))

    def _along(self, state: RunState, through: Way) -> tuple[Manifest, int]:
        hops = self._hops(state, through)
        if len(hops) == 1 and not hops[0].back:
            return hops[0].manifest, 1
        key = tuple(f"{hop.manifest.name}{hop.back:d}" for hop in hops)
        with self._lock:
            merging = self._merging.setdefault(key, threading.Lock())
        with merging:
            found = self._merge(key, hops)
            with self._lock:
                self._merging.pop(key, None)
                self._cache[key] = found
                self._cache.move_to_end(key)
                while len(self._cache) > CACHED:
                    self._cache.popitem(last=False)
        return found, len(hops)

    def _merge(self, key: _Key, hops: list[Hop]) -> Manifest:
        with self._lock:
            found = self._cache.get(key)
        blocks = self._store.blocks
        if found is not None and not blocks.missing(block.sha256 for block in found.blocks):
            return found
        try:
            return compose(hops, self._read, self._store.put_block)
        except BlockError as error:
            raise Damaged(str(error)) from error

    def _hops(self, state: RunState, through: Way) -> list[Hop]:
        entry: Callable[[WeightVersion], Manifest] = lambda version: self._store.manifest(  # noqa: E731
            _kept(state, version)
        )
        hops = [Hop(entry(version), back=True) for version in through.back]
        if through.anchor is not None:
            hops.append(Hop(entry(through.anchor)))
        return hops + [Hop(entry(version)) for version in through.forward]

    def _read(self, block: BlockEntry) -> bytes:
        return self._store.blocks.get(block.sha256)


def recognise(state: RunState, have: WeightVersion | None, digest: str) -> Kept | None:
    """The kept version a receiver holds, judged by its digest; None when there is none."""
    named = state.kept(have)
    if named is not None and named.digest == digest:
        return named
    same = [kept for kept in state.versions if digest and kept.digest == digest]
    return same[-1] if same else None


def _kept(state: RunState, version: WeightVersion) -> Kept:
    found = state.kept(version)
    if found is None:
        message = f"{version} is not kept"
        raise UnknownVersion(message)
    return found


def _empty(target: Manifest, base: WeightVersion) -> Manifest:
    return msgspec.structs.replace(
        target,
        base=base,
        base_digest=target.digest,
        base_tiles=target.tiles,
        blocks=(),
    )
