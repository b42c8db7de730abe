"""Several versions as one delta, made on demand and kept for the next request.

Store and relay both merge: the store because receivers are behind by different numbers of versions,
the relay because it has the single deltas already and need not have their sum sent. Who asks for a
merge that is being made waits for it; who asks for another one does not.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from rose_core.delta import BlockEntry, BlockError, Hop, Manifest, compose
from rose_weights.errors import Damaged
from rose_weights.store.backends import BlockBackend

CACHED = 64

_Key = tuple[str, ...]


class Merger:
    """Merges over one place of blocks; safe to call from several threads.

    Args:
        blocks: where the blocks of every hop are.
        put: keeps a block that a merge made.
    """

    def __init__(self, blocks: BlockBackend, put: Callable[[bytes], object]) -> None:
        self._blocks = blocks
        self._put = put
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Key, Manifest] = OrderedDict()
        self._merging: dict[_Key, threading.Lock] = {}

    def merged(self, hops: Sequence[Hop]) -> Manifest:
        """One manifest for a connected way; a single forward hop is its own.

        Raises:
            LineageError: the hops do not connect, or lead back through a dense block.
            Incomplete, Damaged: a block is not here intact.
        """
        if len(hops) == 1 and not hops[0].back:
            return hops[0].manifest
        key = tuple(f"{hop.manifest.name}{hop.back:d}" for hop in hops)
        with self._lock:
            merging = self._merging.setdefault(key, threading.Lock())
        with merging:
            found = self._find_or_make(key, hops)
            with self._lock:
                self._merging.pop(key, None)
                self._cache[key] = found
                self._cache.move_to_end(key)
                while len(self._cache) > CACHED:
                    self._cache.popitem(last=False)
        return found

    def made_blocks(self) -> set[bytes]:
        """Blocks of the merges that are kept, which retention must spare."""
        with self._lock:
            return {block.sha256 for found in self._cache.values() for block in found.blocks}

    def _find_or_make(self, key: _Key, hops: Sequence[Hop]) -> Manifest:
        with self._lock:
            found = self._cache.get(key)
        if found is not None and not self._blocks.missing(block.sha256 for block in found.blocks):
            return found
        try:
            return compose(hops, self._read, self._put)
        except BlockError as error:
            raise Damaged(str(error)) from error

    def _read(self, block: BlockEntry) -> bytes:
        return self._blocks.get(block.sha256)
