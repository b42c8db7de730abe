"""``rose agent``: guard this node's serving replicas.

It needs the tap and the engine host on the same run directory, the operator for grants and the API
server for pods, and protects serving without any of them. Next step: ``guard.loop`` is the guard;
``node_verbs`` has the verbs for people (``rose agent report``, ``trace``, ``stop``, ``resume``).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rose_agent.devices.opening import open_or_idle
from rose_agent.errors import AgentError, BadConfiguration, DeviceError
from rose_agent.guard.devices import devices_access
from rose_agent.guard.inspection import node_verbs
from rose_agent.guard.inspection.pages import inspection
from rose_agent.guard.links.sandboxlink import SandboxLink
from rose_agent.guard.loop import Guard, Settings
from rose_agent.guard.sync.operator_link import OperatorLink
from rose_agent.metrics import REGISTRY
from rose_agent.pods.claims import Claims, KubeletClaims, WrittenClaims, driver_gpus, own_namespace
from rose_agent.pods.kubernetes import Access, KubernetesPods
from rose_agent.pods.model import PodSource
from rose_agent.pods.podresources import SOCKET, PodResources
from rose_agent.pods.static import StaticPods
from rose_agent.signals import confined
from rose_agent.signals.reader import ConfinedReaders
from rose_core.devices.memory import BudgetLimits
from rose_engines.node.rundir import RunDir
from rose_wire import flags, tls
from rose_wire.flags import VerbParser
from rose_wire.observability import guarded, pages
from rose_wire.serving import Server
from rose_wire.token_file import TokenFile

if TYPE_CHECKING:
    from rose_agent.guard.sync.identity import Identity

_log = logging.getLogger("rose.agent")
_CERTIFICATE_SECONDS = 1.0

Part = Callable[[], Coroutine[Any, Any, None]]
"""What runs as a task of the agent until it is cancelled."""


def arguments() -> argparse.ArgumentParser:
    """The flags of the guard."""
    parser = VerbParser(
        prog="rose agent",
        description="Guard the serving replicas of this node. "
        "Also: rose agent report|trace|stop|resume --rundir DIR.",
    )
    add = parser.add_argument
    add("--node", required=True, help="this node's name")
    add("--rundir", type=Path, default=Path("/run/rose"), help="run directory of the node")
    add(
        "--operator",
        type=lambda text: flags.target(text) if text else "",
        default="",
        help="HOST:PORT of the operator; empty = none, nothing is lent",
    )
    add("--token-file", type=Path, help="the installation's bearer token")
    add(
        "--enrol",
        type=flags.target,
        help="tls://HOST:PORT of the operator; asks for this node's certificate",
    )
    add("--identity-token-file", type=Path, help="the pod's own token, the proof for --enrol")
    add(
        "--guard-address",
        type=flags.listener,
        help="HOST:PORT on which guards of other nodes ask this one about replicas over several "
        f"nodes; needs a certificate ({tls.IDENTITY}). Without it no such replica is lent",
    )
    add("--guard-host", default="", help="under which they reach it; else the --guard-address's")
    add("--http-host", default="0.0.0.0", help="address of /metrics, /healthz and the pages")  # noqa: S104  # scraped by Prometheus
    add("--http-port", type=flags.port, default=9101, help="0 = any")
    add(
        "--devices",
        choices=["static", "nvml"],
        default="nvml",
        help="who knows the GPUs: NVIDIA's driver, or a file",
    )
    add("--static-gpus", type=Path, help="with static: JSON, the GPUs of this node")
    add(
        "--pod-resources",
        type=Path,
        default=SOCKET,
        help="the kubelet's socket that says which pod has which GPU",
    )
    add(
        "--platform-namespaces",
        default="",
        help="NAME,NAME: pods there may use GPUs without owning them (monitors); ROSE's own is one",
    )
    add("--static-replicas", type=Path, help="serving replicas from a file, without Kubernetes")
    add("--kube-url", type=flags.web, help="API server outside a cluster")
    add("--kube-token-file", type=Path, help="with --kube-url: the token that it asks for")
    add("--kube-ca-file", type=Path, help="with --kube-url: authority of its certificate")
    add("--settle-seconds", type=flags.amount, default=60.0, help="rest after a serving restart")
    add(
        "--calm-seconds",
        type=flags.amount,
        default=30.0,
        help="memory has to be plentiful for this long before rollouts get more of it again",
    )
    add(
        "--crossover-seconds",
        type=flags.amount,
        default=0.0,
        help="withhold lending in every second window of this length and compare; 0 = by a coin, "
        "in so many gaps between requests as a pool's withheldPercent says",
    )
    add("--sandbox-host", type=flags.web, action="append", default=[],
        help="of this node (rose sandbox-host): told while serving burns its budget; "
        "repeat")  # fmt: skip
    add("--sandbox-token-file", type=Path, action="append", default=[],
        help="bearer token that it asks for, read at each call: one for all hosts, or one for "
        "each, in their order")  # fmt: skip
    flags.add_log_level(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the guard, or look into a running one.

    Returns:
        Exit code: 0 ended as asked, 1 failed.
    """
    if argv and argv[0] in node_verbs.LOOKS:
        return node_verbs.main(argv[0], argv[1:])
    flags_of_guard = arguments()
    if argv and not argv[0].startswith("-"):
        flags_of_guard.error(
            f"no verb {argv[0]!r}; expected {', '.join(node_verbs.LOOKS)}, or flags"
        )
    options = flags_of_guard.parse_args(argv)
    logging.basicConfig(level=options.log_level, format="%(levelname)s %(name)s %(message)s")
    # Before a thread, a loop or a driver's library exists: none of them survives a fork.
    with confined.start() as factory:
        try:
            asyncio.run(_run(options, factory))
        except (AgentError, DeviceError, OSError) as error:
            _log.error("%s", flags.complaint(error, argv))  # for people, no trace
            return 1
    return 0


async def _run(options: argparse.Namespace, factory: socket.socket) -> None:
    """Guard until SIGTERM or SIGINT, or until a part fails."""
    try:
        rundir = RunDir(options.rundir).create()
    except ValueError as error:
        raise BadConfiguration(f"--rundir: {error}") from error
    settings = _settings(options)
    devices = open_or_idle(options.devices, options.static_gpus)
    readers = ConfinedReaders(factory)
    async with AsyncExitStack() as stack:
        stack.callback(devices.close)
        guard = Guard(rundir, settings, devices, readers)
        guard.pods = _pods(options, guard)
        operator = _operator(options, guard) if options.operator else []
        for runner in await _serve(guard, options):
            stack.push_async_callback(runner.cleanup)
        guards: list[Part] = []
        if options.guard_address:
            guards.append(partial(_answer_guards, guard, options))
        access = partial(
            devices_access.watch_access, guard.on_no_devices, guard.on_devices, devices
        )
        others = [*operator, *guards, *_sandboxes(options, guard.is_burning)]
        parts: tuple[Part, ...] = (guard.run, guard.pods.run, readers.run, access, *others)
        tasks = [asyncio.create_task(part()) for part in parts]
        stack.push_async_callback(_ended, tasks)
        await _until_signal(tasks)


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        options.node,
        flags.token(options.token_file),
        options.settle_seconds,
        crossover_seconds=options.crossover_seconds,
        budget=BudgetLimits(calm_seconds=options.calm_seconds),
        identity=tls.own_identity(),
    )


async def _answer_guards(guard: Guard, options: argparse.Namespace) -> None:
    """Answer guards of other nodes, once there is a certificate to be known by."""
    identity = guard.settings.identity
    if identity is None:
        raise BadConfiguration(f"--guard-address needs {tls.IDENTITY} to name a folder")
    while True:
        try:
            credentials = tls.server_credentials(identity, identity / tls.BUNDLE)
            break
        except OSError as error:  # the operator has not signed yet
            _log.debug("no certificate for --guard-address yet: %s", error)
            await asyncio.sleep(_CERTIFICATE_SECONDS)
    server = Server(token=guard.settings.token, credentials=credentials)
    guard.leading.serve_on(server)
    port = await server.start(options.guard_address)
    host = (options.guard_host or options.guard_address.rpartition(":")[0]).strip("[]")
    guard.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        await asyncio.Event().wait()
    finally:
        guard.address = ""
        await server.stop(0)


def _operator(options: argparse.Namespace, guard: Guard) -> list[Part]:
    """What speaks to the operator: reports and grants, and where asked for the certificate."""
    link = OperatorLink(
        options.operator,
        guard.settings.token,
        guard.request,
        guard.on_reply,
        ready=lambda: guard.surveyed,
    )
    guard.on_transition = link.report_soon
    identity = _identity(options)
    if identity is None:
        return [link.run]
    return [partial(_linked, link, identity), identity.run]


def _sandboxes(options: argparse.Namespace, burns: Callable[[], bool]) -> list[Part]:
    hosts, files = options.sandbox_host, options.sandbox_token_file
    if len(files) not in {0, 1, len(hosts)}:
        raise ValueError(
            f"{len(files)} --sandbox-token-file for {len(hosts)} --sandbox-host: give one for all "
            "or one for each"
        )
    each = files if len(files) == len(hosts) else (files or [None]) * len(hosts)
    return [
        SandboxLink(host, TokenFile(path), burns).run
        for host, path in zip(hosts, each, strict=True)
    ]


async def _until_signal(tasks: list[asyncio.Task[None]]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: [task.cancel() for task in tasks])
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        _log.info("ending; permits are closed, the engine host keeps the engines stopped")


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _identity(options: argparse.Namespace) -> Identity | None:
    if not options.enrol:
        return None
    folder = os.environ.get(tls.IDENTITY)
    if not folder or options.identity_token_file is None:
        raise BadConfiguration(
            f"--enrol needs --identity-token-file, and {tls.IDENTITY} to name a folder"
        )
    flags.token(options.identity_token_file)
    from rose_agent.guard.sync.identity import Identity  # noqa: PLC0415  # 9 MB, needed by few

    return Identity(options.node, options.enrol, options.identity_token_file, Path(folder))


async def _linked(link: OperatorLink, identity: Identity) -> None:
    """Sync with the operator, once there is a certificate to dial with."""
    await identity.wait()
    await link.run()


def _pods(options: argparse.Namespace, guard: Guard) -> PodSource:
    if options.static_replicas:
        return StaticPods(options.static_replicas)
    if options.kube_url:
        if options.kube_token_file is None:
            raise BadConfiguration("--kube-url needs --kube-token-file")
        flags.token(options.kube_token_file)
        if options.kube_ca_file is not None:
            tls.check_authority(options.kube_ca_file)
        access = Access(options.kube_url, options.kube_token_file, options.kube_ca_file)
    else:
        access = Access.in_cluster()
    devices = guard.devices
    if options.devices == "static":
        claims: Claims = WrittenClaims(lambda: [gpu.uuid for gpu in devices.gpus])
        return KubernetesPods(access, options.node, guard.match, claims)
    platform = own_namespace() | frozenset(filter(None, options.platform_namespaces.split(",")))
    kubelet = PodResources(options.pod_resources, guard.match)
    claims = KubeletClaims(kubelet, lambda: driver_gpus(devices.gpus), devices.used_by, platform)
    return KubernetesPods(access, options.node, guard.match, claims, platform)


async def _serve(guard: Guard, options: argparse.Namespace) -> list[web.AppRunner]:
    """``/metrics``, ``/healthz``, ``/trace``, ``/report``, on TCP and on ``agent.sock``."""
    token = guard.settings.token
    public = await _application(guard, inspection(guard, lambda page: guarded(page, token)))
    await web.TCPSite(public, options.http_host, options.http_port).start()
    local = await _application(guard, inspection(guard))
    path = guard.rundir.root / "agent.sock"
    path.unlink(missing_ok=True)
    await web.UnixSite(local, str(path)).start()
    path.chmod(0o600)
    _log.info("agent of node %s on %s", options.node, public.addresses[0])
    return [public, local]


async def _application(guard: Guard, more: list[web.RouteDef]) -> web.AppRunner:
    app = web.Application()
    app.add_routes([*pages(REGISTRY, guard.health), *more])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    return runner


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
