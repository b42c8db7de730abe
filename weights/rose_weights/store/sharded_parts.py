"""Parts of versions whose trainer is sharded: kept until all are here, then committed as one.

| parts of a version | next | when |
|---|---|---|
| some | all | the last rank's part arrived |
| all | head | assembled and committed, by the same rules as any manifest |
| all | some | refused: the part that arrived last is forgotten, its rank gets the reason |
| some | none | the store restarted, or another version of the run was begun: ranks send again |

A trainer that has started again asks first whether its state is a version that is kept: parts with
digests alone, gathered beside the others. When all are there, it is the head as an empty delta from
that version, or the ranks have to send it in full.

Parts are small (blocks are staged before) and held in memory.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import msgspec

from rose_core.delta import DeltaError, Manifest
from rose_core.delta.parts import RankPart, assemble
from rose_core.identity import WeightVersion
from rose_core.unreadable import UNREADABLE
from rose_weights.errors import BadManifest, Damaged, Fenced
from rose_weights.store.state import RunState, StoredVersion
from rose_weights.store.store import Store


class PartOutcome(NamedTuple):
    """What has become of a version whose parts are all there.

    Attributes:
        kept: None = no kept version is this state, it must be sent in full.
        completed_here: this part completed it; otherwise it was complete before.
    """

    state: RunState
    kept: StoredVersion | None
    completed_here: bool


class IncompleteVersions:
    """Incomplete versions of one store; safe to call from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, bool], dict[int, RankPart]] = {}
        self._encoding: dict[str, float] = {}

    def add(
        self,
        data: bytes,
        expected: WeightVersion | None,
        encode_seconds: float = 0.0,
        *,
        continues: bool = False,
    ) -> PartOutcome | None:
        """Add one rank's part.

        Args:
            data: the encoded part.
            expected: the head the publisher believes in.
            encode_seconds: what comparing and encoding took this rank. Ranks encode side by side:
                the version took as long as the slowest.
            continues: it has digests alone and asks whether a kept version is this state.

        Returns:
            What became of the version; None while parts are missing.

        Raises:
            BadManifest: the part is no part, or all of them do not make a version.
            WeightsError: as ``Store.commit``.
        """
        part = _read(data)
        run = part.target.run
        with self._lock:
            state = self._store.state(run)
            kept = state.kept(part.target)
            if kept is not None:
                return PartOutcome(state, kept, completed_here=False)
            if part.target.incarnation != state.fence:
                message = f"{part.target} is refused: incarnation {state.fence} publishes {run!r}"
                raise Fenced(message)
            if continues and self._is_sent(part):
                return PartOutcome(state, None, completed_here=False)
            waiting = self._of(part, continues=continues)
            waiting[part.rank] = part
            self._encoding[run] = max(self._encoding.get(run, 0.0), encode_seconds)
            if len(waiting) < part.world:
                return None
            try:
                if continues:
                    return self._continue(state, waiting, expected)
                return self._commit(state, waiting, expected)
            except DeltaError as error:
                waiting.pop(part.rank, None)
                raise BadManifest(str(error)) from error

    def _is_sent(self, part: RankPart) -> bool:
        """Whether another rank had to send the version in full, perhaps before a restart."""
        sent = self._waiting.get((part.target.run, False), {})
        return any(other.target == part.target for other in sent.values())

    def _of(self, part: RankPart, *, continues: bool) -> dict[int, RankPart]:
        """The parts beside this one; those of another version of the run are given up."""
        waiting = self._waiting.setdefault((part.target.run, continues), {})
        if any(other.target != part.target for other in waiting.values()):
            waiting.clear()
        if not waiting:
            self._encoding.pop(part.target.run, None)
        return waiting

    def _continue(
        self, state: RunState, waiting: dict[int, RankPart], expected: WeightVersion | None
    ) -> PartOutcome:
        bare = assemble(list(waiting.values()), None)
        same = next((one for one in reversed(state.versions) if one.digest == bare.digest), None)
        if same is None or not self._is(bare, same):
            return PartOutcome(state, None, completed_here=True)
        empty = msgspec.structs.replace(
            bare, base=same.version, base_digest=same.digest, base_tiles=bare.tiles
        )
        done = self._store.commit(empty.encode(), expected)
        waiting.clear()
        return PartOutcome(done, done.versions[-1], completed_here=True)

    def _is(self, bare: Manifest, kept: StoredVersion) -> bool:
        """Whether a kept version is this state, cut into the same tiles, and can be read."""
        try:
            found = self._store.manifest(kept)
        except Damaged:
            return False
        same = (found.tensors, found.tied, found.tiles)
        return same == (bare.tensors, bare.tied, bare.tiles)

    def _commit(
        self, state: RunState, waiting: dict[int, RankPart], expected: WeightVersion | None
    ) -> PartOutcome:
        base = None
        wanted = next(iter(waiting.values())).base
        if wanted is not None:
            kept = state.kept(wanted)
            if kept is None:
                message = f"the parts start from {wanted}, which is not kept"
                raise BadManifest(message)
            base = self._store.manifest(kept)
        manifest = assemble(list(waiting.values()), base)
        encoding = self._encoding.get(state.run, 0.0)
        done = self._store.commit(manifest.encode(), expected, encode_seconds=encoding)
        waiting.clear()
        return PartOutcome(done, done.versions[-1], completed_here=True)


def run_of_part(data: bytes) -> str:
    """The run an encoded part belongs to.

    Raises:
        BadManifest: the bytes are no part.
    """
    return _read(data).target.run


def _read(data: bytes) -> RankPart:
    try:
        return msgspec.msgpack.decode(data, type=RankPart)
    except UNREADABLE as error:
        message = f"not a part of a version: {error}"
        raise BadManifest(message) from error
