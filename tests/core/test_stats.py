"""Quantiles and intervals, and that an interval covers what it says it covers."""

import random

import pytest

from rose_core.stats import Clustered, Share, newcombe, paired_ratio, quantile, student, wilson

GROUPS, MEMBERS, TRUE = 40, 16, 0.8


def drawn(draw: random.Random) -> list[tuple[int, int]]:
    """Groups whose members are mostly kept or lost together."""
    found = []
    for _ in range(GROUPS):
        share = draw.betavariate(0.4, 0.1)  # mean 0.8, members alike
        found.append((sum(draw.random() < share for _ in range(MEMBERS)), MEMBERS))
    return found


def grouped_share(cells: list[tuple[int, int]]) -> Share:
    meter = Clustered()
    for number, (kept, count) in enumerate(cells):
        for member in range(count):
            meter.add(str(number), hit=member < kept)
    return meter.share()


def test_a_quantile_between_two_values_is_interpolated() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.75) == 1.75
    assert quantile([5.0], 0.99) == 5.0


def test_students_quantile_falls_towards_the_normal_one() -> None:
    values = [student(degrees) for degrees in range(1, 60)]
    assert values == sorted(values, reverse=True)
    assert student(40) == pytest.approx(2.0211, abs=1e-3)


def test_a_paired_ratio_covers_its_mean_as_often_as_it_says() -> None:
    draw = random.Random(7)
    hits = 0
    for _ in range(2000):
        ones = [draw.lognormvariate(0.1, 0.2) for _ in range(6)]
        found = paired_ratio(ones, [1.0] * 6)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 2.718281828**0.1 <= found.high
    assert 0.94 <= hits / 2000 <= 0.96


def test_an_interval_by_group_covers_where_one_by_member_does_not() -> None:
    draw = random.Random(3)
    by_group = by_member = 0
    for _ in range(1000):
        cells = drawn(draw)
        found = grouped_share(cells)
        naive = wilson(sum(kept for kept, _ in cells), GROUPS * MEMBERS)
        by_group += found.low <= TRUE <= found.high
        by_member += naive.low <= TRUE <= naive.high
    assert by_group >= 930
    assert by_member < 600


def test_a_difference_by_group_covers_none_as_often_as_it_says() -> None:
    draw = random.Random(5)
    hits = 0
    for _ in range(1000):
        gap = newcombe(grouped_share(drawn(draw)), grouped_share(drawn(draw)))
        hits += gap.low <= 0 <= gap.high
    assert hits >= 930
