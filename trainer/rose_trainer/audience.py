"""What a publisher knows of those who follow its run: barriers, ages, the fixed prompt.

Both publishers (``publisher``, ``sharded``) keep one. It counts versions as they are taken, and it
asks and tells the store about engines that serve them, over a connection of its own because the
publisher's thread is busy sending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import TypeVar

from rose_core.delta import quorum as rules
from rose_core.delta.probe import Answer
from rose_core.identity import WeightVersion
from rose_trainer import metrics
from rose_trainer.errors import NotPublished, NotReached, PublishFailed
from rose_trainer.lineage import Published
from rose_trainer.staleness import Consumed, Order
from rose_weights.errors import WeightsError
from rose_weights.messages import AwaitReply
from rose_weights.receive.client import WeightsClient
from rose_wire.errors import Unavailable, WireError

_ResultT = TypeVar("_ResultT")
_FOR_EVER = 1e9


class Audience:
    """Versions of one publisher, and who serves them.

    Args:
        address: ``host:port`` of the store.
        token: the store's bearer token.
        known: versions published before this publisher, oldest first.
    """

    def __init__(self, address: str, token: str, known: Iterable[WeightVersion]) -> None:
        self._address = address
        self._token = token
        self._order = Order(known)
        self._steps: dict[int, WeightVersion] = {}

    def note_taken(self, version: WeightVersion, step: int) -> None:
        """Note the version that was taken at the trainer's step."""
        self._steps[step] = version
        self._order.add(version)

    def version_of(self, version: WeightVersion | int) -> WeightVersion:
        """A version as it is, or the one that a step was given.

        Raises:
            NotPublished: no such step.
        """
        if not isinstance(version, int):
            return version
        found = self._steps.get(version)
        if found is None:
            message = f"step {version} was not published by this publisher"
            raise NotPublished(message)
        return found

    def wait_reached(self, version: WeightVersion, quorum: float, seconds: float | None) -> None:
        """Wait until enough engines serve a version or a later one.

        Raises:
            NotReached: they did not within ``seconds`` (None = for ever); says who is behind.
            ValueError: no such quorum.
        """
        wait_for_quorum(self._address, self._token, version, quorum, seconds)

    def refer(self, published: Published, logprobs: Sequence[float]) -> None:
        """Say what the trainer computes for the fixed prompt with a durable version.

        Raises:
            NotPublished: it is no longer kept.
            PublishFailed: the store cannot be reached.
        """
        answer = tuple(map(float, logprobs))
        version, digest = published.version, published.digest
        if not refer_answer(self._address, self._token, version, digest, answer):
            message = f"{version} is no longer kept"
            raise NotPublished(message)

    def consume(self, version: WeightVersion | str, *, most: int | None) -> Consumed:
        """Count the age of a trajectory that is used now.

        Raises:
            ValueError: the text is no version.
        """
        parsed = WeightVersion.parse(version) if isinstance(version, str) else version
        found = self._order.consume(parsed, most)
        if found.age is not None:
            metrics.CONSUMED_AGE.observe(found.age)
        if not found.fresh:
            metrics.STALE.inc()
        return found


def wait_for_quorum(
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


def refer_answer(
    address: str, token: str, version: WeightVersion, digest: str, answer: Answer
) -> bool:
    """Tell the store what the trainer computes for the fixed prompt with this version.

    Returns:
        Whether the store keeps such a version.

    Raises:
        PublishFailed: the store cannot be reached.
    """

    async def send() -> bool:
        async with WeightsClient(address, token=token, holder="trainer") as client:
            return (await client.compare(version, digest, answer, trainer=True)).known

    try:
        return _apart(send())
    except (WeightsError, WireError) as error:
        message = f"the store could not be told what {version} computes: {error}"
        raise PublishFailed(message) from error


def _apart(work: Coroutine[None, None, _ResultT]) -> _ResultT:
    """Run a coroutine in a thread of its own: the trainer may be inside an event loop."""
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
                return await client.wait_reached(version, quorum, max(deadline - loop.time(), 0.0))
            except Unavailable:
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(0.5)
