"""Speak to an engine that may stand still at any moment.

A stopped engine answers nothing, and that is no failure: deadlines here count only time in which
the permit was open. One connection per engine process is kept, because a stopped engine accepts
none. Next step: ``follower``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection
from pathlib import Path
from typing import TypeVar

from rose_agent.weightsync.decide import Engine
from rose_engines.errors import CommitRefused, EngineUnavailable
from rose_engines.node.pace import rest_of
from rose_engines.node.permit import BadPermit, Permit
from rose_engines.node.rundir import SlotDir
from rose_engines.weights.calls import Attested, Committed, Staged, Status
from rose_engines.weights.control import ControlClient

T = TypeVar("T")

_TICK_SECONDS = 0.05
# Open time that one answer may take.
ANSWER_SECONDS = 30.0
STAGE_SECONDS = 600.0
COMMIT_SECONDS = 5.0


class Gate:
    """Whether a slot's permit is open; a permit that is missing is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._permit: Permit | None = None
        self._inode = 0

    def is_open(self) -> bool:
        """Look now."""
        if self._permit is not None and self._permit.is_open(time.monotonic_ns()):
            return True
        # Closed, or not there, or replaced by another file: look at what lies there now.
        try:
            inode = self._path.stat().st_ino
            if self._permit is None or inode != self._inode:
                self.close()
                self._permit = Permit.attach(self._path, writable=False)
                self._inode = inode
        except (OSError, BadPermit):
            return False
        return self._permit.is_open(time.monotonic_ns())

    async def wait_open(self) -> None:
        """Wait until it is open."""
        # The permit is memory that another process writes: nothing notifies this one.
        while not self.is_open():  # noqa: ASYNC110
            await asyncio.sleep(_TICK_SECONDS)

    async def pause_after(self, worked_seconds: float) -> None:
        """After a piece of work beside serving, which is busy while the permit is closed."""
        left = rest_of(worked_seconds)
        while left > 0 and not self.is_open():
            await asyncio.sleep(min(left, _TICK_SECONDS))
            left -= _TICK_SECONDS

    def close(self) -> None:
        """Unmap the permit."""
        if self._permit is not None:
            self._permit.detach()
            self._permit = None

    async def patiently(self, answer: Awaitable[T], seconds: float) -> T:
        """Await an answer for ``seconds`` of open time.

        Raises:
            EngineUnavailable: none came in that time.
        """
        task = asyncio.ensure_future(answer)
        left = seconds
        try:
            while left > 0:
                done, _ = await asyncio.wait({task}, timeout=_TICK_SECONDS)
                if done:
                    return task.result()
                left -= _TICK_SECONDS if self.is_open() else 0.0
        finally:
            task.cancel()
        message = f"the engine's plugin did not answer in {seconds:.0f} s of open gate"
        raise EngineUnavailable(message)


class Plugin:
    """The plugin of one engine process.

    Args:
        slot: where its socket and its permit are.
        run: whose adapter it is about, where the engine holds those of several.
        first: requests that name no run are its.
    """

    def __init__(self, slot: SlotDir, run: str = "", *, first: bool) -> None:
        self.gate = Gate(slot.permit)
        self._run, self._first = run, first
        self._bound = not run
        self._socket = slot.plugin_socket
        self._client: ControlClient | None = None

    async def read_engine(self) -> Engine:
        """What is live; a run without a slot gets one.

        Raises:
            EngineUnavailable: the engine is starting, hangs or is gone, or has no slot left.
        """
        client = await self._connect()
        if self._bound:
            status = await self._status(client)
        else:  # also where it has a slot: that may be about to be taken away
            status = await self._bind(client)
            self._bound = True
        return Engine(status.version, status.digest, status.phase == "Broken", status.codecs)

    async def _status(self, client: ControlClient) -> Status:
        try:
            return await self._ask(client.status(), ANSWER_SECONDS)
        except CommitRefused as refused:
            if refused.reason != "UnknownRun":
                raise EngineUnavailable(str(refused)) from refused
            return await self._bind(client)

    async def _bind(self, client: ControlClient) -> Status:
        try:
            return await self._ask(client.bind(self._run, first=self._first), ANSWER_SECONDS)
        except CommitRefused as full:  # of one that goes, whose last request is still to end
            raise EngineUnavailable(full.message) from full

    async def unbind_others(self, runs: Collection[str]) -> bool:
        """Take the adapters of all other runs away.

        Returns:
            False when a request of theirs is still to end: ask again.

        Raises:
            EngineUnavailable: the engine is starting, hangs or is gone.
        """
        client = await self._connect()
        try:
            held = (await self._ask(client.status(), ANSWER_SECONDS)).runs
            for run in set(held) - set(runs):
                await self.gate.wait_open()
                await self._ask(client.unbind(run, COMMIT_SECONDS), 4 * COMMIT_SECONDS)
        except CommitRefused:
            return False
        return True

    async def stage(self, bundle: Path) -> Staged:
        """Stage beside the serving engine.

        Raises:
            CommitRefused, EngineUnavailable: as ``ControlClient.stage``.
        """
        client = await self._connect()
        return await self._ask(client.stage(bundle), STAGE_SECONDS)

    async def commit(self, version: str) -> Committed:
        """Commit at the next iteration boundary under an open permit.

        Raises:
            CommitRefused, EngineUnavailable: as ``ControlClient.commit``.
        """
        client = await self._connect()
        await self.gate.wait_open()
        return await self._ask(client.commit(version, COMMIT_SECONDS), 4 * COMMIT_SECONDS)

    async def attest(self) -> Attested:
        """Recompute the digest of the live weights.

        Raises:
            EngineUnavailable: as ``ControlClient.attest``.
        """
        client = await self._connect()
        return await self._ask(client.attest(), STAGE_SECONDS)

    async def close(self) -> None:
        """Hang up; the next call connects again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _connect(self) -> ControlClient:
        if self._client is None:
            self._client = await ControlClient.connect(self._socket, self._run)
        return self._client

    async def _ask(self, answer: Awaitable[T], seconds: float) -> T:
        try:
            return await self.gate.patiently(answer, seconds)
        except (EngineUnavailable, asyncio.CancelledError):
            # An answer may still be under way: it must not be taken for the next one's.
            await self.close()
            raise
