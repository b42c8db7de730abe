"""The flight recorder: what the guard saw, decided and did, in a bounded ring in memory.

Entries are (CLOCK_MONOTONIC ns, track, what, details); a track is a pod or a slot.

| what | on | tells |
|---|---|---|
| ``arrived``, ``predicted``, ``finished`` | pod | a request; its predicted cost; its outcome |
| ``gate`` | slot | position, reason, duty, and the slack it was decided on |
| ``closed``, ``stopped`` | slot | how long after an arrival |
| ``engine`` | slot | its state as the host tells it, with the reason of a failure |
| ``order``, ``rung`` | slot | what was ordered, how far the engine was taken back |
| ``breaker``, ``serving-exit``, ``serving-restart`` | pod | |
| ``refused``, ``unsaved`` | ``sync`` | a deposed planner's answer; ``guard.json`` not written |

``BlackBox`` keeps a dump after a breach. Next step: ``perfetto`` and ``timeline`` show one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from rose_agent.guard import metrics

Entry = tuple[int, str, str, dict[str, Any]]
KEPT = 20_000

_log = logging.getLogger(__name__)
_BEFORE_NS = 30_000_000_000
_AFTER_SECONDS = 2.0
_REST_NS = 60_000_000_000
KEPT_DUMPS = 8


class Recorder:
    """A ring of the last entries."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ring: deque[Entry] = deque(maxlen=kept)
        # Lets a reader put the entries beside other clocks.
        self.wall_offset_ns = time.time_ns() - time.monotonic_ns()

    def note(self, time_ns: int, track: str, what: str, **details: Any) -> None:  # noqa: ANN401  # JSON
        """Add one entry."""
        self._ring.append((time_ns, track, what, details))

    def entries(self) -> list[Entry]:
        """Everything kept, oldest first."""
        return list(self._ring)

    def dump(self, since_ns: int = 0) -> dict[str, Any]:
        """The JSON form of what was noted from ``since_ns`` on."""
        return {
            "clock": "CLOCK_MONOTONIC nanoseconds",
            "wallOffsetNs": self.wall_offset_ns,
            "entries": [
                {"t": t, "track": track, "what": what, **details}
                for t, track, what, details in self._ring
                if t >= since_ns
            ],
        }


class BlackBox:
    """Keeps dumps of the recorder, as files of the run directory.

    A breach is a request over its SLO that had met an open gate, or a breaker that opened. The
    entries of the last half minute and of the two seconds after it are written to ``D/flight/``. At
    most one dump a minute is written, and the newest eight stay. Everything slow happens in a
    thread: the guard's loop must close gates meanwhile. ``rose agent trace --file`` shows a dump.

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
    for old in dumps(folder)[:-KEPT_DUMPS]:
        old.unlink(missing_ok=True)
    return path


def dumps(folder: Path) -> list[Path]:
    """The dumps that are kept, oldest first."""
    return sorted(folder.glob("[0-9]*.json"))
