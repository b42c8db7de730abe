"""Where a store's runs, manifests and blocks are kept: a folder, or a bucket.

``Store`` states the rules, a ``Backend`` keeps what it is given and promises three things:
what ``sync`` and ``write_manifest`` returned for survives; a block that is read is what its name
says; ``change`` replaces a run's state only if nobody else replaced it since it was read.

| place | ``change`` | a block survives |
|---|---|---|
| ``folder.Folder`` | under a lock on a file | after ``sync`` |
| ``bucket.Bucket`` | by a conditional put on the state's entity tag | when ``put`` returns |

Next step: ``open_store`` makes a place of what ``--root`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from rose_core.identity import run_name
from rose_weights.store.state import RunState

Change = Callable[[RunState], RunState]
"""From a run's state to the next one; the same object = nothing to write. May be called again."""


class BlockBackend(Protocol):
    """Content-addressed blocks: the name is the SHA-256 of the content."""

    def put(self, data: bytes) -> bytes:
        """Keep a block and return its name; it is sure to survive only after ``sync``."""

    def get(self, name: bytes) -> bytes:
        """A block's bytes, checked.

        Raises:
            Incomplete: it is not here.
            Damaged: its bytes have changed; it has been removed.
        """

    def read(self, names: Sequence[bytes], *, check: bool = True) -> list[bytes]:
        """Several blocks, read together.

        Args:
            names: of the blocks.
            check: False leaves the check to the receiver for those that were intact here before.

        Raises:
            Incomplete, Damaged: as ``get``.
        """

    def missing(self, names: Iterable[bytes]) -> list[bytes]:
        """Those that have to be sent (again); the others are spared by ``sweep`` for its grace."""

    def mark(self, names: Iterable[bytes]) -> None:
        """These are in use: ``sweep`` spares them for its grace."""

    def sync(self, names: Iterable[bytes]) -> None:
        """Make these blocks survive whatever happens to this machine's power."""

    def sweep(self, needed: Collection[bytes], grace_seconds: float) -> int:
        """Remove blocks that nobody needs or has used within the grace; returns bytes set free."""


class Backend(Protocol):
    """What a store is kept in."""

    @property
    def blocks(self) -> BlockBackend:
        """The blocks."""

    def record_blocks(self, run: str) -> BlockBackend:
        """Blocks of a run's records of sandboxes: apart from weights and from other runs."""

    def record_runs(self) -> list[str]:
        """Runs that have such blocks, in order."""

    def __str__(self) -> str:
        """Where it is, for people."""

    def runs(self) -> list[str]:
        """Every run with a state, in order."""

    def state(self, run: str) -> RunState | None:
        """A run's state, None when there is none.

        Raises:
            Damaged: what is there is no state.
        """

    def change(self, run: str, change: Change) -> RunState:
        """Replace a run's state in one step that survives.

        Args:
            run: the run; one without a state is an empty one.
            change: what to make of it; what it raises goes through and nothing is changed.

        Returns:
            The state there is now.
        """

    def manifest(self, run: str, name: str) -> bytes:
        """A manifest's bytes, not checked.

        Raises:
            OSError: it is not there.
        """

    def write_manifest(self, run: str, name: str, data: bytes) -> None:
        """Keep a manifest; it survives."""

    def sweep_manifests(self, run: str, listed: Collection[str], grace_seconds: float) -> int:
        """Remove manifests that are not listed and older than the grace; returns bytes set free."""


def run_names(entries: Iterable[str]) -> list[str]:
    """Those of a place's entries that can name a run, in order; others are not the store's."""
    return sorted(entry for entry in entries if _is_run_name(entry))


def _is_run_name(text: str) -> bool:
    try:
        run_name(text)
    except ValueError:
        return False
    return True
