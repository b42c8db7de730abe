"""Groups and ends of trajectories, inferred where the trainer names neither.

Some trainers send a prompt and nothing else. What they would say can be seen:

| seen | inferred |
|---|---|
| trajectories of a run that begin with equal prompts, soon after each other | they are a group |
| the same prompt again after a pause, or some publishes later | another group: the next epoch |
| idle for much longer than this lease's trajectories pause between turns | it is over |
| idle for longer than most pause, and a publish came since its last turn | it is over |

An inference may be wrong, and is never mixed with what was said: names of inferred groups begin
with ``~``, ends are counted apart, and a trajectory that comes back after its inferred end is not
over and counts as a mistake. Next: ``prospects`` asks here; the router says ``inferred``.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

MARK = "~"
"""How the name of an inferred group begins; no header of a caller may."""

SAME_GROUP_SECONDS = 120.0
"""Members of a group are sent together, but wait for a trainer's limit of requests in flight."""

LEAST_IDLE_SECONDS = 60.0
"""Below this nothing is over for being idle alone: tools that run for half a minute are common."""

LEAST_IDLE_AFTER_PUBLISH_SECONDS = 5.0
"""The same once a publish came: more than an answer's way to the trainer and back."""

_FAR = 3.0  # times the pause that 99 in 100 turns keep below
_SOON = 1.5  # the same after a publish
_PAUSES = 512
_MOST_PROMPTS = 16384


class Idle(msgspec.Struct, frozen=True, gc=False):
    """A trajectory without a turn in flight.

    Attributes:
        since: when its last turn ended, seconds.
        published: a publish came after that.
    """

    since: float
    published: bool


def is_over(idle: Idle, usual_pause: float | None, now: float) -> bool:
    """Whether the trajectory can be taken for over.

    Args:
        idle: what is known of it.
        usual_pause: what 99 of 100 pauses between turns keep below; ``None`` = no pause was seen.
        now: seconds.
    """
    pause = usual_pause or 0.0
    if idle.published:
        return now - idle.since >= max(LEAST_IDLE_AFTER_PUBLISH_SECONDS, _SOON * pause)
    return now - idle.since >= max(LEAST_IDLE_SECONDS, _FAR * pause)


class Pauses:
    """How long trajectories of this lease pause between two turns."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_PAUSES)
        self._usual: float | None = None

    def record(self, seconds: float) -> None:
        """Note how long a trajectory was away before it came back."""
        self._last.append(seconds)
        self._usual = None

    def usual(self) -> float | None:
        """What 99 of 100 keep below; ``None`` before any."""
        if self._usual is None and self._last:
            ordered = sorted(self._last)
            self._usual = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return self._usual


_Key = tuple[str, str, int]
"""Job, run and hash of a prompt."""


@dataclass(slots=True)
class _Recent:
    name: str
    last: float
    publishes: int


class InferredGroups:
    """Groups by equal prompts.

    Args:
        most: prompts remembered.
    """

    def __init__(self, most: int = _MOST_PROMPTS) -> None:
        self._most = most
        self._recent: OrderedDict[_Key, _Recent] = OrderedDict()
        self._named = 0
        self.joined = 0

    def of(  # each says whether two prompts are of one group
        self,
        prompt: Sequence[int],
        job: str,
        publishes: int,
        now: float,
        most: int,
        *,
        run: str = "",
    ) -> str:
        """Name of the group that a trajectory with this prompt begins in.

        Args:
            prompt: token ids of its first turn.
            job: whose it is; jobs have groups of their own.
            publishes: how many of its run have been seen.
            now: seconds.
            most: publishes after which equal prompts are of another epoch.
            run: whose versions answer it; runs have groups of their own.
        """
        # Of a tuple of numbers it is the same everywhere; a million ids take 4 ms, their bytes 60.
        key = job, run, hash(tuple(prompt))
        known = self._recent.pop(key, None)
        fits = known is not None and (
            now - known.last < SAME_GROUP_SECONDS and publishes - known.publishes <= most
        )
        if known is None or not fits:
            self._named += 1
            known = _Recent(f"{MARK}{_digest(key)}.{self._named}", now, publishes)
        else:
            self.joined += 1
        known.last = now
        self._recent[key] = known
        if len(self._recent) > self._most:
            self._recent.popitem(last=False)
        return known.name


def _digest(key: _Key) -> str:
    """A name for job, run and prompt that shows neither of them."""
    job, run, prompt = key
    digest = hashlib.blake2b(f"{job}\0{run}\0".encode(), digest_size=12)
    digest.update(prompt.to_bytes(8, signed=True))
    return digest.hexdigest()
