"""Rewards from ``rose rewards``: a trajectory's turns are sent the moment it has its last token.

| the gateway says | the trajectory |
|---|---|
| scored, for each turn | has these rewards |
| masked, or lost after ``_TRIES`` | has none: its group is left out, knowingly |
| 429, 5xx, or nothing | is asked for again until the deadline: the result is the same |
| 4xx | ends the run: the request is wrong |

Next step: ``rounds`` trains on what is scored, and need not wait for the last one (``--late``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from examples.grpo.client import RETRIED, pause_before_retry
from examples.grpo.errors import OutOfTime, RewardRefused, Unscored
from examples.grpo.rollouts import Trajectory
from rose_wire import flags

# The gateway tries a lost one itself before it says so; each time it is asked it tries anew.
_TRIES = 3


@dataclass
class RewardClient:
    """Asks for the rewards of trajectories.

    Args:
        url: of ``rose rewards``.
        session: the HTTP session to use.
        members: of a group that are trained on.
        deadline: ``clock()`` value after which no attempt is made.
        function: ``checks.score``, by the platform's name for it.
        token_file: the team's token; None = the gateway asks for none.
    """

    url: str
    session: aiohttp.ClientSession
    members: int
    deadline: float
    function: str = "grpo"
    token_file: Path | None = None
    clock: Callable[[], float] = time.monotonic

    async def scored(self, member: Trajectory, group: str) -> Trajectory:
        """The trajectory with the rewards of its turns.

        Raises:
            Unscored: it has none that may be used.
            RewardRefused: the gateway says the request is wrong.
            OutOfTime: the deadline came first.
        """
        asked = (self._turn(member, group, number) for number in range(len(member.turns)))
        return replace(member, rewards=tuple(await asyncio.gather(*asked)))

    async def _turn(self, member: Trajectory, group: str, number: int) -> float:
        body = {
            "trajectory": f"{member.key}/{number}",
            "function": self.function,
            "task": f"turn {number}",
            "group": f"{group}/{number}",
            "members": self.members,
            "answer": list(member.turns[number].tokens),
            "data": {"sign": member.task.signs[number]},
        }
        lost = attempt = 0
        while True:
            answer, pause = await self._attempt(body, attempt)
            if answer.get("outcome") == "scored":
                return float(answer["reward"])
            lost += answer.get("outcome") == "lost"
            if answer.get("outcome") == "masked" or lost >= _TRIES:
                message = f"{body['trajectory']}: {answer['outcome']}: {answer['reason']}"
                raise Unscored(message)
            attempt += 1
            if self.clock() + pause >= self.deadline:
                message = f"no reward from {self.url} before the time limit ({attempt} attempts)"
                raise OutOfTime(message)
            await asyncio.sleep(pause)

    async def _attempt(self, body: dict[str, Any], attempt: int) -> tuple[dict[str, Any], float]:
        """What the gateway says; nothing where it is to be asked again, and when."""
        token = flags.token(self.token_file)
        try:
            async with self.session.post(
                f"{self.url.rstrip('/')}/v1/rewards",
                json=body,
                headers={"Authorization": f"Bearer {token}"} if token else {},
                timeout=aiohttp.ClientTimeout(total=max(self.deadline - self.clock(), 0.001)),
            ) as reply:
                pause = pause_before_retry(attempt, reply.headers.get("Retry-After"))
                if reply.status in RETRIED:
                    return {}, pause
                if reply.status >= 300:
                    message = f"{self.url}: {reply.status}: {(await reply.text())[:500]}"
                    raise RewardRefused(message)
                answer: dict[str, Any] = await reply.json()
                return answer, pause
        except (aiohttp.ClientError, TimeoutError, OSError):
            return {}, pause_before_retry(attempt, None)
