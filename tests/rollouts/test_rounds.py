"""Tail batching: which prompts a round starts, trains on and puts off; each counted once."""

import random

import pytest

from rose_core.rollouts.errors import InvalidRound
from rose_core.rollouts.rounds import Closing, Kind, Rounds, Shape


def _begun(rounds: Rounds, *names: str) -> None:
    for name in names:
        rounds.begin(name)


def _ready(rounds: Rounds, name: str) -> Closing | None:
    closings = [rounds.finished(name) for _ in range(rounds.shape.enough)]
    assert closings[:-1] == [None] * (len(closings) - 1)
    return closings[-1]


def test_a_short_round_starts_a_surplus_and_ends_when_a_batch_is_ready() -> None:
    rounds = Rounds(Shape(batch=2, members=3, surplus=0.5))
    opening = rounds.open()
    assert opening is not None
    assert (opening.kind, opening.resumed, opening.fresh) == (Kind.SHORT, (), 3)
    _begun(rounds, "a", "b", "c")
    rounds.finished("a")
    assert _ready(rounds, "b") is None
    closing = _ready(rounds, "c")
    assert closing is not None
    assert closing.batch == ("b", "c")
    assert [(one.prompt, one.round, one.finished) for one in closing.deferred] == [("a", 1, 1)]
    assert rounds.kind is None


def test_deferred_prompts_get_a_long_round_once_they_are_a_batch_and_are_never_put_off_again() -> (
    None
):
    rounds = Rounds(Shape(batch=2, members=1, surplus=0.5))
    for first, second, late in (("a", "b", "x"), ("c", "d", "y")):
        opening = rounds.open()
        assert opening is not None
        assert opening.kind is Kind.SHORT
        _begun(rounds, first, second, late)
        rounds.finished(first)
        rounds.finished(second)
    opening = rounds.open()
    assert opening is not None
    assert (opening.kind, opening.resumed, opening.fresh) == (Kind.LONG, ("x", "y"), 0)
    assert rounds.finished("y") is None
    closing = rounds.finished("x")
    assert closing is not None
    assert (closing.batch, closing.deferred) == (("y", "x"), ())


def test_what_an_earlier_run_put_off_is_run_in_a_long_round_and_counted() -> None:
    rounds = Rounds(Shape(batch=2, members=1))
    for name in ("x", "y"):
        rounds.put_off(name)
    with pytest.raises(InvalidRound, match="under way"):
        rounds.put_off("x")
    opening = rounds.open()
    assert opening is not None
    assert (opening.kind, opening.resumed) == (Kind.LONG, ("x", "y"))
    rounds.finished("x")
    rounds.finished("y")
    tally = rounds.tally
    assert (tally.begun, tally.trained, tally.under_way) == (2, 2, 0)


def test_members_that_end_after_their_group_was_put_off_change_nothing() -> None:
    rounds = Rounds(Shape(batch=1, members=2, surplus=1.0))
    rounds.open()
    _begun(rounds, "a", "b")
    assert _ready(rounds, "a") is not None
    assert rounds.finished("b") is None
    assert rounds.finished("a") is None
    assert [one.prompt for one in rounds.deferred] == ["b"]


def test_first_k_of_n_is_off_unless_asked_for() -> None:
    assert Shape(batch=1, members=8).enough == 8
    rounds = Rounds(Shape(batch=1, members=3, need=2, surplus=0.0))
    rounds.open()
    rounds.begin("a")
    assert rounds.finished("a") is None
    closing = rounds.finished("a")
    assert closing is not None
    assert closing.batch == ("a",)


def test_a_dropped_prompt_is_counted_and_does_not_hold_the_round_up() -> None:
    rounds = Rounds(Shape(batch=2, members=1, surplus=0.0))
    rounds.open()
    _begun(rounds, "a", "b")
    assert rounds.finished("a") is None
    closing = rounds.drop("b")
    assert closing is not None
    assert closing.batch == ("a",)
    assert (rounds.tally.trained, rounds.tally.dropped) == (1, 1)
    with pytest.raises(InvalidRound, match="'b' is not under way"):
        rounds.drop("b")


def test_when_prompts_run_out_what_is_deferred_is_run_all_the_same() -> None:
    rounds = Rounds(Shape(batch=2, members=1, surplus=0.5))
    rounds.open()
    _begun(rounds, "a", "b", "c")
    rounds.finished("a")
    rounds.finished("b")
    opening = rounds.open(last=True)
    assert opening is not None
    assert (opening.kind, opening.resumed) == (Kind.LONG, ("c",))
    closing = rounds.finished("c")
    assert closing is not None
    assert closing.batch == ("c",)
    assert rounds.open(last=True) is None
    assert rounds.tally.under_way == 0


def test_a_round_that_finds_too_few_prompts_makes_do() -> None:
    rounds = Rounds(Shape(batch=3, members=1))
    rounds.open()
    rounds.begin("a")
    assert rounds.exhausted() is None
    closing = rounds.finished("a")
    assert closing is not None
    assert closing.batch == ("a",)


def test_what_the_states_do_not_allow_is_refused_by_name() -> None:
    rounds = Rounds(Shape(batch=1, members=1, surplus=1.0))
    with pytest.raises(InvalidRound, match="takes no fresh prompt"):
        rounds.begin("a")
    rounds.open()
    with pytest.raises(InvalidRound, match="round 1 is still open"):
        rounds.open()
    rounds.begin("a")
    with pytest.raises(InvalidRound, match="'a' is under way already"):
        rounds.begin("a")
    with pytest.raises(InvalidRound, match="need 3 is not between 1 and the 2 members"):
        Shape(batch=1, members=2, need=3)
    with pytest.raises(InvalidRound, match="at least 1"):
        Shape(batch=0, members=2)
    with pytest.raises(InvalidRound, match="below 0"):
        Shape(batch=1, members=2, surplus=-1.0)


@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_is_trained_or_dropped_exactly_once(seed: int) -> None:
    draw = random.Random(seed)
    rounds = Rounds(Shape(batch=4, members=3, surplus=0.5))
    begun = 0
    trained: list[str] = []
    dropped: list[str] = []
    put_off: dict[str, int] = {}
    for turn in range(40):
        opening = rounds.open(last=turn > 30)
        if opening is None:
            break
        live = list(opening.resumed)
        for _ in range(opening.fresh):
            begun += 1
            rounds.begin(str(begun))
            live.append(str(begun))
        closing = None
        while closing is None:
            name = draw.choice(live)
            if draw.random() < 0.02:
                live.remove(name)
                ready = name in rounds._ready
                closing = rounds.drop(name)
                dropped.append(name)
                assert not ready or name not in trained
            else:
                closing = rounds.finished(name)
        trained += closing.batch
        for one in closing.deferred:
            put_off[one.prompt] = put_off.get(one.prompt, 0) + 1
    assert len(set(trained)) == len(trained)
    assert set(trained) | set(dropped) == set(map(str, range(1, begun + 1)))
    assert not set(trained) & set(dropped)
    assert max(put_off.values()) == 1
    tally = rounds.tally
    assert (tally.begun, tally.trained, tally.dropped) == (begun, len(trained), len(dropped))
