"""A store in a local folder: ``runs/<run>/state.json``, ``runs/<run>/manifests``, ``blocks``.

``record-blocks/<run>`` has those of a run's records of sandboxes.

The state is replaced under a lock on a file beside it, so that several processes on one machine
may use one folder. Everything is written through ``disk``, which says what survives a power loss.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from rose_weights.disk import Disk
from rose_weights.store.backends import Change, run_names
from rose_weights.store.blocks import Blocks
from rose_weights.store.state import RunState, decode, encode


class Folder:
    """Runs, manifests and blocks under one folder.

    Args:
        root: the folder; made when something is written.
        disk: how files are written.
    """

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self._disk = disk or Disk()
        self.blocks = Blocks(root / "blocks", self._disk)
        self._of_records: dict[str, Blocks] = {}

    def record_blocks(self, run: str) -> Blocks:
        """Blocks of a run's records; one object for each, since it remembers what it checked."""
        if (known := self._of_records.get(run)) is not None:
            return known
        made = Blocks(self.root / "record-blocks" / run, self._disk)
        return self._of_records.setdefault(run, made)

    def record_runs(self) -> list[str]:
        """Runs that have such blocks."""
        entries = (self.root / "record-blocks").glob("*")
        return run_names(path.name for path in entries if path.is_dir())

    def __str__(self) -> str:
        return str(self.root)

    def runs(self) -> list[str]:
        """Every run with a state."""
        return sorted(path.parent.name for path in (self.root / "runs").glob("*/state.json"))

    def state(self, run: str) -> RunState | None:
        """A run's state, None when the run is unknown.

        Raises:
            Damaged: the file is not a state.
        """
        path = self._path(run)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return decode(data, str(path))

    def change(self, run: str, change: Change) -> RunState:
        """Lock, read, change, replace, unlock."""
        with self._locked(run):
            before = self.state(run) or RunState(run)
            after = change(before)
            if after is not before:
                self._disk.write(self._path(run), encode(after), durable=True)
        return after

    def manifest(self, run: str, name: str) -> bytes:
        """A manifest's bytes, not checked.

        Raises:
            OSError: it is not there.
        """
        return self.manifest_path(run, name).read_bytes()

    def write_manifest(self, run: str, name: str, data: bytes) -> None:
        """Keep a manifest durably."""
        self._disk.write(self.manifest_path(run, name), data, durable=True)

    def sweep_manifests(self, run: str, listed: Collection[str], grace_seconds: float) -> int:
        """Remove manifests that are not listed and older than the grace."""
        oldest = time.time() - grace_seconds
        freed = 0
        for path in (self.root / "runs" / run / "manifests").glob("*"):
            status = path.stat()
            if path.name not in listed and status.st_mtime < oldest:
                freed += status.st_size
                path.unlink(missing_ok=True)
        return freed

    def manifest_path(self, run: str, name: str) -> Path:
        """Where a manifest is or would be; ``name`` is its content address."""
        return self.root / "runs" / run / "manifests" / name

    def _path(self, run: str) -> Path:
        return self.root / "runs" / run / "state.json"

    @contextlib.contextmanager
    def _locked(self, run: str) -> Iterator[None]:
        """Hold the run's lock, also against other processes."""
        folder = self._path(run).parent
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
