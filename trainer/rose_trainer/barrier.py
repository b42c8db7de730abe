"""Asks and tells the store about engines that serve a version, from a trainer's own thread.

The publisher's thread is busy sending; this is a connection of its own. It runs in a thread of its
own too, because the trainer may already be inside an event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

from rose_core.delta import quorum as rules
from rose_core.delta.probe import Answer
from rose_core.identity import WeightVersion
from rose_trainer.errors import NotReached, PublishFailed
from rose_weights.errors import WeightsError
from rose_weights.messages import AwaitReply
from rose_weights.receive.client import WeightsClient
from rose_wire.errors import Unavailable, WireError

_ResultT = TypeVar("_ResultT")

_FOR_EVER = 1e9


def reached(
    address: str, token: str, version: WeightVersion, quorum: float, seconds: float | None
) -> None:
    """Return when the quorum is met.

    Raises:
        NotReached: it was not within ``seconds``; says who is behind.
        ValueError: no such quorum.
    """
    rules.check(quorum)
    try:
        reply = _apart(_ask(address, token, version, quorum, seconds))
    except (WeightsError, WireError) as error:
        message = f"nobody can say who serves {version}: {error}"
        raise NotReached(message) from error
    if not reply.met:
        message = (
            f"{version} is served by {len(reply.serving)} engines "
            f"({', '.join(reply.serving) or 'none'}) where quorum={quorum} was asked for; behind: "
            f"{', '.join(reply.behind) or 'none that reports'}"
        )
        raise NotReached(message)


def refer(address: str, token: str, version: WeightVersion, digest: str, answer: Answer) -> bool:
    """Tell the store what the trainer computes for the fixed prompt with this version.

    Returns:
        Whether the store keeps such a version.

    Raises:
        PublishFailed: the store cannot be told.
    """

    async def tell() -> bool:
        async with WeightsClient(address, token=token, holder="trainer") as client:
            return (await client.compare(version, digest, answer, trainer=True)).known

    try:
        return _apart(tell())
    except (WeightsError, WireError) as error:
        message = f"the store could not be told what {version} computes: {error}"
        raise PublishFailed(message) from error


def _apart(work: Coroutine[None, None, _ResultT]) -> _ResultT:
    """Run a coroutine in a thread and a loop of its own."""
    outcome: list[_ResultT] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001  # raised again in the trainer's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="rose-barrier", daemon=True)
    thread.start()
    thread.join()
    for error in failed:
        raise error
    return outcome[0]


async def _ask(
    address: str, token: str, version: WeightVersion, quorum: float, seconds: float | None
) -> AwaitReply:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (_FOR_EVER if seconds is None else max(seconds, 0.0))
    async with WeightsClient(address, token=token) as client:
        while True:
            try:
                return await client.reached(version, quorum, max(deadline - loop.time(), 0.0))
            except Unavailable:
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(0.5)
