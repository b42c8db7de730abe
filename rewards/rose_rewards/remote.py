"""``rose reward-worker``: a pod's worker. It dials a gateway and verifies what that gives it.

    rose reward-worker --gateway http://rose-rewards:8100 --functions functions.yaml --team a

What keeps it from others is its pod: a user, a network and limits of its own. Each verification
runs in a process below this one, as in the gateway's own pool, so that one that overruns or dies
takes nothing with it. At SIGTERM it takes nothing more, finishes what it has, and goes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from rose_rewards import functions
from rose_rewards.errors import BadFunctions, RewardsError, WorkerEnded, WorkerKilled
from rose_rewards.functions import RewardFunction
from rose_rewards.homes import homes
from rose_rewards.links import BEAT_SECONDS, MESSAGE_BYTES, Verification, VerificationResult
from rose_rewards.pool import WorkerPool
from rose_wire import flags
from rose_wire.daemon import stop_signal
from rose_wire.flags import VerbParser

LOG = logging.getLogger(__name__)
_LEAST_PAUSE, _MOST_PAUSE = 0.1, 2.0
# So long, what the gateway sent before it heard that this worker leaves may take to arrive.
_LAST_GIVEN_SECONDS = 0.1


def own(listed: Mapping[str, RewardFunction], team: str) -> dict[str, RewardFunction]:
    """The functions that this worker serves; their network is the pod's.

    Raises:
        BadFunctions: it has none.
    """
    found = {
        name: one.model_copy(update={"network": True})
        for name, one in listed.items()
        if one.team == team and one.takes_worker
    }
    if not found:
        message = (
            f"--team {team!r} has no function in --functions; a worker serves those whose team is "
            "its own, and without --team those that have none"
        )
        raise BadFunctions(message)
    return found


@dataclass
class RemoteWorker:
    """One pod's worker.

    Args:
        pool: its processes.
        places: verifications at a time.
        stop: set when it has to go.
    """

    pool: WorkerPool
    places: int
    stop: asyncio.Event
    _running: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    async def work(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        """Serve one connection until it ends, or until all is answered after ``stop``.

        Raises:
            aiohttp.ClientError, OSError: there is no gateway, or it refuses.
        """
        shown = {"Authorization": f"Bearer {token}"} if token else {}
        async with session.ws_connect(
            f"{url.rstrip('/')}/v1/work?places={self.places}",
            headers=shown,
            heartbeat=BEAT_SECONDS,
            max_msg_size=MESSAGE_BYTES,
        ) as socket:
            LOG.info("serves %s", url)
            leave = asyncio.create_task(self._leave(socket))
            try:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        self._receive(socket, msgspec.json.decode(message.data, type=Verification))
            finally:
                leave.cancel()
                running = list(self._running.values())
                for task in running:  # its caller has been told that there is no answer
                    task.cancel()
                await asyncio.gather(leave, *running, return_exceptions=True)

    def _receive(self, socket: aiohttp.ClientWebSocketResponse, given: Verification) -> None:
        if not given.stop:
            task = asyncio.create_task(self._answer(socket, given))
            self._running[given.number] = task
            task.add_done_callback(lambda _: self._running.pop(given.number, None))
        elif given.number in self._running:
            self._running[given.number].cancel()

    async def _leave(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        await self.stop.wait()
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(msgspec.json.encode(VerificationResult(leaving=True)))
            await asyncio.sleep(_LAST_GIVEN_SECONDS)
            while self._running:
                await asyncio.wait(self._running.values())
            await socket.close()

    async def _answer(self, socket: aiohttp.ClientWebSocketResponse, given: Verification) -> None:
        try:
            returned, took = await self.pool.verify(
                given.function, bytes(given.body), given.seconds
            )
            verdict = VerificationResult(given.number, said=returned, seconds=took)
        except TimeoutError:
            verdict = VerificationResult(given.number, overran=True)
        except (WorkerEnded, OSError, KeyError) as error:
            verdict = VerificationResult(
                given.number,
                ended=str(error) or type(error).__name__,
                killed=isinstance(error, WorkerKilled),
            )
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(msgspec.json.encode(verdict))


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = VerbParser(prog="rose reward-worker", description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--gateway", type=flags.web, required=True, help="URL of rose rewards --workers 0")
    add("--functions", type=Path, required=True, help="the platform's list, YAML")
    add("--team", default="", help="whose functions it serves; without it those of nobody")
    add("--places", type=flags.one_or_more, default=1, help="verifications at a time")
    add("--token-file", type=Path, help="what it shows to the gateway, of its team")
    flags.add_log_level(made)
    return made


async def _serve(given: argparse.Namespace) -> None:
    listed = own(functions.read(given.functions), given.team)
    stop = stop_signal()
    with homes() as above:
        pool = WorkerPool(listed, dict.fromkeys(listed, 0), given.places, above)
        worker = RemoteWorker(pool, given.places, stop)
        pause = _LEAST_PAUSE
        async with aiohttp.ClientSession() as session:
            while not stop.is_set():
                try:
                    await worker.work(session, given.gateway, flags.token(given.token_file))
                    pause = _LEAST_PAUSE
                except (aiohttp.ClientError, OSError) as error:
                    LOG.warning("%s: %s; again in %.1f s", given.gateway, error, pause)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await stop.wait()
                pause = min(_MOST_PAUSE, 2 * pause)
        await pool.close()


def main(argv: list[str]) -> int:
    """``rose reward-worker``: 0 stopped, 1 could not start."""
    given = parser().parse_args(argv)
    logging.basicConfig(level=given.log_level, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(_serve(given))
    except (OSError, ValueError, RewardsError) as error:
        sys.stderr.write(f"rose reward-worker: {flags.complaint(error, argv)}\n")
        return 1
    return 0
