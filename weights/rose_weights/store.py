"""The version store: what has been published, in a local folder.

Order of durability: blocks, then manifest, then the run's state with the new head. A version is
there when it is listed in the state and not before (``state`` has the table), so a crash anywhere
leaves the version before it. The head moves by compare-and-swap and only for the incarnation that
holds the fence. Blocking; the service calls it in threads.

Next step: ``planning`` answers "from what I have to what I want", ``retention`` folds old versions,
``service`` offers all of it over gRPC.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

import msgspec

from rose_core.delta import DeltaError, Manifest
from rose_core.delta.lineage import Link
from rose_core.identity import WeightVersion
from rose_weights.blocks import Blocks
from rose_weights.disk import Disk
from rose_weights.errors import (
    BadManifest,
    Damaged,
    Incomplete,
    StoreFailed,
    UnknownRun,
)
from rose_weights.rules import check_commit, difference, summary
from rose_weights.state import Kept, RunState, StateFile


class Store:
    """Runs, versions and blocks under one folder.

    Args:
        root: the folder; made when missing.
        disk: how files are written.
    """

    def __init__(self, root: Path, *, disk: Disk | None = None) -> None:
        self.root = root
        self._disk = disk or Disk()
        self.blocks = Blocks(root / "blocks", self._disk)

    def runs(self) -> list[str]:
        """Every run with a state."""
        return sorted(path.parent.name for path in (self.root / "runs").glob("*/state.json"))

    def state(self, run: str) -> RunState:
        """A run's state.

        Raises:
            UnknownRun: nobody has opened it.
        """
        found = self._file(run).read()
        if found is None:
            message = f"run {run!r} is unknown here; known: {', '.join(self.runs()) or 'none'}"
            raise UnknownRun(message)
        return found

    def manifest(self, kept: Kept) -> Manifest:
        """Read a kept version's manifest.

        Raises:
            Damaged: the file is gone or not what its name says.
        """
        path = self.manifest_path(kept.version.run, kept.manifest)
        try:
            manifest = Manifest.decode(path.read_bytes())
        except (OSError, DeltaError) as error:
            message = f"manifest of {kept.version} cannot be read: {error}"
            raise Damaged(message) from error
        if manifest.name != kept.manifest:
            message = f"manifest of {kept.version} is not what the state lists"
            raise Damaged(message)
        return manifest

    def lineage(self, state: RunState) -> dict[WeightVersion, Link]:
        """Kept versions as the lineage rules see them."""
        return {kept.version: Link(kept.base, kept.full, kept.bytes) for kept in state.versions}

    def open_incarnation(self, run: str, publisher: str) -> RunState:
        """Take a run over (or begin it): every earlier publisher is fenced from here on.

        Raises:
            StoreFailed: the fence could not be written; nothing has changed.
        """
        file = self._file(run)
        with self._failing("open", run), file.locked() as state:
            opened = msgspec.structs.replace(
                state,
                fence=state.fence + 1,
                publisher=publisher,
            )
            file.replace(opened)
            return opened

    def put_block(self, data: bytes) -> bytes:
        """Stage a block and return its name.

        Raises:
            StoreFailed: the disk is full or broken.
        """
        with self._failing("stage a block", "blocks"):
            return self.blocks.put(data)

    def commit(self, data: bytes, expected: WeightVersion | None) -> RunState:
        """Make a manifest the run's head.

        Args:
            data: the encoded manifest.
            expected: the head the publisher believes in.

        Returns:
            The new state; also when the same commit has been done before (its answer was lost).

        Raises:
            BadManifest: it breaks a rule.
            Fenced: the incarnation is not the one that may publish.
            HeadMoved: ``expected`` is not the head.
            Incomplete: blocks are missing; nothing has changed.
            StoreFailed: the disk is full or broken; the head has not moved.
        """
        manifest = self._decode(data)
        file = self._file(manifest.target.run)
        with self._failing("commit", str(manifest.target)), file.locked() as state:
            kept = state.kept(manifest.target)
            if kept is not None and kept.manifest == manifest.name:
                return state
            check_commit(manifest, state, expected)
            self._check_base(manifest, state)
            names = [block.sha256 for block in manifest.blocks]
            if missing := self.blocks.missing(names):
                message = f"{len(missing)} of {len(names)} blocks of {manifest.target} are missing"
                raise Incomplete(message)
            self.blocks.sync(names)
            self._disk.write(self.manifest_path(state.run, manifest.name), data, durable=True)
            published = msgspec.structs.replace(
                state, head=manifest.target, versions=(*state.versions, summary(manifest))
            )
            file.replace(published)
            return published

    def put_manifest(self, manifest: Manifest) -> None:
        """Keep a manifest and its blocks durably, without listing it.

        Raises:
            StoreFailed: the disk is full or broken.
        """
        with self._failing("write", str(manifest.target)):
            self.blocks.sync([block.sha256 for block in manifest.blocks])
            path = self.manifest_path(manifest.target.run, manifest.name)
            self._disk.write(path, manifest.encode(), durable=True)

    def relist(self, before: RunState, versions: tuple[Kept, ...]) -> bool:
        """Replace the listed versions, unless that would lose what was published meanwhile.

        Args:
            before: the state the new list was made from.
            versions: the list that takes the place of ``before.versions``.

        Returns:
            Whether it was done.

        Raises:
            StoreFailed: the disk is full or broken; nothing has changed.
        """
        file = self._file(before.run)
        with self._failing("fold", before.run), file.locked() as state:
            known = len(before.versions)
            if state.versions[:known] != before.versions:
                return False
            later = state.versions[known:]
            listed = {kept.version for kept in (*versions, *later)}
            if any(kept.base is not None and kept.base not in listed for kept in later):
                return False
            file.replace(msgspec.structs.replace(state, versions=(*versions, *later)))
            return True

    def sweep_manifests(self, run: str, grace_seconds: float) -> int:
        """Remove manifests that the run does not list and that are older than the grace.

        Returns:
            Bytes set free.
        """
        listed = {kept.manifest for kept in self.state(run).versions}
        oldest = time.time() - grace_seconds
        freed = 0
        for path in (self.root / "runs" / run / "manifests").glob("*"):
            status = path.stat()
            if path.name not in listed and status.st_mtime < oldest:
                freed += status.st_size
                path.unlink(missing_ok=True)
        return freed

    def _check_base(self, manifest: Manifest, state: RunState) -> None:
        if manifest.base is not None:
            kept = state.kept(manifest.base)
            if kept is None:
                message = f"{manifest.target} starts from {manifest.base}, which is not kept"
                raise BadManifest(message)
            if kept.digest != manifest.base_digest:
                message = (
                    f"{manifest.target} starts from {manifest.base} with digest "
                    f"{manifest.base_digest}; published was {kept.digest}"
                )
                raise BadManifest(message)
        if state.versions:
            before = self.manifest(state.versions[-1])
            if (before.tensors, before.tied) != (manifest.tensors, manifest.tied):
                message = (
                    f"{manifest.target} has other tensors than {before.target}: "
                    f"{difference(before, manifest)}; publish another model under another run"
                )
                raise BadManifest(message)

    def _decode(self, data: bytes) -> Manifest:
        try:
            manifest = Manifest.decode(data)
        except DeltaError as error:
            raise BadManifest(str(error)) from error
        if manifest.encode() != data:
            message = f"manifest of {manifest.target} has fields this store does not know"
            raise BadManifest(message)
        return manifest

    def _file(self, run: str) -> StateFile:
        try:
            WeightVersion.parse(f"{run}@0.0")
        except ValueError as error:
            message = f"{run!r} is no run name: lower-case letters, digits, '-' and '.', at most 63"
            raise UnknownRun(message) from error
        return StateFile(self.root / "runs" / run, run, self._disk)

    def manifest_path(self, run: str, name: str) -> Path:
        """Where a manifest is or would be; ``name`` is its content address."""
        return self.root / "runs" / run / "manifests" / name

    def _failing(self, doing: str, what: str) -> _Failing:
        return _Failing(f"cannot {doing} ({what}) in {self.root}")


class _Failing:
    """Turns a disk's errors into ``StoreFailed`` that says what was being done."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError):
            message = f"{self._doing}: {error.strerror or error}"
            raise StoreFailed(message) from error
