"""When a refused write is tried again: later each time, at once when something has changed.

Exponential back-off with jitter ("equal jitter": at least half of each wait is kept).

A refusal concerns one object. Trying the same again at every pass would load the API server and
fill the log for as long as the cause stands, so each refusal doubles the wait; another content of
the write or another version of the object is another attempt and waits for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_FIRST_SECONDS = 1.0  # about a pass of the planner later
_MOST_SECONDS = 300.0  # a person who has removed the cause should not wait longer for it
# Waits are spread over this share, so that a thousand refused objects do not come back together.
_JITTER = 0.5


class ExponentialBackoff:
    """A wait that doubles with every failure in a row.

    Args:
        first_seconds, most_seconds: bounds of the wait before its jitter.
        random_unit: numbers in [0, 1), for the jitter.
    """

    def __init__(
        self,
        first_seconds: float,
        most_seconds: float,
        random_unit: Callable[[], float] = random.random,
    ) -> None:
        self._first, self._most, self._random = first_seconds, most_seconds, random_unit
        self._failures = 0

    def next(self) -> float:
        """Seconds to wait after another failure."""
        longest = min(self._most, self._first * 2.0**self._failures)
        self._failures = min(self._failures + 1, 64)
        return longest * (1 - _JITTER * self._random())

    def reset(self) -> None:
        """Begin again with the first wait, after a success."""
        self._failures = 0


@dataclass
class _Wait:
    attempt: str
    growing: ExponentialBackoff
    until: float = 0.0


class KeyedBackoff:
    """Waits by key.

    Args:
        random_unit: numbers in [0, 1), for the jitter.
    """

    def __init__(self, random_unit: Callable[[], float] = random.random) -> None:
        self._random = random_unit
        self._waits: dict[str, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def allows(self, key: str, attempt: str, now: float) -> bool:
        """Whether an attempt (content, and the version it is for) may be made now."""
        wait = self._waits.get(key)
        return wait is None or wait.attempt != attempt or now >= wait.until

    def note_failure(self, key: str, attempt: str, now: float) -> float:
        """The attempt was refused.

        Returns:
            Seconds until the same attempt is made again.
        """
        wait = self._waits.get(key)
        if wait is None or wait.attempt != attempt:
            wait = _Wait(attempt, ExponentialBackoff(_FIRST_SECONDS, _MOST_SECONDS, self._random))
            self._waits[key] = wait
        seconds = wait.growing.next()
        wait.until = now + seconds
        return seconds

    def note_success(self, key: str) -> None:
        """Forget the object's refusals: it takes writes again."""
        self._waits.pop(key, None)

    def keep(self, keep: Callable[[str], bool]) -> None:
        """Forget the keys that ``keep`` does not want."""
        self._waits = {key: wait for key, wait in self._waits.items() if keep(key)}
