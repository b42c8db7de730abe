"""Waits until enough engines serve a version, from a trainer's own thread.

The publisher's thread is busy sending; this is a connection of its own. It runs in a thread of its
own too, because the trainer may already be inside an event loop.
"""

from __future__ import annotations

import asyncio
import threading

from rose_core.delta import quorum as rules
from rose_core.identity import WeightVersion
from rose_trainer.errors import NotReached
from rose_weights.client import WeightsClient
from rose_weights.errors import WeightsError
from rose_weights.messages import AwaitReply
from rose_wire.errors import Unavailable, WireError

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
    outcome: list[AwaitReply | BaseException] = []

    def work() -> None:
        try:
            outcome.append(asyncio.run(_ask(address, token, version, quorum, seconds)))
        except BaseException as error:  # noqa: BLE001  # raised again in the trainer's thread
            outcome.append(error)

    thread = threading.Thread(target=work, name="rose-barrier", daemon=True)
    thread.start()
    thread.join()
    (reply,) = outcome
    if isinstance(reply, WeightsError | WireError):
        message = f"nobody can say who serves {version}: {reply}"
        raise NotReached(message) from reply
    if isinstance(reply, BaseException):
        raise reply
    if not reply.met:
        message = (
            f"{version} is served by {len(reply.serving)} engines "
            f"({', '.join(reply.serving) or 'none'}) where quorum={quorum} was asked for; behind: "
            f"{', '.join(reply.behind) or 'none that reports'}"
        )
        raise NotReached(message)


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
