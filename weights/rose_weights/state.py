"""What a store knows about a run: one small file that is replaced in one step.

``runs/<run>/state.json`` is the truth: a version exists when it is listed there. The file is
replaced under a lock, so a compare-and-swap of the head is: lock, read, compare, replace, unlock.

States of a version and what moves it on:

| state | how it got there |
|---|---|
| staged | some of its blocks are in ``blocks/`` |
| written | all blocks durable, manifest durable; not listed, nobody sees it |
| published | listed and head: the state file was replaced |
| superseded | listed, a later version is head |
| folded | no longer listed: its change is part of a later delta |

A crash between two states leaves the earlier one; a publisher then sends what is missing and
commits again.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rose_core.identity import WeightVersion
from rose_weights.disk import Disk
from rose_weights.errors import Damaged


class Kept(msgspec.Struct, frozen=True):
    """One version the store keeps.

    Attributes:
        manifest: content address of its manifest.
        base: what the manifest starts from; None = full or bare.
        digest: of the whole state.
        step: the trainer's label.
        changes, elements: elements changed, and all there are.
        bytes: size of all blocks.
        full: the manifest is full, with blocks.
    """

    version: WeightVersion
    manifest: str
    base: WeightVersion | None
    digest: str
    step: int | None = None
    changes: int = 0
    elements: int = 0
    bytes: int = 0
    full: bool = False


class RunState(msgspec.Struct, frozen=True):
    """A run.

    Attributes:
        run: its name.
        fence: the incarnation that may publish; older ones are refused.
        publisher: who opened it, for people.
        versions: kept versions, oldest first; the last one published is ``head``.
        head: None before the first publish.
    """

    run: str
    fence: int = 0
    publisher: str = ""
    versions: tuple[Kept, ...] = ()
    head: WeightVersion | None = None

    def kept(self, version: WeightVersion | None) -> Kept | None:
        """The entry of a version, or None."""
        return next((kept for kept in self.versions if kept.version == version), None)


class StateFile:
    """One run's state on disk."""

    def __init__(self, folder: Path, run: str, disk: Disk) -> None:
        self._folder = folder
        self._path = folder / "state.json"
        self._run = run
        self._disk = disk

    def read(self) -> RunState | None:
        """The run's state, None when the run is unknown.

        Raises:
            Damaged: the file is not a state.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=RunState)
        except msgspec.MsgspecError as error:
            message = f"{self._path} is damaged: {error}; restore it from a backup"
            raise Damaged(message) from error

    def replace(self, state: RunState) -> None:
        """Make a state the truth; call inside ``locked``."""
        self._disk.write(self._path, msgspec.json.encode(state), durable=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[RunState]:
        """Hold the run's lock (also against other processes); yields the state or an empty one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.read() or RunState(self._run)
