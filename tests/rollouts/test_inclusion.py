"""The bias meter's statistics: by group, by assignment, and with what nobody reported."""

from __future__ import annotations

import math
import random

import pytest

from rose_core.rollouts.trajectories.inclusion import (
    Arm,
    Fate,
    Inclusion,
    InclusionRow,
    TrajectoryOutcome,
    assigned,
)
from rose_core.stats import Clustered, student, wilson


def _row(meter: Inclusion, dimension: str = "all", stratum: str = "all") -> InclusionRow:
    (row,) = (one for one in meter.rows() if (one.dimension, one.stratum) == (dimension, stratum))
    return row


def _covered(chance: random.Random, alike: float) -> tuple[bool, bool]:
    """Whether the intervals by group and by member hold the truth, 0.7, in 30 groups of 8."""
    by_group, hits = Clustered(), 0
    for group in range(30):
        whole = chance.random() < 0.7
        for _ in range(8):
            hit = whole if chance.random() < alike else chance.random() < 0.7
            by_group.add(str(group), hit=hit)
            hits += hit
    ours, naive = by_group.share(), wilson(hits, 240)
    return ours.low <= 0.7 <= ours.high, naive.low <= 0.7 <= naive.high


def test_groups_that_are_kept_or_dropped_whole_are_told_by_intervals_that_hold_the_truth() -> None:
    chance = random.Random(3)
    held = [_covered(chance, alike=1.0) for _ in range(600)]
    ours, naive = (sum(column) / 600 for column in zip(*held, strict=True))
    assert 0.92 <= ours <= 0.99
    assert naive < 0.6, "siblings taken for witnesses of their own claim far too much"


def test_members_that_have_nothing_in_common_count_one_by_one() -> None:
    chance = random.Random(4)
    held = [_covered(chance, alike=0.0) for _ in range(600)]
    assert 0.92 <= sum(ours for ours, _ in held) / 600 <= 0.99
    cell = Clustered()
    for member in range(2400):
        cell.add(str(member // 8), hit=chance.random() < 0.5)
    ours, naive = cell.share(), wilson(cell.hits, cell.count)
    assert (ours.high - ours.low) / (naive.high - naive.low) == pytest.approx(1, abs=0.15)


def test_sixty_whole_groups_do_not_prove_two_points() -> None:
    cell = Clustered()
    for member in range(236):
        cell.add(str(member % 60), hit=True)
    assert cell.share().value == 1.0
    assert 0.92 < cell.share().low < 0.95
    assert wilson(236, 236).low > 0.98


def test_one_group_says_nothing_of_others() -> None:
    cell = Clustered()
    for _ in range(8):
        cell.add("only", hit=True)
    assert (cell.share().low, cell.share().high) == (0.0, 1.0)


def test_memory_of_groups_is_bounded() -> None:
    cell = Clustered(most=2)
    for number in range(100):
        cell.add(str(number), hit=True)
    assert (cell.groups, len(cell._open)) == (100, 2)


@pytest.mark.parametrize(
    ("freedom", "known"), [(1, 12.71), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (60, 2.000)]
)
def test_students_quantile_is_that_of_the_tables(freedom: int, known: float) -> None:
    assert student(freedom) == pytest.approx(known, rel=0.01)


def test_groups_are_drawn_by_name_in_about_the_share_asked_for() -> None:
    arms = [assigned(f"group-{number}", 0.05) for number in range(20_000)]
    assert arms.count(Arm.CONTROL) / 20_000 == pytest.approx(0.05, abs=0.005)
    assert arms == [assigned(f"group-{number}", 0.05) for number in range(20_000)]
    assert {assigned(str(number), 0.0) for number in range(1000)} == {Arm.ANY}


def test_what_placement_does_to_long_ones_is_no_bias_when_groups_were_assigned() -> None:
    """Long ones meet borrowed engines and are dropped for being long, wherever they run."""
    chance, meter = random.Random(8), Inclusion()
    for number in range(4000):
        arm = assigned(str(number), 0.5)
        long = chance.random() < 0.3
        met = arm is Arm.ANY and (long or chance.random() < 0.2)
        fate = Fate.DROPPED if long and chance.random() < 0.5 else Fate.TRAINED
        meter.add(TrajectoryOutcome(fate, arm, str(number), 20_000 if long else 500, met))
    assert not any(row.biased for row in meter.rows())
    assert abs(_row(meter).gap.value) < 0.03


def test_what_nobody_reported_widens_the_gap_to_both_sides() -> None:
    meter, known = Inclusion(), Inclusion()
    for number in range(400):
        arm = Arm.ANY if number % 2 else Arm.CONTROL
        fate = Fate.LOST if number % 10 == 1 else Fate.TRAINED
        meter.add(TrajectoryOutcome(fate, arm, str(number), 500))
        if fate is not Fate.LOST:
            known.add(TrajectoryOutcome(fate, arm, str(number), 500))
    row, without = _row(meter), _row(known)
    assert row.any.lost == 40
    assert row.gap.value == without.gap.value == 0
    assert row.gap.low < -0.2 < -0.03 < without.gap.low, "all that is lost may have been dropped"


def test_a_trainer_that_never_reports_leaves_everything_possible() -> None:
    meter = Inclusion()
    for number in range(100):
        meter.add(
            TrajectoryOutcome(Fate.LOST, Arm.ANY if number % 2 else Arm.CONTROL, str(number), 500)
        )
    row = _row(meter)
    assert math.isnan(row.gap.value)
    assert row.gap.low < -0.9
    assert row.gap.high > 0.9
    assert not row.biased


def _drawn(chance: random.Random, lost: float) -> TrajectoryOutcome:
    fate = chance.choice([Fate.TRAINED, Fate.DROPPED])
    return TrajectoryOutcome(
        Fate.LOST if chance.random() < lost else fate,
        chance.choice(list(Arm)),
        str(chance.randrange(9)),
        chance.choice([0, 999, 1000, 3999, 4000, 15_999, 16_000, 99_999]),
        borrowed=chance.random() < 0.5,
        reward=chance.choice([None, -1.0, 0.0, 0.5, math.nan, math.inf]),
        stale=chance.choice([None, 0, 1, 2, 3, 4, 99]),
        moves=chance.choice([0, 1, 2, 3, 4, 99]),
    )


@pytest.mark.parametrize("lost", [0.0, 0.1, 1.0])
def test_what_is_counted_once_is_what_three_counts_would_be(lost: float) -> None:
    chance, meter = random.Random(5), Inclusion()
    three: dict[tuple[str, str, Arm], tuple[Clustered, Clustered, Clustered]] = {}
    for number in range(2000):
        one = _drawn(chance, lost if number > 500 else 0.0)
        meter.add(one)
        for key in one.strata():
            counts = three.setdefault((*key, one.arm), (Clustered(), Clustered(), Clustered()))
            known, least, most = counts
            if one.fate is not Fate.LOST:
                known.add(one.group, hit=one.fate is Fate.TRAINED)
            least.add(one.group, hit=one.fate is Fate.TRAINED)
            most.add(one.group, hit=one.fate is not Fate.DROPPED)
    assert len(three) == len(meter._cells)
    for place, counts in three.items():
        cell = meter._cells[place]
        reported = (cell._known, cell._least, cell._most)
        assert [_counted(one) for one in reported] == [_counted(one) for one in counts], place


def _counted(share: Clustered) -> dict[str, object]:
    """All of it, but for the order in which groups came last: that only says which is closed."""
    return {**vars(share), "_open": dict(share._open)}
