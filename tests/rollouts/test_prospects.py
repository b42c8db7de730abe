"""What the scheduler remembers and expects of trajectories."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

from rose_core.identity import WeightVersion
from rose_core.rollouts.placement.views import EngineView, TurnView
from rose_core.rollouts.trajectories import prospects
from rose_core.rollouts.trajectories.freshness import Cadence, budget_seconds
from rose_core.rollouts.trajectories.inclusion import Arm, Fate, Inclusion, TrajectoryOutcome
from rose_core.rollouts.trajectories.inference import Idle, is_over
from rose_core.rollouts.trajectories.lengths import Lengths
from rose_core.rollouts.trajectories.prospects import (
    Deadline,
    Hint,
    Prospects,
    RemainingWork,
    survives,
)
from rose_core.rollouts.trajectories.shares import ContactShares, stratum
from rose_core.stats import newcombe, wilson
from rose_core.wire.routing import EngineKind


def version(sequence: int, incarnation: int = 1) -> WeightVersion:
    return WeightVersion("run", incarnation, sequence)


OURS = EngineView("ours", EngineKind.DEDICATED, version(0), gate_open=True, cap=8)
LENT = replace(OURS, name="lent", kind=EngineKind.BORROWED)
TURN = TurnView(context=100, expected=50)


# --- lengths


def test_nothing_is_expected_before_anything_has_finished() -> None:
    assert Lengths().rest("g", 0).median == 0


def test_siblings_outweigh_the_rest() -> None:
    lengths = Lengths()
    for _ in range(20):
        lengths.record("", 100)
    for _ in range(8):
        lengths.record("g", 1000)
    assert lengths.rest("", 0).median == 100
    assert lengths.rest("g", 0).median == 1000


def test_what_has_outlived_the_short_ones_is_expected_to_be_long() -> None:
    lengths = Lengths()
    for total in range(100, 1100, 10):
        lengths.record("", total)
    young, old = lengths.rest("", 0), lengths.rest("", 950)
    assert young.median == pytest.approx(600, abs=10)
    assert not young.in_tail
    assert old.in_tail
    assert 0 < old.median < 150


def test_of_what_is_longer_than_anything_seen_the_rest_grows_with_age() -> None:
    lengths = Lengths()
    lengths.record("", 10)
    assert lengths.rest("", 1000).median < lengths.rest("", 2000).median


def test_of_a_group_as_many_lengths_are_kept_as_of_all() -> None:
    lengths = Lengths(most=4)
    for tokens in (*[10] * 6, *[100] * 4):  # one prompt, sent again and again
        lengths.record("g", tokens)
    assert lengths.rest("g", 0).median == 100


def test_every_length_that_is_learned_or_forgotten_is_in_the_next_answer() -> None:
    lengths = Lengths()
    lengths.record("g", 10)
    assert lengths.rest("g", 0).tail == 10
    lengths.record("g", 1000)
    assert lengths.rest("g", 0).tail == 1000
    lengths.forget("g", 1000)
    assert lengths.rest("g", 0).tail == 10


def nearest_rank(lengths: list[int], share: float) -> int:
    return sorted(lengths)[min(len(lengths) - 1, int(share * len(lengths)))]


@given(
    some.lists(some.tuples(some.sampled_from(["", "g", "h"]), some.integers(0, 30)), min_size=1),
    some.integers(0, 30),
)
def test_quantiles_are_those_of_all_lengths_with_each_siblings_four_times_more(
    ended: list[tuple[str, int]], written: int
) -> None:
    lengths = Lengths(most=8)
    for group, tokens in ended:
        lengths.record(group, tokens)
    siblings = [tokens for group, tokens in ended if group == "g"][-8:]
    every = [tokens for _, tokens in ended][-8:] + 4 * siblings
    longer = [tokens for tokens in every if tokens > written]
    rest = lengths.rest("g", written)
    if longer:
        assert rest.median == nearest_rank(longer, 0.5) - written
        assert rest.tail == nearest_rank(longer, 0.9) - written
    else:
        assert (rest.median, rest.tail) == (written / 2, written)


def test_to_learn_a_length_and_to_ask_again_sorts_nothing() -> None:
    compared = 0

    class Tokens(int):
        def __lt__(self, other: int) -> bool:
            nonlocal compared
            compared += 1
            return int(self) < int(other)

    lengths, dice = Lengths(), random.Random(1)
    for _ in range(600):  # one prompt, sent again and again; its turns end at once
        compared = 0
        lengths.record("g", Tokens(dice.randrange(4000)))
        lengths.rest("g", 0)
    assert 0 < compared < 1500, "some 700; the last 512 alone would take 4,000 to sort"


# --- freshness


def test_the_time_left_shrinks_with_time_and_with_every_publish() -> None:
    cadence = Cadence().observe(version(0), 0.0).observe(version(1), 100.0)
    assert cadence.seconds == 100
    assert budget_seconds(version(1), 2, cadence, 100.0) == 300
    assert budget_seconds(version(1), 2, cadence, 150.0) == 250
    assert budget_seconds(version(0), 0, cadence, 100.0) == 0


def test_without_a_bound_or_a_second_publish_there_is_no_budget() -> None:
    first = Cadence().observe(version(0), 0.0)
    assert budget_seconds(version(0), 2, first, 5.0) == math.inf
    assert budget_seconds(version(0), None, first.observe(version(1), 9.0), 9.0) == math.inf


def test_a_trajectory_of_an_incarnation_that_is_over_has_no_time_left() -> None:
    cadence = Cadence().observe(version(0), 0.0).observe(version(1), 10.0)
    assert budget_seconds(version(5, incarnation=0), 9, cadence, 10.0) == -math.inf


# --- shares


def test_shares_follow_the_last_turns() -> None:
    shares = ContactShares(memory_turns=32)
    for _ in range(200):
        shares.record("a", EngineKind.BORROWED)
    for _ in range(200):
        shares.record("b", EngineKind.DEDICATED)
    assert shares.overall < 0.01
    assert shares.by_stratum() == {"b": 0.0}  # too little is left of the other


def test_shares_are_the_same_after_any_number_of_turns() -> None:
    shares, all_, borrowed = ContactShares(memory_turns=2), 0.0, 0.0
    for number in range(5000):  # each counts twice as much as the one before: 2**5000 is no float
        kind = EngineKind.BORROWED if number % 3 else EngineKind.DEDICATED
        shares.record("a", kind)
        all_, borrowed = all_ / 2 + 1, borrowed / 2 + (kind is EngineKind.BORROWED)
        assert shares.overall == pytest.approx(borrowed / all_)


def test_strata_join_what_is_about_as_long_and_as_fresh() -> None:
    assert stratum(0, math.inf) == "?/fresh"
    assert stratum(20_000, 0.5) == "16k+/late"
    assert stratum(500, 1.5) == "<1k/tight"


# --- vanish


def test_dedicated_engines_must_be_able_to_finish_everything_in_time() -> None:
    one = RemainingWork(context=0, rest_tokens=1000, budget_seconds=30.0)  # 20 s alone
    assert survives([one] * 8, [OURS, LENT])
    assert not survives([one] * 16, [OURS, LENT])
    assert survives([dataclasses.replace(one, budget_seconds=math.inf)] * 1000, [OURS])


def test_the_earliest_deadline_is_served_first() -> None:
    urgent = RemainingWork(0, 1000, 21.0)
    patient = RemainingWork(0, 1000, 300.0)
    assert survives([patient] * 80 + [urgent] * 8, [OURS])


def test_without_dedicated_engines_a_loss_of_all_is_never_made_good() -> None:
    assert not survives([], [LENT])


# --- inclusion


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    chance = random.Random(5)
    held = 0
    for _ in range(400):
        hits = sum(chance.random() < 0.3 for _ in range(60))
        found = wilson(hits, 60)
        held += found.low <= 0.3 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_a_difference_of_equal_shares_is_not_called_bias() -> None:
    gap = newcombe(wilson(80, 100), wilson(160, 200))
    assert gap.low < 0 < gap.high


def test_the_meter_finds_that_long_ones_are_dropped_when_borrowed() -> None:
    meter = Inclusion()
    for number in range(400):
        arm, group = (Arm.ANY if number % 2 else Arm.CONTROL), str(number)
        meter.add(TrajectoryOutcome(Fate.TRAINED, arm, group, 500, reward=1.0))
        fate = Fate.TRAINED if not number % 2 or number % 3 == 0 else Fate.DROPPED
        meter.add(TrajectoryOutcome(fate, arm, group, 20_000, stale=1))
    rows = {(row.dimension, row.stratum): row for row in meter.rows()}
    assert rows["length", "16k+"].biased
    assert rows["length", "16k+"].gap.high < -0.5
    assert not rows["length", "<1k"].biased
    assert rows["staleness", "1"].gap.high < -0.5
    assert not rows["staleness", "1"].biased, "how stale it was is a consequence of the arm"
    assert rows["reward", "above 0"].any.groups == 200


def test_the_correlation_is_that_of_ranks_with_ties() -> None:
    chance = random.Random(7)
    meter = Inclusion()
    pairs = []
    for _ in range(300):
        tokens = chance.choice((500, 2000, 9000, 40_000))
        borrowed = chance.random() < {500: 0.2, 2000: 0.3, 9000: 0.5, 40_000: 0.8}[tokens]
        pairs.append((tokens, int(borrowed)))
        meter.add(TrajectoryOutcome(Fate.TRAINED, Arm.ANY, "g", tokens, borrowed))
    ranks = [[_rank(one, column) for one in column] for column in zip(*pairs, strict=True)]
    assert meter.correlations()["length"] == pytest.approx(statistics.correlation(*ranks))
    assert meter.correlations()["length"] > 0.3


def _rank(value: int, among: tuple[int, ...]) -> float:
    """The mean place of a value among all, ties included."""
    return sum(other < value for other in among) + sum(other == value for other in among) / 2


def test_of_one_pool_or_one_stratum_no_correlation_is_told() -> None:
    meter = Inclusion()
    meter.add(TrajectoryOutcome(Fate.TRAINED, Arm.ANY, "a", 500, borrowed=True))
    meter.add(TrajectoryOutcome(Fate.TRAINED, Arm.ANY, "b", 5000, borrowed=True))
    assert meter.correlations() == {}
    meter.add(TrajectoryOutcome(Fate.TRAINED, Arm.ANY, "c", 500, reward=1.0))
    assert meter.correlations().keys() == {"length"}
    assert meter.correlations()["length"] == pytest.approx(0.5)


# --- memory


def test_only_the_first_turn_begins_a_trajectory() -> None:
    memory = Prospects()
    memory.begin_turn("t", Hint(group="g"), 100, 0.0)
    assert memory.with_expectation("t", TURN, 0.0).begins
    memory.note_placement("t", EngineKind.BORROWED, left_home=False)
    memory.end_turn("t", 40, 140, 1.0)
    memory.begin_turn("t", Hint(), 200, 2.0)
    assert not memory.with_expectation("t", TURN, 2.0).begins
    memory.begin_turn("other", Hint(turn=3), 200, 2.0)
    assert not memory.with_expectation("other", TURN, 2.0).begins


def test_turns_since_the_last_move_are_counted() -> None:
    memory = Prospects()
    memory.begin_turn("t", Hint(), 100, 0.0)
    memory.note_placement("t", EngineKind.BORROWED, left_home=True)
    assert memory.with_expectation("t", TURN, 0.0).since_move == 0
    memory.note_placement("t", EngineKind.BORROWED, left_home=False)
    assert memory.with_expectation("t", TURN, 0.0).since_move == 1


def test_a_deadline_in_seconds_counts_from_the_beginning() -> None:
    memory = Prospects()
    memory.begin_turn("t", Hint(deadline=Deadline(seconds=60)), 100, 10.0)
    assert memory.with_expectation("t", TURN, 30.0).budget_seconds == 40


def test_a_trajectory_that_began_before_the_first_publish_grows_old_from_it_on() -> None:
    memory = Prospects(Deadline(publishes=2))
    memory.note_head(WeightVersion.of_base("run", "a" * 32), 0.0)
    memory.begin_turn("t", Hint(), 100, 0.0)
    memory.note_head(version(0), 100.0)
    assert memory.with_expectation("t", TURN, 100.0).budget_seconds == math.inf, "no rhythm yet"
    memory.note_head(version(1), 110.0)
    assert memory.with_expectation("t", TURN, 110.0).budget_seconds == 10, "the next is the third"
    memory.note_head(version(2), 120.0)
    assert memory.with_expectation("t", TURN, 120.0).budget_seconds == 0


def test_what_the_trainer_reports_is_counted_once_with_its_staleness() -> None:
    memory = Prospects()
    memory.note_head(version(3), 0.0)
    memory.begin_turn("t", Hint(), 100, 0.0)
    memory.note_placement("t", EngineKind.BORROWED, left_home=False)
    memory.end_turn("t", 40, 140, 1.0, moves=2)
    memory.note_head(version(5), 9.0)
    found = memory.conclude("t", trained=True, reward=0.0)
    assert found == TrajectoryOutcome(Fate.TRAINED, Arm.ANY, "t", 40, True, 0.0, 2, moves=2)
    assert memory.conclude("t", trained=True) is None


def test_siblings_learn_from_a_trajectory_that_is_over_before_it_is_trained_on() -> None:
    memory = Prospects()
    for name in ("one", "other"):
        memory.begin_turn(name, Hint(group="g"), 100, 0.0)
    assert memory.with_expectation("other", TURN, 0.0).tail_tokens == 0  # nothing is known
    memory.end_trajectory("one")  # while a turn runs it is not over
    memory.end_turn("one", 4000, 4100, 1.0)
    assert memory.with_expectation("other", TURN, 1.0).tail_tokens == 0
    memory.end_trajectory("one")
    memory.end_trajectory("one")
    assert memory.with_expectation("other", TURN, 1.0).tail_tokens == 4000
    assert memory.conclude("one", trained=True) is not None
    assert memory.lengths._all.ordered == [4000]  # counted once


def test_a_silent_trajectory_is_forgotten_and_its_length_kept() -> None:
    memory = Prospects()
    memory.begin_turn("t", Hint(), 100, 0.0)
    memory.end_turn("t", 40, 140, 1.0)
    memory.begin_turn("live", Hint(), 100, 2.0)
    assert memory.forget_silent(10_000.0) == 1
    assert len(memory) == 1
    assert memory.lengths.rest("", 0).median == 40


def test_memory_is_bounded() -> None:
    memory = Prospects(most=3)
    for number in range(10):
        memory.begin_turn(str(number), Hint(), 1, float(number))
    assert len(memory) == 3
    assert memory.forgotten == 7


def test_the_outlook_says_when_a_loss_of_all_borrowed_engines_could_not_be_made_good() -> None:
    memory = Prospects(Deadline(seconds=1.0))
    assert memory.outlook(lambda: [OURS], 1.0, 0.0).safe
    for number in range(20):
        memory.begin_turn(str(number), Hint(), 100_000, 0.0)
    assert not memory.outlook(lambda: [OURS], 1.0, 5.0).safe


@pytest.mark.parametrize("end", ["ended", "concluded", "forgotten"])
def test_what_is_no_more_in_flight_does_not_count_for_the_outlook(end: str) -> None:
    memory = Prospects(Deadline(seconds=4))
    for name in ("a", "b"):
        memory.begin_turn(name, Hint(), 50_000, 0.0)  # 5 s of prefill
    assert not memory.outlook(lambda: [OURS], 1.0, 0.0).safe
    for name in ("a", "b"):
        if end == "ended":
            memory.end_turn(name, 1, 10, 0.5)
        elif end == "concluded":
            memory.conclude(name, trained=True)
        else:
            memory.forget(name)
    assert memory.outlook(lambda: [OURS], 1.0, 1.0).safe


def test_each_run_has_a_cadence_of_its_own() -> None:
    memory = Prospects(Deadline(publishes=1))
    for publish in range(3):
        memory.note_head(version(publish), 10.0 * publish)
        memory.note_head(WeightVersion("slow", 1, publish), 100.0 * publish, "slow")
    memory.begin_turn("t", Hint(), 100, 200.0)
    memory.begin_turn("named", Hint(), 100, 200.0, run="run")
    memory.begin_turn("slow", Hint(), 100, 200.0, run="slow")
    memory.begin_turn("unseen", Hint(), 100, 200.0, run="unseen")
    views = {
        name: memory.with_expectation(name, TURN, 200.0)
        for name in ("t", "named", "slow", "unseen")
    }
    assert {name: view.from_version for name, view in views.items()} == {
        "t": version(2),
        "named": version(2),
        "slow": WeightVersion("slow", 1, 2),
        "unseen": None,
    }
    assert views["t"].budget_seconds == views["named"].budget_seconds == 20 - 180
    assert views["slow"].budget_seconds == 200
    assert views["unseen"].budget_seconds == math.inf
    assert memory.outlook(list, 1.0, 200.0).swapping == {"slow"}


def test_a_trajectory_of_the_first_run_from_before_its_first_version_hears_of_its_publishes() -> (
    None
):
    memory = Prospects()
    for run in ("run", "other"):
        memory.begin_turn(f"of {run}", Hint(), 3, 0.0, run=run)
        memory.end_turn(f"of {run}", 40, 43, 1.0)
    for publish in range(2):
        memory.note_head(version(publish), 2.0 + publish)
    assert memory.infer_ends(20.0) == 1
    assert memory.conclude("of other", trained=True), "nobody published for it"


def test_a_publish_of_one_run_ends_no_trajectory_of_another() -> None:
    memory = Prospects()
    for run in ("", "other"):
        memory.note_head(WeightVersion(run or "run", 1, 0), 0.0, run)
        memory.begin_turn(f"of {run}", Hint(), 3, 0.0, prompt=(1, 2), run=run)
        memory.end_turn(f"of {run}", 40, 43, 1.0)
    memory.note_head(version(1), 2.0)
    assert memory.infer_ends(20.0) == 1
    memory.note_head(WeightVersion("other", 1, 1), 21.0, "other")
    assert memory.infer_ends(22.0) == 1
    assert memory.groups.joined == 0, "equal prompts of two runs are no group"


def test_one_of_another_run_that_is_not_over_hides_none_that_is() -> None:
    memory = Prospects()
    for run in ("other", ""):
        memory.note_head(WeightVersion(run or "run", 1, 0), 0.0, run)
        memory.begin_turn(f"of {run}", Hint(), 3, 0.0, run=run)
        memory.end_turn(f"of {run}", 40, 43, 1.0)
    memory.note_head(version(1), 2.0)
    assert memory.infer_ends(20.0) == 1, "the other is as old, and nothing was published for it"


def test_a_look_for_ends_asks_of_those_that_are_over_and_of_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    def counted(idle: Idle, pause: float | None, now: float) -> bool:
        asked.append(idle.since)
        return is_over(idle, pause, now)

    monkeypatch.setattr(prospects, "is_over", counted)
    memory = Prospects()
    for number in range(100):
        memory.begin_turn(str(number), Hint(), 3, 0.1 * number)
        memory.end_turn(str(number), 40, 43, 0.1 * number)
    assert memory.infer_ends(30.0) == 0
    assert len(asked) == 1
    assert memory.infer_ends(60.95) == 10
    assert len(asked) == 12
