"""Objects in a bucket: a thin layer over obstore that speaks in the store's errors.

obstore signs, retries and speaks to whatever offers S3's API. What is added here: what does not
answer or refuses is ``StoreFailed`` with the reason in one line, and a write that lost the race for
an object is ``Outrun``. Nothing is kept; ``bucket`` says what the objects mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from rose_weights.errors import Outrun, StoreFailed

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class Entry(NamedTuple):
    """One object of a listing."""

    key: str
    size: int
    modified: datetime


class Objects:
    """Get, put, list, delete by key.

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
