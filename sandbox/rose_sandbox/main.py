"""``rose sandbox-host``: agents' sandboxes on this node, over HTTP.

It needs root and what ``make sandbox`` brings. Records go to a store as weights do, where a host on
another node finds them:

| ``--store`` | who may read and write them |
|---|---|
| ``tls://HOST:PORT``, or ``rose://HOST:PORT`` | whom the store granted ``record`` of the run |
| ``s3://bucket/prefix`` | whoever has the bucket |
| a folder | whoever has the folder |
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from rose_core.sandboxes.policy import HostPressure
from rose_core.sandboxes.tunnels import IDLE_SECONDS, MOST_TUNNELS, TunnelLimits
from rose_sandbox.admission import memory_pressure
from rose_sandbox.errors import SandboxError, Unavailable
from rose_sandbox.host import Host
from rose_sandbox.http import ServingTraffic, application
from rose_sandbox.inspector.bpf import BpfInspector
from rose_sandbox.inspector.inspector import BlindInspector, Inspector
from rose_sandbox.runtimes.parts import Parts, find_parts
from rose_sandbox.runtimes.processes import delegate
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runsc import RunscRuntime
from rose_sandbox.runtimes.volume import VOLUME_BYTES
from rose_sandbox.templates import Templates
from rose_weights.errors import WeightsError
from rose_weights.receive.record_client import RemoteRecords
from rose_weights.store.open_store import open_store
from rose_weights.store.record_store import RecordStore
from rose_weights.store.records import Records
from rose_weights.store.store import Store
from rose_wire import flags
from rose_wire.daemon import listen, stop_signal
from rose_wire.flags import VerbParser
from rose_wire.token_file import TokenFile

if TYPE_CHECKING:
    from rose_sandbox.cluster_templates import ClusterTemplates

LOG = logging.getLogger(__name__)
RUNTIMES = {one.name: one for one in (RuncRuntime, RunscRuntime)}


def open_host(
    folder: Path,
    store: str,
    run: str,
    *,
    egress: Sequence[str] = (),
    owner: str = "",
    pressure: Callable[[], HostPressure] = memory_pressure,
    store_token: Path | None = None,
    within: str = "",
    gibibytes: int | None = None,
    runtime: str = RuncRuntime.name,
    tunnels: TunnelLimits = TunnelLimits(),  # noqa: B008 - frozen
) -> Host:
    """A host of real sandboxes; ``Host.close`` lets go of it.

    Args:
        folder: of its sandboxes.
        store: of the records.
        run: that they belong to.
        egress: hosts that sandboxes may reach, as shell patterns.
        owner: name in records; empty: this machine's.
        pressure: what else happens on the machine.
        store_token: file with the credential that a store over gRPC asks for.
        within: group below which those of sandboxes lie (``delegate``).
        gibibytes: of disk that the folder may take; None: as much as there is.
        runtime: name in ``RUNTIMES``.
        tunnels: into sandboxes, of callers elsewhere.

    Raises:
        Unavailable: the machine lacks a part; the text says what brings it.
        ValueError: no disk is allowed.
    """
    if gibibytes == 0:
        raise ValueError("--gibibytes 0: sandboxes need a disk, 1 at least")
    parts = find_parts(RUNTIMES[runtime].programs)
    disk = VOLUME_BYTES if gibibytes is None else (gibibytes << 30) * 3 // 4
    at = folder / runtime
    return Host(
        RunscRuntime(at, parts, within, disk, way_out=bool(egress))
        if runtime == RunscRuntime.name
        else RuncRuntime(at, parts, within, disk),
        _inspector(parts, runtime),
        Records(_records(store, store_token), run),
        owner=owner or socket.gethostname(),
        scratch=folder / "parts",
        egress=egress,
        pressure=pressure,
        tunnels=tunnels,
    )


def _records(store: str, token: Path | None) -> Store | RecordStore:
    """Where records are kept.

    Raises:
        ValueError: a credential for a store that asks for none, which would not hold it back.
        OSError: the credential cannot be read.
    """
    scheme, _, address = store.partition("://")
    if scheme not in {"tls", "rose"}:
        if token is not None:
            raise ValueError(
                f"--store-token-file is for a store over gRPC, and {store} is none: take "
                "tls://HOST:PORT, or leave it out"
            )
        return open_store(store)
    flags.token(token)  # a file that cannot be read is told before anything is promised
    at = store if scheme == "tls" else address
    return RemoteRecords(flags.target(at), lambda: flags.token(token))


def _inspector(parts: Parts, runtime: str) -> Inspector:
    if runtime == RunscRuntime.name:
        return BlindInspector("gVisor shows its host no process")
    try:
        return BpfInspector(parts.folder / "bpf")
    except Unavailable as error:
        LOG.warning("every turn is saved in full: %s", error)
        return BlindInspector(str(error))


@asynccontextmanager
async def serving(given: argparse.Namespace) -> AsyncIterator[int]:
    """Serve until the block ends; gives the port."""
    traffic = ServingTraffic()
    within = delegate()
    host = open_host(
        given.folder,
        given.store,
        given.run,
        egress=given.egress,
        owner=given.owner,
        pressure=traffic,
        store_token=given.store_token_file,
        within=within,
        gibibytes=given.gibibytes,
        runtime=given.runtime,
        tunnels=TunnelLimits(given.tunnels, given.tunnel_idle_seconds),
    )
    flags.token(given.token_file)  # one that cannot be read is told at once
    tokens = TokenFile(given.token_file), TokenFile(given.traffic_token_file)
    source = _cluster_templates(given.templates) if given.templates else None
    templates = Templates(source, given.runtime, dict(given.template_image))
    app = application(host, traffic, *tokens, templates)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        yield await listen(runner, given.address)
    finally:
        await runner.cleanup()
        if source is not None:
            await source.close()
        await host.close()


def _cluster_templates(namespace: str) -> ClusterTemplates:
    # The client of Kubernetes is half of a start, and most hosts read no templates.
    from rose_sandbox.cluster_templates import ClusterTemplates  # noqa: PLC0415

    return ClusterTemplates(namespace)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = VerbParser(prog="rose sandbox-host", description=__doc__.splitlines()[0])
    _add_records(made.add_argument)
    _add_callers(made.add_argument)
    _add_sandboxes(made.add_argument)
    _add_templates(made.add_argument)
    flags.add_log_level(made)
    return made


def _add_records(add: Callable[..., argparse.Action]) -> None:
    add(
        "--store",
        required=True,
        help="of the records: tls://HOST:PORT (rose:// without TLS), s3://bucket/prefix, a folder",
    )
    add(
        "--store-token-file",
        type=Path,
        help="what a store over gRPC asks for: a credential of rose tenant grant --record",
    )
    add("--run", type=flags.run, required=True, help="the run whose agents these are")
    add("--folder", type=Path, default=Path("/var/lib/rose/sandboxes"), help="of the sandboxes")


def _add_callers(add: Callable[..., argparse.Action]) -> None:
    add("--address", type=flags.listener, default="127.0.0.1:7600", help="host:port to listen on")
    add(
        "--token-file",
        type=Path,
        required=True,
        help="bearer token that callers must bring, read at each call",
    )
    add(
        "--traffic-token-file",
        type=Path,
        help="bearer token that opens POST /traffic alone, for the node's guard; read at each call",
    )


def _add_sandboxes(add: Callable[..., argparse.Action]) -> None:
    add(
        "--gibibytes",
        type=flags.count,
        help="of disk that the folder may take: three quarters for sandboxes, to whom the disk is "
        "full then, and the rest for what is being saved; by default as much as there is",
    )
    add(
        "--runtime",
        choices=sorted(RUNTIMES),
        default=RuncRuntime.name,
        help="runsc (gVisor): sandboxes meet a kernel of their own, and all of them is saved at "
        "every turn. By default runc: they share this machine's kernel",
    )
    add("--owner", default="", help="name of this host in records; this machine's by default")
    add(
        "--egress",
        action="append",
        default=[],
        metavar="HOST",
        help="that sandboxes may reach through the proxy at 127.0.0.1:3128, *.example too; repeat",
    )
    add(
        "--tunnels",
        type=flags.count,
        default=MOST_TUNNELS,
        help="connections of callers elsewhere that a sandbox may have at once",
    )
    add(
        "--tunnel-idle-seconds",
        type=flags.amount,
        default=IDLE_SECONDS,
        help="without a byte, after which one of them ends",
    )


def _add_templates(add: Callable[..., argparse.Action]) -> None:
    add(
        "--templates",
        default="",
        metavar="NAMESPACE",
        help="of the cluster, whose SandboxTemplates (agent-sandbox) sandboxes may be made of",
    )
    add(
        "--template-image",
        action="append",
        default=[],
        type=_template_image,
        metavar="REFERENCE=NAME",
        help="the image of this host that an image of templates stands for; repeat",
    )


def _template_image(text: str) -> tuple[str, str]:
    reference, mark, name = text.rpartition("=")
    if not mark or not reference or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: expected REFERENCE=NAME")
    return reference, name


async def _serve(given: argparse.Namespace) -> None:
    stop = stop_signal()
    async with serving(given) as port:
        LOG.info("on port %d", port)
        await stop.wait()


def main(argv: list[str]) -> int:
    """``rose sandbox-host``: 0 stopped, 1 could not start."""
    given = parser().parse_args(argv)
    logging.basicConfig(level=given.log_level, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(_serve(given))
    except (OSError, ValueError, SandboxError, WeightsError) as error:
        sys.stderr.write(f"rose sandbox-host: {flags.complaint(error, argv)}\n")
        return 1
    return 0
