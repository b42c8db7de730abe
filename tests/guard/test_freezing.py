"""When a tree is frozen, and when it is left to come to rest: the table of ``freezing``."""

from __future__ import annotations

import pytest

from rose_core.guard.freezing import Activity, FreezeStep, Grace, next_step
from rose_core.guard.ladder import LadderLimits

GRACE = Grace(iteration_ns=100, start_ns=1000)


@pytest.mark.parametrize(
    ("activity", "stopped_ns", "hurried", "expected"),
    [
        (Activity.UNREPORTED, 0, False, FreezeStep.FREEZE),
        (Activity.RESTING, 0, False, FreezeStep.FREEZE),
        (Activity.ITERATING, 99, False, FreezeStep.WAIT),
        (Activity.ITERATING, 100, False, FreezeStep.FREEZE),
        (Activity.ITERATING, 0, True, FreezeStep.FREEZE),
        (Activity.ITERATING_TOGETHER, 99, False, FreezeStep.WAIT),
        (Activity.ITERATING_TOGETHER, 99, True, FreezeStep.WAIT),
        (Activity.ITERATING_TOGETHER, 100, False, FreezeStep.END),
        (Activity.ITERATING_TOGETHER, 100, True, FreezeStep.END),
        (Activity.STARTING, 999, False, FreezeStep.WAIT),
        (Activity.STARTING, 999, True, FreezeStep.WAIT),
        (Activity.STARTING, 1000, False, FreezeStep.END),
        (Activity.STARTING, 1000, True, FreezeStep.END),
    ],
)
def test_every_row_of_the_table(
    activity: Activity, stopped_ns: int, hurried: bool, expected: FreezeStep
) -> None:
    assert next_step(activity, stopped_ns, GRACE, hurried=hurried) is expected


def test_the_host_ends_a_start_that_does_not_rest_before_the_guard_loses_patience() -> None:
    limits = LadderLimits()
    assert Grace().start_ns < limits.hold_ns + limits.freeze_ns


def test_a_hold_is_confirmed_before_the_guard_freezes_the_tree_itself() -> None:
    assert Grace().iteration_ns < LadderLimits().hold_ns
