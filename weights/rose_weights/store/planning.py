"""From what a receiver has to what it wants: one manifest, whatever lies between.

| receiver has | answer |
|---|---|
| the target | an empty delta |
| a kept version, with the digest published for it | the deltas between, merged into one |
| an unlisted version or none, but a digest some kept version has | as if it had that version |
| anything else | the target in full, dense |

A receiver's own digest decides, not its label: an engine whose weights are not what its label says
gets them in full. A receiver exactly one version behind that can read blocks coded on their base
gets those where the publisher sent them; whatever must be merged is made of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec

from rose_core.delta import Hop, LineageError, Manifest
from rose_core.delta.codec import SELF_CONTAINED, Codec
from rose_core.delta.lineage import VersionPath, full_way, way
from rose_core.identity import WeightVersion
from rose_weights.errors import Damaged, UnknownVersion
from rose_weights.messages import FetchPlan
from rose_weights.store.merging import Merger
from rose_weights.store.state import RunState, StoredVersion
from rose_weights.store.store import Store

LOG = logging.getLogger(__name__)


class FetchPlanner:
    """Answers plans for one store; safe to call from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._merger = Merger(store.blocks, store.put_block)

    def plan(
        self,
        run: str,
        have: WeightVersion | None = None,
        digest: str = "",
        want: WeightVersion | None = None,
        codecs: Collection[int] = SELF_CONTAINED,
    ) -> FetchPlan:
        """The manifest that leads from ``have`` to ``want`` (the head when None).

        Args:
            run: the run.
            have: the version the receiver holds, if it knows.
            digest: the digest of what it holds, attested; empty = nothing that counts.
            want: the version it wants.
            codecs: what the receiver can read.

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
        plan = self._answer(state, recognise(state, have, digest), target)
        one_behind = (plan.manifest.base, plan.merged) == (target.base, 1)
        if one_behind and target.on_base and Codec.RICE in codecs:
            plan = plan._replace(manifest=self._smaller(target) or plan.manifest)
        # Marks them as in use: retention leaves them alone while they are being fetched.
        self._store.blocks.mark(block.sha256 for block in plan.manifest.blocks)
        return plan

    def cached_blocks(self) -> set[bytes]:
        """Blocks of cached merges, which retention must spare."""
        return self._merger.made_blocks()

    def _smaller(self, target: StoredVersion) -> Manifest | None:
        """The version coded on its base; None where that manifest is damaged: the other will do."""
        try:
            return self._store.on_base(target)
        except Damaged as error:
            LOG.warning("%s is sent in its first form: %s", target.version, error)
            return None

    def _answer(
        self, state: RunState, start: StoredVersion | None, target: StoredVersion
    ) -> FetchPlan:
        if start is not None:
            if start.digest == target.digest:
                return FetchPlan(_empty(self._store.manifest(target), start.version), 0)
            lineage = self._store.lineage(state)
            try:
                return self._along(state, way(start.version, target.version, lineage))
            except LineageError:
                pass  # no way by deltas: in full
        return self._along(state, full_way(target.version, self._store.lineage(state)))

    def _along(self, state: RunState, through: VersionPath) -> FetchPlan:
        hops = self._hops(state, through)
        return FetchPlan(self._merger.merged(hops), len(hops))

    def _hops(self, state: RunState, through: VersionPath) -> list[Hop]:
        hops = [Hop(self._listed(state, version), back=True) for version in through.back]
        if through.anchor is not None:
            hops.append(Hop(self._listed(state, through.anchor)))
        return hops + [Hop(self._listed(state, version)) for version in through.forward]

    def _listed(self, state: RunState, version: WeightVersion) -> Manifest:
        kept = state.kept(version)
        if kept is None:
            message = f"{version} is not kept"
            raise UnknownVersion(message)
        return self._store.manifest(kept)


def recognise(state: RunState, have: WeightVersion | None, digest: str) -> StoredVersion | None:
    """The kept version a receiver holds, judged by its digest; None when there is none."""
    named = state.kept(have)
    if named is not None and named.digest == digest:
        return named
    same = [kept for kept in state.versions if digest and kept.digest == digest]
    return same[-1] if same else None


def _empty(target: Manifest, base: WeightVersion) -> Manifest:
    return msgspec.structs.replace(
        target,
        base=base,
        base_digest=target.digest,
        base_tiles=target.tiles,
        blocks=(),
    )
