"""The demo's section on cost, on a recording whose figures are known."""

from __future__ import annotations

from types import ModuleType

import msgspec
import pytest

from rose_core.accounting.breakdown import money
from rose_core.accounting.late import LateSource
from rose_core.accounting.ledger import GpuTier
from rose_demo.records import Recording
from rose_demo.report import costs, costs_markdown, costs_section, late_requests
from rose_demo.statistics import Attainment
from rose_demo.verdicts import judge


@pytest.fixture
def recording(synthetic: ModuleType) -> Recording:
    found: Recording = synthetic.recording()
    return found


def test_the_bill_is_of_the_time_that_its_tokens_and_steps_are_of(recording: Recording) -> None:
    found = costs(recording, judge(recording).attainments)
    assert found is not None
    assert found.factors is not None
    steps = [one for one in recording.training if one["event"] == "step"]
    assert found.accepted == 32 * len(steps)
    assert 0 < found.correct < found.accepted
    assert found.factors.total * found.correct == pytest.approx(found.bill.total, rel=0.01)
    assert found.bill.dedicated == pytest.approx(2 * 300 / 3600 * 1e6), (
        "the trainer too, and the minute before the measurement in which tokens were counted"
    )
    assert set(found.factors.per_million) == {GpuTier.DEDICATED, GpuTier.BORROWED}
    assert found.violation.source is LateSource.BREAK_EVEN
    assert found.violation.micros == pytest.approx(
        2 * 240 / 3600 * 1e6 / len(recording.requests)
    ), "of the time in which the requests were served"


def test_the_section_says_each_factor_and_what_it_costs_serving(recording: Recording) -> None:
    found = costs(recording, judge(recording).attainments)
    assert found is not None
    text = costs_section(found)
    for words in (
        "cost of a correct answer",
        "a million borrowed tokens",
        "reasoning multiplier",
        "rollout ratio",
        "accept rate",
        "price of a late request",
        "price of the reserve",
        "the trainer&#x27;s GPUs in it",
    ):
        assert words in text


def test_the_factors_make_the_bill_again_and_say_how_far_off_they_are(recording: Recording) -> None:
    found = costs(recording, judge(recording).attainments)
    assert found is not None
    assert found.off_bill is not None
    assert abs(found.off_bill) < 0.01
    assert f"the bill again: {abs(found.off_bill):.2%} off it" in costs_section(found)


def test_the_lines_are_a_table_that_a_page_can_hold(recording: Recording) -> None:
    found = costs(recording, judge(recording).attainments)
    assert found is not None
    assert found.factors is not None
    rows = costs_markdown(found).splitlines()
    assert rows[:2] == ["| | figure | |", "|---|---|---|"]
    assert f"| bill | {money(found.bill.total)} | of which the next five |" in rows
    assert {row.count("|") for row in rows} == {4}
    assert costs_markdown(None) == ""


def test_what_was_not_recorded_is_unknown(recording: Recording) -> None:
    assert costs(Recording(settings=recording.settings), {}) is None
    assert "Unknown" in costs_section(None)
    none = msgspec.structs.replace(
        recording, training=tuple({**one, "correct": 0} for one in recording.training)
    )
    found = costs(none, {})
    assert found is not None
    assert found.factors is None
    assert "unknown" in costs_section(found)


def test_only_what_is_late_beyond_the_withheld_windows_is_lendings() -> None:
    def met(share: float) -> Attainment:
        return Attainment(count=100, met=share, ttft_s=None, tpot_s=None)

    both = {"lent, lent windows": met(0.9), "lent, withheld windows": met(0.95)}
    assert late_requests(both) == 5
    assert late_requests({**both, "lent, lent windows": met(1.0)}) == 0
    assert late_requests({}) == 0
