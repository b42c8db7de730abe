"""A real API server ends a watch in time and says by a bookmark from where the next goes on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from uuid import uuid4

import pytest

from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.waiting import until
from rose_wire.api_server import ApiServer, Resource, find_access

pytestmark = pytest.mark.cluster
MAPS = Resource("", "v1", "ConfigMap", "configmaps")


class Noting(ApiServer):
    """Notes after which versions its watches began."""

    versions: list[int]

    async def _begin_watch(self, *, path: str, **given: object) -> object:
        assert isinstance(given["resource_version"], int)
        self.versions.append(given["resource_version"])
        return await super()._begin_watch(path=path, **given)


async def test_a_watch_goes_on_past_its_end_without_a_listing(control_plane: ControlPlane) -> None:
    server = Noting(await find_access(control_plane.kubeconfig), watch_seconds=3, trust_env=False)
    server.versions = []
    label = {"watched": uuid4().hex[:8]}
    names = [f"{name}-{label['watched']}" for name in ("first", "other", "second")]

    async def create(name: str, labels: dict[str, str]) -> int:
        made = await server.create(MAPS, {"metadata": {"name": name, "labels": labels}})
        return int(made["metadata"]["resourceVersion"])

    _, version = await server.list(MAPS, "default")
    selector = f"watched={label['watched']}"
    async with aclosing(server.watch(MAPS, version, "default", labels=selector)) as changes:
        first = await create(names[0], label)
        seen = [await anext(changes)]
        coming = asyncio.ensure_future(anext(changes))
        # It brings no change, and so no version; a bookmark does.
        other = await create(names[1], {})
        await until(lambda: max(server.versions) >= other)
        await create(names[2], label)
        seen.append(await coming)
    assert [raw["metadata"]["name"] for _, raw in seen] == [names[0], names[2]], "none twice"
    assert server.versions[0] == version < first < other
    for name in names:
        await server.delete(MAPS, name, "default")
    await server.close()
