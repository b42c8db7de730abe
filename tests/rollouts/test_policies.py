"""Each rule by its name, and each guard of the joint rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rose_core.identity import WeightVersion
from rose_core.rollouts.engines.estimates import Hazard, Speed
from rose_core.rollouts.placement.guards import RolloutOutlook
from rose_core.rollouts.placement.selection import (
    EngineView,
    Obstacle,
    Placement,
    Policy,
    PolicyName,
    TurnView,
    Wait,
    place,
)
from rose_core.wire.routing import EngineKind

HEAD = WeightVersion("run", 2, 10)
OURS = EngineView("ours", EngineKind.DEDICATED, HEAD, gate_open=True, cap=8)
LENT = EngineView("lent", EngineKind.BORROWED, HEAD, gate_open=True, cap=8)
SLOW = Speed(step_seconds=0.1)
TURN = TurnView(context=100, expected=50)


def chosen(
    turn: TurnView,
    *engines: EngineView,
    name: PolicyName = PolicyName.JOINT,
    outlook: RolloutOutlook = RolloutOutlook(),  # noqa: B008  # frozen
) -> str:
    found = place(turn, engines, HEAD, Policy(name=name), 0.0, outlook=outlook)
    return found.engine if isinstance(found, Placement) else found.obstacle.reason


# --- rules


def test_the_papers_rule_stays_then_borrows_then_takes_the_least_loaded() -> None:
    other = replace(LENT, name="other", live=3)
    rule = PolicyName.ROSE_PAPER
    assert chosen(replace(TURN, home="ours"), OURS, LENT, name=rule) == "ours"
    assert chosen(TURN, OURS, replace(LENT, live=5), other, name=rule) == "other"
    assert chosen(TURN, OURS, name=rule) == "ours"


def test_the_other_reading_of_the_paper_stays_then_takes_its_own_then_borrows() -> None:
    rule = PolicyName.ROSE_PAPER_DEDICATED
    assert chosen(replace(TURN, home="lent"), OURS, LENT, name=rule) == "lent"
    assert chosen(TURN, replace(OURS, live=7), LENT, name=rule) == "ours"
    assert chosen(TURN, replace(OURS, live=8), LENT, name=rule) == "lent"


def test_cache_aware_stays_while_enough_is_cached_and_loads_are_even() -> None:
    rule = PolicyName.CACHE_AWARE
    warm = replace(TURN, home="lent", cached=50)
    assert chosen(warm, OURS, replace(LENT, live=5), name=rule) == "lent"
    assert chosen(replace(warm, cached=10), OURS, replace(LENT, live=5), name=rule) == "ours"
    crowded = replace(LENT, live=100, cap=200)
    assert chosen(warm, OURS, crowded, name=rule) == "ours"


def test_least_loaded_looks_at_shares_of_places() -> None:
    big = replace(LENT, cap=64, live=16)
    assert chosen(TURN, replace(OURS, live=3), big, name=PolicyName.LEAST_LOADED) == "lent"


def test_fixed_never_borrows() -> None:
    assert chosen(TURN, replace(OURS, live=7), LENT, name=PolicyName.FIXED) == "ours"
    assert chosen(TURN, replace(OURS, live=8), LENT, name=PolicyName.FIXED) == "Full"


def test_the_degenerate_rules_send_one_sort_of_work_to_borrowed_engines() -> None:
    long, short = replace(TURN, tail=True), TURN
    rule = PolicyName.LONG_TO_BORROWED
    assert (chosen(long, OURS, LENT, name=rule), chosen(short, OURS, LENT, name=rule)) == (
        "lent",
        "ours",
    )
    late = replace(TURN, budget_seconds=1.0, rest_tokens=500)
    rule = PolicyName.LATE_TO_BORROWED
    assert (chosen(late, OURS, LENT, name=rule), chosen(TURN, OURS, LENT, name=rule)) == (
        "lent",
        "ours",
    )


@pytest.mark.parametrize("name", PolicyName)
def test_every_rule_leaves_an_engine_that_cannot_take_the_turn_alone(name: PolicyName) -> None:
    shut = replace(OURS, gate_open=False)
    full = replace(LENT, live=8)
    found = place(TURN, [shut, full], HEAD, Policy(name=name), 0.0)
    assert found == Wait(Obstacle.FULL)


# --- guards of the joint rule


def test_no_trajectory_begins_on_a_borrowed_engine_while_a_loss_of_all_could_not_be_made_good() -> (
    None
):
    begins, unsafe = replace(TURN, begins=True), RolloutOutlook(safe=False)
    assert chosen(begins, replace(OURS, live=7, speed=SLOW), LENT, outlook=unsafe) == "ours"
    assert chosen(begins, replace(OURS, live=8), LENT, outlook=unsafe) == "Full"
    assert chosen(begins, LENT, outlook=unsafe) == "lent"  # nothing to wait for
    assert chosen(TURN, replace(OURS, live=8), LENT, outlook=unsafe) == "lent"


def test_a_trajectory_with_less_time_than_a_turn_is_not_put_at_risk() -> None:
    last = replace(TURN, expected=500, budget_seconds=5.0)
    slow = replace(OURS, speed=SLOW)
    assert chosen(last, slow, LENT) == "ours"
    assert chosen(last, replace(slow, live=8), LENT) == "Full"
    too_late = replace(last, budget_seconds=-1.0)
    assert chosen(too_late, slow, LENT) == "lent"


def test_a_session_that_just_moved_stays() -> None:
    hot = replace(LENT, speed=SLOW)
    moved = replace(TURN, home="lent", cached=90, since_move=1)
    assert chosen(moved, OURS, hot) == "lent"
    assert chosen(replace(moved, since_move=4), OURS, hot) == "ours"


def test_a_stratum_that_met_too_many_borrowed_engines_gets_dedicated_ones() -> None:
    slow = replace(OURS, live=1, speed=SLOW)
    turn = replace(TURN, stratum="16k+/fresh")
    over = RolloutOutlook(0.5, {"16k+/fresh": 0.8})
    assert chosen(turn, slow, LENT) == "lent"
    assert chosen(turn, slow, LENT, outlook=over) == "ours"
    under = RolloutOutlook(0.5, {"16k+/fresh": 0.1})
    fast = replace(OURS, live=1)
    assert chosen(turn, fast, replace(LENT, speed=SLOW), outlook=under) == "lent"
    idle = replace(fast, live=0)
    assert chosen(turn, idle, replace(LENT, speed=SLOW), outlook=under) == "ours"


def test_the_last_dedicated_places_are_kept_for_the_tail() -> None:
    nearly = replace(OURS, live=7)
    slow = replace(LENT, speed=SLOW)
    assert chosen(TURN, nearly, slow) == "lent"
    assert chosen(replace(TURN, tail=True), nearly, slow) == "ours"
    assert chosen(TURN, nearly) == "ours"  # never empty while somebody waits


def test_a_turn_that_lost_many_engines_runs_where_nobody_takes_it_back() -> None:
    slow = replace(OURS, speed=SLOW)
    assert chosen(replace(TURN, losses=3), slow, LENT) == "ours"
    assert chosen(replace(TURN, losses=2), slow, LENT) == "lent"


def test_a_trajectory_that_may_end_late_prefers_the_engine_that_is_always_open() -> None:
    shaky = replace(LENT, hazard=Hazard(open_seconds=100, closed_seconds=100))
    busy = replace(OURS, live=5, speed=Speed(prefill_seconds_per_token=0.01))
    turn = replace(TURN, tail_tokens=5000)
    assert chosen(turn, busy, shaky) == "lent"
    assert chosen(replace(turn, budget_seconds=120), busy, shaky) == "ours"


def test_a_few_trajectories_begin_at_random() -> None:
    slow = replace(LENT, speed=SLOW)
    begins = replace(TURN, begins=True)
    assert chosen(begins, OURS, slow, outlook=RolloutOutlook(dice=0.001)) == "lent"
    assert chosen(begins, OURS, slow, outlook=RolloutOutlook(dice=0.5)) == "ours"
    assert chosen(TURN, OURS, slow, outlook=RolloutOutlook(dice=0.001)) == "ours"


def test_reading_goes_to_compute_and_writing_to_memory_bandwidth() -> None:
    compute = replace(OURS, name="compute", speed=Speed(0.04, 0.0001))
    memory = replace(OURS, name="memory", speed=Speed(0.01, 0.0004))
    reads, writes = TurnView(context=16_000, expected=50), TurnView(context=500, expected=2000)
    assert chosen(reads, compute, memory) == "compute"
    assert chosen(writes, compute, memory) == "memory"


@given(
    outlook=st.builds(
        RolloutOutlook,
        st.just(0.5),
        st.fixed_dictionaries({"s": st.floats(0, 1)}),
        st.booleans(),
        st.floats(0, 1),
    ),
    budget=st.floats(-100, 1000) | st.just(float("inf")),
    name=st.sampled_from(PolicyName),
    live=st.lists(st.integers(0, 8), min_size=4, max_size=4),
)
def test_no_rule_starves_a_turn_while_an_engine_is_idle_and_none_dedicated_is_full(
    outlook: RolloutOutlook, budget: float, name: PolicyName, live: list[int]
) -> None:
    engines = [
        replace(base, name=f"{base.name}{index}", live=count)
        for index, (base, count) in enumerate(zip((OURS, LENT, OURS, LENT), live, strict=True))
    ]
    turn = replace(TURN, budget_seconds=budget, begins=True, stratum="s")
    found = place(turn, engines, HEAD, Policy(name=name), 0.0, outlook=outlook)
    room = {one.name for one in engines if one.live < one.cap}
    if isinstance(found, Placement):
        assert found.engine in room
    else:
        assert all(one.live >= one.cap for one in engines if one.kind is EngineKind.DEDICATED)


def test_a_trajectory_begins_on_weights_as_new_as_it_is_while_engines_swap() -> None:
    old = WeightVersion("run", 2, 9)
    bound = replace(TURN, from_version=HEAD)
    lagging, new = replace(OURS, version=old), replace(LENT, live=7)
    assert chosen(bound, lagging, new) == "lent"
    swapping = RolloutOutlook(swapping=frozenset({"run"}))
    assert chosen(bound, lagging, outlook=swapping) != "ours"
    assert chosen(bound, lagging) == "ours"
    older = replace(TURN, from_version=old)
    assert chosen(older, lagging, new, outlook=swapping) == "ours"
    assert chosen(TURN, lagging, new, outlook=swapping) == "ours"
