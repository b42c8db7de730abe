"""What clients of the API server cost: list 2,000 leases, then take a change of each.

The clients are the asyncio one of the official ``kubernetes`` package, as the operator uses it, and
kopf, which brings it events. They ask the same real API server for the same
objects, one process each, one after the other in every round, so that what differs is the client.
CPU is the process's own, after its imports; memory what the process holds more than after them.
Every client decodes what it is given and keeps it by name, as a cache does.

    python -m bench.operator.clients [--objects 2000] [--rounds 3]

Needs ``make cluster``. Next step: docs/decisions/0165 and 0773 read the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import kopf

from bench.operator.fleet import NAMESPACE, Fleet
from bench.record import Figure, figure, record
from rose_core.api.crd import KINDS
from rose_dev.api_client import ApiClient
from rose_dev.control_plane import ControlPlane
from rose_operator.kube.api import RESOURCES, ObjectKind
from rose_wire.api_server import ApiServer, find_access

LEASE = RESOURCES[ObjectKind.LEASE]
_ROOT = Path(__file__).parents[2]
_PAGE = 500
_SECONDS = 300.0
_LISTED = "listed"

Seen = Callable[[], None]
Run = Callable[[Seen, Seen], Awaitable[None]]


async def _official(listed: Seen, seen: Seen) -> None:
    server = ApiServer(await find_access(Path(os.environ["KUBECONFIG"])), trust_env=False)
    store: dict[str, Any] = {}
    items, version = await server.list(LEASE, page=_PAGE)
    for item in items:
        store[item["metadata"]["name"]] = item
        listed()
    del items  # a cache keeps what it was told last
    async for _, item in server.watch(LEASE, version):
        store[item["metadata"]["name"]] = item
        seen()


async def _kopf(listed: Seen, seen: Seen) -> None:
    handlers, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    store: dict[str, Any] = {}

    @kopf.on.login(registry=handlers)
    def login(**given: Any) -> kopf.ConnectionInfo | None:  # noqa: ANN401  # kopf's own signature
        return kopf.login_with_kubeconfig(**given)

    @kopf.on.event(LEASE.group, LEASE.version, LEASE.plural, registry=handlers)
    async def changed(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401  # likewise
        item: dict[str, Any] = dict(event["object"])
        store[item["metadata"]["name"]] = item
        (listed if event["type"] is None else seen)()

    await kopf.operator(registry=handlers, settings=settings, clusterwide=True, standalone=True)


CLIENTS: dict[str, Run] = {"kubernetes.aio": _official, "kopf": _kopf}


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def child(name: str, objects: int) -> None:
    """Run one client; print a line once it has listed, and then what it took."""
    run, ended = CLIENTS[name], asyncio.Event()
    counts = {"listed": 0, "seen": 0}
    begin, before = time.process_time(), _rss()
    found: dict[str, float] = {"imports_mib": before / 2**20}

    def listed() -> None:
        counts["listed"] += 1
        if counts["listed"] == objects:
            found["list_s"] = time.process_time() - begin
            sys.stdout.write(f"{_LISTED}\n")
            sys.stdout.flush()

    def seen() -> None:
        counts["seen"] += 1
        if counts["seen"] == objects:
            found["watch_s"] = time.process_time() - begin - found["list_s"]
            found["both_mib"] = (_rss() - before) / 2**20
            ended.set()

    running = asyncio.ensure_future(run(listed, seen))
    waiting = asyncio.ensure_future(ended.wait())
    async with asyncio.timeout(_SECONDS):
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # clients that watch have no end


class Leases:
    """The objects that are listed and changed, on a real API server.

    Args:
        plane: with nothing of ROSE on it.
        client: of that; its caller closes it.
        objects: how many.
    """

    def __init__(self, plane: ControlPlane, client: ApiClient, objects: int) -> None:
        crds = (f"--filename={_ROOT / 'crds' / kind.plural}.yaml" for kind in KINDS)
        plane.kubectl("apply", *crds)
        plane.kubectl("wait", "--for=condition=Established", *(f"crd/{k.full_name}" for k in KINDS))
        plane.kubectl("create", "namespace", NAMESPACE)
        self._client = client
        self._names = [f"grpo-{number}" for number in range(objects)]
        self._turn = 0
        fleet = Fleet()
        for number, name in enumerate(self._names):
            self._client.create(LEASE, fleet.lease(name, number % fleet.pools, 4))

    def change(self) -> None:
        """One change of every lease: its status, as the operator writes it."""
        self._turn += 1
        conditions = [
            {
                "type": kind,
                "status": "True",
                "reason": "AsExpected",
                "message": f"turn {self._turn}: it is as it should be, 4 of 4 slots run",
                "lastTransitionTime": "2026-11-25T12:00:00Z",
                "observedGeneration": 1,
            }
            for kind in ("Accepted", "Ready", "Serving", "Progressing")
        ]
        for name in self._names:
            status = {"status": {"slotsReady": 4, "conditions": conditions}}
            self._client.merge(LEASE, name, status, NAMESPACE, "status")

    def size(self) -> float:
        """Mean bytes of a lease as JSON."""
        found = [len(json.dumps(one)) for one in self._client.list(LEASE)]
        return statistics.fmean(found)


def measured(name: str, leases: Leases, objects: int, kubeconfig: Path) -> dict[str, float]:
    """One client in a process of its own.

    Raises:
        SystemExit: it ended without figures.
    """
    command = [sys.executable, "-m", __spec__.name, "--client", name, "--objects", str(objects)]
    env = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        lines = iter(process.stdout or ())
        with contextlib.suppress(StopIteration):
            if next(lines).strip() == _LISTED:
                leases.change()
                found: dict[str, float] = json.loads(next(lines))
                return found
    message = f"bench.operator.clients: {name} ended with {process.returncode}"
    raise SystemExit(message)


def main(argv: list[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="bench.operator.clients", description=__doc__)
    parser.add_argument("--objects", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", choices=list(CLIENTS), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.client:
        asyncio.run(child(given.client, given.objects))
    names = list(CLIENTS)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with ControlPlane() as plane, ApiClient(plane.kubeconfig) as client:
        leases = Leases(plane, client, given.objects)
        leases.change()
        for _ in range(given.rounds):
            for name in names:
                rounds[name].append(measured(name, leases, given.objects, plane.kubeconfig))
        size = leases.size()
    figures: list[Figure] = []
    for name in names:
        for key, unit in (("list_s", "s"), ("watch_s", "s"), ("both_mib", "MiB")):
            values = [one[key] for one in rounds[name]]
            ends = min(values), max(values)
            figures.append(figure(f"{name}: {key}", statistics.median(values), unit, interval=ends))
    record(
        "operator-clients",
        figures,
        notes=[
            f"{given.objects} leases of {size:.0f} bytes, {given.rounds} rounds, pages of {_PAGE}"
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
