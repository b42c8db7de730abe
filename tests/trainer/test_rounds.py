"""Tail batching as a trainer calls it, on virtual time."""

import asyncio
from collections.abc import Callable

import pytest

from rose_core.rollouts.errors import InvalidRound
from rose_trainer.rounds import Batches, Late, RoundKind, RoundShape

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def _rollout(
    seconds: Callable[[int], float], log: list[tuple[str, int]]
) -> Callable[[int, int], asyncio.Future[str]]:
    async def sample(prompt: int, member: int) -> str:
        log.append(("began", prompt))
        try:
            # No two end at once, whose order would be the event loop's.
            await asyncio.sleep(seconds(prompt) + 0.001 * member + 0.00001 * prompt)
        except asyncio.CancelledError:
            log.append(("cancelled", prompt))
            raise
        return f"{prompt}.{member}"

    return lambda prompt, member: asyncio.ensure_future(sample(prompt, member))


async def test_stragglers_are_cancelled_and_run_together_in_a_long_round() -> None:
    log: list[tuple[str, int]] = []
    slow = {2, 5}
    batches = Batches(
        range(6),
        _rollout(lambda n: 100.0 if n in slow else 1.0, log),
        RoundShape(2, 2, surplus=0.5),
    )
    found = [batch async for batch in batches]
    assert [batch.kind for batch in found] == [RoundKind.SHORT, RoundKind.SHORT, RoundKind.LONG]
    assert [sorted(prompt for prompt, _ in batch.groups) for batch in found] == [
        [0, 1],
        [3, 4],
        [2, 5],
    ]
    assert found[0].groups[0] == (0, ["0.0", "0.1"])
    assert log.count(("cancelled", 2)) == 2
    assert log.count(("began", 2)) == 4
    tally = batches.tally
    assert (tally.begun, tally.trained, tally.dropped, tally.under_way) == (6, 6, 0, 0)
    # Two short rounds of about a second and one long one, instead of three long ones.
    assert 102 <= asyncio.get_running_loop().time() < 103


async def test_a_rollout_that_fails_drops_its_prompt_and_is_kept_with_its_reason() -> None:
    async def sample(prompt: int, _member: int) -> int:
        await asyncio.sleep(1)
        if prompt == 1:
            message = "no engine"
            raise ConnectionError(message)
        return prompt

    batches = Batches(range(4), sample, RoundShape(2, 2, surplus=0.0))
    found = [batch async for batch in batches]
    trained = sorted(prompt for batch in found for prompt, _ in batch.groups)
    assert trained == [0, 2, 3]
    assert [(prompt, str(error)) for prompt, error in batches.failures] == [(1, "no engine")]
    assert batches.tally.dropped == 1


async def test_a_trainer_that_stops_in_the_middle_leaves_nothing_running() -> None:
    log: list[tuple[str, int]] = []
    batches = Batches(range(100), _rollout(lambda n: 1.0 + n, log), RoundShape(2, 1, surplus=1.0))
    iterator = batches.__aiter__()
    first = await anext(iterator)
    assert [prompt for prompt, _ in first.groups] == [0, 1]
    await iterator.aclose()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_a_trainer_that_resumes_loses_no_prompt_it_had_put_off() -> None:
    slow, shape = {2, 5}, RoundShape(2, 2, surplus=0.5)
    rollout = _rollout(lambda n: 100.0 if n in slow else 1.0, [])
    drawn = iter(range(6))
    killed = Batches(drawn, rollout, shape).__aiter__()
    first = await anext(killed)
    await killed.aclose()
    trained = [prompt for prompt, _ in first.groups]
    again = Batches(range(3, 6), rollout, shape, put_off=[2])
    assert again.put_off == [2]
    async for batch in again:
        trained += [prompt for prompt, _ in batch.groups]
    assert sorted(trained) == list(range(6))
    assert again.put_off == []


async def test_what_is_put_off_is_told_between_two_batches() -> None:
    rollout = _rollout(lambda n: 100.0 if n == 2 else 1.0, [])
    batches = Batches(range(6), rollout, RoundShape(2, 2, surplus=0.5))
    found = [list(batches.put_off) async for _ in batches]
    assert found[0] == [2]
    assert found[-1] == []


async def test_of_more_responses_than_are_trained_on_the_first_stay_and_the_rest_are_cut() -> None:
    log: list[tuple[str, int]] = []
    slow = {2}
    rollout = _rollout(lambda n: 100.0 if n in slow else 1.0, log)
    shape = RoundShape(2, 2, surplus=0.5, member_surplus=0.5)
    found = [batch async for batch in Batches(range(3), rollout, shape)]
    assert [batch.kind for batch in found] == [RoundKind.SHORT, RoundKind.LONG]
    # The third member of each would have ended a millisecond later.
    assert found[0].groups == [(0, ["0.0", "0.1"]), (1, ["1.0", "1.1"])]
    assert [log.count(("cancelled", prompt)) for prompt in (0, 1, 2)] == [1, 1, 3]
    # Three began in the short round; the long one starts only those that it trains on.
    assert log.count(("began", 2)) == 3 + 2
    assert found[1].groups == [(2, ["2.0", "2.1"])]


async def test_a_streamed_round_gives_groups_as_they_become_ready() -> None:
    def rollout() -> Callable[[int, int], asyncio.Future[str]]:
        return _rollout(lambda n: 100.0 if n == 1 else 1.0 + n, [])

    shape = RoundShape(3, 2, surplus=0.0)
    found = [
        (int(asyncio.get_running_loop().time()), part)
        async for part in Batches(range(3), rollout(), shape, stream=True)
    ]
    assert [(when, [p for p, _ in part.groups], part.last) for when, part in found] == [
        (1, [0], False),
        (3, [2], False),
        (100, [1], True),
    ]
    [batch] = [batch async for batch in Batches(range(3), rollout(), shape)]
    assert batch.last
    assert [group for _, part in found for group in part.groups] == batch.groups


async def test_a_streamed_round_says_with_its_last_part_what_it_put_off() -> None:
    rollout = _rollout(lambda n: 100.0 if n == 0 else 1.0 + n, [])
    batches = Batches(range(3), rollout, RoundShape(2, 1, surplus=0.5), stream=True)
    parts = [part async for part in batches]
    assert [[p for p, _ in part.groups] for part in parts] == [[1], [2], [0]]
    assert [part.last for part in parts] == [False, True, True]
    assert [[one.finished for one in part.deferred] for part in parts] == [[], [0], []]
    assert batches.tally.trained == 3


async def test_a_streamed_round_whose_tail_fails_ends_with_an_empty_part() -> None:
    async def sample(prompt: int, _member: int) -> int:
        await asyncio.sleep(1 + prompt)
        if prompt == 1:
            message = "no engine"
            raise ConnectionError(message)
        return prompt

    batches = Batches(range(2), sample, RoundShape(2, 1, surplus=0.0), stream=True)
    parts = [part async for part in batches]
    assert [([p for p, _ in part.groups], part.last) for part in parts] == [
        ([0], False),
        ([], True),
    ]


async def test_a_trainer_that_is_busy_with_a_part_misses_no_group() -> None:
    rollout = _rollout(lambda n: 1.0 + n, [])
    found = []
    async for part in Batches(range(6), rollout, RoundShape(6, 1, surplus=0.0), stream=True):
        found += [prompt for prompt, _ in part.groups]
        await asyncio.sleep(2.5)
    assert found == list(range(6))
    assert asyncio.get_running_loop().time() < 1 + 6 * 2.5, "groups that waited come together"


@pytest.mark.parametrize(
    ("delays", "shape"),
    [
        ([0.1, 0.3, 0.2, 0.4, 0.5], RoundShape(2, 1, surplus=0.5)),
        ([0.1, 0.7, 0.2, 0.4, 0.5], RoundShape(2, 2, surplus=0.5, member_surplus=1.0)),
    ],
)
async def test_a_trainer_that_is_busy_with_a_part_gets_the_batches_of_one_that_is_not(
    delays: list[float], shape: RoundShape
) -> None:
    """What ends meanwhile, prompts and members, counts in the order in which it ended."""

    def rollout(prompt: int, member: int) -> asyncio.Future[str]:
        async def sample() -> str:
            # The members that start last end first.
            await asyncio.sleep(delays[prompt] - 0.02 * member)
            return f"{prompt}.{member}"

        return asyncio.ensure_future(sample())

    whole = [batch.groups async for batch in Batches(range(5), rollout, shape)]
    streamed: list[list[tuple[int, list[str]]]] = [[]]
    async for part in Batches(range(5), rollout, shape, stream=True):
        streamed[-1] += part.groups
        if part.last:
            streamed.append([])
        await asyncio.sleep(0.4)
    assert streamed == [*whole, []]
    if shape.members == 1:
        assert [[prompt for prompt, _ in groups] for groups in whole] == [[0, 2], [3, 4], [1]]


def _rewarded(
    seconds: Callable[[int], float],
) -> Callable[[int, str], asyncio.Future[str]]:
    async def reward(prompt: int, sample: str) -> str:
        await asyncio.sleep(seconds(prompt))
        return f"{sample}!"

    return lambda prompt, sample: asyncio.ensure_future(reward(prompt, sample))


async def test_late_rewards_are_hidden_behind_the_next_round_and_are_in_its_batch() -> None:
    rollout = _rollout(lambda n: 100.0 + n % 3, [])
    shape = RoundShape(2, 2, surplus=0.0, late=1)
    batches = Batches(range(9), rollout, shape, reward=_rewarded(lambda _: 10.0))
    found, carried = [], []
    async for batch in batches:
        found.append(([prompt for prompt, _ in batch.groups], batch.late))
        carried.append(list(batches.carried))
    assert found == [([0, 1], 0), ([2, 3], 1), ([4, 6], 1), ([5, 7], 1), ([8], 1)]
    assert carried == [[2], [4], [5], [8], []], "the last to have its tokens"
    assert batches.tally.trained == 9
    assert batches.failures == []


async def test_a_round_waits_for_its_last_token_and_not_for_the_reward_after_it() -> None:
    def played(late: int) -> Batches[int, str]:
        # The last prompt of each round is a straggler.
        slow = {late + n for n in (2, 5, 8)} | {2 + late}
        rollout = _rollout(lambda n: 100.0 if n in slow else 20.0, [])
        shape = RoundShape(3, 1, surplus=0.0, late=late)
        return Batches(range(9 + late), rollout, shape, reward=_rewarded(lambda _: 10.0))

    loop = asyncio.get_running_loop()
    steps = []
    for late in (0, 1):
        began, found = loop.time(), []
        async for batch in played(late):
            found.append(len(batch.groups))
            if len(found) == 3:
                break
        steps.append((loop.time() - began) / 3)
        assert found == [3, 3, 3]
    assert 110 <= steps[0] < 111
    assert 100 <= steps[1] < 101


async def test_streamed_parts_with_late_groups_are_the_batches_of_whole_rounds() -> None:
    def batches(*, stream: bool) -> Batches[int, str]:
        rollout = _rollout(lambda n: 10.0 + (n * 7) % 5, [])
        shape = RoundShape(3, 2, surplus=0.5, member_surplus=0.5, late=2)
        score = _rewarded(lambda n: 1.0 + (n * 3) % 7)
        return Batches(range(30), rollout, shape, stream=stream, reward=score)

    whole = [(batch.groups, batch.late) async for batch in batches(stream=False)]
    streamed: list[tuple[list[tuple[int, list[str]]], int]] = []
    groups: list[tuple[int, list[str]]] = []
    late = 0
    async for part in batches(stream=True):
        groups, late = [*groups, *part.groups], late + part.late
        if part.last:
            streamed.append((groups, late))
            groups, late = [], 0
    assert streamed == whole
    assert any(count for _, count in whole)
    trained = sorted(prompt for groups, _ in whole for prompt, _ in groups)
    assert trained == list(range(30))
    assert all(sample.endswith("!") for groups, _ in whole for _, one in groups for sample in one)


async def test_a_reward_that_fails_drops_its_prompt_also_when_it_is_late() -> None:
    async def score(prompt: int, sample: str) -> str:
        await asyncio.sleep(5.0)
        if prompt == 2:
            message = "no worker"
            raise ConnectionError(message)
        return sample

    shape = RoundShape(2, 1, surplus=0.0, late=1)
    batches = Batches(range(6), _rollout(lambda n: 10.0 + n % 3, []), shape, reward=score)
    found = [prompt for batch in [one async for one in batches] for prompt, _ in batch.groups]
    assert sorted(found) == [0, 1, 3, 4, 5]
    assert [(prompt, str(error)) for prompt, error in batches.failures] == [(2, "no worker")]
    assert (batches.tally.trained, batches.tally.dropped, batches.tally.under_way) == (5, 1, 0)


async def test_a_trainer_that_resumes_loses_no_prompt_whose_rewards_were_late() -> None:
    slow = {1}
    rollout = _rollout(lambda n: 100.0 if n in slow else 1.0, [])
    score, shape = _rewarded(lambda _: 10.0), RoundShape(2, 1, surplus=0.5, late=1)
    batches = Batches(range(5), rollout, shape, reward=score)
    killed = batches.__aiter__()
    trained = [prompt for prompt, _ in (await anext(killed)).groups]
    saved = [*batches.carried, *batches.put_off]
    await killed.aclose()
    assert (trained, batches.carried, saved) == ([0, 2], [3], [3, 4, 1])
    async for batch in Batches(range(5, 9), rollout, shape, put_off=saved, reward=score):
        trained += [prompt for prompt, _ in batch.groups]
    assert sorted(trained) == list(range(9)), "each once"


@pytest.mark.parametrize("steps", range(1, 9))
async def test_a_trainer_that_learns_trains_on_each_prompt_once_wherever_it_was_killed(
    steps: int,
) -> None:
    rollout = _rollout(lambda n: 100.0 if n % 4 == 3 else 20.0, [])
    score, shape = _rewarded(lambda _: 10.0), RoundShape(4, 1, surplus=0.25, late="learned")
    prompts = iter(range(60))
    batches = Batches(prompts, rollout, shape, stream=True, reward=score)
    trained: list[int] = []
    late = left = 0
    async for part in (killed := aiter(batches)):
        trained += [prompt for prompt, _ in part.groups]
        late, left = late + part.late, left + part.last
        if left == steps:
            break
    saved = [*batches.carried, *batches.put_off]
    await killed.aclose()
    assert bool(late) == (steps > 2), "what was seen decides"
    async for part in Batches(prompts, rollout, shape, put_off=saved, stream=True, reward=score):
        trained += [prompt for prompt, _ in part.groups]
    assert sorted(trained) == list(range(60))


async def test_late_groups_without_a_reward_of_their_own_are_refused() -> None:
    many: tuple[Late, ...] = (1, "learned")
    for late in many:
        with pytest.raises(InvalidRound, match=f"late {late} needs reward="):
            Batches(range(2), _rollout(lambda _: 1.0, []), RoundShape(2, 1, late=late))


async def test_as_few_groups_are_late_as_hide_the_rewards_and_none_unless_the_trainer_says_so() -> (
    None
):
    async def played(takes: float, shape: RoundShape) -> tuple[float, list[int]]:
        # Every fourth prompt is a straggler, by more than its reward takes.
        rollout = _rollout(lambda n: 100.0 if n % 4 == 3 else 20.0, [])
        loop = asyncio.get_running_loop()
        began, late = loop.time(), []
        async for batch in Batches(range(99), rollout, shape, reward=_rewarded(lambda _: takes)):
            late.append(batch.late)
            if len(late) == 24:
                return (loop.time() - began) / 24, late
        raise AssertionError

    learns = RoundShape(4, 2, surplus=0.0, late="learned")
    learned_s, late = await played(10.0, learns)
    assert late[:2] == [0, 0], "one round is seen first"
    assert set(late[3:10]) == {2}, "ten rounds are seen before one group is enough"
    assert set(late[14:]) == {1}
    waits_s, on_policy = await played(10.0, RoundShape(4, 2, surplus=0.0))
    assert set(on_policy) == {0}
    assert waits_s == pytest.approx(110.0, abs=1.0)
    assert learned_s < 103.0
    _, quick = await played(0.5, learns)
    assert set(quick) == {0}, "a reward of half a hundredth of a step makes no group older"


async def test_groups_are_late_no_more_when_rewards_get_quick_however_long_a_step_takes() -> None:
    rollout = _rollout(lambda n: 100.0 if n % 4 == 3 else 20.0, [])
    score = _rewarded(lambda n: 10.0 if n < 12 else 0.5)
    shape, late = RoundShape(4, 1, surplus=0.0, late="learned"), []
    async for batch in Batches(range(120), rollout, shape, reward=score):
        late.append(batch.late)
        await asyncio.sleep(60.0)  # what is late has its reward long before the trainer looks
    assert 2 in late[2:6]
    assert set(late[-5:]) == {0}
