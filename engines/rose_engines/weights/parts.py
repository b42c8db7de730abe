"""The ranks of one engine: which part of every tensor each holds, and how they reach each other.

What ranks say about their parts is checked here: together they hold every element once or as copies
that agree. Next step: ``multi_rank`` stages, swaps and votes over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rose_core.delta.digest import Digest, total
from rose_engines.errors import CommitRefused, UnsupportedEngine
from rose_engines.tensors.canonical import Live, LiveTensor
from rose_engines.tensors.slices import SlicedTensor
from rose_engines.weights.rank_board import RankBoard

Part = tuple[tuple[int, int, int, int], ...]
"""Which elements of a tensor a rank holds: the source sides of its boxes."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of one engine.

    Attributes:
        rank: this one.
        board: shared by all.
        parts: for every rank, which part of every tensor it holds.
        sockets: control sockets of the ranks, the leader's first.
        meet: returns when every rank has called it.
        vote_seconds: time the others have for their swap after the leader is done with its own.
        undo_seconds: time they have to undo theirs.
    """

    rank: int
    board: RankBoard
    parts: tuple[Mapping[str, Part], ...]
    sockets: tuple[Path, ...]
    meet: Callable[[], None]
    vote_seconds: float = 10.0
    undo_seconds: float = 30.0

    @property
    def others(self) -> tuple[int, ...]:
        """Every rank but the leader."""
        return tuple(range(1, len(self.parts)))

    def whole(self, names: Iterable[str]) -> dict[str, Digest]:
        """Digests of whole tensors, from what the ranks have written.

        Raises:
            CommitRefused: ``DigestMismatch``: copies of the same part differ.
        """
        return {name: self._add(name) for name in names}

    def _add(self, name: str) -> Digest:
        found: dict[Part, tuple[int, Digest]] = {}
        for rank, parts in enumerate(self.parts):
            digest = self.board.read(rank, name)
            first, before = found.setdefault(parts[name], (rank, digest))
            if before != digest:
                raise CommitRefused(
                    "DigestMismatch", f"ranks {first} and {rank} hold different copies of {name}"
                )
        return total(digest for _, digest in found.values())


def parts_of(live: Live) -> dict[str, Part]:
    """Which part of every tensor this rank holds."""
    return {name: _part(tensor) for name, tensor in live.items()}


def _part(tensor: LiveTensor) -> Part:
    if isinstance(tensor, SlicedTensor):
        return tuple(box.source for box in tensor.boxes)
    size = math.prod(tensor.shape)
    return ((0, 1, size, size),)


def check_parts(parts: Iterable[Mapping[str, Part]], sizes: Mapping[str, int]) -> None:
    """The ranks together hold every element, and hold it once or as the same part.

    Raises:
        UnsupportedEngine: names the first tensor that is not so.
    """
    distinct = list(parts)
    for name, size in sizes.items():
        held = {part[name] for part in distinct if part[name]}
        boxes = [box for part in held for box in part]
        found = sum(rows * columns for _, rows, columns, _ in boxes)
        if found != size or len(set(boxes)) != len(boxes):
            raise UnsupportedEngine(
                f"the ranks hold {found} elements of checkpoint tensor {name!r}, which has {size}"
            )


def socket_of(leader: Path, rank: int) -> Path:
    """Control socket of a rank, beside the leader's."""
    return leader if rank == 0 else leader.with_name(f"{leader.stem}.{rank}")
