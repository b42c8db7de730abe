"""The version store: what has been published, in a folder or a bucket.

Order of durability: blocks, then manifest, then the run's state with the new head. A version is
there when it is listed in the state and not before (``state`` has the table), so a crash anywhere
leaves the version before it. The head moves by compare-and-swap and only for the incarnation that
holds the fence. Blocking; the service calls it in threads. Where things are kept and how a state is
replaced is the ``places.Place``'s business.

Next step: ``planning`` answers "from what I have to what I want", ``retention`` folds old versions,
``service`` offers all of it over gRPC.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import msgspec

from rose_core.delta import DeltaError, Manifest, faults
from rose_core.delta.lineage import VersionLink
from rose_core.identity import WeightVersion, run_name
from rose_weights.disk import Disk
from rose_weights.errors import (
    BadManifest,
    Damaged,
    Incomplete,
    StoreFailed,
    UnknownRun,
)
from rose_weights.store.backends import Backend, BlockBackend, Change
from rose_weights.store.folder import Folder
from rose_weights.store.rules import check_commit, check_forms, check_model, summary
from rose_weights.store.state import RunState, StoredVersion


class Store:
    """Runs, versions and blocks in one place.

    Args:
        backend: where; a path is a local folder, made when missing.
        disk: how the files of a local folder are written.
    """

    def __init__(self, backend: Backend | Path, *, disk: Disk | None = None) -> None:
        self.backend: Backend = Folder(backend, disk) if isinstance(backend, Path) else backend
        self.blocks = self.backend.blocks

    def runs(self) -> list[str]:
        """Every run with a state."""
        return self.backend.runs()

    def state(self, run: str) -> RunState:
        """A run's state.

        Raises:
            UnknownRun: nobody has opened it.
        """
        found = self.backend.state(_checked(run))
        if found is None:
            message = f"run {run!r} is unknown here; known: {', '.join(self.runs()) or 'none'}"
            raise UnknownRun(message)
        return found

    def manifest(self, stored: StoredVersion) -> Manifest:
        """Read a kept version's manifest.

        Raises:
            Damaged: the file is gone or not what its name says.
        """
        return self._read_manifest(stored.version, stored.manifest)

    def on_base(self, stored: StoredVersion) -> Manifest:
        """Read a kept version's manifest whose blocks are coded on their base.

        Raises:
            Damaged: the file is gone or not what its name says.
        """
        return self._read_manifest(stored.version, stored.on_base)

    def manifests(self, stored: StoredVersion) -> list[Manifest]:
        """Every manifest that a kept version has.

        Raises:
            Damaged: one is gone or not what its name says.
        """
        return [self.manifest(stored), *([self.on_base(stored)] if stored.on_base else [])]

    def _read_manifest(self, version: WeightVersion, name: str) -> Manifest:
        try:
            manifest = Manifest.decode(self.backend.manifest(version.run, name))
        except (OSError, DeltaError) as error:
            message = f"manifest of {version} cannot be read: {error}"
            raise Damaged(message) from error
        if manifest.name != name:
            message = f"manifest of {version} is not what the state lists"
            raise Damaged(message)
        return manifest

    def lineage(self, state: RunState) -> dict[WeightVersion, VersionLink]:
        """Kept versions as the lineage rules see them."""
        return {
            kept.version: VersionLink(kept.base, kept.full, kept.bytes) for kept in state.versions
        }

    def open_incarnation(
        self, run: str, publisher: str, check: Callable[[RunState], None] = lambda _: None
    ) -> RunState:
        """Take a run over (or begin it): every earlier publisher is fenced from here on.

        Args:
            run: to take over.
            publisher: that does.
            check: may refuse by what the run is at that instant; what it raises is raised.

        Raises:
            StoreFailed: the fence could not be written; nothing has changed.
        """

        def open_(state: RunState) -> RunState:
            check(state)
            return msgspec.structs.replace(state, fence=state.fence + 1, publisher=publisher)

        with self._failing("open", run):
            opened = self.backend.change(_checked(run), open_)
            faults.at("store.opened")
            return opened

    def put_block(self, data: bytes) -> bytes:
        """Stage a block and return its name.

        Raises:
            StoreFailed: the disk is full or broken.
        """
        with self._failing("stage a block", "blocks"):
            name = self.blocks.put(data)
            faults.at("store.block")
            return name

    def record_blocks(self, run: str) -> BlockBackend:
        """Blocks of a run's records of sandboxes: no other run has them, and no weights do.

        Raises:
            UnknownRun: no run is called so.
        """
        return self.backend.record_blocks(_checked(run))

    def put_record_block(self, run: str, data: bytes) -> bytes:
        """Stage a block for a record of a run and return its name.

        Raises:
            StoreFailed: the disk is full or broken.
        """
        with self._failing("stage a block", f"records of {run}"):
            name = self.record_blocks(run).put(data)
            faults.at("store.block")
            return name

    def commit(
        self,
        data: bytes,
        expected: WeightVersion | None,
        on_base: bytes = b"",
        encode_seconds: float = 0.0,
    ) -> RunState:
        """Make a manifest the run's head.

        Args:
            data: the encoded manifest.
            expected: the head the publisher believes in.
            on_base: the same version with blocks coded on their base, encoded; may be empty.
            encode_seconds: what comparing and encoding took; 0 = unknown.

        Returns:
            The new state; also when the same commit has been done before (its answer was lost, or
            its manifest has been damaged since and is kept again).

        Raises:
            BadManifest: it breaks a rule.
            Fenced: the incarnation is not the one that may publish.
            HeadMoved: ``expected`` is not the head.
            Incomplete: blocks are missing; nothing has changed.
            StoreFailed: the disk is full or broken; the head has not moved.
        """
        manifest = self._decode(data)
        smaller = self._decode(on_base) if on_base else None

        def publish(state: RunState) -> RunState:
            kept = state.kept(manifest.target)
            if kept is not None and kept.manifest == manifest.name:
                self._restore(kept, data)
                return state
            check_commit(manifest, state, expected)
            check_forms(manifest, smaller)
            self._check_base(manifest, state)
            self._check_blocks(manifest, smaller)
            faults.at("store.commit.blocks")
            self.backend.write_manifest(state.run, manifest.name, data)
            if smaller is not None:
                self.backend.write_manifest(state.run, smaller.name, on_base)
            faults.at("store.commit.manifest")
            kept = summary(manifest, smaller, encode_seconds)
            return msgspec.structs.replace(
                state, head=manifest.target, versions=(*state.versions, kept)
            )

        with self._failing("commit", str(manifest.target)):
            published = self.backend.change(_checked(manifest.target.run), publish)
            faults.at("store.commit.head")
            return published

    def put_manifest(self, manifest: Manifest) -> None:
        """Keep a manifest and its blocks durably, without listing it.

        Raises:
            StoreFailed: the disk is full or broken.
        """
        with self._failing("write", str(manifest.target)):
            self.blocks.sync([block.sha256 for block in manifest.blocks])
            self.backend.write_manifest(manifest.target.run, manifest.name, manifest.encode())
            faults.at("store.fold.manifest")

    def commit_record(
        self, run: str, place: str, data: bytes, blocks: Iterable[bytes], change: Change
    ) -> RunState:
        """Publish a record of a sandbox: its blocks, then itself, then the state that lists it.

        Args:
            run: whose blocks it needs.
            place: the store's run that holds the session.
            data: the record; its content is its name.
            blocks: that it needs.
            change: lists it; what it raises goes through, and nothing is changed.

        Raises:
            Incomplete: blocks are not among the run's; nothing has changed.
            StoreFailed: the disk is full or broken; the state is as it was.
        """
        names, held = list(blocks), self.record_blocks(run)

        def publish(state: RunState) -> RunState:
            after = change(state)
            if missing := held.missing(names):
                message = (
                    f"{len(missing)} of {len(names)} blocks of a record are not among those that "
                    f"hosts of {run} have sent; send them"
                )
                raise Incomplete(message)
            held.sync(names)
            self.backend.write_manifest(place, hashlib.sha256(data).hexdigest(), data)
            return after

        return self.change(place, publish, "publish a record of")

    def change(self, run: str, change: Change, doing: str) -> RunState:
        """Replace a run's state in one step.

        Raises:
            StoreFailed: the disk is full or broken; the state is as it was.
        """
        with self._failing(doing, run):
            return self.backend.change(_checked(run), change)

    def relist(self, before: RunState, versions: tuple[StoredVersion, ...]) -> bool:
        """Replace the listed versions, unless that would lose what was published meanwhile.

        Args:
            before: the state the new list was made from.
            versions: the list that takes the place of ``before.versions``.

        Returns:
            Whether it was done.

        Raises:
            StoreFailed: the disk is full or broken; nothing has changed.
        """
        known = len(before.versions)
        done = False

        def replace(state: RunState) -> RunState:
            nonlocal done
            later = state.versions[known:]
            listed = {kept.version for kept in (*versions, *later)}
            based = all(kept.base is None or kept.base in listed for kept in later)
            done = state.versions[:known] == before.versions and based
            if not done:
                return state
            return msgspec.structs.replace(state, versions=(*versions, *later))

        with self._failing("fold", before.run):
            self.backend.change(before.run, replace)
        if done:
            faults.at("store.fold.list")
        return done

    def sweep_manifests(self, run: str, grace_seconds: float) -> int:
        """Remove manifests that the run does not list and that are older than the grace.

        Returns:
            Bytes set free.
        """
        versions = self.state(run).versions
        listed = {name for kept in versions for name in (kept.manifest, kept.on_base)}
        listed |= {one.manifest for one in self.state(run).recorded}
        return self.backend.sweep_manifests(run, listed, grace_seconds)

    def _check_blocks(self, manifest: Manifest, smaller: Manifest | None) -> None:
        """All blocks of both forms are here, and survive from now on."""
        listed = (*manifest.blocks, *(smaller.blocks if smaller else ()))
        names = list(dict.fromkeys(block.sha256 for block in listed))
        if missing := self.blocks.missing(names):
            message = f"{len(missing)} of {len(names)} blocks of {manifest.target} are missing"
            raise Incomplete(message)
        self.blocks.sync(names)

    def _check_base(self, manifest: Manifest, state: RunState) -> None:
        if manifest.base is None:
            before = self._newest(state)
            if before is not None:
                check_model(manifest, before)
            return
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
        check_model(manifest, self.manifest(kept))

    def _newest(self, state: RunState) -> Manifest | None:
        """The newest manifest that can still be read."""
        for kept in reversed(state.versions):
            with contextlib.suppress(Damaged):
                return self.manifest(kept)
        return None

    def _restore(self, kept: StoredVersion, data: bytes) -> None:
        """Keep a listed manifest's bytes again where they have been damaged."""
        try:
            self.manifest(kept)
        except Damaged:
            self.backend.write_manifest(kept.version.run, kept.manifest, data)

    def _decode(self, data: bytes) -> Manifest:
        try:
            manifest = Manifest.decode(data)
        except DeltaError as error:
            raise BadManifest(str(error)) from error
        if manifest.encode() != data:
            message = f"manifest of {manifest.target} has fields this store does not know"
            raise BadManifest(message)
        return manifest

    def _failing(self, doing: str, what: str) -> _Failing:
        return _Failing(f"cannot {doing} ({what}) in {self.backend}")


def _checked(run: str) -> str:
    try:
        return run_name(run)
    except ValueError as error:
        raise UnknownRun(str(error)) from error


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
