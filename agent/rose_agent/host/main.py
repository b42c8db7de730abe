"""``rose engine-host``: run rollout engines on this node.

On SIGTERM: nothing new is started, requests in flight may end within ``--drain-seconds``, then
every tree is killed, which thaws it where that is needed. ``--thaw-all`` is for a preStop hook.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web

from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.driver_limit import SmiLimits
from rose_agent.devices.errors import DeviceError, NoDevices
from rose_agent.devices.mps import PROGRAM
from rose_agent.devices.opening import open_driver
from rose_agent.devices.static import StaticDriver
from rose_agent.devices.usage import meter_for
from rose_agent.host import dedicated, vacancy
from rose_agent.host.accounts import Accounts
from rose_agent.host.capabilities import Capabilities
from rose_agent.host.classes import LAUNCHERS
from rose_agent.host.courtesy import Courtesy
from rose_agent.host.enforcer import Enforcer
from rose_agent.host.engine_host import EngineHost
from rose_agent.host.errors import HostError, NoLimits
from rose_agent.host.freezers import Freezer, detect, own_base
from rose_agent.host.limits import LEAST_BUSY_PERCENT, PROCESSES, Limiter, Limits
from rose_agent.host.mps import MpsNode
from rose_agent.host.proxy import DataProxy
from rose_agent.host.repair import repair, thaw_all
from rose_agent.host.sharing import Ways, free_leftovers
from rose_agent.host.site import Site
from rose_agent.host.sizing import Sizer
from rose_agent.metrics import REGISTRY
from rose_engines.rundir import RunDir
from rose_wire import flags, observability
from rose_wire.errors import WireError
from rose_wire.rpc import Server

_log = logging.getLogger(__name__)

# The enforcer ticks every few milliseconds; a host whose enforcer rests this long is not healthy.
_STALE_SECONDS = 2.0
_KILL_SECONDS = 10.0
# How soon the interpreter hands over to the enforcer's thread while the event loop works.
_SWITCH_SECONDS = 0.0005


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = argparse.ArgumentParser(prog="rose engine-host", description=__doc__)
    made.add_argument("--rundir", type=Path, default=Path("/run/rose"))
    made.add_argument("--models", type=Path, help="folder with the node's models")
    made.add_argument("--engine-python", type=Path, default=Path(sys.executable))
    made.add_argument("--data-host", default="127.0.0.1", help="address routers can reach")
    made.add_argument("--data-bind", default="", help="address to listen on (default: data-host)")
    made.add_argument("--data-port", type=int, default=30800, help="0 = any")
    made.add_argument(
        "--http-port", type=flags.port, default=9103, help="metrics and health; 0 = any"
    )
    made.add_argument("--cgroup", choices=["auto", "v1", "v2", "signals"], default="auto")
    made.add_argument(
        "--devices",
        choices=["static", "nvml"],
        default="static",
        help="where engines hold their memory: nvml = on GPUs, static = in host memory",
    )
    made.add_argument(
        "--engine-uid", type=int, default=0, help="first of the users engines get; 0 = the host's"
    )
    made.add_argument("--engine-memory-mib", type=int, default=0, help="per engine; 0 = no limit")
    made.add_argument(
        "--engine-pids",
        type=int,
        help=f"processes and threads per engine; 0 = any, {PROCESSES} where that can be limited",
    )
    made.add_argument("--engine-cpu-percent", type=int, default=0, help="of one core; 0 = any")
    made.add_argument(
        "--engine-busy-cpu-percent",
        type=int,
        default=0,
        help="of one core, for MPS clients while serving is busy; 0 = as always",
    )
    made.add_argument("--engine-shm-mib", type=int, default=0, help="own /dev/shm; 0 = shared")
    made.add_argument("--mps-root", type=Path, help="pipe directories of the MPS daemons")
    made.add_argument("--mps-program", default=PROGRAM, help="the MPS control program")
    made.add_argument("--drain-seconds", type=float, default=5.0)
    made.add_argument("--thaw-all", action="store_true", help="let every engine go on, then exit")
    made.add_argument("--dedicated", type=Path, metavar="FILE", help="run one engine by itself")
    made.add_argument("--router", default="", metavar="HOST:PORT", help="with --dedicated")
    made.add_argument("--lease", default="", metavar="NS/NAME", help="with --dedicated")
    made.add_argument("--token-file", type=Path, help="the install's bearer token")
    flags.add_log_level(made)
    return made


@dataclass
class Running:
    """A started host; ``stop`` ends it."""

    host: EngineHost
    proxy: DataProxy
    enforcer: Enforcer
    server: Server
    pages: web.AppRunner
    looking: asyncio.Future[tuple[None, None]]
    data_port: int
    http_port: int

    async def stop(self, drain_seconds: float) -> bool:
        """Drain, kill, close.

        Returns:
            False when an engine could not be killed.
        """
        self.host.drain()
        self.looking.cancel()
        await self.proxy.drained(drain_seconds)
        ended = await self.host.shut_down(_KILL_SECONDS)
        await self.proxy.stop()
        await self.server.stop()
        self.enforcer.stop()
        await self.pages.cleanup()
        return ended


async def start(arguments: argparse.Namespace, freezer: Freezer) -> Running:
    """Repair, then serve.

    Raises:
        Unavailable, OSError: an address is taken or the run directory cannot be made.
    """
    rundir = RunDir(arguments.rundir).create()
    logs = rundir.root / "logs"
    logs.mkdir(mode=0o700, exist_ok=True)
    devices, broken = _devices(arguments)
    ways = _ways(arguments, devices, freezer.prefix)
    await asyncio.to_thread(free_leftovers, ways, rundir)
    repaired = await asyncio.to_thread(repair, rundir, freezer)
    _log.info("engines are stopped by %s: %s", freezer.driver, freezer.reason)
    limiter = _limiter(arguments, freezer.prefix)
    limiter.sweep()
    accounts = Accounts(arguments.engine_uid)
    accounts.open(rundir)
    if repaired:
        _log.warning("ended %d engines of an earlier host", repaired)
    enforcer = Enforcer(rundir.stop.exists, rundir.enforcer_bell)
    site = Site(
        models=arguments.models,
        python=arguments.engine_python,
        freezer=freezer,
        enforcer=enforcer,
        launchers=LAUNCHERS,
        logs=logs,
        dedicated=arguments.dedicated is not None,
        meter=meter_for(devices),
        sizer=Sizer(devices if devices.name == "nvml" else None),
        accounts=accounts,
        limiter=limiter,
        ways=ways,
    )
    host = EngineHost(rundir, site)
    able = Capabilities(ways, devices, arguments.engine_uid, arguments.engine_python, broken)
    await able.look()
    host.capabilities = lambda: able.said
    proxy = DataProxy(host.target)
    site.cut = proxy.cut
    bind = arguments.data_bind or arguments.data_host
    data_port = await proxy.start(bind, arguments.data_port)
    host.endpoint = f"http://{arguments.data_host}:{data_port}"
    server = Server()
    host.bind(server)
    rundir.host_socket.unlink(missing_ok=True)
    await server.start(f"unix:{rundir.host_socket}")
    rundir.host_socket.chmod(0o600)
    enforcer.start()

    def health() -> str:
        age = enforcer.age_seconds()
        return f"the enforcer has not ticked for {age:.1f} s" if age > _STALE_SECONDS else ""

    pages, http_port = await observability.serve(
        REGISTRY,
        host="0.0.0.0",  # noqa: S104  # the kubelet probes by the node's address
        port=arguments.http_port,
        health=health,
        more=[vacancy.page(host.holdings)],
    )
    looking = asyncio.gather(able.keep(), Courtesy(limiter).keep(host.engines))
    return Running(host, proxy, enforcer, server, pages, looking, data_port, http_port)


def _devices(arguments: argparse.Namespace) -> tuple[DeviceDriver, str]:
    """The driver, and why there is none: a host without its GPUs stays up to say so."""
    try:
        return open_driver(arguments.devices), ""
    except NoDevices as error:
        _log.error("%s", error)
        return StaticDriver.open(None), str(error)


def _ways(arguments: argparse.Namespace, devices: DeviceDriver, prefix: str) -> Ways:
    on_gpus = devices.name == "nvml"
    mps = MpsNode(arguments.mps_root, devices, arguments.mps_program.split())
    return Ways(mps, SmiLimits(lambda: own_base(2), prefix) if on_gpus else None)


def _limiter(arguments: argparse.Namespace, prefix: str) -> Limiter:
    """The limits that were asked for, and one on processes wherever that is possible.

    Raises:
        NoLimits: one that was asked for cannot be set.
    """
    limits = _limits(arguments)
    if arguments.engine_pids is None:
        try:
            return Limiter.detect(replace(limits, pids=PROCESSES), prefix)
        except NoLimits as error:
            _log.warning("a fork bomb in an engine would not be contained: %s", error)
    return Limiter.detect(limits, prefix)


def _limits(arguments: argparse.Namespace) -> Limits:
    return Limits(
        memory_bytes=arguments.engine_memory_mib << 20,
        pids=arguments.engine_pids or 0,
        cpu_percent=arguments.engine_cpu_percent,
        busy_cpu_percent=max(arguments.engine_busy_cpu_percent, LEAST_BUSY_PERCENT)
        if arguments.engine_busy_cpu_percent
        else 0,
        shm_bytes=arguments.engine_shm_mib << 20,
    )


async def serve(arguments: argparse.Namespace, freezer: Freezer) -> int:
    """Run until SIGTERM or SIGINT.

    Returns:
        Exit code.
    """
    running = await start(arguments, freezer)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    _log.info("ready: data route on port %d, pages on %d", running.data_port, running.http_port)
    attached = None
    if arguments.dedicated is not None:
        try:
            attached = await dedicated.begin(arguments, running.host)
        except (HostError, WireError, OSError, ValueError):
            await running.stop(0.0)
            raise
    await stop.wait()
    if attached is not None:
        await attached.leave()
    return 0 if await running.stop(arguments.drain_seconds) else 1


def main(argv: list[str]) -> int:
    """Entry of the verb.

    Returns:
        0 ended as told, 1 failed, 2 wrong usage.
    """
    arguments = parser().parse_args(argv)
    logging.basicConfig(
        level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        freezer = detect(arguments.cgroup, scope=str(arguments.rundir.resolve()))
        if arguments.thaw_all:
            _log.info("thawed %d trees", thaw_all(RunDir(arguments.rundir), freezer))
            return 0
        if arguments.models is None:
            sys.stderr.write("rose engine-host: --models is needed\n")
            return 2
        return asyncio.run(serve(arguments, freezer))
    except (HostError, WireError, DeviceError, OSError, ValueError) as error:
        sys.stderr.write(f"rose engine-host: {flags.complaint(error, argv)}\n")
        return 1
