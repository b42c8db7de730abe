"""What one slot more brings a lease, and who is next where slots go by it."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.lending import Demand, Lease, PlannerPolicy
from rose_core.lending.shares import gain, targets, work
from tests.lending.world import POLICY, lease, lent, released, replica, slot, world

PLACES = 16
DEAF = POLICY.deaf_seconds
BY_GAIN = PlannerPolicy(by_gain=True)

turns = st.integers(0, 400)


def leased(name: str, turns_: int, dedicated: int = 0, **changes: object) -> Lease:
    demand = Demand(turns_, dedicated_turns=dedicated)
    fields = {"min_slots": 0, "max_slots": 16, "turns_per_slot": PLACES, "demand": demand}
    return lease(name, **(fields | changes))


@given(turns, st.integers(0, 200), st.integers(0, 30))
def test_a_slot_never_brings_more_than_the_one_before(
    asked: int, dedicated: int, held: int
) -> None:
    one = leased("l", asked, dedicated)
    now, then = gain(one, held, DEAF), gain(one, held + 1, DEAF)
    assert 0 <= then <= now + 1e-9
    assert now <= 1 + 1e-9


@given(turns, turns, st.integers(0, 30))
def test_more_turns_never_make_a_slot_bring_less(one: int, more: int, held: int) -> None:
    few, many = leased("l", one), leased("l", one + more)
    assert gain(few, held, DEAF) <= gain(many, held, DEAF) + 1e-9


@pytest.mark.parametrize(("share", "brings"), [(2.0, 1.0), (0.5, 0.48), (0.25, 0.24), (0.0, 0.0)])
def test_the_table_of_the_module(share: float, brings: float) -> None:
    many = 1000
    one = leased("l", round(share * many * PLACES))
    assert gain(one, many, DEAF) == pytest.approx(brings, abs=0.006)


def test_dedicated_engines_are_engines_too() -> None:
    assert gain(leased("l", 64), 4, DEAF) == gain(leased("l", 64, dedicated=32), 0, DEAF)


def test_a_router_that_was_not_heard_is_not_one_without_turns() -> None:
    silent = replace(leased("l", 0), demand=None)
    old = replace(leased("l", 0), demand=Demand(0, age_seconds=DEAF + 1))
    assert gain(silent, 9, DEAF) == gain(old, 9, DEAF) == 1
    paused = replace(leased("l", 0), demand=Demand(0, usual_turns=400))
    assert gain(paused, 9, DEAF) == 1, "between two steps the usual number counts"


@given(st.lists(st.tuples(turns, st.integers(0, 60)), min_size=2, max_size=3), st.integers(0, 8))
def test_slots_where_they_bring_most_make_the_most_of_all(
    asked: list[tuple[int, int]], slots: int
) -> None:
    """Against every other way to share them; what is lost is less than rounding to a tenth."""
    leases = [leased(f"l{n}", *one) for n, one in enumerate(asked)]
    found = targets(leases, slots, {}, BY_GAIN)
    assert sum(found.values()) == slots

    def made(counts: tuple[int, ...]) -> float:
        own = [2 * dedicated / PLACES for _, dedicated in asked]
        return sum(
            work(turns_, mine + count, PLACES)
            for (turns_, _), mine, count in zip(asked, own, counts, strict=True)
        )

    ways = product(range(slots + 1), repeat=len(leases))
    best = max(made(way) for way in ways if sum(way) == slots)
    assert made(tuple(found[one.key] for one in leases)) >= best - 0.1 * slots - 1e-9


@given(st.lists(st.integers(0, 400), min_size=1, max_size=4), st.integers(0, 12))
def test_minimums_and_priorities_come_before_what_a_slot_brings(
    asked: list[int], slots: int
) -> None:
    weak = [leased(f"l{n}", one, min_slots=1) for n, one in enumerate(asked)]
    strong = leased("strong", 0, min_slots=1, max_slots=3, priority=1)
    found = targets([*weak, strong], slots, {}, BY_GAIN)
    assert sum(found.values()) == min(slots, 3 + 16 * len(weak))
    if slots >= len(weak) + 3:
        assert found[strong.key] == 3
        assert all(found[one.key] >= 1 for one in weak)


def test_equal_work_is_shared_by_weight() -> None:
    heavy, light = leased("heavy", 4000, weight=3), leased("light", 4000)
    assert targets([heavy, light], 4, {}, POLICY) == {"r/heavy": 3, "r/light": 1}
    assert targets([heavy, light], 4, {}, BY_GAIN) == {"r/heavy": 4, "r/light": 0}
    light = replace(light, weight=3)
    assert targets([heavy, light], 4, {}, BY_GAIN) == {"r/heavy": 2, "r/light": 2}


def test_only_where_it_is_switched_on_slots_follow_it() -> None:
    """A lease with little to do has half by weight and less by gain; slots that exist move."""
    busy, calm = leased("busy", 200, max_slots=4), leased("calm", 20, max_slots=4)
    replicas = [replica(f"p{number}") for number in range(4)]
    seen = world(replicas, [busy, calm])
    assert sorted(one for one, _ in lent(seen)) == ["r/busy", "r/busy", "r/calm", "r/calm"]
    by_gain = replace(seen, policy=BY_GAIN)
    assert sorted(one for one, _ in lent(by_gain)) == ["r/busy", "r/busy", "r/busy", "r/calm"]
    old = {"created": 0.0}
    held = [slot(busy if n < 2 else calm, one, **old) for n, one in enumerate(replicas)]
    full = world(replicas, [busy, calm], held)
    assert released(full) == {}
    assert list(released(replace(full, policy=BY_GAIN))) == [held[-1].name]
