"""What clients of the API server cost: list 2,000 objects, then take as many changes of them.

The clients are lightkube, which the operator uses, and the asyncio client of the official
``kubernetes`` package. Both ask the same stub on loopback for the same bytes, one process each, so
that what differs is the client. CPU is the process's own, after its imports; memory what the
process holds more than after them.

    python -m bench.operator.clients [--objects 2000] [--rounds 3]

A client that is not installed is left out. Next step: docs/decisions/0165 reads the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from bench.record import Figure, figure, record

GROUP, VERSION, PLURAL = "rose.dev", "v1alpha1", "rolloutleases"
_PATH = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
_PAGE = 500
_SECONDS = 120.0

Seen = Callable[[], None]


def manifest(number: int, version: int) -> dict[str, Any]:
    """A lease with the status that a running one has; about 2.5 kB of JSON."""
    conditions = [
        {
            "type": kind,
            "status": "True",
            "reason": "AsExpected",
            "message": f"lease {number} is as it should be: 4 of 4 slots of chat-{number % 25} run",
            "lastTransitionTime": "2026-11-25T12:00:00Z",
            "observedGeneration": 1,
        }
        for kind in ("Accepted", "Ready", "Serving", "Progressing")
    ]
    fields: dict[str, dict[str, Any]] = {
        f"f:{word}": {} for word in ("poolRef", "model", "slots", "weights", "router")
    }
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "RolloutLease",
        "metadata": {
            "name": f"grpo-{number}",
            "namespace": "serving",
            "uid": f"00000000-0000-0000-0000-{number:012d}",
            "resourceVersion": str(version),
            "generation": 1,
            "creationTimestamp": "2026-11-25T12:00:00Z",
            "managedFields": [
                {
                    "manager": manager,
                    "operation": "Apply",
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "time": "2026-11-25T12:00:00Z",
                    "fieldsType": "FieldsV1",
                    "fieldsV1": {"f:spec": fields},
                }
                for manager in ("kubectl", "rose-operator")
            ],
        },
        "spec": {
            "poolRef": {"namespace": "serving", "name": f"chat-{number % 25}"},
            "model": {"name": "tiny"},
            "slots": {"min": 1, "max": 4},
            "weights": {"storeName": "main", "run": f"grpo-{number}"},
        },
        "status": {"slotsReady": 4, "conditions": conditions, "observedGeneration": 1},
    }


class Stub:
    """As much of an API server as the clients ask for.

    Args:
        objects: how many there are, and how many changes a watch brings.
    """

    def __init__(self, objects: int) -> None:
        self._items = [json.dumps(manifest(n, n + 1)) for n in range(objects)]
        self._changes = [
            json.dumps({"type": "MODIFIED", "object": manifest(n, objects + n + 1)}) + "\n"
            for n in range(objects)
        ]

    def app(self) -> web.Application:
        """Application with the one path that the clients ask."""
        app = web.Application()
        app.router.add_get(_PATH, self._kind)
        return app

    async def _kind(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch", "").lower() in {"1", "true"}:
            return await self._watch(request)
        limit = int(request.query.get("limit", len(self._items)))
        start = int(request.query.get("continue", 0))
        end = min(len(self._items), start + limit)
        going_on = f',"continue":"{end}"' if end < len(self._items) else ""
        text = (
            f'{{"apiVersion":"{GROUP}/{VERSION}","kind":"RolloutLeaseList",'
            f'"metadata":{{"resourceVersion":"{len(self._items)}"{going_on}}},'
            f'"items":[{",".join(self._items[start:end])}]}}'
        )
        return web.Response(text=text, content_type="application/json")

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for change in self._changes:
            await response.write(change.encode())
        with contextlib.suppress(ConnectionResetError):
            await asyncio.sleep(_SECONDS)
        return response


def _lightkube(url: str) -> Callable[[Seen, Seen], Awaitable[None]]:
    from lightkube import AsyncClient, KubeConfig  # noqa: PLC0415  # only what this client needs
    from lightkube.config.models import Cluster, User  # noqa: PLC0415
    from lightkube.generic_resource import create_namespaced_resource  # noqa: PLC0415

    kind = create_namespaced_resource(GROUP, VERSION, "RolloutLease", PLURAL)

    async def run(listed: Seen, seen: Seen) -> None:
        config = KubeConfig.from_one(cluster=Cluster(server=url), user=User(token="t"))  # noqa: S106
        client = AsyncClient(config)
        store: dict[str, Any] = {}
        found = client.list(kind, namespace="*", chunk_size=_PAGE)
        async for item in found:
            store[item["metadata"]["name"]] = dict(item)
            listed()
        version = found.resourceVersion
        async for _, item in client.watch(kind, namespace="*", resource_version=version):
            store[item["metadata"]["name"]] = dict(item)
            seen()

    return run


def _kubernetes(url: str) -> Callable[[Seen, Seen], Awaitable[None]]:
    # Of no extra: the package is compared with, not used.
    kubernetes = importlib.import_module("kubernetes.aio")
    client, watch = kubernetes.client, importlib.import_module("kubernetes.aio.watch")

    async def run(listed: Seen, seen: Seen) -> None:
        settings = client.Configuration(host=url)
        store: dict[str, Any] = {}
        async with client.ApiClient(settings) as api:
            objects = client.CustomObjectsApi(api)
            going_on = ""
            while True:
                more = {"_continue": going_on} if going_on else {}
                page = await objects.list_cluster_custom_object(
                    GROUP, VERSION, PLURAL, limit=_PAGE, **more
                )
                for item in page["items"]:
                    store[item["metadata"]["name"]] = item
                    listed()
                going_on = page["metadata"].get("continue", "")
                if not going_on:
                    break
            version = page["metadata"]["resourceVersion"]
            async with watch.Watch() as changes:
                async for change in changes.stream(
                    objects.list_cluster_custom_object,
                    *(GROUP, VERSION, PLURAL),
                    resource_version=version,
                ):
                    item = change["object"]
                    store[item["metadata"]["name"]] = item
                    seen()

    return run


CLIENTS: dict[str, tuple[str, Callable[[str], Callable[[Seen, Seen], Awaitable[None]]]]] = {
    "lightkube": ("lightkube", _lightkube),
    "kubernetes.aio": ("kubernetes", _kubernetes),
}


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def child(name: str, url: str, objects: int) -> None:
    """Run one client and print what it took."""
    run = CLIENTS[name][1](url)
    counts = {"listed": 0, "seen": 0}
    marks: dict[str, float] = {"list": 0.0}
    begin, before = time.process_time(), _rss()

    async def main() -> None:
        done = asyncio.Event()

        def listed() -> None:
            counts["listed"] += 1
            if counts["listed"] == objects:
                marks["list"], marks["list rss"] = time.process_time(), _rss()

        def seen() -> None:
            counts["seen"] += 1
            if counts["seen"] == objects:
                marks["watch"] = time.process_time()
                done.set()

        task = asyncio.ensure_future(run(listed, seen))
        async with asyncio.timeout(_SECONDS):
            await asyncio.wait(
                {task, asyncio.ensure_future(done.wait())}, return_when=asyncio.FIRST_COMPLETED
            )
        if task.done():
            task.result()
        sys.stdout.write(
            json.dumps(
                {
                    "list_s": marks["list"] - begin,
                    "watch_s": marks["watch"] - marks["list"],
                    "list_mib": (marks["list rss"] - before) / 2**20,
                    "peak_mib": (_rss() - before) / 2**20,
                    "imports_mib": before / 2**20,
                }
            )
            + "\n"
        )
        sys.stdout.flush()
        os._exit(0)  # clients that watch have no end

    asyncio.run(main())


@contextlib.contextmanager
def serving(objects: int) -> Iterator[str]:
    """A stub in a process of its own; its address."""
    with tempfile.TemporaryDirectory() as folder:
        port = Path(folder) / "port"
        command = [sys.executable, "-m", __spec__.name, "--serve", str(port)]
        process = subprocess.Popen([*command, "--objects", str(objects)])
        try:
            deadline = time.monotonic() + _SECONDS
            while not (port.exists() and port.read_text().endswith("\n")):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise SystemExit("bench.operator.clients: the stub does not start")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port.read_text().strip()}"
        finally:
            process.kill()
            process.wait()


async def serve(objects: int, port: Path) -> None:
    """Be the stub until killed."""
    runner = web.AppRunner(Stub(objects).app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port.write_text(f"{runner.addresses[0][1]}\n")  # noqa: ASYNC240  # once, before it serves
    await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="bench.operator.clients", description=__doc__)
    parser.add_argument("--objects", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.serve:
        asyncio.run(serve(given.objects, given.serve))
    if given.client:
        name, url = given.client
        child(name, url, given.objects)
    figures: list[Figure] = []
    for name, (needs, _) in CLIENTS.items():
        if importlib.util.find_spec(needs) is None:
            continue
        rounds: list[dict[str, float]] = []
        with serving(given.objects) as url:
            for _ in range(given.rounds):
                command = [sys.executable, "-m", __spec__.name, "--client", name, url]
                command += ["--objects", str(given.objects)]
                out = subprocess.run(command, check=True, capture_output=True, text=True)
                rounds.append(json.loads(out.stdout.splitlines()[-1]))
        for key, unit in (
            ("list_s", "s"),
            ("watch_s", "s"),
            ("list_mib", "MiB"),
            ("peak_mib", "MiB"),
            ("imports_mib", "MiB"),
        ):
            values = [one[key] for one in rounds]
            middle = statistics.median(values)
            found = figure(f"{name}: {key}", middle, unit, interval=(min(values), max(values)))
            figures.append(found)
    record("operator-clients", figures, notes=[f"{given.objects} objects, {given.rounds} rounds"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
