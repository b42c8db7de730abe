from types import ModuleType

import numpy as np
import pytest

from rose_demo.records import Request, Role, Sample, Window
from rose_demo.statistics import (
    attainment,
    classify,
    compare,
    growth,
    open_share,
    pairs,
    quantile,
    ratio_draws,
    split,
    windows,
)
from rose_demo.verdicts import HARM_TOLERANCE


def sample(at: float, withheld: bool | None, gate: bool | None = None) -> Sample:
    return Sample(at_s=at, withheld=withheld, gate_open=gate)


def test_windows_join_equal_neighbours_and_leave_unknown_stretches_out() -> None:
    seen = [
        sample(0, None),
        sample(1, False),
        sample(2, False),
        sample(3, True),
        sample(4, None),
        sample(5, True),
        sample(6, True),
    ]
    assert windows(seen) == [
        (1, 3, Window.LENT),
        (5, 6, Window.WITHHELD),
    ]


def test_a_request_that_straddles_windows_belongs_to_none() -> None:
    spans = [(0.0, 10.0, Window.LENT), (10.0, 20.0, Window.WITHHELD)]

    def request(at: float, end: float) -> Request:
        return Request(Role.LENT, at, 1, 1, ttft_s=0.1, end_s=end)

    assert classify(request(1, 2), spans) is Window.LENT
    assert classify(request(10, 11), spans) is Window.WITHHELD
    assert classify(request(9, 11), spans) is None
    assert classify(request(30, 31), spans) is None


def test_failed_requests_and_the_other_role_are_left_out() -> None:
    spans = [(0.0, 10.0, Window.LENT)]
    good = Request(Role.LENT, 1, 1, 1, ttft_s=0.1, end_s=2)
    bad = Request(Role.LENT, 1, 1, 1, end_s=2, error="reset")
    other = Request(Role.CONTROL, 1, 1, 1, ttft_s=0.1, end_s=2)
    assert split([good, bad, other], spans, Role.LENT)[Window.LENT] == [good]


def ratios(synthetic: ModuleType, harm: float, machine: float) -> dict[str, tuple[float, float]]:
    requests = synthetic.requests(harm=harm, machine=machine)
    spans = windows(synthetic.samples())
    lent, control = (split(requests, spans, role) for role in (Role.LENT, Role.CONTROL))
    found = compare(lent, control, "tpot", 0.5)
    assert found.ratio is not None
    assert found.excess is not None
    return {
        "ratio": (found.ratio.low, found.ratio.high),
        "excess": (found.excess.low, found.excess.high),
    }


def test_no_harm_gives_intervals_around_one(synthetic: ModuleType) -> None:
    found = ratios(synthetic, harm=1.0, machine=1.0)
    assert found["ratio"][0] < HARM_TOLERANCE
    assert found["excess"][0] < HARM_TOLERANCE


def test_harm_on_the_lent_replica_alone_is_proven(synthetic: ModuleType) -> None:
    found = ratios(synthetic, harm=1.6, machine=1.0)
    assert found["ratio"][0] > HARM_TOLERANCE
    assert found["excess"][0] > HARM_TOLERANCE


def test_a_machine_that_slows_both_replicas_is_not_harm(synthetic: ModuleType) -> None:
    found = ratios(synthetic, harm=1.0, machine=1.6)
    assert found["ratio"][0] > HARM_TOLERANCE
    assert found["excess"][0] < HARM_TOLERANCE


def test_only_requests_measured_in_both_classes_are_compared() -> None:
    def request(number: int, ttft: float | None) -> Request:
        return Request(Role.LENT, 0, 1, 1, ttft_s=ttft, number=number)

    lent = [request(2, 0.2), request(1, 0.1), request(3, None), request(4, 0.4)]
    withheld = [request(1, 1.1), request(2, 1.2), request(3, 1.3), request(5, 1.5)]
    found = pairs({Window.LENT: lent, Window.WITHHELD: withheld}, "ttft")
    assert [list(values) for values in found] == [[0.1, 0.2], [1.1, 1.2]]


def test_pairs_are_drawn_together() -> None:
    values = np.geomspace(0.01, 1.0, 40)
    draws = ratio_draws(values * 1.5, values, 0.9, seed=0)
    assert draws is not None
    assert draws == pytest.approx(1.5), "the spread of the requests is not noise"


def test_below_the_floor_there_is_no_ratio() -> None:
    assert ratio_draws(np.ones(5), np.ones(5), 0.5, seed=0) is None
    assert quantile(np.array([]), 0.5) is None


def test_attainment_counts_both_limits() -> None:
    rows = [
        Request(Role.LENT, 0, 1, 9, ttft_s=0.1, tpot_s=0.01),
        Request(Role.LENT, 0, 1, 9, ttft_s=0.1, tpot_s=0.09),
        Request(Role.LENT, 0, 1, 9, ttft_s=0.9, tpot_s=0.01),
        Request(Role.LENT, 0, 1, 2, ttft_s=0.1),
    ]
    found = attainment(rows, 0.5, 0.05, 90)
    assert found.met == 0.5
    assert attainment([], 0.5, 0.05, 90).met is None


def test_open_share_leaves_withheld_and_unknown_time_out() -> None:
    seen = [
        sample(0, False, gate=True),
        sample(2, False, gate=False),
        sample(4, True, gate=False),
        sample(8, False, gate=None),
        sample(9, False, gate=True),
    ]
    assert open_share(seen) == 0.5
    assert open_share([]) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [([10, 25, 25], 15), ([10, 25, 5, 9], 24), ([None, 3, None, 7], 4), ([None], None)],
)
def test_growth_survives_restarts_and_gaps(values: list[int | None], expected: int | None) -> None:
    seen = [Sample(at_s=i, borrowed_tokens=value) for i, value in enumerate(values)]
    assert growth(seen, "borrowed_tokens") == expected
