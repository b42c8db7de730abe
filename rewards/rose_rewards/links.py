"""Workers in pods of their own: they dial the gateway, are given verifications and answer them.

| a link is | from | left by |
|---|---|---|
| free | a worker has dialled and has a place | a verification is given to it |
| full | as many run as it has places | one of them is answered |
| leaving | it has said that it will go | its last answer, or its end |

A worker serves the functions of its team, which its token names, and no other's. Where a connection
ends, what ran there has ended without an answer (``WorkerEnded``) and is tried again elsewhere.
Next step: ``remote`` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from rose_core.unreadable import UNREADABLE
from rose_rewards import metrics
from rose_rewards.errors import WorkerEnded, WorkerKilled
from rose_rewards.functions import RewardFunction
from rose_rewards.pool import Machines

LOG = logging.getLogger(__name__)
# A pod whose node is gone says nothing; this often it is asked whether it is there.
BEAT_SECONDS = 5.0
# Beside the time limit, which the worker keeps: starting a process and importing a library.
_START_SECONDS = 60.0
MESSAGE_BYTES = 8 << 20
"""Of the largest message, either way."""


class Verification(msgspec.Struct, frozen=True):
    """What a worker is given; ``body`` is the object that the function takes.

    Attributes:
        stop: no verification: nobody waits for that of this number any more.
    """

    number: int
    function: str
    body: msgspec.Raw
    seconds: float
    stop: bool = False


class VerificationResult(msgspec.Struct, frozen=True):
    """What came of it.

    Attributes:
        said: what the function returned, with the ``seconds`` that it took.
        ended: instead, why there is no answer.
        killed: its worker was killed.
        overran: instead, it took longer than it may.
        leaving: no answer: the worker takes nothing more.
    """

    number: int = 0
    said: Any = None
    seconds: float = 0.0
    ended: str = ""
    killed: bool = False
    overran: bool = False
    leaving: bool = False


@dataclass(eq=False)
class _Link:
    """A worker that has dialled."""

    team: str
    places: int
    socket: web.WebSocketResponse
    running: dict[int, asyncio.Future[VerificationResult]] = field(default_factory=dict)
    leaving: bool = False

    @property
    def free(self) -> int:
        return 0 if self.leaving else self.places - len(self.running)


@dataclass
class LinkedWorkers:
    """Every worker that has dialled; a pool, as ``rose_rewards.pool.WorkerPool`` is one.

    Args:
        functions: the platform's list.

    Attributes:
        on_room: called when there may be room for one more.
    """

    functions: Mapping[str, RewardFunction]
    on_room: Callable[[], None] = lambda: None
    _links: list[_Link] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def places(self, team: str) -> int:
        """Verifications of a team that may run at a time."""
        return sum(one.places for one in self._links if one.team == team and not one.leaving)

    def room(self, name: str, verifying: Counter[str]) -> bool:
        """Whether one more of this function may begin; ``verifying`` counts by team."""
        return self._room(self.functions[name].team, verifying) > 0

    def idle(self, team: str, verifying: Counter[str]) -> int:
        """How many of the team's workers have nothing to do, at any of their places."""
        mine = [one for one in self._links if one.team == team]
        on_their_way = verifying[team] - sum(len(one.running) for one in mine)
        return max(0, sum(one.free == one.places for one in mine) - on_their_way)

    def _room(self, team: str, verifying: Counter[str]) -> int:
        """How many of the team's verifications may begin."""
        # Those that leave take nothing more, and what they finish holds no place of the others.
        held = sum(
            len(one.running) if one.leaving else one.places
            for one in self._links
            if one.team == team
        )
        return max(0, held - verifying[team])

    def leaves(self, machine: object) -> bool:
        """See ``gateway.Pool``."""
        return isinstance(machine, _Link) and machine.leaving

    async def verify(
        self, name: str, body: bytes, seconds: float, machines: Machines
    ) -> tuple[object, float]:
        """See ``gateway.Pool``; on a worker of the function's team, when one is free."""
        link = await self._free(self.functions[name].team, machines.apart)
        machines.mine = link
        machines.apart.add(link)
        number = next(self._numbers)
        answer: asyncio.Future[VerificationResult] = asyncio.get_running_loop().create_future()
        link.running[number] = answer
        began = time.monotonic()
        try:
            given = Verification(number, name, msgspec.Raw(body), seconds)
            try:
                await link.socket.send_bytes(msgspec.json.encode(given))
                async with asyncio.timeout(seconds + _START_SECONDS):
                    result = await answer
            except (ConnectionError, TimeoutError) as error:
                # It keeps no promise: whatever it is doing, nobody waits for it any more.
                metrics.ENDED.labels(name).inc()
                await link.socket.close()
                message = "the worker's pod was lost"
                raise WorkerKilled(message) from error
            except asyncio.CancelledError:
                # Its place is another's from now on: what it is still doing must end there.
                stopped = Verification(number, name, msgspec.Raw(b"null"), 0.0, stop=True)
                with contextlib.suppress(ConnectionError):
                    await link.socket.send_bytes(msgspec.json.encode(stopped))
                raise
        finally:
            link.running.pop(number, None)
            # Not on_room: the gateway counts this one until it has heard, and then looks itself.
            self._changed.set()
        if result.ended:
            raise WorkerKilled(result.ended) if result.killed else WorkerEnded(result.ended)
        if result.overran:
            raise TimeoutError
        # As the worker reports, within what can be: a team's code must not draw others' figures.
        most = min(seconds, time.monotonic() - began)
        return result.said, min(max(result.seconds, 0.0), most)

    async def _free(self, team: str, apart: set[object]) -> _Link:
        """The link with most room, those ``apart`` last; waits for one."""
        while True:
            found = [one for one in self._links if one.team == team and one.free > 0]
            if found:
                return max(found, key=lambda one: (one not in apart, one.free))
            self._changed.clear()
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self.on_room()

    async def serve(self, request: web.Request, team: str) -> web.WebSocketResponse:
        """A worker has dialled; until its connection ends.

        Args:
            request: with ``places``, how many verifications it runs at a time.
            team: whose it is, by its token.
        """
        places = request.query.get("places", "1")
        if not places.isascii() or not places.isdigit() or not 1 <= int(places) <= 1024:
            raise web.HTTPBadRequest(text=f"places={places}: expected 1 to 1024")
        socket = web.WebSocketResponse(heartbeat=BEAT_SECONDS, max_msg_size=MESSAGE_BYTES)
        await socket.prepare(request)
        link = _Link(team, int(places), socket)
        self._links.append(link)
        metrics.WORKERS.labels(team).set(self.places(team))
        self._notify()
        try:
            async for message in socket:
                if message.type is WSMsgType.BINARY and not self._receive(link, message.data):
                    break
        finally:
            self._links.remove(link)
            metrics.WORKERS.labels(team).set(self.places(team))
            for answer in link.running.values():
                if not answer.done():
                    answer.set_exception(ConnectionError())
            self._notify()
        await socket.close()
        return socket

    def _receive(self, link: _Link, data: bytes) -> bool:
        """Whether it can be understood; which verification the rest belongs to, nobody knows."""
        try:
            result = msgspec.json.decode(data, type=VerificationResult)
        except UNREADABLE as error:
            LOG.warning("a worker of %s wrote no answer and is let go: %s", link.team, error)
            return False
        if result.leaving:
            link.leaving = True
            metrics.WORKERS.labels(link.team).set(self.places(link.team))
            return True
        answer = link.running.get(result.number)
        if answer is not None and not answer.done():
            answer.set_result(result)
        return True

    async def close(self) -> None:
        """Let every worker go."""
        for link in list(self._links):
            with contextlib.suppress(ConnectionError):
                await link.socket.close()
