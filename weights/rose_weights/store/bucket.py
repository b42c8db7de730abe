"""A store in a bucket with S3's API: the folder's layout as objects, no locks.

| object | how it is written |
|---|---|
| ``blocks/<2 digits>/<64 digits>`` | put; named by its content, so all writers write the same |
| ``record-blocks/<run>/<2 digits>/<64 digits>`` | likewise |
| ``runs/<run>/manifests/<name>`` | put, after all its blocks |
| ``runs/<run>/state.json`` | put if its entity tag is still the one that was read |

A put that returned is durable, and is read back by the next get: S3 and what is compatible with it
promise that. Several store processes may therefore serve one bucket. A state that somebody else
replaced meanwhile is read again and the change is tried on it: that finds out who lost.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from rose_core.delta import name_of
from rose_weights.errors import Damaged, Incomplete, Outrun, StoreFailed
from rose_weights.store.backends import Change, run_names
from rose_weights.store.blocks import NAME_BYTES
from rose_weights.store.retention import GRACE_SECONDS
from rose_weights.store.state import RunState, decode, encode

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CALLS = 32
"""Requests to the bucket at the same time: one takes tens of milliseconds, whatever its size."""

_RECORDS = "record-blocks/"

TRIES = 16
"""Changes of one state that may come between before this one gives up."""


class Entry(NamedTuple):
    """One object of a listing."""

    key: str
    size: int
    modified: datetime


class Objects:
    """Get, put, list, delete by key: a thin layer over obstore that speaks in the store's errors.

    obstore signs, retries and speaks to whatever offers S3's API. What is added here: what does not
    answer or refuses is ``StoreFailed`` with the reason in one line, and a write that lost the race
    for an object is ``Outrun``. Nothing is kept; ``Bucket`` says what the objects mean.

    Args:
        store: obstore's store; its prefix is the root.
        where: URL without credentials, for people.
    """

    def __init__(self, store: ObjectStore, where: str) -> None:
        self._store = store
        self._where = where

    def __str__(self) -> str:
        return self._where

    def get(self, key: str) -> tuple[bytes, str] | None:
        """An object and its entity tag; None when there is none.

        Raises:
            StoreFailed: the bucket does not answer or refuses.
        """
        with self._failing(f"read {key}"):
            try:
                found = obstore.get(self._store, key)
                return bytes(found.bytes()), found.meta["e_tag"] or ""
            except FileNotFoundError:
                return None

    def put(self, key: str, data: bytes) -> None:
        """Write an object, whatever is there; it is durable when this returns.

        Raises:
            StoreFailed: the bucket does not answer or refuses.
        """
        with self._failing(f"write {key}"):
            obstore.put(self._store, key, data, use_multipart=False)

    def swap(self, key: str, data: bytes, tag: str | None) -> None:
        """Write an object only if it is still what was read.

        Args:
            key: the object.
            data: its new content.
            tag: entity tag that was read; None = there was no object.

        Raises:
            Outrun: it is not; also when an earlier attempt of this call was lost on the way back.
            StoreFailed: the bucket does not answer, refuses or knows no conditional writes.
        """
        with self._failing(f"replace {key}"):
            try:
                if tag is None:
                    obstore.put(self._store, key, data, mode="create", use_multipart=False)
                else:
                    obstore.put(self._store, key, data, mode={"e_tag": tag}, use_multipart=False)
            except (AlreadyExistsError, PreconditionError) as error:
                raise Outrun(key) from error

    def modified(self, key: str) -> datetime | None:
        """When an object was last written; None when there is none.

        Raises:
            StoreFailed: the bucket does not answer or refuses.
        """
        with self._failing(f"look at {key}"):
            try:
                return obstore.head(self._store, key)["last_modified"]
            except FileNotFoundError:
                return None

    def folders(self, prefix: str) -> list[str]:
        """The next part of every key under a prefix that has more parts.

        Raises:
            StoreFailed: the bucket does not answer or refuses.
        """
        with self._failing(f"list {prefix}"):
            found = obstore.list_with_delimiter(self._store, prefix)
            return sorted(path.rsplit("/", 1)[-1] for path in found["common_prefixes"])

    def list(self, prefix: str) -> Iterator[Entry]:
        """Every object under a prefix.

        Raises:
            StoreFailed: the bucket does not answer or refuses.
        """
        with self._failing(f"list {prefix}"):
            for page in obstore.list(self._store, prefix):
                for meta in page:
                    yield Entry(meta["path"], meta["size"], meta["last_modified"])

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are no error.

        Raises:
            StoreFailed: the bucket does not answer or refuses.
        """
        if listed := list(keys):
            with self._failing(f"remove {len(listed)} objects"), contextlib.suppress(OSError):
                obstore.delete(self._store, listed)

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except BaseError as error:
            reason = str(error).split("\n", 1)[0]
            message = f"cannot {doing} in {self._where}: {reason}"
            raise StoreFailed(message) from error


class Bucket:
    """Runs, manifests and blocks in one bucket."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._proven = False
        self.blocks = BucketBlocks(objects)
        self._of_records: dict[str, BucketBlocks] = {}

    def record_blocks(self, run: str) -> BucketBlocks:
        """Blocks of a run's records; one object for each, since it remembers what it used."""
        if (known := self._of_records.get(run)) is not None:
            return known
        made = BucketBlocks(self._objects, root=f"{_RECORDS}{run}/", pool=self.blocks.pool)
        return self._of_records.setdefault(run, made)

    def record_runs(self) -> list[str]:
        """Runs that have such blocks."""
        return run_names(self._objects.folders(_RECORDS))

    def __str__(self) -> str:
        return str(self._objects)

    def runs(self) -> list[str]:
        """Every run with a state."""
        return [run for run in self._objects.folders("runs/") if self.state(run) is not None]

    def state(self, run: str) -> RunState | None:
        """A run's state, None when the run is unknown.

        Raises:
            Damaged: the object is not a state.
            StoreFailed: the bucket does not answer or refuses.
        """
        found = self._objects.get(_state_key(run))
        return None if found is None else decode(found[0], f"{self}/{_state_key(run)}")

    def change(self, run: str, change: Change) -> RunState:
        """Read, change, replace if it is still what was read; else again.

        Raises:
            StoreFailed: the bucket does not answer, or others were faster every time.
        """
        self._prove()
        key = _state_key(run)
        for _ in range(TRIES):
            found = self._objects.get(key)
            before = decode(found[0], f"{self}/{key}") if found else RunState(run)
            after = change(before)
            if after is before:
                return after
            try:
                self._objects.swap(key, encode(after), found[1] if found else None)
            except Outrun:
                continue
            return after
        message = f"{self}/{key} was replaced by others {TRIES} times in a row; try again"
        raise StoreFailed(message)

    def _prove(self) -> None:
        """Once: the bucket keeps to conditions. One that ignores them would lose versions.

        Raises:
            StoreFailed: it does not.
        """
        if self._proven:
            return
        key = f"probe/{uuid.uuid4().hex}"
        try:
            self._objects.put(key, b"read")
            _, tag = self._objects.get(key) or (b"", "")
            self._objects.put(key, b"written since")
            self._objects.swap(key, b"overwritten", tag)
        except Outrun:
            self._proven = True
        finally:
            self._objects.delete([key])
        if not self._proven:
            message = f"{self} ignores conditional writes (If-Match); use another object store"
            raise StoreFailed(message)

    def manifest(self, run: str, name: str) -> bytes:
        """A manifest's bytes, not checked.

        Raises:
            FileNotFoundError: it is not there.
            StoreFailed: the bucket does not answer or refuses.
        """
        found = self._objects.get(_manifest_key(run, name))
        if found is None:
            message = f"{self}/{_manifest_key(run, name)} is not there"
            raise FileNotFoundError(message)
        return found[0]

    def write_manifest(self, run: str, name: str, data: bytes) -> None:
        """Keep a manifest."""
        self._objects.put(_manifest_key(run, name), data)

    def sweep_manifests(self, run: str, listed: Collection[str], grace_seconds: float) -> int:
        """Remove manifests that are not listed and older than the grace."""
        oldest = _ago(grace_seconds)
        found = [
            entry
            for entry in self._objects.list(f"runs/{run}/manifests/")
            if entry.key.rsplit("/", 1)[-1] not in listed and entry.modified < oldest
        ]
        self._objects.delete(entry.key for entry in found)
        return sum(entry.size for entry in found)


class BucketBlocks:
    """The blocks of one bucket; safe to call from several threads.

    Args:
        objects: the bucket.
        stale_seconds: a block this old that this process has not used is asked for again, since
            another process may be about to sweep it. Half of the sweep's grace.
        root: what their keys begin with.
        pool: threads for requests; None = its own.
    """

    def __init__(
        self,
        objects: Objects,
        stale_seconds: float = GRACE_SECONDS / 2,
        *,
        root: str = "blocks/",
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        self._objects = objects
        self._stale = stale_seconds
        self._root = root
        self.pool = pool or ThreadPoolExecutor(CALLS, thread_name_prefix="rose-bucket")
        self._used: dict[bytes, float] = {}

    def put(self, data: bytes) -> bytes:
        """Keep a block and return its name; it survives from here on."""
        name = name_of(data)
        if not self._fresh(name):
            self._objects.put(self._key(name), data)
            self.mark([name])
        return name

    def get(self, name: bytes) -> bytes:
        """A block's bytes, checked.

        Raises:
            Incomplete: it is not here.
            Damaged: its bytes have changed; the object has been removed.
            StoreFailed: the bucket does not answer or refuses.
        """
        found = self._objects.get(self._key(name))
        if found is None:
            self._used.pop(name, None)
            message = f"block {name.hex()[:16]} is not in {self._objects}"
            raise Incomplete(message)
        if name_of(found[0]) != name:
            self._remove(name)
        return found[0]

    def read(self, names: Sequence[bytes], *, check: bool = True) -> list[bytes]:
        """Several blocks at once; always checked, they came over a network."""
        del check
        return list(self.pool.map(self.get, names))

    def missing(self, names: Iterable[bytes]) -> list[bytes]:
        """Those that have to be sent (again)."""
        listed = list(dict.fromkeys(names))
        here = list(self.pool.map(self._here, listed))
        self.mark(name for name, found in zip(listed, here, strict=True) if found)
        return [name for name, found in zip(listed, here, strict=True) if not found]

    def mark(self, names: Iterable[bytes]) -> None:
        """These are in use by this process."""
        now = time.monotonic()
        self._used.update(dict.fromkeys(names, now))

    def sync(self, names: Iterable[bytes]) -> None:
        """Nothing to do: a put that returned survives."""

    def sweep(self, needed: Collection[bytes], grace_seconds: float) -> int:
        """Remove blocks that nobody needs; those used or written within the grace stay."""
        oldest, recent = _ago(grace_seconds), time.monotonic() - grace_seconds
        for name, at in list(self._used.items()):
            if at < recent:
                self._used.pop(name, None)
        found = [
            entry
            for entry in self._objects.list(self._root)
            if entry.modified < oldest and self._forgotten(entry.key, needed)
        ]
        self._objects.delete(entry.key for entry in found)
        return sum(entry.size for entry in found)

    def _key(self, name: bytes) -> str:
        """Where a block is or would be.

        Raises:
            Incomplete: the name is no SHA-256, so there can be no such block.
        """
        if len(name) != NAME_BYTES:
            message = f"{name[:40]!r} is no name of a block"
            raise Incomplete(message)
        text = name.hex()
        return f"{self._root}{text[:2]}/{text}"

    def _here(self, name: bytes) -> bool:
        if self._fresh(name):
            return True
        written = self._objects.modified(self._key(name))
        return written is not None and written > _ago(self._stale)

    def _fresh(self, name: bytes) -> bool:
        used = self._used.get(name)
        return used is not None and time.monotonic() - used < self._stale

    def _forgotten(self, key: str, needed: Collection[bytes]) -> bool:
        try:
            name = bytes.fromhex(key.rsplit("/", 1)[-1])
        except ValueError:
            return False  # not ours
        return name not in needed and name not in self._used

    def _remove(self, name: bytes) -> NoReturn:
        self._used.pop(name, None)
        self._objects.delete([self._key(name)])
        message = f"block {name.hex()[:16]} is damaged in {self._objects} and has been removed"
        raise Damaged(message)


def _state_key(run: str) -> str:
    return f"runs/{run}/state.json"


def _manifest_key(run: str, name: str) -> str:
    return f"runs/{run}/manifests/{name}"


def _ago(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)
