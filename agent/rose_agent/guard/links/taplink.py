"""The guard's end of ``tap.sock``: says what to watch and hands on what the tap tells.

Events are handed on inside the call that reads them, so that an arrival does not wait for the
loop's next turn. A lost connection makes every replica unknown at once; the link connects again by
itself. Next step: ``loop`` takes the events; ``rose_agent.tap.frames`` has the messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

from rose_agent.tap import frames
from rose_agent.tap.frames import TapWatch, Unwatch
from rose_core.identity import PodUid
from rose_core.telemetry.events import TapEvent

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.2


class Listener(Protocol):
    """Takes the events: the guard's loop."""

    def on_tap(self, events: list[TapEvent], now_ns: int) -> None:
        """Events, in order; called at once."""

    def on_tap_lost(self, now_ns: int) -> None:
        """The tap is gone."""


class _Session(asyncio.Protocol):
    """One connection; ``ended`` is set when it is over."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._splitter = frames.Splitter(frames.events)
        self._transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The tap listens now."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # for mypy: a stream
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Frames that came together are one step."""
        try:
            found = self._splitter.feed(data)
        except ValueError as error:
            _log.warning("tap: %s", error)
            self.abort()
            return
        if found:
            events = found[0] if len(found) == 1 else [e for frame in found for e in frame]
            self._listener.on_tap(events, time.monotonic_ns())

    def connection_lost(self, _error: Exception | None) -> None:
        """The connection has ended, for whatever reason."""
        if not self.ended.done():
            self.ended.set_result(None)

    def send(self, commands: list[frames.Command]) -> None:
        """Say what to follow."""
        if self._transport is not None and commands:
            self._transport.write(frames.pack(commands))

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()


class TapLink:
    """Connection to the tap.

    Args:
        path: ``tap.sock``.
        listener: takes the events.
    """

    def __init__(self, path: Path, listener: Listener) -> None:
        self._path = path
        self._listener = listener
        self._watches: dict[PodUid, TapWatch] = {}
        self._session: _Session | None = None

    def watch(self, wanted: dict[PodUid, TapWatch]) -> None:
        """Follow exactly these replicas."""
        if wanted == self._watches:
            return
        commands: list[frames.Command] = [
            w for name, w in wanted.items() if self._watches.get(name) != w
        ]
        commands += [Unwatch(name) for name in self._watches if name not in wanted]
        self._watches = dict(wanted)
        if self._session is not None:
            self._session.send(commands)

    def resync(self) -> None:
        """Connect again and hear the requests under way from the start."""
        if self._session is not None:
            self._session.abort()

    async def run(self) -> None:
        """Stay connected until cancelled."""
        while True:
            try:
                await self._listen()
            except OSError as error:
                _log.debug("tap: %s", error)
            self._session = None
            self._listener.on_tap_lost(time.monotonic_ns())
            await asyncio.sleep(_RETRY_SECONDS)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        _, session = await loop.create_unix_connection(
            lambda: _Session(self._listener), str(self._path)
        )
        self._session = session
        _log.info("connected to the tap at %s", self._path)
        try:
            session.send(list(self._watches.values()))
            await session.ended
        finally:
            session.abort()
