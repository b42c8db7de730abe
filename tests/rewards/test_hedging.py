"""A late verification that decides its group is given to a second worker, on virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec
import pytest

from rose_core.rewards.limits import LEAST
from rose_core.rewards.results import Lost, Masked, Result, Scored
from rose_rewards.errors import WorkerEnded
from rose_rewards.functions import RewardFunction
from rose_rewards.gateway import Gateway, Reward
from rose_rewards.pool import Machines

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

# Eight correct answers took two seconds: late after 2 s, hopeless after 4 s.
USUAL_S = 2.0


@dataclass
class ScriptedPool:
    """Places whose n-th verification of an answer takes what the script says; below 0 = it dies.

    Attributes:
        stopped: answers of verifications that were cancelled.
    """

    places: int
    script: dict[str, list[float]] = field(default_factory=dict)
    given: Counter[str] = field(default_factory=Counter)
    stopped: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0

    def room(self, _name: str, verifying: Counter[str]) -> bool:
        return verifying.total() < self.places

    def idle(self, _team: str, verifying: Counter[str]) -> int:
        return self.places - verifying.total()

    def leaves(self, _machine: object) -> bool:
        return False

    async def verify(
        self, _name: str, body: bytes, seconds: float, _machines: Machines
    ) -> tuple[object, float]:
        answer = msgspec.json.decode(body)["answer"]
        tries = self.script.get(answer, [USUAL_S / 2])
        takes = tries[min(self.given[answer], len(tries) - 1)]
        self.given[answer] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(min(abs(takes), seconds))
        except asyncio.CancelledError:
            self.stopped.append(answer)
            raise
        finally:
            self.running -= 1
        if takes < 0:
            message = "exit code -9"
            raise WorkerEnded(message)
        if takes > seconds:
            raise TimeoutError
        return {"reward": takes, "correct": True}, takes

    async def close(self) -> None:
        """Nothing is left."""


@dataclass
class Scripted:
    """A gateway over scripted places."""

    pool: ScriptedPool
    gateway: Gateway

    async def score(self, answer: str, **more: object) -> tuple[Result, float]:
        """The result, and after how long."""
        began = asyncio.get_running_loop().time()
        fields = {"trajectory": answer, "function": "f", "answer": answer, "task": "t", **more}
        result = await self.gateway.score(msgspec.convert(fields, Reward))
        return result, asyncio.get_running_loop().time() - began


async def scripted(places: int, **script: list[float]) -> Scripted:
    """A gateway that knows what its task usually takes."""
    pool = ScriptedPool(places, script)
    listed = {
        "f": RewardFunction(rule="exact", tries=2, seconds=60),
        "once": RewardFunction(rule="exact", tries=1, seconds=60),
    }
    async with aiohttp.ClientSession() as session:  # no judge is asked
        clock = asyncio.get_running_loop().time
        made = Scripted(pool, Gateway(listed, pool, session, clock=clock))
    for _ in range(LEAST):
        for name in listed:
            made.gateway.limits.learn(name, "/t", USUAL_S)
    return made


async def test_a_late_member_that_decides_its_group_is_given_to_a_second_worker() -> None:
    world = await scripted(4, late=[60.0, 0.5])
    _, (result, took) = await asyncio.gather(
        world.score("usual", group="g", members=2), world.score("late", group="g", members=2)
    )
    assert result == Scored(0.5, True, 0.5)
    assert took == pytest.approx(USUAL_S + 0.5, abs=0.01)
    await asyncio.sleep(0.01)
    assert world.pool.stopped == ["late"], "the first worker is stopped, not waited for"
    assert world.pool.given == {"usual": 1, "late": 2}
    assert world.gateway.verifications == 0, "both places are free again"
    again, _ = await world.score("late", group="g", members=2)
    assert again == result
    assert world.pool.given["late"] == 2


async def test_one_more_worker_is_wished_for_where_none_is_free_for_a_late_member() -> None:
    world = await scripted(1, late=[3.9])
    world.gateway._demand[""].times.extend([USUAL_S] * 9)
    asked = asyncio.create_task(world.score("late", group="g", members=1))
    await asyncio.sleep(USUAL_S - 0.1)
    assert world.gateway.wish(10.0) == 1
    await asyncio.sleep(0.2)
    assert world.gateway.wish(10.0, "") == 2
    assert world.gateway.wish(10.0, "other") == 0
    await asked
    assert world.gateway.wish(10.0) == 0


async def test_members_that_decide_nothing_are_not_hedged() -> None:
    world = await scripted(8, one=[3.9], other=[3.8])
    await asyncio.gather(*(world.score(name, group="g", members=3) for name in ("one", "other")))
    assert world.pool.given == {"one": 1, "other": 1}, "the third member has no result yet"


async def test_late_members_that_decide_their_group_together_are_both_hedged() -> None:
    world = await scripted(8, one=[60.0, 0.5], other=[60.0, 1.0])
    names = ("one", "usual", "other")
    found = await asyncio.gather(*(world.score(name, group="g", members=3) for name in names))
    assert [result for result, _ in found] == [
        Scored(0.5, True, 0.5),
        Scored(USUAL_S / 2, True, USUAL_S / 2),
        Scored(1.0, True, 1.0),
    ]
    assert world.pool.given == {"one": 2, "usual": 1, "other": 2}


async def test_the_member_that_gives_a_group_as_many_as_its_trainer_keeps_decides_it() -> None:
    world = await scripted(8, late=[60.0, 0.5], surplus=[60.0])
    names = ("usual", "late")
    about = {"group": "g", "members": 3, "keep": 2}
    surplus = asyncio.create_task(world.score("surplus", **about))
    found = await asyncio.gather(*(world.score(name, **about) for name in names))
    assert [type(result) for result, _ in found] == [Scored, Scored]
    # Both of those that ran were late while either could be the second; one was enough.
    before = world.pool.given["surplus"]
    assert isinstance((await surplus)[0], Masked | Scored)
    assert world.pool.given["surplus"] == before, "a decided group's members are never hedged"


async def test_nothing_is_hedged_while_no_worker_is_free() -> None:
    world = await scripted(2, late=[3.5, 0.5], first=[2.5], second=[2.5])
    found = await asyncio.gather(*(world.score(name) for name in ("late", "first", "second")))
    assert {name: world.pool.given[name] for name in ("first", "second")} == {
        "first": 1,
        "second": 1,
    }
    assert world.pool.given["late"] == 1, "what waited had the place"
    assert world.pool.most == 2
    assert found[0][0] == Scored(3.5, True, 3.5)


async def test_a_place_that_comes_free_is_for_what_is_late() -> None:
    world = await scripted(2, late=[60.0, 0.5], other=[3.0])
    (result, took), _ = await asyncio.gather(world.score("late"), world.score("other"))
    assert result == Scored(0.5, True, 0.5)
    assert took == pytest.approx(3.5, abs=0.01)
    assert world.pool.most == 2


@pytest.mark.parametrize(
    ("tries", "expected", "given"),
    [
        ([-3.0, 1.5], Scored(1.5, True, 1.5), 2),  # the first dies, the second has a verdict
        ([3.0, -0.5], Scored(3.0, True, 3.0), 2),  # the second dies, the first has one
        ([60.0, 3.0], Scored(3.0, True, 3.0), 2),  # the first overruns, the second has one
        ([-3.0, -0.5, 1.0], Scored(1.0, True, 1.0), 3),  # both die: it is tried again
    ],
)
async def test_one_verdict_is_enough_whatever_becomes_of_the_other(
    tries: list[float], expected: Result, given: int
) -> None:
    world = await scripted(4, one=tries)
    result, _ = await world.score("one")
    assert result == expected
    assert world.pool.given["one"] == given
    await asyncio.sleep(0.01)
    assert world.gateway.verifications == 0


async def test_what_no_worker_judges_in_time_is_masked_and_what_kills_all_is_lost() -> None:
    world = await scripted(4, slow=[60.0], deadly=[-0.1])
    result, took = await world.score("slow")
    assert isinstance(result, Masked)
    assert took == pytest.approx(3 * USUAL_S, abs=0.01), "the second has its own time"
    assert world.pool.given["slow"] == 2, "never more than two"
    assert isinstance((await world.score("deadly"))[0], Lost)
    assert world.pool.given["deadly"] == 2, "two tries, neither of them late"


async def test_a_task_of_which_little_is_known_is_not_hedged() -> None:
    world = await scripted(4, one=[50.0])
    result, _ = await world.score("one", task="unknown")
    assert result == Scored(50.0, True, 50.0)
    assert world.pool.given["one"] == 1


async def test_what_may_be_tried_once_alone_is_never_given_to_two() -> None:
    world = await scripted(4, acts=[3.0])
    assert await world.score("acts", function="once") == (Scored(3.0, True, 3.0), 3.0)
    assert world.pool.given["acts"] == 1


async def test_hedges_are_bounded_by_free_places() -> None:
    names: Sequence[str] = [f"n{number}" for number in range(6)]
    world = await scripted(8, **{name: [60.0, 1.0] for name in names})
    found = await asyncio.gather(*(world.score(name) for name in names))
    assert all(result == Scored(1.0, True, 1.0) for result, _ in found)
    assert world.pool.most == 8, "six and two more, and then whoever comes free"


async def test_closing_stops_both_copies() -> None:
    world = await scripted(4, one=[60.0])
    asked = asyncio.create_task(world.score("one"))
    await asyncio.sleep(USUAL_S + 0.5)
    assert world.pool.running == 2
    await world.gateway.close()
    assert world.pool.running == 0
    assert world.pool.stopped == ["one", "one"]
    await asyncio.gather(asked, return_exceptions=True)
