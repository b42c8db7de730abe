"""Pause, new weights, resume: the barrier of trainers that push weights into one engine.

    Open --pause--> Held --update: ingest, then wait for the quorum--> Held --continue--> Open
    Held --hold_seconds pass--> Open         (a trainer that died must not hold turns for ever)

Held turns wait in the queue; the time they are held does not count as waiting. What runs is ended
with a typed abort (SGLang's ``abort``), or goes on (``keep``, ``in_place``, ``retract``: engines
change weights between two tokens and every token is stamped), or is waited for (``wait``).

Who must have the new weights is ``rose_core.rollouts.training.quorum``'s.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

import aiohttp
import msgspec

from rose_core.identity import WeightVersion
from rose_core.rollouts.training.quorum import Quorum, missing
from rose_core.unreadable import UNREADABLE
from rose_router import metrics
from rose_router.engines.fleet import Clock, Fleet
from rose_router.errors import BadRequest, Overloaded
from rose_router.turns.turn_queue import TurnQueue

LOG = logging.getLogger(__name__)
_MOST_LABELS = 4096


class Ingest(Protocol):
    """Takes a checkpoint into the weight store; the process beside the trainer, or a test."""

    async def take(self, path: str, label: str) -> WeightVersion:
        """Publish the checkpoint in that folder and return once it is durable.

        Raises:
            BadRequest: the checkpoint cannot be read or does not fit the run.
            Overloaded: nobody answered.
        """
        ...


@dataclass
class HttpIngest:
    """``rose ingest`` over HTTP.

    Args:
        session: connections.
        url: of ``rose ingest``; empty = there is none, and checkpoints are refused.
        token: its bearer token.
        seconds: longest time of one checkpoint.
    """

    session: aiohttp.ClientSession
    url: str
    token: str = ""
    seconds: float = 1800.0

    async def take(self, path: str, label: str) -> WeightVersion:
        """See ``Ingest``.

        Raises:
            BadRequest: no ingest is configured, or it refuses the checkpoint.
            Overloaded: it does not answer.
        """
        if not self.url:
            message = (
                "this router takes no checkpoints; start it with --ingest-url (docs/router.md)"
            )
            raise BadRequest("NoIngest", message)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            async with self.session.post(
                f"{self.url}/ingest",
                json={"path": path, "label": label},
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self.seconds),
            ) as reply:
                body = await reply.read()
                if reply.status >= 500:
                    message = f"rose ingest at {self.url}: HTTP {reply.status}: {body[:300]!r}"
                    raise Overloaded("Ingest", message, retry_after=5)
                return _version(body, reply.status)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            message = f"rose ingest at {self.url} does not answer: {type(error).__name__}: {error}"
            raise Overloaded("Ingest", message, retry_after=5) from error


def _version(body: bytes, status: int) -> WeightVersion:
    try:
        answer = msgspec.json.decode(body)
        if status == 200:
            return WeightVersion.parse(answer["version"])
        message = str(answer["message"])
    except (*UNREADABLE, KeyError, TypeError, ValueError) as error:
        message = f"rose ingest answered HTTP {status} with {body[:200]!r}: {error}"
    raise BadRequest("Checkpoint", message)


class Barrier:
    """The barrier of one lease.

    Args:
        fleet: the engines.
        room: where turns are held.
        ingest: takes checkpoints.
        quorum: who must have them.
        labels: filled with the trainer's own names of versions.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        room: TurnQueue,
        ingest: Ingest,
        quorum: Quorum,
        *,
        labels: dict[str, str],
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._room = room
        self._ingest = ingest
        self._quorum = quorum
        self._clock = clock
        self._under_way: dict[tuple[str, str], asyncio.Task[WeightVersion]] = {}
        self._release: asyncio.TimerHandle | None = None
        self._labels = labels

    @property
    def held(self) -> bool:
        """Whether turns are held."""
        return self._room.held

    def hold(self) -> None:
        """Begin no turn until ``release``."""
        self._room.hold()
        metrics.HELD.set(1)
        if self._release is not None:
            self._release.cancel()
        loop = asyncio.get_running_loop()
        self._release = loop.call_later(self._quorum.hold_seconds, self._forgotten)

    def release(self) -> None:
        """Begin turns again; doing so twice is no error."""
        if self._release is not None:
            self._release.cancel()
            self._release = None
        metrics.HELD.set(0)
        self._room.release()

    async def update(self, path: str, label: str) -> WeightVersion:
        """Take a checkpoint and wait until the quorum runs it.

        Args:
            path: folder that ``rose ingest`` can read; may be deleted once this returns.
            label: the trainer's own name for the version, or empty.

        Returns:
            The version that it is known by here.

        Raises:
            BadRequest: the checkpoint cannot be taken.
            Overloaded: the ingest or the quorum did not answer in time.
        """
        version = await asyncio.shield(self._taken(path, label))
        self.name(version, label)
        await self._until_quorum(version)
        return version

    def name(self, version: WeightVersion, label: str) -> None:
        """A version has been published; the trainer calls it so, or has no name for it."""
        self._fleet.announce(version)
        if label:
            self._labels[str(version)] = label
            while len(self._labels) > _MOST_LABELS:
                self._labels.pop(next(iter(self._labels)))

    def _taken(self, path: str, label: str) -> asyncio.Task[WeightVersion]:
        # A trainer that asks again while its first try is under way must not publish twice.
        key = (path, label)
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.ensure_future(self._ingest.take(path, label))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return task

    async def _until_quorum(self, version: WeightVersion) -> None:
        began = self._clock()
        try:
            async with asyncio.timeout(self._quorum.seconds):
                while late := self._missing(version):
                    await self._fleet.changed.wait()
        except TimeoutError:
            message = (
                f"{version} is published, but within {self._quorum.seconds:.0f} s the quorum did "
                f"not run it; missing: {late}. Engines go on by themselves; ask again"
            )
            raise Overloaded("NoQuorum", message, retry_after=5) from None
        finally:
            metrics.BARRIER_SECONDS.observe(self._clock() - began)

    def _missing(self, version: WeightVersion) -> str:
        here = [one.view(self._fleet.usual) for one in self._fleet if one.detached_at is None]
        return missing(here, version, self._quorum)

    def _forgotten(self) -> None:
        seconds = self._quorum.hold_seconds
        LOG.warning("nobody ended the pause within %.0f s; turns begin again", seconds)
        self.release()
