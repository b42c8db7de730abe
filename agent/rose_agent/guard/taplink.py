"""The guard's end of ``tap.sock``: says what to watch, feeds events to the replicas' books.

A lost connection makes every replica unknown at once; the link connects again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Protocol

from rose_agent.tap import frames
from rose_agent.tap.frames import Unwatch, Watch
from rose_core.telemetry.events import TapEvent

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.2


class Listener(Protocol):
    """Who takes the events."""

    def on_tap(self, events: list[TapEvent], now_ns: int) -> None:
        """Events, in order; called at once."""

    def on_tap_lost(self, now_ns: int) -> None:
        """The tap is gone."""


class TapLink:
    """Connection to the tap.

    Args:
        path: ``tap.sock``.
        listener: takes the events.
    """

    def __init__(self, path: Path, listener: Listener) -> None:
        self._path = path
        self._listener = listener
        self._watches: dict[str, Watch] = {}
        self._writer: asyncio.StreamWriter | None = None

    def watch(self, wanted: dict[str, Watch]) -> None:
        """Follow exactly these replicas."""
        if wanted == self._watches:
            return
        commands: list[frames.Command] = [
            w for name, w in wanted.items() if self._watches.get(name) != w
        ]
        commands += [Unwatch(name) for name in self._watches if name not in wanted]
        self._watches = dict(wanted)
        self._send(commands)

    def resync(self) -> None:
        """Connect again and hear the requests under way from the start."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def run(self) -> None:
        """Stay connected until cancelled."""
        while True:
            try:
                await self._session()
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                _log.debug("tap: %s", error)
            self._writer = None
            self._listener.on_tap_lost(time.monotonic_ns())
            await asyncio.sleep(_RETRY_SECONDS)

    async def _session(self) -> None:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        self._writer = writer
        _log.info("connected to the tap at %s", self._path)
        try:
            self._send(list(self._watches.values()))
            while True:
                events = await frames.read(reader, frames.events)
                self._listener.on_tap(events, time.monotonic_ns())
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _send(self, commands: list[frames.Command]) -> None:
        if self._writer is not None and commands:
            self._writer.write(frames.pack(commands))
