"""How many groups may be late with their rewards: as few as hide what the rewards take."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.rollouts.errors import InvalidRound
from rose_core.rollouts.training.lateness import Lateness, fewest_late
from rose_core.rollouts.training.rounds import Rounds, RoundShape

STEP_S = 200.0


def test_no_group_is_late_before_a_round_was_seen() -> None:
    assert fewest_late([], STEP_S, 4) == 0


def test_no_group_is_late_where_rewards_take_less_than_a_hundredth_of_a_step() -> None:
    assert fewest_late([[2.0, 1.0, -5.0]], STEP_S, 2) == 0
    assert fewest_late([[2.1, 0.9, -5.0]] * 10, STEP_S, 2) == 2


def test_as_many_are_late_as_end_within_a_rewards_time_of_the_last() -> None:
    assert fewest_late([[10.0, -3.0, -40.0]] * 10, STEP_S, 3) == 1
    often = [[10.0, 8.0, -40.0], [10.0, -3.0, -50.0]] * 5
    assert fewest_late(often, STEP_S, 3) == 2
    rare = [[10.0, 5.0, -40.0], *[[10.0, -3.0, -50.0]] * 15]
    assert fewest_late(rare, STEP_S, 3) == 1, "one round in sixteen waits 5 s: within both"


@pytest.mark.parametrize("took_s", [10.0, 10.1, 7.3, 1 / 3 * 30])
def test_few_rounds_are_not_enough_to_find_a_number_that_will_do(took_s: float) -> None:
    """One more is taken to wait in full with it: after eight, more than the tenth that may show."""
    lucky = [took_s, -3.0, -40.0]
    assert fewest_late([lucky], STEP_S, 2) == fewest_late([lucky] * 8, STEP_S, 2) == 2
    assert fewest_late([lucky] * 9, STEP_S, 2) == 1


@pytest.mark.parametrize("step_s", [20.0, 33.0, 50.0, 60.0, 200.0])
def test_rewards_that_are_long_beside_a_step_leave_no_more_groups_late_for_good(
    step_s: float,
) -> None:
    """Half a step, or a third: the round that is added would be over a hundredth of one."""
    assert fewest_late([[10.0, -3.0, -40.0]] * 16, step_s, 2) == 1
    assert fewest_late([[10.0, 0.3, -40.0]] * 16, step_s, 2) == (1 if step_s > 30 else 2)


def test_more_than_half_are_late_only_where_half_was_seen_to_be_too_few() -> None:
    quiet = [10.0, 9.0, -30.0, -60.0]
    assert fewest_late([quiet] * 8, STEP_S, 2, 3) == 2, "nothing speaks against half"
    crowded = [10.0, 9.0, 8.0, -60.0]
    assert fewest_late([quiet, crowded], STEP_S, 2, 3) == 3, "4 s of a round, and 2 may be"
    assert fewest_late([crowded, *[quiet] * 7], STEP_S, 2, 3) == 2, "one round in eight waits 8 s"
    wide = [10.0, 9.0, 8.0, 7.0, -60.0, -70.0, -80.0, -90.0]
    assert fewest_late([wide], STEP_S, 3, 7) == 4, "the fewest that would have been enough"
    assert fewest_late([[10.0, 9.0, 8.0, 7.0]] * 9, STEP_S, 2, 3) == 3, "never all of a batch"


def test_no_more_are_late_than_may_be() -> None:
    assert fewest_late([[60.0, 59.0, 58.0, 57.0]], STEP_S, 2) == 2
    assert fewest_late([[60.0, 59.0]], STEP_S, 0) == 0


class Batches:
    """A clock that says what it was told."""

    now_s = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s


def test_a_late_groups_reward_is_learned_in_the_round_after() -> None:
    clock = Batches()
    seen = Lateness(2, 2, clock)
    assert seen.open() == 0
    clock.now_s = 100.0
    seen.sampled("a")
    clock.now_s = 110.0
    seen.ready("a")
    clock.now_s = 190.0
    seen.sampled("b")
    seen.close({"a", "b"})
    clock.now_s = 200.0
    assert seen.open() == 0, "b has no reward yet"
    seen.ready("b")
    clock.now_s = 400.0
    assert seen.open() == 2, "a had its reward long before b's last token, but in one round"
    for number in range(8):
        opened_s, first, last = clock.now_s, f"a{number}", f"b{number}"
        seen.sampled(first)
        clock.now_s = opened_s + 10.0
        seen.ready(first)
        clock.now_s = opened_s + 90.0
        seen.sampled(last)
        seen.close({first, last})
        clock.now_s = opened_s + 100.0
        seen.ready(last)
        clock.now_s = opened_s + 200.0
        late = seen.open()
    assert late == 1, "in nine: b alone was waited for, the first time too"


def test_a_group_that_is_given_up_holds_no_learning_up() -> None:
    clock = Batches()
    seen = Lateness(2, 2, clock)
    seen.open()
    for number in range(9):
        opened_s, first, last = clock.now_s, f"a{number}", f"b{number}"
        seen.sampled(first)
        seen.sampled(last)
        seen.close({first, last})
        clock.now_s = opened_s + 30.0
        seen.ready(first)
        seen.drop(last)
        clock.now_s = opened_s + 100.0
        late = seen.open()
    assert late == 1, "a was waited for in nine rounds, and b in none"


def test_rounds_that_are_to_learn_are_refused_where_nobody_tells_the_time() -> None:
    with pytest.raises(InvalidRound, match="late learned needs a clock"):
        Rounds(RoundShape(batch=2, members=1, late="learned"))


def test_rounds_tell_when_groups_have_tokens_and_rewards_and_which_are_given_up() -> None:
    clock = Batches()
    rounds = Rounds(RoundShape(batch=2, members=1, surplus=0.0, late="learned"), clock)
    rounds.open()
    clock.now_s = 10.0
    for name in ("a", "b"):
        rounds.begin(name)
        rounds.sampled(name)
    rounds.finished("a")
    clock.now_s = 30.0
    assert rounds.finished("b") is not None
    clock.now_s = 40.0
    opening = rounds.open()
    assert opening is not None
    assert opening.fresh == 3, "b's reward came 20 s after its token: one may be late"
    for name in ("c", "d", "e"):
        rounds.begin(name)
        rounds.sampled(name)
    rounds.finished("c")
    closing = rounds.finished("d")
    assert closing is not None
    assert closing.carried == ("e",)
    rounds.drop("e")
    clock.now_s = 3000.0
    opening = rounds.open()
    assert opening is not None
    assert opening.fresh == 2, "10 s on average, without e: less than a hundredth of a step"


@given(batch=st.integers(2, 6), takes=st.floats(0.1, 60), seed=st.integers(0, 2**32))
def test_every_batch_is_whole_and_each_prompt_in_one_while_the_number_changes(
    batch: int, takes: float, seed: int
) -> None:
    """Groups of one member; rewards take as long for all, a while less in the second half."""
    draw, clock = random.Random(seed), Batches()
    shape = RoundShape(batch, 1, surplus=0.25, late="learned")
    rounds = Rounds(shape, clock)
    begun, trained, carried = 0, list[str](), tuple[str, ...]()
    due = dict[str, tuple[float, float]]()  # when its last token comes, and when its reward
    for number in range(24):
        opening = rounds.open()
        assert opening is not None
        fresh = [str(begun + n) for n in range(opening.fresh)]
        begun += len(fresh)
        for name in (*opening.resumed, *fresh):
            if name in fresh:
                rounds.begin(name)
            token_s = clock.now_s + draw.uniform(10, 100)
            due[name] = (token_s, token_s + takes / (1 + number // 12))
        closing = None
        found = sorted(
            (at, kind, name)
            for name, times in due.items()
            for kind, at in enumerate(times)
            if at > clock.now_s
        )
        for at, kind, name in found:
            clock.now_s = at
            closing = (rounds.sampled, rounds.finished)[kind](name)
            if closing is not None:
                break
        assert closing is not None
        assert len(closing.batch) == batch
        assert set(carried) <= set(closing.batch), "one version late, never two"
        assert len(closing.carried) <= min(batch - 1, len(carried) + batch // 2)
        carried = closing.carried
        trained += closing.batch
        for name in (*closing.batch, *(one.prompt for one in closing.deferred)):
            del due[name]
    assert len(trained) == len(set(trained))
