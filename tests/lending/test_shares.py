"""How leases share a pool: minimums, priorities, weights; and what moves a slot that exists."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rose_core.api import Reason
from rose_core.lending import Lease, plan
from rose_core.lending.shares import targets
from tests.lending.world import NOW, POLICY, lease, lent, pool, released, replica, slot, world


def count(leases: list[Lease], slots: int, caps: dict[str, int] | None = None) -> dict[str, int]:
    found = targets(leases, slots, caps or {}, POLICY)
    return {key.removeprefix("r/"): value for key, value in found.items()}


def test_equal_leases_share_by_weight_above_their_minimums() -> None:
    heavy, light = lease("heavy", weight=3, max_slots=9), lease("light", max_slots=9)
    assert count([heavy, light], 8) == {"heavy": 6, "light": 2}
    assert count([heavy, replace(light, min_slots=4)], 8) == {"heavy": 4, "light": 4}


def test_a_higher_priority_takes_all_it_wants_above_the_minimums() -> None:
    strong, weak = lease("strong", priority=1, max_slots=5), lease("weak", max_slots=5)
    assert count([weak, strong], 6) == {"strong": 5, "weak": 1}
    assert count([weak, strong], 1) == {"strong": 1, "weak": 0}


def test_what_one_lease_cannot_use_goes_to_the_others() -> None:
    small, large = lease("small", max_slots=1), lease("large", max_slots=9)
    assert count([small, large], 6) == {"small": 1, "large": 5}
    assert count([small, large], 6, {"r/large": 2}) == {"small": 1, "large": 2}
    refused = replace(small, refusal=Reason.UNKNOWN_STORE)
    assert count([refused, large], 6) == {"large": 6}


@given(
    st.lists(
        st.tuples(st.integers(-1, 1), st.integers(1, 5), st.integers(0, 3), st.integers(0, 6)),
        max_size=5,
    ),
    st.integers(0, 20),
)
def test_shares_use_every_slot_that_anybody_wants_and_break_no_bound(
    given_leases: list[tuple[int, int, int, int]], slots: int
) -> None:
    leases = [
        lease(f"l{n}", priority=p, weight=w, min_slots=least, max_slots=least + more)
        for n, (p, w, least, more) in enumerate(given_leases)
    ]
    found = targets(leases, slots, {}, POLICY)
    assert sum(found.values()) == min(slots, sum(one.max_slots for one in leases))
    for one in leases:
        assert 0 <= found[one.key] <= one.max_slots
        if found[one.key] < one.min_slots:  # then nobody has more than a minimum
            assert all(found[other.key] <= other.min_slots for other in leases)


def test_loans_go_round_by_weight() -> None:
    replicas = [replica(name) for name in "abcdef"]
    heavy = lease("heavy", weight=2, min_slots=0, max_slots=9)
    light = lease("light", min_slots=0, max_slots=9)
    got = [name for name, _ in lent(world(replicas, [heavy, light]))]
    assert sorted(got) == ["r/heavy"] * 4 + ["r/light"] * 2


def test_in_a_full_pool_a_lease_below_its_share_takes_one_old_slot_of_an_equal_one() -> None:
    four = [replica(name) for name in "abcd"]
    early, late = lease("early", max_slots=4), lease("late", created=NOW - 1, max_slots=4)
    old = NOW - POLICY.rebalance_seconds - 100
    held = [slot(early, one, created=old + n) for n, one in enumerate(four)]
    snapshot = world(four, [early, replace(late, min_slots=0)], held)
    # Of one lease the youngest slot goes first: it has cost the least.
    assert released(snapshot) == {held[3].name: Reason.REBALANCED}
    young = [replace(one, created=NOW - 10) for one in held]
    assert released(replace(snapshot, slots=tuple(young))) == {}
    going = (*held[:3], replace(held[3], released=True))
    assert released(replace(snapshot, slots=going)) == {}
    fair = (held[0], held[1], slot(late, four[2]), slot(late, four[3]))
    assert released(replace(snapshot, slots=fair)) == {}


def test_a_slot_whose_engine_does_not_run_yet_is_given_up_first() -> None:
    a, b = replica("a"), replica("b")
    weak, strong = lease("weak", max_slots=2), lease("strong", priority=1)
    held = [slot(weak, a, running=False, created=NOW - 400), slot(weak, b, created=NOW - 100)]
    assert released(world([a, b], [weak, strong], held)) == {held[0].name: Reason.PREEMPTED}


def test_a_lease_that_may_not_preempt_waits() -> None:
    a = replica("a")
    weak, strong = lease("weak"), lease("strong", priority=1, preempts=False)
    assert released(world([a], [weak, strong], [slot(weak, a)])) == {}


def test_a_minimum_is_preempted_for_when_the_pools_limit_and_not_its_size_is_reached() -> None:
    three = [replica(name) for name in "abc"]
    weak, strong = lease("weak"), lease("strong", priority=1)
    limits = [pool(min_unlent_replicas=2)]
    held = [slot(weak, three[0])]
    assert released(world(three, [weak, strong], held, limits)) == {held[0].name: Reason.PREEMPTED}


def test_one_lease_holds_no_more_than_its_percentage_of_what_the_pool_may_lend() -> None:
    four = [replica(name) for name in "abcd"]
    limits = [pool(per_lease_percent=50)]
    greedy = lease("greedy", max_slots=4)
    assert len(lent(world(four, [greedy], pools=limits))) == 2
    held = [slot(greedy, one, created=NOW - n) for n, one in enumerate(four)]
    assert set(released(world(four, [greedy], held, limits)).values()) == {
        Reason.LEASE_LIMIT_REACHED
    }
    outcome = plan(world(four, [greedy], held[:2], limits), NOW).outcomes["r/greedy"]
    assert "maxReplicasPerLeasePercent 50 allows 2" in outcome.message
    assert outcome.share == 2
