"""What the ranks of one engine say to each other in the middle of a commit: a table in memory.

A commit changes the weights of several processes between the same two iterations, and each must
learn within microseconds what the others have done. There is no time for messages, so they share
one mapped file: a few words of the leader (rank 0), one word per rank, and each rank's digests of
every tensor. A word holds the commit's number and a state; who writes it is fixed, so nothing is
ever locked. Words and their edges:

    leader   Quiet --> Planned --> Go --> Commit | Undo      (Planned --> Cancel: withdrawn)
    rank     Scattered | Failed --> Kept                     (after Commit)
                                --> Undone | Broken          (after Undo)

Next step: ``rose_engines.weights.multi_rank`` is the protocol on top.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path

from rose_core.delta.digest import Digest

_POLL_SECONDS = 0.0002
_STATES = 16
_HEADER = 8
"""64-bit words in front of the ranks' words; two are used."""


class RankState(IntEnum):
    """States that the leader and the ranks post."""

    QUIET = 0
    PLANNED = 1
    CANCEL = 2
    GO = 3
    COMMIT = 4
    UNDO = 5
    SCATTERED = 6
    FAILED = 7
    UNDONE = 8
    BROKEN = 9
    KEPT = 10


class RankBoard:
    """The shared table of one engine.

    Args:
        path: the file; made by the leader before anybody maps it.
        ranks: number of ranks.
        names: every tensor, in the same order on all ranks.
    """

    def __init__(self, path: Path, ranks: int, names: Sequence[str]) -> None:
        self.ranks = ranks
        self._rows = {name: row for row, name in enumerate(names)}
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _size(ranks, len(names)))
        # A memoryview of 8-byte integers loads and stores a whole word at a time.
        words = memoryview(self._map).cast("Q")
        self._leader = words[:_HEADER]
        self._words = words[_HEADER : _HEADER + ranks]
        self._digests = words[_HEADER + ranks :]

    @staticmethod
    def create(path: Path, ranks: int, tensors: int) -> None:
        """Make the file, empty; only its owner may map it.

        Raises:
            OSError: it cannot be made.
        """
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(handle, _size(ranks, tensors))
        finally:
            os.close(handle)

    def plan(self, number: int, boundary: int) -> None:
        """Leader: commit ``number`` happens at this boundary of every rank."""
        self._leader[1] = boundary
        self.announce(number, RankState.PLANNED)

    @property
    def planned(self) -> int:
        """Boundary of the last plan."""
        return self._leader[1]

    def announce(self, number: int, state: RankState) -> None:
        """Leader: announce a state for a commit."""
        self._leader[0] = number * _STATES + state

    def announced(self) -> tuple[int, RankState]:
        """What the leader announced last: commit number and state."""
        return _split(self._leader[0])

    def post(self, rank: int, number: int, state: RankState) -> None:
        """A rank: post its state for a commit."""
        self._words[rank] = number * _STATES + state

    def posted(self, rank: int) -> tuple[int, RankState]:
        """What a rank posted last: commit number and state."""
        return _split(self._words[rank])

    def write(self, rank: int, digests: Mapping[str, Digest]) -> None:
        """A rank's digests of its parts of these tensors; before the state that announces them."""
        for name, digest in digests.items():
            place = self._place(rank, name)
            self._digests[place], self._digests[place + 1] = digest

    def read(self, rank: int, name: str) -> Digest:
        """What a rank has written."""
        place = self._place(rank, name)
        return Digest(self._digests[place], self._digests[place + 1])

    def _place(self, rank: int, name: str) -> int:
        return 2 * (rank * len(self._rows) + self._rows[name])

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Look until it is true or the time is over; returns whether it is.

        Looks are counted and not the clock: a whole engine that is frozen meanwhile is not late.
        """
        for _ in range(int(seconds / _POLL_SECONDS)):
            if condition():
                return True
            time.sleep(_POLL_SECONDS)
        return condition()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Look until it is true, however long a closed gate makes it last."""
        while not condition():
            time.sleep(_POLL_SECONDS)


def _split(value: int) -> tuple[int, RankState]:
    return value // _STATES, RankState(value % _STATES)


def _size(ranks: int, tensors: int) -> int:
    return 8 * (_HEADER + ranks + ranks * tensors * 2)
