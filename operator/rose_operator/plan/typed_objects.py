"""Objects as typed models, each parsed once per version.

A pass over thousands of objects would spend most of its time reading what it has read before. A
``TypedReader`` keeps what it made of every version, so a pass pays only for what has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic

from rose_operator.kube.object_cache import ObjectCache, Raw, key_of, version_of
from rose_operator.plan.admission import KindT, Parsed, Unreadable, parse_object


class TypedReader(Generic[KindT]):
    """Reads one kind from its store."""

    def __init__(self, kind: type[KindT], store: ObjectCache) -> None:
        self._kind: type[KindT] = kind
        self._store = store
        self._revision = -1
        self._seen: dict[str, tuple[int, KindT | Unreadable | None]] = {}
        self._parsed: Parsed[KindT] = Parsed({}, ())

    def read(self) -> Parsed[KindT]:
        """Everything that is there now; the same object while nothing has changed."""
        if self._store.revision != self._revision:
            self._revision = self._store.revision
            self._seen = {key_of(raw): self._entry(raw) for raw in self._store.all()}
            self._parsed = _sorted(self._seen)
        return self._parsed

    def _entry(self, raw: Raw) -> tuple[int, KindT | Unreadable | None]:
        version = version_of(raw)
        seen = self._seen.get(key_of(raw))
        if seen is not None and seen[0] == version:
            return seen
        return version, parse_object(self._kind, raw)


def _sorted(seen: Mapping[str, tuple[int, KindT | Unreadable | None]]) -> Parsed[KindT]:
    good = {
        key: found
        for key, (_, found) in seen.items()
        if found is not None and not isinstance(found, Unreadable)
    }
    bad = tuple(found for _, found in seen.values() if isinstance(found, Unreadable))
    return Parsed(good, bad)
