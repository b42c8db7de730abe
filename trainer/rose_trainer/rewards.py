"""Asks ``rose rewards`` for the reward of a trajectory until there is an answer.

Asking again under the same trajectory gives the same result and computes nothing twice, so whoever
has no answer asks again. None becomes a zero that nobody has computed.

    asking --scored, masked--> result
    asking --lost--> asking   (it is tried anew) --lost ``tries`` times--> result
    asking --408, 409, 429, 5xx, nothing--> waiting --Retry-After--> asking
    asking --400, 401, 413 ..., no URL of HTTP--> ``RewardRefused``
    waiting, asking --seconds over--> ``NoReward``

``docs/rewards.md`` says what the results mean.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rose_core.rewards.results import Lost, Masked, Result, Scored
from rose_core.unreadable import UNREADABLE
from rose_trainer.errors import NoReward, RewardRefused
from rose_wire import flags

__all__ = ["Lost", "Masked", "Result", "RewardClient", "Scored"]

_AGAIN = frozenset({408, 409, 429})
_LONGEST_PAUSE_SECONDS = 2.0
_SHOWN = 500  # characters of a refusal


@dataclass(frozen=True)
class RewardClient:
    """Asks for rewards.

    Args:
        url: of ``rose rewards``.
        session: the HTTP session to use.
        token_file: the team's token, read at each request; None = the gateway asks for none.
        tries: how often a lost reward is asked for; the gateway itself tries it ``tries`` of its
            list each time.
    """

    url: str
    session: aiohttp.ClientSession
    token_file: Path | None = None
    tries: int = 3

    async def score(self, reward: dict[str, Any], seconds: float) -> Result:
        """The result; of a lost reward the last one.

        Args:
            reward: as ``POST /v1/rewards`` takes it; ``trajectory``, ``function`` and ``answer``
                are needed, ``task``, ``group`` and ``members`` make it quicker.
            seconds: from now in which there shall be an answer.

        Raises:
            RewardRefused: the request is wrong, and stays wrong.
            NoReward: there was no answer in time.
            OSError: the token cannot be read.
        """
        until = time.monotonic() + seconds
        lost = attempt = 0
        while True:
            found, pause = await self._attempt(reward, until, attempt)
            if isinstance(found, (Scored, Masked)):
                return found
            if isinstance(found, Lost):
                lost += 1
                if lost >= self.tries:
                    return found
            attempt += 1
            if time.monotonic() + pause >= until:
                message = (
                    f"{self.url}: no reward of {reward.get('trajectory')!r} in {seconds:g} s "
                    f"({attempt} attempts, the last: {_shown(found)}); ask again under the same "
                    "trajectory"
                )
                raise NoReward(message)
            await asyncio.sleep(pause)

    async def _attempt(
        self, reward: dict[str, Any], until: float, attempt: int
    ) -> tuple[Result | str, float]:
        """The result, or why there is none yet; and in how many seconds to ask again."""
        token = flags.token(self.token_file)
        pause = min(0.1 * 2 ** min(attempt, 10), _LONGEST_PAUSE_SECONDS)
        try:
            async with self.session.post(
                f"{self.url.rstrip('/')}/v1/rewards",
                json=reward,
                headers={"Authorization": f"Bearer {token}"} if token else {},
                timeout=aiohttp.ClientTimeout(total=max(until - time.monotonic(), 0.001)),
            ) as reply:
                body = await reply.read()
                if reply.status in _AGAIN or reply.status >= 500:
                    why = f"{reply.status} {reply.reason}"
                    return why, _wished(reply.headers.get("Retry-After"), pause)
                if reply.status >= 300:
                    text = body.decode(errors="replace")[:_SHOWN]
                    message = f"{self.url}: {reply.status}: {text}"
                    raise RewardRefused(message)
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            message = f"{self.url}: give the URL of rose rewards, with http:// or https://"
            raise RewardRefused(message) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"{type(error).__name__}: {error}", pause
        return _result(body, self.url), pause


def _result(body: bytes, url: str) -> Result:
    try:
        found: Result = msgspec.json.decode(body, type=Result)
    except UNREADABLE as error:
        message = f"{url}: {error}; is that the URL of rose rewards?"
        raise RewardRefused(message) from error
    return found


def _shown(found: Result | str) -> str:
    return f"lost: {found.reason}" if isinstance(found, Lost) else str(found)


def _wished(retry_after: str | None, pause: float) -> float:
    """Seconds until the next attempt: what the gateway asks for, within our own longest."""
    try:
        return min(float(retry_after), _LONGEST_PAUSE_SECONDS) if retry_after else pause
    except ValueError:
        return pause
