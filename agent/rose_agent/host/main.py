"""``rose engine-host``: run rollout engines on this node.

On SIGTERM: nothing new is started, requests in flight may end within ``--drain-seconds``, then
every tree is killed, which thaws it where that is needed. ``--thaw-all`` is for a preStop hook.

What the slots share (``Site``) is put together from the flags and what the node offers. A host that
is root does everything itself, and first ends what an earlier host left behind. One without
privileges is given a root helper, which has done that already and makes cgroups, users and
processes in its place. Next step: ``engine_host`` for the slots.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from rose_agent.devices.access import located
from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.driver_limit import SmiLimits
from rose_agent.devices.opening import open_driver
from rose_agent.devices.static import StaticDriver
from rose_agent.devices.usage import meter_for
from rose_agent.errors import DeviceError, HostError, NoDevices
from rose_agent.host import dedicated, metrics
from rose_agent.host.discovery import capabilities
from rose_agent.host.discovery.capabilities import Capabilities
from rose_agent.host.discovery.inventory import Inventory
from rose_agent.host.enforcement.enforcer import Enforcer
from rose_agent.host.helper.client import HelpedAccounts, HelpedKvFolders, Helper
from rose_agent.host.memory.footprints import Footprints
from rose_agent.host.memory.sizing import Sizer
from rose_agent.host.options import inputs
from rose_agent.host.options.arguments import (
    encrypts,
    kv_folders_of,
    kv_pool_of,
    limiter_of,
    limits_of,
    parser,
)
from rose_agent.host.processes.classes import LAUNCHERS
from rose_agent.host.processes.repair import forget_slot, repair, thaw_all
from rose_agent.host.route.data_certificate import DataCertificate
from rose_agent.host.route.proxy import DataProxy
from rose_agent.host.sharing.mps import MpsNode
from rose_agent.host.sharing.sharing import SharingMeans, free_leftovers, out_of_reach
from rose_agent.host.slots.cpu_throttle import CpuThrottle
from rose_agent.host.slots.engine_host import EngineHost
from rose_agent.host.slots.site import Site
from rose_agent.host.users.accounts import Accounts
from rose_agent.host.users.kernel_caches import UNKNOWN, made_by
from rose_agent.host.users.kv_folders import KvFolders
from rose_agent.host.vacancy import holders
from rose_agent.metrics import REGISTRY
from rose_agent.os.freezers import Freezer, detect, own_base
from rose_agent.os.limits import Limiter
from rose_core.devices.capabilities import Capability
from rose_core.wire.host import EngineState
from rose_engines.node.rundir import RunDir, SlotDir
from rose_wire import flags, observability
from rose_wire.daemon import stop_signal
from rose_wire.errors import WireError
from rose_wire.observability import probe
from rose_wire.rpc import Server

_log = logging.getLogger(__name__)

# The enforcer ticks every few milliseconds; a host whose enforcer rests this long is not healthy.
_STALE_SECONDS = 2.0
_KILL_SECONDS = 10.0
# How soon the interpreter hands over to the enforcer's thread while the event loop works.
_SWITCH_SECONDS = 0.0005
_STARTED = frozenset({EngineState.SERVING, EngineState.DORMANT})


@dataclass
class RunningHost:
    """A started host; ``stop`` ends it."""

    host: EngineHost
    proxy: DataProxy
    enforcer: Enforcer
    server: Server
    pages: web.AppRunner
    abilities: Capabilities
    background: tuple[asyncio.Task[None], ...]
    data_port: int
    http_port: int

    async def stop(self, drain_seconds: float) -> bool:
        """Drain, kill, close.

        Returns:
            False when an engine could not be killed.
        """
        self.host.drain()
        for one in self.background:
            one.cancel()
        await asyncio.wait(self.background)
        await self.proxy.drain(drain_seconds)
        ended = await self.host.shut_down(_KILL_SECONDS)
        await self.proxy.stop()
        await self.server.stop()
        self.enforcer.stop()
        await self.pages.cleanup()
        return ended


async def start(
    arguments: argparse.Namespace, freezer: Freezer, helper: Helper | None = None
) -> RunningHost:
    """Repair, then serve.

    Args:
        arguments: the verb's.
        freezer: the way to stop trees here.
        helper: does what needs root, and has repaired; without, this process does.

    Raises:
        Unavailable, OSError: an address is taken or the run directory cannot be made.
    """
    _log.info("engines are stopped by %s: %s", freezer.driver, freezer.reason)
    found = NodeFacts.gather(arguments, freezer)
    rights = (
        await HostPrivileges.with_helper(found, helper)
        if helper is not None
        else await HostPrivileges.as_root(found)
    )
    site = site_of(found, rights)
    host = EngineHost(found.rundir, site)
    abilities = await _capabilities(found, rights)
    host.capabilities = lambda: abilities.texts
    inventory = Inventory(arguments.models)
    await inventory.refresh()
    host.models = lambda: inventory.models
    async with contextlib.AsyncExitStack() as undo:
        proxy, data_port = await _data_route(host, site, arguments, undo)
        server = await _socket(host, found.rundir, undo)
        undo.callback(site.enforcer.stop)
        site.enforcer.start()
        pages, http_port = await _pages(host, site, arguments.http_port)
        undo.pop_all()  # from here on ``RunningHost.stop`` ends them
    watches = (abilities.keep(), CpuThrottle(site.limiter).keep(host.engines), inventory.keep())
    # No gathering: one that is cancelled holds an exception, and says so where nobody takes it.
    background = tuple(map(asyncio.create_task, watches))
    return RunningHost(
        host, proxy, site.enforcer, server, pages, abilities, background, data_port, http_port
    )


async def _capabilities(found: NodeFacts, rights: HostPrivileges) -> Capabilities:
    """What the host can do, looked at once."""
    arguments = found.arguments
    abilities = Capabilities(
        rights.means,
        found.devices,
        arguments.engine_uid,
        arguments.engine_python,
        found.broken,
        unprivileged=rights.helper is not None,
    )
    await abilities.refresh()
    return abilities


async def _data_route(
    host: EngineHost, site: Site, arguments: argparse.Namespace, undo: contextlib.AsyncExitStack
) -> tuple[DataProxy, int]:
    """The way from routers to the engines, and its port."""
    proxy = DataProxy(host.target)
    undo.push_async_callback(proxy.stop)
    site.cut, host.turns = proxy.cut, proxy.turns
    place = arguments.data_bind or arguments.data_host
    route = DataCertificate(renewed=arguments.data_tls_seconds) if encrypts(arguments) else None
    try:
        port = await proxy.start(
            place, arguments.data_port, route.context if route is not None else None
        )
    except OSError as error:
        reason = f"cannot listen on port {arguments.data_port} there: {error.strerror}"
        raise OSError(error.errno, reason, place) from error
    host.endpoint = f"{'https' if route is not None else 'http'}://{arguments.data_host}:{port}"
    if route is not None:
        host.certificates = route.announced
    return proxy, port


async def _socket(host: EngineHost, rundir: RunDir, undo: contextlib.AsyncExitStack) -> Server:
    """``host.sock``, which only our own user may open."""
    server = Server()
    undo.push_async_callback(server.stop)
    host.bind(server)
    rundir.host_socket.unlink(missing_ok=True)
    await server.start(f"local:{rundir.host_socket}")
    rundir.host_socket.chmod(0o600)
    return server


async def _pages(host: EngineHost, site: Site, port: int) -> tuple[web.AppRunner, int]:
    """``/metrics``, both probes and the page of GPUs in use, and their port."""

    def health() -> str:
        age = site.enforcer.age_seconds()
        return f"the enforcer has not ticked for {age:.1f} s" if age > _STALE_SECONDS else ""

    def readiness() -> str:
        """A dedicated host is there for its one engine; a node's host waits for orders."""
        started = any(engine.state in _STARTED for engine in host.engines())
        return "its engine is starting" if site.dedicated and not started else health()

    return await observability.serve(
        REGISTRY,
        host="0.0.0.0",  # noqa: S104  # the kubelet probes by the node's address
        port=port,
        health=health,
        more=[probe("/readyz", readiness), holders.page(host.holdings)],
    )


async def serve(
    arguments: argparse.Namespace, freezer: Freezer, helper: Helper | None = None
) -> int:
    """Run until SIGTERM or SIGINT, or until the root helper has ended.

    Returns:
        Exit code.
    """
    stop = stop_signal()
    if helper is not None:
        asyncio.get_running_loop().add_reader(helper.pidfd, _end_without_helper, freezer)
    running = await _start_unless_stopped(stop, start(arguments, freezer, helper))
    if running is None:
        _log.info("told to end while starting: no engine was started")
        return 0
    _log.info("ready: data route on port %d, pages on %d", running.data_port, running.http_port)
    attached = None
    if arguments.dedicated is not None:
        try:
            attached = await dedicated.begin(arguments, running.host)
        except (HostError, WireError, OSError, ValueError):
            await running.stop(0.0)
            raise
    losing = asyncio.create_task(_stop_without_devices(running, stop))
    await stop.wait()
    losing.cancel()
    if attached is not None:
        await attached.leave()
    ended = await running.stop(arguments.drain_seconds)
    return 0 if ended and not running.abilities.lost() else 1


async def _stop_without_devices(running: RunningHost, stop: asyncio.Event) -> None:
    """Have the host end, and start anew with its devices, once they are lost and no engine serves.

    What runs has its files open and goes on; what starts now could open none.
    """
    while not stop.is_set():
        await asyncio.sleep(capabilities.PERIOD_SECONDS)
        serving = any(engine.state in _STARTED for engine in running.host.engines())
        lost = await asyncio.to_thread(running.abilities.lost)
        if lost and not serving:
            texts = running.abilities.texts
            _log.error("%s", texts.get(Capability.DEVICE_ACCESS.value, "GPUs are lost"))
            stop.set()


async def _start_unless_stopped(
    stop: asyncio.Event, starting: Coroutine[None, None, RunningHost]
) -> RunningHost | None:
    """What was started; None when SIGTERM came first, and what had begun is undone."""
    started, stopping = asyncio.create_task(starting), asyncio.create_task(stop.wait())
    await asyncio.wait({started, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not started.done():
        started.cancel()
        await asyncio.wait({started})
    return None if started.cancelled() else started.result()


def _end_without_helper(freezer: Freezer) -> None:
    """The root helper has ended: its engines are killed, and the next host begins anew.

    A killed task that is frozen still lives; what stops it is ours to lift.
    """
    _log.error("the root helper has ended; so does this host")
    for tree in freezer.strays():
        with contextlib.suppress(HostError):
            tree.thaw()
    logging.shutdown()
    os._exit(1)


def main(
    argv: list[str], connection: tuple[socket.socket, subprocess.Popen[bytes]] | None = None
) -> int:
    """Entry of the verb, once it is known who is root.

    Args:
        argv: the verb's arguments.
        connection: to the root helper, and its process; None = this process does its work.

    Returns:
        0 ended as asked, 1 failed, 2 wrong usage.
    """
    arguments = parser().parse_args(argv)
    logging.basicConfig(
        level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    sys.setswitchinterval(_SWITCH_SECONDS)
    if problem := inputs.problem(arguments, argv):
        sys.stderr.write(f"rose engine-host: {problem}\n")
        return 2
    try:
        if connection is not None:
            helper = Helper(*connection)
            return asyncio.run(serve(arguments, helper.freezer(), helper))
        freezer = detect(arguments.cgroup, scope=str(arguments.rundir.resolve()))
        if arguments.thaw_all:
            _log.info("thawed %d trees", thaw_all(RunDir(arguments.rundir), freezer))
            return 0
        return asyncio.run(serve(arguments, freezer))
    except (HostError, WireError, DeviceError, OSError, ValueError) as error:
        sys.stderr.write(f"rose engine-host: {flags.complaint(error, argv)}\n")
        return 1


@dataclass(frozen=True)
class NodeFacts:
    """What a host finds on its node.

    Attributes:
        freezer: the way to stop trees here.
        devices: the driver of the node's GPUs.
        broken: why the driver that was asked for does not work; empty when it does.
    """

    arguments: argparse.Namespace
    rundir: RunDir
    freezer: Freezer
    devices: DeviceDriver
    broken: str

    @classmethod
    def gather(cls, arguments: argparse.Namespace, freezer: Freezer) -> NodeFacts:
        """Make the run directory and open the driver.

        A host without its GPUs stays up, so that its capabilities can say what is wrong.

        Raises:
            OSError: the run directory cannot be made.
        """
        rundir = RunDir(arguments.rundir).create()
        try:
            devices, broken = open_driver(arguments.devices), ""
        except NoDevices as error:
            _log.error("%s", error)
            devices, broken = StaticDriver.open(None), str(error)
        return cls(arguments, rundir, freezer, devices, broken)

    @property
    def on_gpus(self) -> bool:
        """Engines hold their memory on GPUs, not in the node's."""
        return self.devices.name == "nvml"

    def kernels_key(self) -> str:
        """What makes the engines' kernels here; neither image nor driver changes under a host."""
        try:
            version = self.devices.version()
        except DeviceError as error:
            _log.warning("the driver does not say its version, so kernels are made anew: %s", error)
            return UNKNOWN
        return made_by(self.arguments.engine_python, version.driver if version else None)

    def logs(self) -> Path:
        """Folder of the engines' logs, made."""
        folder = self.rundir.root / "logs"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


@dataclass(frozen=True)
class HostPrivileges:
    """How this host does what takes root: by itself, or through its helper.

    Attributes:
        means: how engines can share GPUs.
        limiter: holds engines to what they may take of the node.
        accounts: users that engines run as.
        forget: removes what a slot's engine left.
        kv_folders: where the engines of a lease keep keys for each other.
        helper: starts engines in the host's place; None = the host does.
    """

    means: SharingMeans
    limiter: Limiter
    accounts: Accounts
    forget: Callable[[SlotDir, bool], None] = forget_slot
    kv_folders: KvFolders = field(default_factory=KvFolders)
    helper: Helper | None = None

    @classmethod
    async def as_root(cls, facts: NodeFacts) -> HostPrivileges:
        """The host is root: end what an earlier host left, then see how engines can be held.

        Raises:
            NoLimits: a limit that was asked for cannot be set.
        """
        arguments, rundir, freezer = facts.arguments, facts.rundir, facts.freezer
        first, *rest = arguments.mps_program.split()
        mps = MpsNode(arguments.mps_root, facts.devices, [located(first), *rest])
        limits = SmiLimits(lambda: own_base(2), freezer.prefix) if facts.on_gpus else None
        ways = SharingMeans(mps, limits)
        await asyncio.to_thread(free_leftovers, ways, rundir)
        repaired = await asyncio.to_thread(repair, rundir, freezer)
        if repaired:
            _log.warning("ended %d engines of an earlier host", repaired)
        limiter = limiter_of(arguments, freezer.prefix)
        limiter.sweep()
        accounts = Accounts(arguments.engine_uid, await asyncio.to_thread(facts.kernels_key))
        accounts.open(rundir)
        folders = kv_folders_of(arguments)
        folders.sweep()
        return cls(ways, limiter, accounts, kv_folders=folders)

    @classmethod
    async def with_helper(cls, facts: NodeFacts, helper: Helper) -> HostPrivileges:
        """The host is not root: the helper is, and has repaired."""
        kernels = await asyncio.to_thread(facts.kernels_key)
        return cls(
            SharingMeans(MpsNode(None, facts.devices), elastic=out_of_reach),
            helper.limiter(limits_of(facts.arguments)),
            HelpedAccounts(helper, facts.arguments.engine_uid, kernels),
            helper.forget,
            HelpedKvFolders(helper, facts.arguments.kv_store),
            helper,
        )


def site_of(facts: NodeFacts, rights: HostPrivileges) -> Site:
    """What the slots of this host share; its enforcer has not been started."""
    arguments, rundir = facts.arguments, facts.rundir
    metrics.KV_STORE_BYTES.set_function(rights.kv_folders.used)
    return Site(
        models=arguments.models,
        python=arguments.engine_python,
        freezer=facts.freezer,
        enforcer=Enforcer(rundir.stop.exists, rundir.enforcer_bell),
        launchers=LAUNCHERS,
        logs=facts.logs(),
        dedicated=arguments.dedicated is not None,
        meter=meter_for(facts.devices),
        sizer=Sizer(facts.devices if facts.on_gpus else None, Footprints(rundir.footprints)),
        accounts=rights.accounts,
        limiter=rights.limiter,
        means=rights.means,
        spawner=rights.helper,
        forget=rights.forget,
        kv_folders=rights.kv_folders,
        kv_pool=kv_pool_of(arguments),
    )
