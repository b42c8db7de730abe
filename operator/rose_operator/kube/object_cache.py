"""The operator's copy of its objects, fed by watch events, its own writes and full listings.

Every source says which resource version it speaks of, and an older word never replaces a newer
one; deletions are remembered for the same reason. So events may be late, doubled or missed: the
next full listing (``replace``) repairs what was missed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

Raw = dict[str, Any]

_GRAVES = 4096


class ObjectCache:
    """Objects of one kind by ``namespace/name``.

    Args:
        on_change: called after every change that is news.
        on_request: called before that for a new object or generation.

    Attributes:
        complete: a full listing has been taken in.
        revision: grows with every change, so that readers can keep what they derived.
    """

    def __init__(
        self,
        on_change: Callable[[], None] = lambda: None,
        on_request: Callable[[], None] = lambda: None,
    ) -> None:
        self._objects: dict[str, Raw] = {}
        self._graves: OrderedDict[str, int] = OrderedDict()
        self._on_change, self._on_request = on_change, on_request
        self.complete = False
        self.revision = 0

    def __len__(self) -> int:
        return len(self._objects)

    def all(self) -> list[Raw]:
        """Every object, by key."""
        return [self._objects[key] for key in sorted(self._objects)]

    def get(self, key: str) -> Raw | None:
        """One object."""
        return self._objects.get(key)

    def put(self, raw: Raw) -> None:
        """An object exists in this version."""
        key, version = key_of(raw), version_of(raw)
        known = self._objects.get(key)
        if known is not None and version_of(known) >= version:
            return
        if self._graves.get(key, -1) >= version:
            return
        self._objects[key] = raw
        if known is None or _generation(known) != _generation(raw):
            self._on_request()
        self._changed()

    def remove(self, raw: Raw) -> None:
        """The object was deleted; ``raw`` is its last state."""
        key, version = key_of(raw), version_of(raw)
        self._bury(key, version)
        known = self._objects.get(key)
        if known is not None and version_of(known) <= version:
            del self._objects[key]
            self._changed()

    def forget(self, key: str) -> None:
        """We deleted it ourselves; the watch event with its last version follows."""
        known = self._objects.pop(key, None)
        if known is not None:
            self._bury(key, version_of(known))
            self._changed()

    def replace(self, listed: Iterable[Raw], version: int) -> None:
        """These were all objects at this version; what is newer here stays."""
        present = {key_of(raw): raw for raw in listed}
        for raw in present.values():
            self.put(raw)
        for key, known in list(self._objects.items()):
            if key not in present and version_of(known) <= version:
                self._bury(key, version)
                del self._objects[key]
                self._changed()
        self.complete = True

    def _changed(self) -> None:
        self.revision += 1
        self._on_change()

    def _bury(self, key: str, version: int) -> None:
        self._graves[key] = max(version, self._graves.pop(key, -1))
        while len(self._graves) > _GRAVES:
            self._graves.popitem(last=False)


def key_of(raw: Raw) -> str:
    """``namespace/name``."""
    metadata = raw["metadata"]
    return f"{metadata.get('namespace', '')}/{metadata['name']}"


def version_of(raw: Raw) -> int:
    """Resource version; they can be compared within one resource type."""
    return int(raw["metadata"].get("resourceVersion") or 0)


def _generation(raw: Raw) -> object:
    return raw["metadata"].get("generation")
