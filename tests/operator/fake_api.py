"""An API server in memory: versions, generations, apply, refusals. Real validation it has none;
that is what the tests on the real API server are for."""

from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

from rose_operator.errors import ApiRefused, ApiUnavailable
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import Raw


class FakeApi:
    namespace = "rose-system"

    def __init__(self) -> None:
        self.objects: dict[tuple[ObjectKind, str], Raw] = {}
        self.writes: list[tuple[str, str]] = []
        self.events: list[Raw] = []
        self.down = False
        self.refuse: set[str] = set()
        self._version = 0

    def add(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Make or change an object as a user would."""
        return self._store(kind, manifest, {"spec"})

    async def apply(self, kind: ObjectKind, manifest: Raw) -> Raw:
        self._check("apply", manifest)
        return self._store(kind, manifest, {"spec"})

    async def apply_status(self, kind: ObjectKind, manifest: Raw) -> Raw:
        self._check("status", manifest)
        if (kind, _key(manifest)) not in self.objects:
            raise ApiRefused(404, "not found")
        return self._store(kind, manifest, {"status"})

    async def delete(self, kind: ObjectKind, name: str) -> None:
        self._check("delete", {"metadata": {"name": name}})
        self.objects.pop((kind, f"{self.namespace}/{name}"), None)

    async def create(self, kind: ObjectKind, manifest: Raw) -> Raw:
        if kind is ObjectKind.EVENT:
            self.events.append(manifest)
            return manifest
        key = (kind, _key(manifest))
        self._check("create", manifest)
        if key in self.objects:
            raise ApiUnavailable("409: exists")
        return self._store(kind, manifest, {"spec"})

    async def replace(self, kind: ObjectKind, manifest: Raw) -> Raw:
        self._check("replace", manifest)
        found = self.objects[kind, _key(manifest)]
        if found["metadata"]["resourceVersion"] != manifest["metadata"].get("resourceVersion"):
            raise ApiUnavailable("409: conflict")
        return self._store(kind, manifest, {"spec"})

    async def get(self, kind: ObjectKind, name: str) -> Raw | None:
        if self.down:
            raise ApiUnavailable("down")
        return deepcopy(self.objects.get((kind, f"{self.namespace}/{name}")))

    def all(self, kind: ObjectKind) -> list[Raw]:
        return [deepcopy(raw) for (k, _), raw in self.objects.items() if k is kind]

    def _check(self, verb: str, manifest: Raw) -> None:
        if self.down:
            raise ApiUnavailable("down")
        name = manifest["metadata"]["name"]
        self.writes.append((verb, name))
        if name in self.refuse:
            raise ApiRefused(422, f"{name} is refused")

    def _store(self, kind: ObjectKind, manifest: Raw, parts: set[str]) -> Raw:
        key = (kind, _key(manifest))
        found = self.objects.get(key)
        made: dict[str, Any] = (
            deepcopy(found)
            if found is not None
            else {
                "metadata": {
                    "uid": f"uid-{len(self.objects)}-{manifest['metadata']['name']}",
                    "generation": 0,
                    "creationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
            }
        )
        self._version += 1
        changed = "spec" in parts and made.get("spec") != manifest.get("spec")
        made["metadata"] |= manifest["metadata"] | {"resourceVersion": str(self._version)}
        made["metadata"]["generation"] += changed
        for part in parts & manifest.keys():
            made[part] = deepcopy(manifest[part])
        self.objects[key] = made
        return deepcopy(made)


def _key(manifest: Raw) -> str:
    return f"{manifest['metadata'].get('namespace', '')}/{manifest['metadata']['name']}"
