"""Tail batching: which prompts a round starts, trains on and puts off; each counted once."""

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.rollouts.errors import InvalidRound
from rose_core.rollouts.training.rounds import Closing, Opening, RoundKind, Rounds, RoundShape


def _begun(rounds: Rounds, *names: str) -> None:
    for name in names:
        rounds.begin(name)


def _ready(rounds: Rounds, name: str) -> Closing | None:
    closings = [rounds.finished(name) for _ in range(rounds.shape.members)]
    assert closings[:-1] == [None] * (len(closings) - 1)
    return closings[-1]


def test_a_short_round_starts_a_surplus_and_ends_when_a_batch_is_ready() -> None:
    rounds = Rounds(RoundShape(batch=2, members=3, surplus=0.5))
    opening = rounds.open()
    assert opening is not None
    assert (opening.kind, opening.resumed, opening.fresh) == (RoundKind.SHORT, (), 3)
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
    rounds = Rounds(RoundShape(batch=2, members=1, surplus=0.5))
    for first, second, late in (("a", "b", "x"), ("c", "d", "y")):
        opening = rounds.open()
        assert opening is not None
        assert opening.kind is RoundKind.SHORT
        _begun(rounds, first, second, late)
        rounds.finished(first)
        rounds.finished(second)
    opening = rounds.open()
    assert opening is not None
    assert (opening.kind, opening.resumed, opening.fresh) == (RoundKind.LONG, ("x", "y"), 0)
    assert rounds.finished("y") is None
    closing = rounds.finished("x")
    assert closing is not None
    assert (closing.batch, closing.deferred) == (("y", "x"), ())


def test_what_an_earlier_run_put_off_is_run_in_a_long_round_and_counted() -> None:
    rounds = Rounds(RoundShape(batch=2, members=1))
    for name in ("x", "y"):
        rounds.put_off(name)
    with pytest.raises(InvalidRound, match="under way"):
        rounds.put_off("x")
    opening = rounds.open()
    assert opening is not None
    assert (opening.kind, opening.resumed) == (RoundKind.LONG, ("x", "y"))
    rounds.finished("x")
    rounds.finished("y")
    tally = rounds.tally
    assert (tally.begun, tally.trained, tally.under_way) == (2, 2, 0)


def test_members_that_end_after_their_group_was_put_off_change_nothing() -> None:
    rounds = Rounds(RoundShape(batch=1, members=2, surplus=1.0))
    rounds.open()
    _begun(rounds, "a", "b")
    assert _ready(rounds, "a") is not None
    assert rounds.finished("b") is None
    assert rounds.finished("a") is None
    assert [one.prompt for one in rounds.deferred] == ["b"]


def test_a_short_round_starts_a_surplus_of_trajectories_and_keeps_the_first_of_them() -> None:
    rounds = Rounds(RoundShape(batch=1, members=2, surplus=0.0, member_surplus=0.5))
    opening = rounds.open()
    assert opening is not None
    assert opening.members == 3
    rounds.begin("a")
    assert rounds.finished("a") is None
    closing = rounds.finished("a")
    assert closing is not None
    assert closing.batch == ("a",)
    assert rounds.finished("a") is None, "the third came too late and is cut"


def test_no_surplus_of_trajectories_is_started_unless_asked_for() -> None:
    assert RoundShape(batch=1, members=8).started_members == 8


def test_a_long_round_does_not_speculate() -> None:
    rounds = Rounds(RoundShape(batch=1, members=2, surplus=1.0, member_surplus=1.0))
    rounds.open()
    _begun(rounds, "a", "b")
    _ready(rounds, "a")
    opening = rounds.open()
    assert opening is not None
    assert (opening.kind, opening.resumed, opening.members) == (RoundKind.LONG, ("b",), 2)


def test_a_surplus_is_a_share_rounded_up_and_not_by_the_error_of_a_float() -> None:
    shape = RoundShape(batch=70, members=16, surplus=0.1, member_surplus=0.25)
    assert (shape.started, shape.started_members) == (77, 20)
    assert RoundShape(batch=3, members=3, surplus=0.1).started == 4
    learned = RoundShape(batch=4, members=3, surplus=0.0, late="learned")
    assert learned.started == 6, "half of a batch may be late"


def test_a_dropped_prompt_is_counted_and_does_not_hold_the_round_up() -> None:
    rounds = Rounds(RoundShape(batch=2, members=1, surplus=0.0))
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
    rounds = Rounds(RoundShape(batch=2, members=1, surplus=0.5))
    rounds.open()
    _begun(rounds, "a", "b", "c")
    rounds.finished("a")
    rounds.finished("b")
    opening = rounds.open(last=True)
    assert opening is not None
    assert (opening.kind, opening.resumed) == (RoundKind.LONG, ("c",))
    closing = rounds.finished("c")
    assert closing is not None
    assert closing.batch == ("c",)
    assert rounds.open(last=True) is None
    assert rounds.tally.under_way == 0


def test_a_round_that_finds_too_few_prompts_makes_do() -> None:
    rounds = Rounds(RoundShape(batch=3, members=1))
    rounds.open()
    rounds.begin("a")
    assert rounds.exhausted() is None
    closing = rounds.finished("a")
    assert closing is not None
    assert closing.batch == ("a",)


def test_what_the_states_do_not_allow_is_refused_by_name() -> None:
    rounds = Rounds(RoundShape(batch=1, members=1, surplus=1.0))
    with pytest.raises(InvalidRound, match="takes no fresh prompt"):
        rounds.begin("a")
    rounds.open()
    with pytest.raises(InvalidRound, match="round 1 is still open"):
        rounds.open()
    rounds.begin("a")
    with pytest.raises(InvalidRound, match="'a' is under way already"):
        rounds.begin("a")
    with pytest.raises(InvalidRound, match=r"member_surplus -0\.5 must be 0 or more"):
        RoundShape(batch=1, members=2, member_surplus=-0.5)
    with pytest.raises(InvalidRound, match="at least 1"):
        RoundShape(batch=0, members=2)
    with pytest.raises(InvalidRound, match="surplus -1 must be 0 or more"):
        RoundShape(batch=1, members=2, surplus=-1.0)


SHAPES = st.builds(
    RoundShape,
    batch=st.integers(1, 5),
    members=st.integers(1, 4),
    surplus=st.floats(0, 2),
    member_surplus=st.floats(0, 2),
)


@dataclass
class Played:
    """What a job of random lengths did; the rules below are asserted of it."""

    rounds: Rounds
    begun: int = 0
    trained: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    put_off: dict[str, int] = field(default_factory=dict)
    long_prompts: set[str] = field(default_factory=set)

    def round(self, draw: random.Random, *, last: bool, losses: float) -> bool:
        opening = self.rounds.open(last=last)
        if opening is None:
            return False
        fresh = [str(self.begun + n + 1) for n in range(opening.fresh)]
        self.begun += len(fresh)
        _begun(self.rounds, *fresh)
        left = dict.fromkeys([*opening.resumed, *fresh], opening.members)
        ended = dict.fromkeys(left, 0)
        closing = None
        while closing is None:
            name = draw.choice([one for one in left if left[one]])
            if draw.random() < losses:
                left.pop(name)
                self.dropped.append(name)
                closing = self.rounds.drop(name)
            else:
                left[name] -= 1
                ended[name] += 1
                closing = self.rounds.finished(name)
        self.check(opening, closing, ended)
        return True

    def check(self, opening: Opening, closing: Closing, ended: dict[str, int]) -> None:
        shape = self.rounds.shape
        assert len(closing.batch) <= shape.batch
        assert all(ended[name] >= shape.members for name in closing.batch)
        assert all(ended[one.prompt] < shape.members for one in closing.deferred)
        if opening.kind is RoundKind.LONG:
            assert not closing.deferred
            assert opening.members == shape.members
            self.long_prompts |= set(opening.resumed)
        self.trained += closing.batch
        for one in closing.deferred:
            self.put_off[one.prompt] = self.put_off.get(one.prompt, 0) + 1


@given(shape=SHAPES, seed=st.integers(0, 2**32), losses=st.sampled_from([0.0, 0.02, 0.3]))
def test_every_prompt_is_trained_or_dropped_exactly_once_and_put_off_at_most_once(
    shape: RoundShape, seed: int, losses: float
) -> None:
    draw = random.Random(seed)
    played = Played(Rounds(shape))
    for _ in range(12):
        played.round(draw, last=False, losses=losses)
    while played.round(draw, last=True, losses=losses):
        pass
    trained, dropped = set(played.trained), set(played.dropped)
    assert len(played.trained) == len(trained)
    assert len(played.dropped) == len(dropped)
    assert not trained & dropped
    assert trained | dropped == set(map(str, range(1, played.begun + 1)))
    assert set(played.put_off.values()) <= {1}
    assert set(played.put_off) == played.long_prompts
    tally = played.rounds.tally
    assert (tally.begun, tally.trained, tally.dropped, tally.under_way) == (
        played.begun,
        len(trained),
        len(dropped),
        0,
    )


def _sampled(rounds: Rounds, name: str) -> Closing | None:
    closings = [rounds.sampled(name) for _ in range(rounds.shape.members)]
    assert closings[:-1] == [None] * (len(closings) - 1)
    assert rounds.has_tokens(name)
    return closings[-1]


def test_a_round_does_not_wait_for_late_rewards_and_the_next_batch_has_them() -> None:
    rounds = Rounds(RoundShape(batch=2, members=2, surplus=0.0, late=1))
    opening = rounds.open()
    assert opening is not None
    assert opening.fresh == 3, "one more than a batch, once"
    _begun(rounds, "a", "b", "c")
    for name in "abc":
        assert _sampled(rounds, name) is None
    assert _ready(rounds, "c") is None
    closing = _ready(rounds, "a")
    assert closing is not None, "b has its tokens, and its rewards hold nobody up"
    assert (closing.batch, closing.carried, closing.deferred) == (("c", "a"), ("b",), ())
    opening = rounds.open()
    assert opening is not None
    assert opening.fresh == 2, "what is carried has a place in the batch"
    _begun(rounds, "d", "e")
    for name in "de":
        assert _sampled(rounds, name) is None
        assert _ready(rounds, name) is None
    assert rounds.taken == ("d",), "b has its place, whenever its rewards come"
    closing = _ready(rounds, "b")
    assert closing is not None
    assert (closing.batch, closing.carried) == (("d", "b"), ("e",))
    assert rounds.open(last=True) is not None
    closing = rounds.exhausted()
    assert closing is not None
    assert (closing.batch, closing.carried) == (("e",), ())
    assert rounds.open(last=True) is None
    assert rounds.tally.under_way == 0


def test_a_round_still_waits_for_tokens_and_for_more_rewards_than_may_be_late() -> None:
    rounds = Rounds(RoundShape(batch=2, members=1, surplus=0.0, late=1))
    rounds.open()
    _begun(rounds, "a", "b", "c")
    _sampled(rounds, "a")
    _ready(rounds, "a")
    _sampled(rounds, "b")
    assert _ready(rounds, "b") is None, "a batch is ready, and c still writes"
    closing = _sampled(rounds, "c")
    assert closing is not None
    assert (closing.batch, closing.carried) == (("a", "b"), ("c",))
    rounds.open()
    _begun(rounds, "d", "e")
    _sampled(rounds, "d")
    assert _sampled(rounds, "e") is None
    assert _ready(rounds, "e") is None, "c is late once already: the round waits for it"
    assert _ready(rounds, "c") is not None


@pytest.mark.parametrize("streams", [False, True])
def test_a_late_group_that_is_lost_leaves_its_place_and_the_order_of_the_batch(
    streams: bool,
) -> None:
    rounds = Rounds(RoundShape(batch=2, members=1, surplus=0.0, late=2))
    rounds.open()
    _begun(rounds, "a", "b", "c", "d")
    for name in "abcd":
        _sampled(rounds, name)
    _ready(rounds, "a")
    closing = _ready(rounds, "b")
    assert closing is not None
    assert closing.carried == ("c", "d")
    rounds.open()
    _begun(rounds, "e", "f")
    given: list[str] = []
    for call, name in ((_ready, "e"), (_ready, "c"), (Rounds.drop, "d")):
        assert call(rounds, name) is None
        if streams:  # only who streams asks
            given += [one for one in rounds.taken if one not in given]
    closing = _ready(rounds, "f")
    assert closing is not None
    assert closing.batch == ("c", "e"), "e had no place before d was lost"
    assert given == (["c", "e"] if streams else [])


def test_more_late_groups_than_a_batch_has_are_refused() -> None:
    with pytest.raises(InvalidRound, match="late 3 must be 0 to batch, 2"):
        RoundShape(batch=2, members=1, late=3)


@dataclass
class TwoSteps:
    """A job whose members have their tokens first and their rewards later, in any order."""

    rounds: Rounds
    begun: int = 0
    batches: list[tuple[str, ...]] = field(default_factory=list)
    carried: list[tuple[str, ...]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    left: dict[str, list[int]] = field(default_factory=dict)  # members to sample, and to reward

    def round(self, draw: random.Random, *, last: bool, losses: float) -> bool:
        opening = self.rounds.open(last=last)
        if opening is None:
            return False
        fresh = [str(self.begun + n + 1) for n in range(opening.fresh)]
        self.begun += len(fresh)
        _begun(self.rounds, *fresh)
        self.left |= {name: [opening.members, 0] for name in (*opening.resumed, *fresh)}
        closing = None if opening.fresh or opening.resumed else self.rounds.exhausted()
        given: list[str] = []
        while closing is None:
            closing = self.step(draw, losses)
            given += [name for name in self.rounds.taken if name not in given]
        assert list(closing.batch[: len(given)]) == given, "what was given early stays first"
        for one in closing.deferred:
            del self.left[one.prompt]
        self.batches.append(closing.batch)
        self.carried.append(closing.carried)
        return True

    def step(self, draw: random.Random, losses: float) -> Closing | None:
        name = draw.choice(sorted(one for one, left in self.left.items() if any(left)))
        left = self.left[name]
        if draw.random() < losses:
            del self.left[name]
            self.dropped.append(name)
            return self.rounds.drop(name)
        if left[1] and (not left[0] or draw.random() < 0.3):
            left[1] -= 1
            return self.rounds.finished(name)
        left[0] -= 1
        left[1] += 1
        closing = self.rounds.sampled(name)
        if self.rounds.has_tokens(name):
            left[0] = 0
        return closing


@given(
    shape=SHAPES,
    late=st.integers(0, 3),
    seed=st.integers(0, 2**32),
    losses=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_what_is_late_is_trained_on_one_round_later_and_never_two(
    shape: RoundShape, late: int, seed: int, losses: float
) -> None:
    shape = replace(shape, late=min(late, shape.batch))
    draw, played = random.Random(seed), TwoSteps(Rounds(shape))
    for _ in range(12):
        played.round(draw, last=False, losses=losses)
    if not losses:
        assert {len(batch) for batch in played.batches} == {shape.batch}
    while played.round(draw, last=True, losses=losses):
        pass
    for carried, batch in zip(played.carried, played.batches[1:], strict=False):
        assert len(carried) <= shape.most_late
        assert set(carried) - set(played.dropped) <= set(batch)
    trained = [name for batch in played.batches for name in batch]
    assert sorted([*trained, *played.dropped], key=int) == [
        str(n + 1) for n in range(played.begun)
    ], "each once"
    assert not played.carried[-1]
    assert played.rounds.tally.under_way == 0
