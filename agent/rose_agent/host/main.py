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
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from rose_agent.host import dedicated
from rose_agent.host.classes import LAUNCHERS
from rose_agent.host.enforcer import Enforcer
from rose_agent.host.engine_host import EngineHost
from rose_agent.host.errors import HostError
from rose_agent.host.freezers import Freezer, detect
from rose_agent.host.lifecycle import Site
from rose_agent.host.proxy import DataProxy
from rose_agent.host.repair import repair, thaw_all
from rose_agent.metrics import REGISTRY
from rose_engines.rundir import RunDir
from rose_wire import observability
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
    made.add_argument("--http-port", type=int, default=9103, help="metrics and health; 0 = any")
    made.add_argument("--cgroup", choices=["auto", "v1", "v2", "signals"], default="auto")
    made.add_argument("--drain-seconds", type=float, default=5.0)
    made.add_argument("--thaw-all", action="store_true", help="let every engine go on, then exit")
    made.add_argument("--dedicated", type=Path, metavar="FILE", help="run one engine by itself")
    made.add_argument("--router", default="", metavar="HOST:PORT", help="with --dedicated")
    made.add_argument("--lease", default="", metavar="NS/NAME", help="with --dedicated")
    made.add_argument("--token-file", type=Path, help="the install's bearer token")
    made.add_argument("--log-level", default="INFO")
    return made


@dataclass
class Running:
    """A started host; ``stop`` ends it."""

    host: EngineHost
    proxy: DataProxy
    enforcer: Enforcer
    server: Server
    pages: web.AppRunner
    data_port: int
    http_port: int

    async def stop(self, drain_seconds: float) -> bool:
        """Drain, kill, close.

        Returns:
            False when an engine could not be killed.
        """
        self.host.drain()
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
    repaired = await asyncio.to_thread(repair, rundir, freezer)
    _log.info("engines are stopped by %s: %s", freezer.driver, freezer.reason)
    if repaired:
        _log.warning("ended %d engines of an earlier host", repaired)
    enforcer = Enforcer(rundir.stop.exists)
    site = Site(
        models=arguments.models,
        python=arguments.engine_python,
        freezer=freezer,
        enforcer=enforcer,
        launchers=LAUNCHERS,
        logs=logs,
        dedicated=arguments.dedicated is not None,
    )
    host = EngineHost(rundir, site)
    proxy = DataProxy(host.target)
    bind = arguments.data_bind or arguments.data_host
    data_port = await proxy.start(bind, arguments.data_port)
    host.endpoint = f"http://{arguments.data_host}:{data_port}"
    server = Server()
    host.bind(server)
    rundir.host_socket.unlink(missing_ok=True)
    await server.start(f"unix:{rundir.host_socket}")
    enforcer.start()

    def health() -> str:
        age = enforcer.age_seconds()
        return f"the enforcer has not ticked for {age:.1f} s" if age > _STALE_SECONDS else ""

    pages, http_port = await observability.serve(
        REGISTRY,
        host="0.0.0.0",  # noqa: S104  # the kubelet probes by the node's address
        port=arguments.http_port,
        health=health,
    )
    return Running(host, proxy, enforcer, server, pages, data_port, http_port)


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
        attached = await dedicated.begin(arguments, running.host)
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
    except (HostError, WireError, OSError, ValueError) as error:
        sys.stderr.write(f"rose engine-host: {error}\n")
        return 1
