import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from examples.grpo.client import LeaseClient, Span, Turn
from examples.grpo.errors import OutOfTime, TurnRefused
from examples.grpo.rollouts import Sampler, Trajectory, age, fresh, play, room
from examples.grpo.task import ANSWER_TOKENS, TURNS, Task
from rose_core.identity import WeightVersion


def trajectory(*labels: str) -> Trajectory:
    turns = tuple(Turn((0,), (-1.0,), (Span(label, 0, 1),)) for label in labels)
    return Trajectory(Task(0, (0, 0)), (), (), turns, (0.0,) * len(labels))


HEAD = WeightVersion("grpo", 1, 5)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["grpo@1.5"], 0),
        (["grpo@1.5", "grpo@1.2"], 3),
        (["unknown"], None),
        (["v0"], None),
        (["grpo@0.5"], None),
        (["other@1.5"], None),
        (["grpo@1.5", "grpo@base.0123456789ab"], 6),
        (["other@base.0123456789ab"], None),
    ],
)
def test_age_counts_from_the_oldest_version(labels: list[str], expected: int | None) -> None:
    assert age(trajectory(*labels), HEAD) == expected


def test_a_group_with_one_stale_or_unknown_member_is_not_fresh() -> None:
    good, old, unknown = trajectory("grpo@1.4"), trajectory("grpo@1.1"), trajectory("unknown")
    assert fresh((good, good), HEAD, 1)
    assert not fresh((good, old), HEAD, 1)
    assert not fresh((good, unknown), HEAD, 99)


def test_room_is_one_step_now_and_the_bounds_steps_ahead() -> None:
    assert room(in_flight=0, ready=0, per_step=4, bound=2) == 12
    assert room(in_flight=5, ready=3, per_step=4, bound=2) == 4
    assert room(in_flight=12, ready=3, per_step=4, bound=2) == 0


@dataclass
class FakeClient:
    """Answers soon, or fails; the version is what ``label`` says then.

    Groups need different times, so that some are under way while others are taken; turns of
    trajectories whose key ends with ``failing`` are refused at once.
    """

    label: str = "grpo@1.0"
    error: Exception | None = None
    failing: str = ""
    live: int = 0
    most_live: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    over: list[str] = field(default_factory=list)
    leaving: bool = False
    reports: list[tuple[list[str], list[str], list[str]]] = field(default_factory=list)

    async def report(
        self,
        trained: Mapping[str, float] | None = None,
        dropped: Mapping[str, float] | None = None,
        withdrawn: Sequence[str] = (),
        correct: Sequence[str] = (),
    ) -> None:
        assert set(correct) <= set(trained or ())
        self.reports.append((sorted(trained or {}), sorted(dropped or {}), list(withdrawn)))

    async def finished(self, session_key: str) -> None:
        self.over.append(session_key)

    async def turn(
        self, prompt: Sequence[int], *, session_key: str, max_tokens: int, group: str = ""
    ) -> Turn:
        if self.leaving:
            raise OutOfTime("leaving")
        self.groups.add(group)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        if self.failing and session_key.endswith(self.failing):
            self.live -= 1
            raise TurnRefused(session_key)
        number = int(group.removeprefix("group-") or 0)
        await asyncio.sleep(0.004 * (1 + number % 3))
        self.live -= 1
        if self.error is not None:
            raise self.error
        self.prompts.append(list(prompt))
        return Turn((1,) * max_tokens, (-1.0,) * max_tokens, (Span(self.label, 0, max_tokens),))


def sampler(client: FakeClient, head: Callable[[], WeightVersion | None]) -> Sampler:
    return Sampler(
        cast("LeaseClient", client),
        group_size=2,
        per_step=3,
        bound=1,
        concurrency=4,
        head=head,
        seed=0,
    )


async def test_an_episode_appends_answer_and_observation_to_its_context() -> None:
    client = FakeClient()
    played = await play(cast("LeaseClient", client), Task(0, (1, 2)), "k.")
    assert len(played.turns) == TURNS
    assert played.rewards == (1.0, 0.0)
    assert list(played.context[: played.starts[1]]) == client.prompts[1]
    for start in played.starts:
        assert played.context[start : start + ANSWER_TOKENS] == (1,) * ANSWER_TOKENS
    assert client.over == ["k."]


async def test_groups_come_whole_and_concurrency_is_bounded() -> None:
    client = FakeClient()
    source = sampler(client, lambda: WeightVersion("grpo", 1, 0))
    groups = (await source.take()).groups
    await source.close()
    assert len(groups) == 3
    assert all(len(group) == 2 for group in groups)
    assert client.most_live <= 4 * 2
    assert {"group-000000", "group-000001", "group-000002"} <= client.groups
    assert {"group-000000-000.", "group-000000-001."} <= set(client.over)


async def test_every_trajectory_that_began_is_reported_once_when_the_run_ends() -> None:
    version = [WeightVersion("grpo", 1, 0)]
    client = FakeClient()
    source = sampler(client, lambda: version[0])
    await source.report((await source.take()).groups)
    await source.take()  # finished, and not said to be trained on
    version[0] = WeightVersion("grpo", 1, 9)
    client.label = "grpo@1.9"
    await source.report((await source.take()).groups)
    await source.close()
    trained, dropped, withdrawn = (
        [key for report in client.reports for key in report[kind]] for kind in range(3)
    )
    found = [*trained, *dropped, *withdrawn]
    assert len(found) == len(set(found))
    assert set(client.over) <= set(found)
    assert len(trained) == 12
    assert dropped, "groups of version 0 were too old for version 9"


async def test_no_finished_group_is_lost() -> None:
    source = sampler(FakeClient(), lambda: WeightVersion("grpo", 1, 0))
    taken = [group for _ in range(4) for group in (await source.take()).groups]
    await asyncio.gather(*source._in_flight)
    assert source.statistics.groups == len(taken) + len(source._ready)
    await source.close()


async def test_groups_that_grew_too_old_are_dropped_and_sampled_again() -> None:
    client = FakeClient()
    head = WeightVersion("grpo", 1, 0)
    source = sampler(client, lambda: head)
    await source.take()
    await asyncio.gather(*source._in_flight)
    waiting = len(source._ready)
    head, client.label = WeightVersion("grpo", 1, 9), "grpo@1.9"
    groups = (await source.take()).groups
    await source.close()
    assert source.statistics.dropped_groups >= waiting
    assert all(member.versions() == {"grpo@1.9"} for group in groups for member in group)


async def test_a_refusal_reaches_the_learner() -> None:
    source = sampler(FakeClient(error=TurnRefused("bad prompt")), lambda: None)
    with pytest.raises(TurnRefused, match="bad prompt"):
        await source.take()
    await source.close()


async def test_turns_of_a_group_that_failed_are_waited_for() -> None:
    """A turn that nobody waits for is sampled, counted by the router and received by nobody."""
    client = FakeClient(failing="-000.")
    source = sampler(client, lambda: None)
    with pytest.raises(TurnRefused):
        await source.take()
    await source.close()
    assert client.prompts, "the siblings' turns were answered"
    assert client.live == 0


async def test_the_time_limit_reaches_the_learner() -> None:
    source = sampler(FakeClient(error=OutOfTime("late")), lambda: None)
    with pytest.raises(OutOfTime):
        await source.take()
    await source.close()
