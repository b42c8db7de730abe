"""``rose sleeper``: wakes this node's serving engines when nobody lets them sleep any more.

A process of its own, so that neither a dead guard nor a dead engine host leaves serving asleep. It
follows the orders in the run directory (``rose_engines.node.servingdir``): one ``DeadMan`` for
each. The word to a pod's readiness probe stands while serving may sleep or does not answer as
before. When it has to end it first wakes all that sleeps; one that was killed is started again
by the kubelet and finds its records.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import aiohttp

from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.opening import open_driver
from rose_agent.devices.usage import meter_for
from rose_agent.errors import DeviceError
from rose_agent.os.processes import start_ticks
from rose_agent.sleeper.sleeper import (
    DeadMan,
    SleeperRecord,
    WatchedServing,
    end_tree,
    tree,
    vacated_page,
)
from rose_core.devices.sleeper import Sleeper, SleeperLimits, SleepStage
from rose_core.identity import GpuUuid
from rose_engines.node.permit import Permit
from rose_engines.node.rundir import read_json, write_json
from rose_engines.node.servingdir import ServingDir, ServingDirs, SleepOrder
from rose_engines.process.sleep import SERVING
from rose_wire import flags
from rose_wire.flags import VerbParser

_log = logging.getLogger("rose.sleeper")
_PERIOD_SECONDS = 0.5
_Ask = Callable[[], Awaitable[bool | None]]


async def _unknown() -> bool | None:
    return None


@dataclass
class _One:
    """A replica that is followed."""

    folder: ServingDir
    order: SleepOrder
    man: DeadMan
    task: asyncio.Task[None]


class Sleepers:
    """Every replica of the node that was ever lent whole and still has an order.

    Args:
        dirs: where orders are.
        driver: measures memory; None = that of the processes.
        session: to speak to engines.
        vacated_url: the engine host's page; empty = nobody tells who holds the GPUs.
    """

    def __init__(
        self,
        dirs: ServingDirs,
        driver: DeviceDriver | None,
        session: aiohttp.ClientSession,
        vacated_url: str = "",
    ) -> None:
        self._dirs = dirs
        self._meter = meter_for(driver)
        self._session = session
        self._vacated_url = vacated_url
        self._followed: dict[str, _One] = {}
        self._ending = False
        for folder in (dirs.folder, dirs.drains):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._alive = Permit.create(dirs.alive)

    def end(self) -> None:
        """Let nobody sleep any more; ``run`` returns once all are awake."""
        self._ending = True

    async def run(self) -> None:
        """Follow orders until cancelled, and then until serving is back."""
        try:
            while not (self._ending and self._all_awake()):
                await self.step()
                await asyncio.sleep(_PERIOD_SECONDS)
        finally:
            for followed in self._followed.values():
                followed.task.cancel()
            tasks = [followed.task for followed in self._followed.values()]
            await asyncio.gather(*tasks, return_exceptions=True)
            self._alive.detach()

    async def step(self) -> None:
        """Match what is followed with the orders; say that we live."""
        ordered = {folder.uid: folder for folder in self._dirs.ordered()}
        for uid in set(self._followed) - set(ordered):
            self._leave(uid)
        for uid, folder in ordered.items():
            order = read_json(folder.order, SleepOrder)
            if order is None or order.engine not in SERVING:
                continue
            known = self._followed.get(uid)
            if known is None or known.task.done():
                self._followed[uid] = self._follow(folder, order)
            else:
                known.order = order
        if not self._ending:
            self._alive.beat_host(time.monotonic_ns())

    def _all_awake(self) -> bool:
        return all(
            followed.man.state.stage is SleepStage.AWAKE for followed in self._followed.values()
        )

    def _follow(self, folder: ServingDir, order: SleepOrder) -> _One:
        limits = SleeperLimits(order.release_bytes, wake_s=order.wake_seconds)
        uid = folder.uid
        serving = WatchedServing(
            SERVING[order.engine](self._session, order.url),
            self._meter,
            lambda: _living(self._followed[uid].order),
            lambda: _end(self._followed[uid].order),
            tuple(GpuUuid(name) for name in order.gpus),
            self._vacancy_question(order.gpus) if self._vacated_url else _unknown,
            lambda: self._followed[uid].order.drained,
        )
        if not folder.record.exists():
            # A stage is on disk before its order, so serving has never slept under this one.
            write_json(folder.record, SleeperRecord(Sleeper()))
        man = DeadMan(serving, folder.permit, folder.record, limits)
        return _One(folder, order, man, asyncio.create_task(self._keep(folder, man)))

    def _vacancy_question(self, gpus: tuple[str, ...]) -> _Ask:
        query = urlencode([("gpu", followed) for followed in gpus])
        return vacated_page(self._session, f"{self._vacated_url}?{query}")

    async def _keep(self, folder: ServingDir, man: DeadMan) -> None:
        while True:
            if self._ending:
                with contextlib.suppress(OSError):
                    folder.permit.unlink()
            try:
                _show_readiness(
                    folder, stay_away=man.granted or man.state.stage is not SleepStage.AWAKE
                )
                await man.step()
            except OSError as error:  # a full folder must not end the watch over serving
                _log.error("pod %s: %s", folder.uid, error)
            await asyncio.sleep(_PERIOD_SECONDS)

    def _leave(self, uid: str) -> None:
        """The order is gone: the pod is, or it has been awake."""
        followed = self._followed.pop(uid)
        followed.task.cancel()
        _show_readiness(followed.folder, stay_away=False)
        shutil.rmtree(followed.folder.path, ignore_errors=True)


def _show_readiness(folder: ServingDir, *, stay_away: bool) -> None:
    """Tell the pod's readiness probe, where its owner has mounted the folder."""
    if not stay_away:
        folder.drain.unlink(missing_ok=True)
    elif folder.drain_folder.is_dir() and not folder.drain.exists():
        folder.drain.touch(mode=0o644)


def _living(order: SleepOrder) -> tuple[int, ...]:
    """Serving's processes and what they have started; none that only has an old one's number."""
    roots = [pid for pid, ticks in order.processes if ticks and start_ticks(pid) == ticks]
    return tuple(sorted({followed for pid in roots for followed in tree(pid)}))


def _end(order: SleepOrder) -> None:
    for pid in _living(order):
        end_tree(pid)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = VerbParser(prog="rose sleeper", description=__doc__)
    made.add_argument(
        "--rundir", type=Path, default=Path("/run/rose"), help="run directory of the node"
    )
    made.add_argument(
        "--devices",
        choices=["static", "nvml"],
        default="nvml",
        help="who knows the GPUs: NVIDIA's driver, or a file",
    )
    made.add_argument("--static-gpus", type=Path, help="with static: JSON, the GPUs of this node")
    made.add_argument(
        "--vacated-url",
        type=lambda text: text and flags.web(text),
        default="",
        help="the engine host's page /vacated",
    )
    flags.add_log_level(made)
    return made


async def _run(options: argparse.Namespace) -> None:
    driver = open_driver(options.devices, options.static_gpus)
    try:
        async with aiohttp.ClientSession() as session:
            made = Sleepers(ServingDirs(options.rundir), driver, session, options.vacated_url)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, made.end)
            await made.run()
    finally:
        driver.close()


def main(argv: list[str]) -> int:
    """Run until a signal.

    Returns:
        Exit code: 0 ended as asked, 1 failed.
    """
    options = parser().parse_args(argv)
    logging.basicConfig(level=options.log_level, format="%(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(_run(options))
    except (DeviceError, OSError) as error:
        _log.error("%s", flags.complaint(error, argv))  # for people, no trace
        return 1
    return 0
