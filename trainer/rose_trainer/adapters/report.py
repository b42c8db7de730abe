"""Says to the router which trajectories a step was trained on, and which have ended.

The router sees turns, and cannot see what becomes of them; its bias meter stays empty until the
trainer says so. A report must never cost a step: it is tried a bounded number of times, a failure
is logged, and nothing is raised. A report that is lost leaves its trajectories *lost* in the meter,
which widens its intervals; none is counted as trained that was not reported so.

``report`` and ``report_async`` say what became of trajectories, ``finish_async`` that one is over.
Next: ``docs/placement.md``, the bias meter.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import math
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError

import aiohttp

__all__ = ["finish_async", "report", "report_async"]

LOG = logging.getLogger(__name__)

ATTEMPTS = 3
ATTEMPT_SECONDS = 5.0
"""With the pauses 16 s in all, which is the most that a router that is away delays a step by."""
_PAUSE_SECONDS = 0.5
_KEYS_AT_ONCE = 4096
"""Keys of one request: with keys of 512 characters it stays far below the router's largest body."""
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_NOT_SENT = (aiohttp.ClientError, http.client.HTTPException, OSError, ValueError)

UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What reading a trainer's batch raises where a release lays it out anew; the step goes on."""

Outcomes = Mapping[str, float | None]
"""Rewards by session key; ``None`` = the reward is not known."""


def report(
    url: str,
    trained: Outcomes,
    dropped: Outcomes | None = None,
    *,
    withdrawn: Sequence[str] = (),
    correct: Collection[str] | None = None,
    reasoning: Mapping[str, int] | None = None,
    token: str = "",
) -> bool:
    """Say what became of trajectories; blocks for 16 s per 4096 keys at most, and never raises.

    Args:
        url: the lease's.
        trained: trajectories of which a step was taken.
        dropped: trajectories that were too old, or filtered out.
        withdrawn: keys of trajectories that were never meant for a step, such as evaluations.
        correct: keys of those trained on whose answer is correct; ``None`` = where the reward is at
            least 1.
        reasoning: by key, tokens of those trained on before their answers; ``None`` = the turns are
            answers.
        token: bearer token of the lease's callers.

    Returns:
        Whether the router has taken all of it.
    """
    target = f"{url.rstrip('/')}/trajectories"
    taken = True
    for body in _bodies(trained, dropped or {}, withdrawn, correct, reasoning or {}):
        for attempt in range(ATTEMPTS):
            time.sleep(_PAUSE_SECONDS if attempt else 0.0)
            answer = _asked(target, body, token)
            if not answer.again:
                break
        taken = _noted(target, answer) and taken
    return taken


async def report_async(
    url: str,
    trained: Outcomes,
    dropped: Outcomes | None = None,
    *,
    withdrawn: Sequence[str] = (),
    correct: Collection[str] | None = None,
    reasoning: Mapping[str, int] | None = None,
    token: str = "",
) -> bool:
    """``report`` for trainers whose step runs in an event loop."""
    target = f"{url.rstrip('/')}/trajectories"
    taken = True
    for body in _bodies(trained, dropped or {}, withdrawn, correct, reasoning or {}):
        taken = await _posted(target, body, {}, token) and taken
    return taken


async def finish_async(url: str, key: str, token: str = "") -> bool:
    """Say that no more turns of a trajectory will come; siblings learn from its length at once."""
    target = f"{url.rstrip('/')}/finish_session"
    return await _posted(target, {}, {"session_id": key}, token)


@dataclass(frozen=True)
class _Answer:
    """How one attempt ended.

    Attributes:
        unknown: keys that the router does not know.
        why: what went wrong; empty = it was taken.
        again: another attempt may go better.
    """

    unknown: tuple[str, ...] = ()
    why: str = ""
    again: bool = False


def _asked(target: str, body: Mapping[str, Any], token: str) -> _Answer:
    headers = {"Content-Type": "application/json", **_bearer(token)}
    try:
        request = urllib.request.Request(target, json.dumps(body).encode(), headers)  # noqa: S310  # the lease's URL
        with urllib.request.urlopen(request, timeout=ATTEMPT_SECONDS) as reply:  # noqa: S310
            return _read(reply.status, reply.read())
    except HTTPError as error:
        with error:
            return _read(error.code, error.read())
    except _NOT_SENT as error:
        return _Answer(why=f"{type(error).__name__}: {error}", again=True)


async def _posted(
    target: str, body: Mapping[str, Any], query: Mapping[str, str], token: str
) -> bool:
    patience = aiohttp.ClientTimeout(total=ATTEMPT_SECONDS)
    for attempt in range(ATTEMPTS):
        await asyncio.sleep(_PAUSE_SECONDS if attempt else 0.0)
        try:
            async with (
                aiohttp.ClientSession(headers=_bearer(token), timeout=patience) as session,
                session.post(target, json=body, params=query) as reply,
            ):
                answer = _read(reply.status, await reply.read())
        except _NOT_SENT as error:
            answer = _Answer(why=f"{type(error).__name__}: {error}", again=True)
        if not answer.again:
            break
    return _noted(target, answer)


def _read(status: int, raw: bytes) -> _Answer:
    if status != HTTPStatus.OK:
        why = f"HTTP {status}: {raw[:500].decode(errors='replace')}"
        return _Answer(why=why, again=status in _AGAIN)
    answer = json.loads(raw or b"{}")
    unknown = answer.get("unknown") if isinstance(answer, dict) else None
    return _Answer(unknown=tuple(unknown or ()))


def _bodies(
    trained: Outcomes,
    dropped: Outcomes,
    withdrawn: Sequence[str],
    correct: Collection[str] | None,
    reasoning: Mapping[str, int],
) -> Iterator[dict[str, Any]]:
    fates = [(key, "trained", reward) for key, reward in trained.items()]
    fates += [(key, "dropped", reward) for key, reward in dropped.items()]
    fates += [(key, "withdrawn", None) for key in withdrawn]
    for first in range(0, len(fates), _KEYS_AT_ONCE):
        body: dict[str, Any] = {"trained": [], "dropped": [], "withdrawn": [], "rewards": {}}
        for key, fate, reward in fates[first : first + _KEYS_AT_ONCE]:
            body[fate].append(key)
            if reward is not None and math.isfinite(reward):  # JSON has no NaN; unknown stays so
                body["rewards"][key] = float(reward)
        if correct is not None:
            body["correct"] = [key for key in body["trained"] if key in correct]
        if reasoning:
            body["reasoning"] = {k: reasoning[k] for k in body["trained"] if k in reasoning}
        yield body


def _noted(target: str, answer: _Answer) -> bool:
    if answer.why:
        LOG.warning("%s was not reached, what was said is lost: %s", target, answer.why)
    elif answer.unknown:
        LOG.warning(
            "%s does not know %d keys, such as %r: are they the session keys of the turns?",
            target,
            len(answer.unknown),
            answer.unknown[0],
        )
    return not answer.why


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}
