"""``rose agent``: guard the serving replicas of this node; ``trace``, ``stop``, ``resume`` look in.

The process is the guard (``rose_agent.guard.loop``). It needs the tap and the engine host on the
same run directory, the operator for grants, the API server for pods; it protects serving without
any of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from rose_agent.devices.driver import DeviceDriver, open_driver
from rose_agent.devices.errors import DeviceError
from rose_agent.errors import AgentError, BadConfiguration
from rose_agent.guard.inspect import inspection
from rose_agent.guard.loop import Guard, Settings
from rose_agent.guard.recorder import perfetto
from rose_agent.metrics import REGISTRY
from rose_agent.pods.kubernetes import Access, KubernetesPods
from rose_agent.pods.model import PodSource
from rose_agent.pods.static import StaticPods
from rose_agent.sync import OperatorLink
from rose_engines.rundir import RunDir
from rose_wire.observability import pages

_log = logging.getLogger("rose.agent")


def arguments() -> argparse.ArgumentParser:
    """The flags of the guard."""
    parser = argparse.ArgumentParser(
        prog="rose agent",
        description="Guard the serving replicas of this node. "
        "Also: rose agent trace|stop|resume --rundir DIR.",
    )
    add = parser.add_argument
    add("--node", required=True, help="this node's name")
    add("--rundir", type=Path, default=Path("/run/rose"))
    add("--operator", default="", help="HOST:PORT of the operator; empty = none, nothing is lent")
    add("--token-file", type=Path, help="the installation's bearer token")
    add("--http-host", default="0.0.0.0")  # noqa: S104  # scraped by Prometheus
    add("--http-port", type=int, default=9101, help="0 = any")
    add("--devices", choices=["static", "nvml"], default="nvml")
    add("--static-gpus", type=Path)
    add("--static-replicas", type=Path, help="serving replicas from a file, without Kubernetes")
    add("--kube-url", default="", help="API server outside a cluster")
    add("--kube-token-file", type=Path)
    add("--kube-ca-file", type=Path)
    add("--settle-seconds", type=float, default=60.0, help="rest after a serving restart")
    add(
        "--crossover-seconds",
        type=float,
        default=0.0,
        help="withhold lending in every second window of this length and compare; 0 = never",
    )
    add("--log-level", default="INFO")
    return parser


def main(argv: list[str]) -> int:
    """Run the guard, or look into a running one."""
    if argv and argv[0] in {"trace", "stop", "resume"}:
        return _look(argv[0], argv[1:])
    options = arguments().parse_args(argv)
    logging.basicConfig(level=options.log_level, format="%(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(_run(options))
    except (AgentError, DeviceError, OSError) as error:
        _log.error("%s", error)  # the message is for people, no trace
        return 1
    return 0


async def _run(options: argparse.Namespace) -> None:
    try:
        rundir = RunDir(options.rundir).create()
    except ValueError as error:
        raise BadConfiguration(f"--rundir: {error}") from error
    token = options.token_file.read_text().strip() if options.token_file else ""
    settings = Settings(
        options.node, token, options.settle_seconds, crossover_seconds=options.crossover_seconds
    )
    devices = open_driver(options.devices, options.static_gpus)
    async with aiohttp.ClientSession() as session:
        guard = Guard(rundir, settings, devices, session)
        guard.pods = _pods(options, guard, devices)
        tasks = [asyncio.create_task(guard.run()), asyncio.create_task(guard.pods.run())]
        if options.operator:
            link = OperatorLink(options.operator, token, guard.request, guard.on_reply)
            guard.on_transition = link.report_soon
            tasks.append(asyncio.create_task(link.run()))
        runners = await _serve(guard, options)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: [task.cancel() for task in tasks])
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            _log.info("ending; permits are closed, the engine host keeps the engines stopped")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for runner in runners:
                await runner.cleanup()
            devices.close()


def _pods(options: argparse.Namespace, guard: Guard, devices: DeviceDriver) -> PodSource:
    if options.static_replicas:
        return StaticPods(options.static_replicas)
    if options.kube_url:
        if options.kube_token_file is None:
            raise BadConfiguration("--kube-url needs --kube-token-file")
        access = Access(options.kube_url, options.kube_token_file, options.kube_ca_file)
    else:
        access = Access.in_cluster()

    def gpus_of(pids: tuple[int, ...]) -> tuple[str, ...]:
        members = set(pids)
        found = []
        with contextlib.suppress(DeviceError):
            for gpu in devices.gpus():
                users = devices.processes(gpu.uuid) or ()
                if any(process.pid in members for process in users):
                    found.append(gpu.uuid)
        return tuple(found)

    def every_gpu() -> tuple[str, ...]:
        if devices.name != "static":
            return ()
        with contextlib.suppress(DeviceError):
            return tuple(gpu.uuid for gpu in devices.gpus())
        return ()

    return KubernetesPods(access, options.node, guard.match, gpus_of, every_gpu)


async def _serve(guard: Guard, options: argparse.Namespace) -> list[web.AppRunner]:
    """``/metrics``, ``/healthz``, ``/trace``, ``/report``, on TCP and on ``agent.sock``."""
    app = web.Application()
    app.add_routes(pages(REGISTRY, guard.health))
    app.add_routes(inspection(guard))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, options.http_host, options.http_port).start()
    path = guard.rundir.root / "agent.sock"
    path.unlink(missing_ok=True)
    await web.UnixSite(runner, str(path)).start()
    path.chmod(0o600)
    _log.info("agent of node %s on %s", options.node, runner.addresses[0])
    return [runner]


# --- rose agent trace | stop | resume


def _look(what: str, argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"rose agent {what}")
    parser.add_argument("--rundir", type=Path, default=Path("/run/rose"))
    if what == "trace":
        parser.add_argument("--format", choices=["json", "perfetto"], default="json")
    options = parser.parse_args(argv)
    rundir = RunDir(options.rundir)
    if what == "stop":
        rundir.stop.touch()
        return 0
    if what == "resume":
        rundir.stop.unlink(missing_ok=True)
        return 0
    try:
        dump = asyncio.run(_fetch(rundir.root / "agent.sock", "/trace"))
    except (aiohttp.ClientError, OSError) as error:
        sys.stderr.write(f"rose agent trace: no guard answers in {options.rundir}: {error}\n")
        return 1
    sys.stdout.write(json.dumps(perfetto(dump) if options.format == "perfetto" else dump) + "\n")
    return 0


async def _fetch(path: Path, page: str) -> dict[str, Any]:
    connector = aiohttp.UnixConnector(str(path))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(f"http://agent{page}") as answer,
    ):
        content: dict[str, Any] = await answer.json()
        return content


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
