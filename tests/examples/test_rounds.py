"""Rounds of tail batching as the example's source of groups, on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from examples.grpo.client import LeaseClient, Span, Turn
from examples.grpo.errors import OutOfTime, TrainerError, TurnRefused, Unscored
from examples.grpo.rollouts import Group, Trajectory
from examples.grpo.rounds import RoundSampler
from rose_core.identity import WeightVersion
from rose_trainer.rounds import RoundShape

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

HEAD = WeightVersion("grpo", 1, 0)
SHAPE = RoundShape(batch=2, members=2, surplus=0.5, member_surplus=0.5)


@dataclass
class FakeClient:
    """Turns take the seconds that ``seconds`` says of their group; a second more per sibling."""

    seconds: Callable[[str], float] = lambda _group: 1.0
    label: str = "grpo@1.0"
    error: Callable[[str], Exception | None] = lambda _group: None
    began: list[str] = field(default_factory=list)
    groups: dict[str, str] = field(default_factory=dict)
    reported: dict[str, list[str]] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    leaving: bool = False

    async def turn(
        self, prompt: Sequence[int], *, session_key: str, max_tokens: int, group: str = ""
    ) -> Turn:
        if session_key not in self.groups:
            self.began.append(session_key)
            self.groups[session_key] = group
        siblings = [key for key in self.began if self.groups[key] == group]
        await asyncio.sleep(self.seconds(group) + siblings.index(session_key))
        if (error := self.error(group)) is not None:
            raise error
        return Turn((1,) * max_tokens, (-1.0,) * max_tokens, (Span(self.label, 0, max_tokens),))

    async def finished(self, session_key: str) -> None:
        assert session_key in self.groups

    async def report(
        self,
        trained: Mapping[str, float] | None = None,
        dropped: Mapping[str, float] | None = None,
        withdrawn: Sequence[str] = (),
        cut: Sequence[str] = (),
        correct: Sequence[str] = (),
    ) -> None:
        assert set(correct) <= set(trained or ())
        kinds = {"trained": trained, "dropped": dropped, "withdrawn": withdrawn, "cut": cut}
        for kind, keys in kinds.items():
            self.reported.setdefault(kind, []).extend(keys or ())
        self.rewards |= {**(trained or {}), **(dropped or {})}


@dataclass
class Records:
    """What was written to the progress file."""

    rounds: list[dict[str, object]] = field(default_factory=list)

    def __call__(self, event: str, **fields: object) -> None:
        assert event == "round"
        self.rounds.append(fields)


def sampler(
    client: FakeClient,
    records: Records,
    shape: RoundShape = SHAPE,
    score: Callable[[Trajectory, str], Awaitable[Trajectory]] | None = None,
) -> RoundSampler:
    return RoundSampler(
        cast("LeaseClient", client),
        shape=shape,
        bound=1,
        head=lambda: HEAD,
        seed=0,
        write=records,
        score=score,
    )


async def whole(source: RoundSampler) -> list[Group]:
    """All groups of a round, part by part."""
    groups: list[Group] = []
    while True:
        part = await source.take()
        groups += part.groups
        if part.last:
            return groups


def late(*groups: str) -> Callable[[str], float]:
    return lambda group: 100.0 if group in groups else 1.0


async def test_a_round_keeps_the_first_members_of_the_first_groups_and_says_what_it_cut() -> None:
    client, records = FakeClient(late("group-000000")), Records()
    source = sampler(client, records)
    groups = await whole(source)
    assert [[member.key for member in group] for group in groups] == [
        ["group-000001-000003.", "group-000001-000004."],
        ["group-000002-000006.", "group-000002-000007."],
    ]
    await source.report(groups)
    assert client.reported["cut"] == ["group-000001-000005.", "group-000002-000008."]
    assert not set(client.reported["cut"]) & client.rewards.keys(), "nobody knows their reward"
    assert client.reported["withdrawn"] == [f"group-000000-00000{n}." for n in range(3)]
    assert client.reported["dropped"] == []
    [record] = records.rounds
    assert (record["kind"], record["trained"], record["cut"]) == ("short", 4, 2)
    assert (record["put_off"], record["inclusion"]) == (3, 4 / 6)
    await source.close()


async def test_late_groups_are_sampled_anew_under_other_keys_in_a_long_round_without_surplus() -> (
    None
):
    client, records = FakeClient(late("group-000000", "group-000003")), Records()
    source = sampler(client, records)
    for _ in range(2):
        await source.report(await whole(source))
    groups = await whole(source)
    await source.report(groups)
    assert [record["kind"] for record in records.rounds] == ["short", "short", "long"]
    keys = [member.key for group in groups for member in group]
    assert {client.groups[key] for key in keys} == {"group-000000", "group-000003"}
    assert len(keys) == 4
    assert not set(keys) & set(client.reported["withdrawn"])
    assert (records.rounds[-1]["cut"], records.rounds[-1]["inclusion"]) == (0, 1.0)
    await source.close()


async def test_every_episode_that_began_is_reported_exactly_once() -> None:
    client = FakeClient(lambda group: 1.0 + 7 * int(group[-3:]) % 5)
    source = sampler(client, Records())
    for _ in range(6):
        await source.report(await whole(source))
    await source.close()
    found = [key for keys in client.reported.values() for key in keys]
    assert sorted(found) == sorted(client.began)


async def test_between_two_rounds_and_after_the_last_nothing_is_in_flight() -> None:
    client = FakeClient(late("group-000000"))
    source = sampler(client, Records())
    await source.take()
    began = len(client.began)
    await asyncio.sleep(1000)
    assert len(client.began) == began
    taking = asyncio.create_task(source.take())
    await asyncio.sleep(0.5)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    await source.close()
    assert len(asyncio.all_tasks()) == 1


async def test_groups_that_are_too_old_are_dropped_whole_with_their_rewards() -> None:
    client, records = FakeClient(), Records()
    client.label = "grpo@0.9"  # of a trainer before this one: its age is unknown
    source = sampler(client, records)
    taking = asyncio.create_task(whole(source))
    await asyncio.sleep(5)
    client.label = str(HEAD)
    groups = await taking
    await source.report(groups)
    await source.close()
    assert source.statistics.dropped_groups > 0
    assert len(client.reported["dropped"]) == 2 * source.statistics.dropped_groups
    assert set(client.reported["dropped"]) <= client.rewards.keys()
    assert records.rounds[0]["inclusion"] == 0.0
    assert all(member.versions() == {str(HEAD)} for group in groups for member in group)


async def test_a_refusal_reaches_the_learner_and_says_more_than_the_time_limit() -> None:
    def error(group: str) -> TrainerError:
        return TurnRefused("bad prompt") if group == "group-000001" else OutOfTime("late")

    source = sampler(FakeClient(error=error), Records())
    with pytest.raises(TurnRefused, match="bad prompt"):
        await source.take()
    await source.close()


async def test_the_time_limit_reaches_the_learner() -> None:
    source = sampler(FakeClient(error=lambda _group: OutOfTime("late")), Records())
    with pytest.raises(OutOfTime):
        await source.take()
    await source.close()


async def test_groups_are_handed_out_while_the_rounds_tail_is_sampled() -> None:
    client, records = FakeClient(late("group-000001")), Records()
    source = sampler(client, records, RoundShape(batch=2, members=2, surplus=0.0))
    first = await source.take()
    assert asyncio.get_running_loop().time() < 10, "the other group takes a hundred seconds"
    assert (len(first.groups), first.last) == (1, False)
    assert records.rounds == []
    second = await source.take()
    assert (len(second.groups), second.last) == (1, True)
    assert records.rounds[0]["groups"] == 2
    await source.close()


async def test_a_tail_that_is_too_old_ends_its_step_with_what_it_has() -> None:
    client, records = FakeClient(late("group-000001")), Records()
    source = sampler(client, records, RoundShape(batch=2, members=2, surplus=0.0))
    assert len((await source.take()).groups) == 1
    client.label = "grpo@0.9"  # of a trainer before this one
    end = await source.take()
    assert (list(end.groups), end.last) == ([], True)
    await source.close()


async def test_late_rewards_are_in_the_next_step_and_every_episode_is_reported_once() -> None:
    async def score(member: Trajectory, _group: str) -> Trajectory:
        await asyncio.sleep(10.0)
        return member

    loop, records = asyncio.get_running_loop(), Records()
    client = FakeClient(lambda group: 20.0 + int(group[-3:]) % 5)
    shape = RoundShape(batch=3, members=2, surplus=0.0, late=1)
    source = sampler(client, records, shape, score)
    steps = []
    for _ in range(4):
        began = loop.time()
        groups = await whole(source)
        assert len(groups) == 3
        await source.report(groups)
        steps.append(loop.time() - began)
    await source.close()
    assert [record["late"] for record in records.rounds] == [0, 1, 1, 1]
    # Two turns of up to 24 s, a second more for the sibling; ten more if it waited for the last.
    assert max(steps) < 2 * (24.0 + 1.0) + 10.0
    found = [key for keys in client.reported.values() for key in keys]
    assert sorted(found) == sorted(client.began)


async def test_a_group_without_a_reward_is_left_out_and_the_run_goes_on() -> None:
    async def score(member: Trajectory, group: str) -> Trajectory:
        if group == "group-000001" and member.key.endswith("2."):
            message = "masked: NoVerdict"
            raise Unscored(message)
        return member

    client, records = FakeClient(), Records()
    source = sampler(client, records, RoundShape(batch=2, members=2, surplus=0.5), score)
    for _ in range(3):
        await source.report(await whole(source))
    await source.close()
    left_out = [key for key, group in client.groups.items() if group == "group-000001"]
    assert len(left_out) == 2
    assert set(left_out) <= set(client.reported["dropped"]) | set(client.reported["cut"])
    assert sum(int(str(record["unscored"])) for record in records.rounds) == 2
    found = [key for keys in client.reported.values() for key in keys]
    assert sorted(found) == sorted(client.began)
