"""Rewards from ``rose rewards``: a trajectory's turns are sent the moment it has its last token.

| the gateway says | the trajectory |
|---|---|
| scored, for each turn | has these rewards |
| masked, or lost however often it is asked | has none: its group is left out, knowingly |
| nothing until the run's time limit | ends with the run |
| that the request is wrong | ends the run |

``rose_trainer.rewards`` asks. Next step: ``rounds`` trains on what is scored, and need not wait for
the last one (``--late``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from examples.grpo.errors import OutOfTime, Unscored
from examples.grpo.rollouts import Trajectory
from rose_trainer.errors import NoReward
from rose_trainer.rewards import RewardClient, Scored


@dataclass
class TurnRewards:
    """Asks for the rewards of trajectories.

    Args:
        client: of the rewards' URL.
        members: of a group that are trained on.
        deadline: ``clock()`` value after which no attempt is made.
        function: ``checks.score``, by the platform's name for it.
    """

    client: RewardClient
    members: int
    deadline: float
    function: str = "grpo"
    clock: Callable[[], float] = time.monotonic

    async def scored(self, member: Trajectory, group: str) -> Trajectory:
        """The trajectory with the rewards of its turns.

        Raises:
            Unscored: it has none that may be used.
            TrainerLibraryError: the gateway says the request is wrong.
            OutOfTime: the deadline came first.
        """
        asked = (self._turn(member, group, number) for number in range(len(member.turns)))
        return replace(member, rewards=tuple(await asyncio.gather(*asked)))

    async def _turn(self, member: Trajectory, group: str, number: int) -> float:
        name = f"{member.key}/{number}"
        reward = {
            "trajectory": name,
            "function": self.function,
            "task": f"turn {number}",
            "group": f"{group}/{number}",
            "members": self.members,
            "answer": list(member.turns[number].tokens),
            "data": {"sign": member.task.signs[number]},
        }
        try:
            result = await self.client.score(reward, self.deadline - self.clock())
        except NoReward as error:
            raise OutOfTime(str(error)) from error
        if not isinstance(result, Scored):
            message = f"{name}: {type(result).__name__.lower()}: {result.reason}"
            raise Unscored(message)
        return result.reward
