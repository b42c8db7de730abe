"""Groups of rewards with and without a second worker for what is late, on virtual time.

The gateway is production's; its workers are sleeps. One verification in twenty-five falls on a
machine that makes it ten times longer, whichever answer it is of: that is what a second worker
helps against. Without one, such an answer is taken for hopeless at its learned limit and masked.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import aiohttp
import looptime

from bench.record import Figure, figure
from rose_core.rewards.results import Masked
from rose_core.stats import quantile
from rose_rewards.functions import RewardFunction
from rose_rewards.gateway import Gateway, Reward
from rose_rewards.pool import Machines

_GROUPS, _MEMBERS, _WORKERS = 600, 8, 32
_USUAL_S, _SPREAD, _SLOW_SHARE, _SLOW = 4.0, 0.2, 0.04, 10.0
# Of the workers' time; a step's burst is another matter, where none is free for a second copy.
_BUSY = 0.6


@dataclass
class _Sleeping:
    """Workers that sleep.

    Attributes:
        worked_s: seconds that all of them worked, those of stopped ones included.
    """

    draw: random.Random
    worked_s: float = 0.0

    def room(self, _name: str, verifying: Counter[str]) -> bool:
        return verifying.total() < _WORKERS

    def idle(self, _team: str, verifying: Counter[str]) -> int:
        return _WORKERS - verifying.total()

    def leaves(self, _machine: object) -> bool:
        return False

    async def verify(
        self, _name: str, _body: bytes, seconds: float, _machines: Machines
    ) -> tuple[object, float]:
        slow = _SLOW if self.draw.random() < _SLOW_SHARE else 1.0
        takes = _USUAL_S * self.draw.lognormvariate(0.0, _SPREAD) * slow
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(seconds):
                await asyncio.sleep(takes)
        finally:
            self.worked_s += loop.time() - began
        return 1.0, takes

    async def close(self) -> None:
        """None is left."""


class _NeverHedges(Gateway):
    """The same without a second worker."""

    def _hedge(self) -> None:
        """Leave what is late to its worker."""


@dataclass(frozen=True)
class _Played:
    """What came of one run.

    Attributes:
        last_s: seconds from a group's trajectories to its last reward.
        masked: rewards that were taken for hopeless.
        worked_s: of all workers.
    """

    last_s: list[float]
    masked: int
    worked_s: float


async def _played(kind: type[Gateway], seed: int) -> _Played:
    draw = random.Random(seed)
    pool, masked = _Sleeping(random.Random(seed)), 0
    loop = asyncio.get_running_loop()
    mean_s = _USUAL_S * (1 + _SLOW_SHARE * (_SLOW - 1))
    listed = {"check": RewardFunction(rule="exact", seconds=600)}
    async with aiohttp.ClientSession() as session:  # no judge is asked
        gateway = kind(listed, pool, session, clock=loop.time)

    async def group(number: int, at_s: float) -> float:
        nonlocal masked
        await asyncio.sleep(at_s)
        began = loop.time()
        asked = [
            Reward(
                trajectory=f"{number}.{member}",
                function="check",
                answer="",
                task="t",
                group=str(number),
                members=_MEMBERS,
            )
            for member in range(_MEMBERS)
        ]
        found = await asyncio.gather(*map(gateway.score, asked))
        masked += sum(isinstance(one, Masked) for one in found)
        return loop.time() - began

    gap_s = _MEMBERS * mean_s / (_WORKERS * _BUSY)
    ends, at_s = [], 0.0
    for number in range(_GROUPS):
        at_s += draw.expovariate(1 / gap_s)
        ends.append(group(number, at_s))
    last_s = list(await asyncio.gather(*ends))
    return _Played(last_s, masked, pool.worked_s)


def figures(seed: int) -> list[Figure]:
    """What a second worker for late ones brings groups, and what it costs in work."""
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        alone = runner.run(_played(_NeverHedges, seed))
        hedged = runner.run(_played(Gateway, seed))
    rows = [
        figure(f"a group's last reward, p{100 * q:g}, {which}", quantile(one.last_s, q), "s")
        for q in (0.5, 0.99)
        for which, one in (("one worker", alone), ("hedged", hedged))
    ]
    count = _GROUPS * _MEMBERS
    return [
        *rows,
        figure("correct answers that were masked, one worker", alone.masked / count, "share"),
        figure("correct answers that were masked, hedged", hedged.masked / count, "share"),
        figure(
            "work that hedging added", hedged.worked_s / alone.worked_s - 1, "share", at_most=0.05
        ),
    ]
