"""Who is believed about the fixed prompt: the trainer, else most of the engines."""

import math
import re
from pathlib import Path

import pytest

from rose_core.delta.probe import LIMIT, NOTICE, PROMPT, Answer, ProbeOutcome, distance, judge

ALERTS = Path(__file__).parents[2] / "helm/rose/files/alerts.yaml"

GOOD: Answer = (-1.0, -2.0, -3.0)
NEAR: Answer = (-1.01, -2.0, -2.98)
BAD: Answer = (-2.0, -2.0, -4.0)
WORSE: Answer = (-9.0, -9.0, -9.0)


def test_the_prompt_has_ids_that_every_vocabulary_has() -> None:
    assert len(set(PROMPT)) == len(PROMPT)
    assert all(0 <= token < 256 for token in PROMPT)


def test_answers_that_cannot_be_compared_are_far_apart() -> None:
    assert distance(GOOD, GOOD) == 0
    assert distance(GOOD, BAD) == pytest.approx(2 / 3)
    for other in ((), (-1.0,), (-1.0, math.nan, -3.0), (-1.0, -math.inf, -3.0)):
        assert distance(GOOD, other) == math.inf
    assert distance((), ()) == math.inf


@pytest.mark.parametrize(
    ("mine", "trainer", "others", "outcome"),
    [
        (NEAR, GOOD, [BAD, BAD, BAD], ProbeOutcome.RIGHT),
        (BAD, GOOD, [BAD, BAD], ProbeOutcome.WRONG),
        (GOOD, (), [], ProbeOutcome.ALONE),
        (GOOD, (), [NEAR], ProbeOutcome.RIGHT),
        (BAD, (), [GOOD], ProbeOutcome.DISPUTED),
        (BAD, (), [GOOD, NEAR], ProbeOutcome.WRONG),
        (GOOD, (), [NEAR, BAD], ProbeOutcome.RIGHT),
        (BAD, (), [GOOD, WORSE], ProbeOutcome.DISPUTED),
        (BAD, (), [GOOD, NEAR, WORSE], ProbeOutcome.DISPUTED),
        (BAD, (), [GOOD, NEAR, GOOD, WORSE], ProbeOutcome.WRONG),
        ((-1.0, math.nan, -3.0), (), [GOOD, NEAR], ProbeOutcome.WRONG),
    ],
)
def test_the_trainer_decides_else_most_of_all_engines(
    mine: Answer, trainer: Answer, others: list[Answer], outcome: ProbeOutcome
) -> None:
    assert judge(mine, trainer, others).outcome is outcome


def test_the_limit_is_the_callers() -> None:
    assert judge(NEAR, GOOD, [], limit=0.001).outcome is ProbeOutcome.WRONG
    assert judge(BAD, GOOD, [], limit=1.0).outcome is ProbeOutcome.RIGHT


def test_people_are_told_before_an_engine_is_quarantined() -> None:
    (output,) = re.findall(r"probe_difference_nats\) > ([0-9.]+)", ALERTS.read_text())
    assert float(output) == NOTICE < LIMIT
