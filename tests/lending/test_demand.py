"""How many slots a lease wants, and who gets them: what routers say, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rose_core.api import Reason
from rose_core.lending import Demand, Lease, PlannerPolicy, plan
from rose_core.lending.demand import want
from tests.lending.world import NOW, lease, lent, released, replica, slot, world

EIGHT = lease("a", max_slots=8, turns_per_slot=8, demand=Demand(0))
IDLE = Demand(0, usual_turns=16, idle_seconds=300.0)


def slots(of: Lease, held: int = 0, **changes: Any) -> int:  # noqa: ANN401  # any field
    """Slots wanted when the router says that."""
    asked = replace(of.demand or Demand(0), **changes)
    return want(replace(of, demand=asked), held, PlannerPolicy(), NOW).slots


def test_a_router_that_was_never_heard_is_not_taken_for_an_idle_one() -> None:
    assert want(replace(EIGHT, demand=None), 0, PlannerPolicy(), NOW).slots == 8


def test_nor_is_one_that_has_not_been_heard_for_a_while() -> None:
    assert slots(EIGHT, turns=0, idle_seconds=999.0, age_seconds=61.0) == 8


@pytest.mark.parametrize(("turns", "wanted"), [(1, 1), (4, 1), (5, 2), (16, 4), (29, 8), (999, 8)])
def test_slots_are_wanted_until_turns_fill_them_to_a_half(turns: int, wanted: int) -> None:
    assert slots(EIGHT, turns=turns) == wanted


def test_turns_that_dedicated_engines_carry_want_no_slot() -> None:
    assert slots(EIGHT, turns=16, dedicated_turns=8) == 2


def test_slots_that_are_held_stay_until_they_are_less_than_a_quarter_full() -> None:
    assert slots(EIGHT, held=8, turns=16) == 8
    assert slots(EIGHT, held=8, turns=9) == 5


def test_a_count_that_moves_by_some_turns_moves_no_slot() -> None:
    held, seen = 4, []
    for turns in (16, 14, 12, 15, 9, 16, 10):
        held = slots(EIGHT, held=held, turns=turns)
        seen.append(held)
    assert seen == [4] * 7


def test_the_minimum_is_wanted_while_there_are_turns() -> None:
    assert slots(replace(EIGHT, min_slots=3), turns=1) == 3


def test_an_idle_lease_keeps_its_slots_for_idle_seconds_and_then_wants_none() -> None:
    assert slots(EIGHT, held=4, turns=0, idle_seconds=89.0) == 4
    assert slots(EIGHT, held=4, turns=0, idle_seconds=91.0) == 0
    patient = replace(EIGHT, idle_seconds=600.0)
    assert slots(patient, held=4, turns=0, idle_seconds=599.0) == 4


def test_the_peak_of_the_last_minute_keeps_no_slot_beyond_shorter_idle_seconds() -> None:
    quick = replace(EIGHT, idle_seconds=10.0)
    assert slots(quick, held=4, turns=16, idle_seconds=9.0) == 4
    assert slots(quick, held=4, turns=16, idle_seconds=11.0) == 0


def test_a_short_pause_takes_no_slot_that_the_lease_does_not_have() -> None:
    assert slots(EIGHT, held=0, turns=0, idle_seconds=30.0) == 0


def test_what_a_failure_takes_in_a_pause_comes_back_up_to_the_minimum() -> None:
    """Three of six GPUs fail and come back; the lease stayed at three until its next turn."""
    asked = replace(EIGHT, min_slots=6)
    assert slots(asked, held=3, turns=0, idle_seconds=30.0) == 6
    assert slots(asked, held=7, turns=0, idle_seconds=30.0) == 7
    assert slots(asked, held=3, turns=0, idle_seconds=91.0) == 0


def test_a_new_lease_holds_its_slots_while_its_trainer_starts() -> None:
    young = replace(EIGHT, created=NOW - 500)
    assert slots(young, turns=0, idle_seconds=None) == 8
    assert slots(replace(young, created=NOW - 601), turns=0, idle_seconds=None, up_seconds=601) == 0


def test_a_router_that_was_started_again_costs_a_pausing_trainer_nothing() -> None:
    assert slots(EIGHT, held=5, turns=0, idle_seconds=None, up_seconds=20.0) == 5


def test_a_suspended_lease_wants_nothing_whatever_waits_for_it() -> None:
    suspended = replace(EIGHT, min_slots=2, suspended=True)
    asked = want(replace(suspended, demand=Demand(turns=64)), 4, PlannerPolicy(), NOW)
    assert (asked.slots, asked.reason) == (0, Reason.SUSPENDED)


def test_slots_come_back_before_the_next_step_begins() -> None:
    start = replace(EIGHT, toggle_seconds=40.0)
    for expected, wanted in ((100.0, 0), (56.0, 0), (55.0, 4), (0.0, 4)):
        found = slots(start, turns=0, idle_seconds=300.0, usual_turns=16, expected_seconds=expected)
        assert found == wanted, expected


def test_slots_that_would_start_again_at_once_are_not_given_back() -> None:
    start = replace(EIGHT, toggle_seconds=40.0)
    found: dict[str, Any] = {"turns": 0, "idle_seconds": 100.0, "usual_turns": 16}
    assert slots(start, held=4, expected_seconds=95.0, **found) == 4
    assert slots(start, held=4, expected_seconds=96.0, **found) == 0


def test_a_publish_after_the_last_turn_brings_the_slots() -> None:
    found: dict[str, Any] = {"turns": 0, "idle_seconds": 500.0, "usual_turns": 16}
    assert slots(EIGHT, published_seconds=1.0, **found) == 4
    assert slots(EIGHT, published_seconds=91.0, **found) == 0, "no turn came after it"


# --- the planner


FOUR = [replica(name) for name in "abcd"]


def test_the_planner_takes_back_every_slot_of_an_idle_lease_and_says_why() -> None:
    idle = lease("a", max_slots=4, demand=IDLE)
    snapshot = world(FOUR, [idle], [slot(idle, one) for one in FOUR])
    assert set(released(snapshot).values()) == {Reason.IDLE}
    assert len(released(snapshot)) == 4
    outcome = plan(snapshot, NOW).outcomes["r/a"]
    assert (outcome.wanted, outcome.reason) == (0, Reason.IDLE)


def test_the_planner_takes_back_every_slot_of_a_suspended_lease() -> None:
    rests = lease("a", max_slots=4, min_slots=1, suspended=True, demand=Demand(64))
    snapshot = world(FOUR, [rests], [slot(rests, one) for one in FOUR])
    assert list(released(snapshot).values()) == [Reason.SUSPENDED] * 4
    assert plan(snapshot, NOW).outcomes["r/a"].reason is Reason.SUSPENDED


def test_turns_that_wait_bring_the_first_slot_of_a_lease_without_any() -> None:
    waits = lease("a", max_slots=4, demand=Demand(2, idle_seconds=0.0))
    assert len(lent(world(FOUR, [waits]))) == 1


def test_what_an_idle_lease_gives_back_another_may_have() -> None:
    idle = lease("a", max_slots=4, demand=IDLE)
    busy = lease("b", max_slots=4, demand=Demand(16, idle_seconds=0.0))
    assert {key for key, _ in lent(world(FOUR, [idle, busy]))} == {"r/b"}
    assert len(lent(world(FOUR, [idle, busy]))) == 4


def test_a_pool_is_shared_by_what_leases_want_and_not_by_what_they_may_have() -> None:
    little = lease("a", min_slots=0, max_slots=9, demand=Demand(4, idle_seconds=0.0))
    much = lease("b", min_slots=0, max_slots=9, demand=Demand(99, idle_seconds=0.0))
    shares = [key for key, _ in lent(world(FOUR, [little, much]))]
    assert (shares.count("r/a"), shares.count("r/b")) == (1, 3)


def test_of_two_that_want_more_than_there_is_each_has_half() -> None:
    one = lease("a", min_slots=0, max_slots=9, demand=Demand(99, idle_seconds=0.0))
    other = lease("b", min_slots=0, max_slots=9, demand=Demand(50, idle_seconds=0.0))
    shares = [key for key, _ in lent(world(FOUR, [one, other]))]
    assert (shares.count("r/a"), shares.count("r/b")) == (2, 2)


def test_gpus_that_no_lease_wants_are_counted() -> None:
    little = lease("a", max_slots=9, demand=Demand(4, idle_seconds=0.0))
    assert plan(world(FOUR, [little]), NOW).unwanted == {"s/chat": 3}
    wanting = replace(little, demand=None)
    assert plan(world(FOUR, [wanting]), NOW).unwanted == {"s/chat": 0}
