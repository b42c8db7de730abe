"""Progress as JSON lines, one record per event, for people and for the demo's live table.

| event | fields beside ``event`` and ``seconds`` (since the start) |
|---|---|
| start | settings of the run |
| step | step, reward, version, lag, staleness, tokens, turns, ratio_mean, truncated_share, ... |
| | and of those trained on: trained (how many), correct, kept (their tokens) |
| round | with ``--rounds``: kind, groups; episodes trained, cut, stale, put_off; inclusion |
| publish | step, version, changed_share, bytes |
| evaluation | ``evaluate.Evaluation``; ``final`` on the last |
| mismatch | engine against trainer log-probs of one version |
| end | reason, steps, tokens, counters |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import msgspec


class Progress:
    """Appends records to ``OUT/progress.jsonl`` and, when asked, prints them."""

    def __init__(
        self, folder: Path, *, echo: TextIO | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "progress.jsonl"
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._echo = echo
        self._clock = clock
        self._start = clock()

    def write(self, event: str, **fields: object) -> None:
        """Append one record."""
        record = {"event": event, "seconds": round(self._clock() - self._start, 3), **fields}
        line = msgspec.json.encode(record).decode() + "\n"
        self._file.write(line)
        if self._echo is not None:
            self._echo.write(line)
            self._echo.flush()

    def __enter__(self) -> Self:
        """Use as a context manager; the file is closed at the end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
