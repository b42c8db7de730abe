"""Keeps what the flight recorder held when something went wrong, as files of the run directory.

A breach is a request over its SLO that had met an open gate, or a breaker that opened. The entries
of the last half minute and of the two seconds after it are written to ``D/flight/``; at most one
dump a minute, the newest eight stay. Everything slow happens in a thread: the guard's loop must
close gates meanwhile.

Next step: ``recorder`` makes the dumps, ``rose agent trace --file`` shows one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import msgspec

from rose_agent.guard import metrics
from rose_agent.guard.flight.recorder import Recorder

_log = logging.getLogger(__name__)
_BEFORE_NS = 30_000_000_000
_AFTER_SECONDS = 2.0
_REST_NS = 60_000_000_000
KEPT = 8


class BlackBox:
    """Writes dumps.

    Args:
        folder: where to; made when the first dump is written.
        recorder: what is dumped.
    """

    def __init__(
        self, folder: Path, recorder: Recorder, after_seconds: float = _AFTER_SECONDS
    ) -> None:
        self._folder, self._recorder, self._after = folder, recorder, after_seconds
        self._written_ns = -_REST_NS
        self._task: asyncio.Task[None] | None = None

    def breach(self, reason: str) -> None:
        """Keep what led here, unless that was done within the last minute."""
        now_ns = time.monotonic_ns()
        if now_ns - self._written_ns < _REST_NS:
            metrics.BREACH_DUMPS.labels("rested").inc()
            return
        self._written_ns = now_ns
        self._task = asyncio.create_task(self._write(reason, now_ns))

    async def settle(self) -> None:
        """Wait for a dump that is being written."""
        if self._task is not None:
            await self._task

    async def _write(self, reason: str, now_ns: int) -> None:
        await asyncio.sleep(self._after)
        dump = self._recorder.dump(since_ns=now_ns - _BEFORE_NS)
        dump["breach"] = {"reason": reason, "t": now_ns}
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        try:
            path = await asyncio.to_thread(_store, self._folder, f"{stamp}-{reason}.json", dump)
        except OSError as error:
            metrics.BREACH_DUMPS.labels("failed").inc()
            _log.warning("no dump of the flight recorder: %s", error)
            return
        metrics.BREACH_DUMPS.labels("written").inc()
        _log.warning("%s: the flight recorder was dumped to %s", reason, path)


def _store(folder: Path, name: str, dump: object) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    draft, path = folder / f".{name}", folder / name
    draft.touch(mode=0o600)
    draft.write_bytes(msgspec.json.encode(dump))
    draft.replace(path)
    for old in dumps(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def dumps(folder: Path) -> list[Path]:
    """The dumps that are kept, oldest first."""
    return sorted(folder.glob("[0-9]*.json"))
